"""Ctrl-C waits until a step is whole, unless the step waits for other ranks.

Python runs signal handlers, and with them `KeyboardInterrupt`, between any two instructions of the main thread. In the
middle of a step that would leave some parameters moved and others not, or take coefficients out of a momentum that are
never sent.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # whose handlers may raise


class _Deferred:
    """A signal handler that remembers the calls for the handlers that it stands for."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self.calls: list[tuple[int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.calls.append((number, frame))

    def begin(self) -> None:
        for number in self.handlers:
            signal.signal(number, self)

    def end(self) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        while self.calls:
            number, frame = self.calls.pop(0)
            self.handlers[number](number, frame)


@contextmanager
def deferred() -> Iterator[None]:
    """The context, or decorator, of what is done as a whole: handlers of signals run after it.

    Does nothing in other threads, where no handler runs, and inside another such context.

    Examples:
        >>> try:
        ...     with deferred():
        ...         signal.raise_signal(signal.SIGINT)
        ...         done = True
        ... except KeyboardInterrupt:
        ...     print(done)
        True
    """
    waiting = _Deferred()
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in _SIGNALS}
        waiting.handlers = {n: h for n, h in found.items() if callable(h) and not isinstance(h, _Deferred)}
    waiting.begin()
    try:
        yield
    finally:
        waiting.end()


@contextmanager
def allowed() -> Iterator[None]:
    """The context of waiting, inside `deferred`: handlers run at once, also those of signals that came before.

    Examples:
        >>> with allowed():
        ...     pass
    """
    waiting = signal.getsignal(signal.SIGINT)
    inside = isinstance(waiting, _Deferred) and threading.current_thread() is threading.main_thread()
    if not inside:
        yield
        return
    assert isinstance(waiting, _Deferred)
    try:
        waiting.end()
        yield
    finally:
        waiting.begin()

"""Delays signals: a handler may run between any two instructions, and raise or save when half a round is applied."""

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

# Signals of people, schedulers and timers: looking at all signals would take a tenth of a small model's step.
_SENT = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGALRM", "SIGXCPU")
_SIGNALS = [getattr(signal, name) for name in _SENT if hasattr(signal, name)]
_is_inside = False  # whether the main thread is in the context


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A context in which signals wait: their handlers, which may raise, run at the end of the outermost context.

    Only the main thread runs handlers; in others there is nothing to do.
    """
    global _is_inside
    if _is_inside or threading.current_thread() is not threading.main_thread():
        yield
        return
    calls, found = deque[Callable[[], object]](), {number: signal.getsignal(number) for number in _SIGNALS}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    try:
        _is_inside = True
        for each in handlers:
            signal.signal(each, lambda number, frame: calls.append(partial(handlers[number], number, frame)))
        yield
    finally:
        _is_inside = False
        calls.extendleft(partial(signal.signal, *each) for each in handlers.items())
        _make(calls)


def _make(calls: deque[Callable[[], object]]) -> None:
    """Makes all calls, even if one raises or an interrupt comes between two."""
    try:
        while calls:
            calls.popleft()()
    finally:
        if calls:
            _make(calls)

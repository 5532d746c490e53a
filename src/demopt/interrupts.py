"""Signals that wait: a handler runs between any two instructions, raises or saves, and half a round may be applied."""

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """The context in which signals wait: their handlers, which may raise, run at its end.

    Only the main thread runs handlers; in others there is nothing to do.

    Examples:
        >>> with uninterrupted():
        ...     pass
    """
    handlers, came = dict[int, Any](), list[tuple[int, Any]]()
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in signal.valid_signals()}
        handlers = {number: handler for number, handler in found.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, lambda *number_and_frame: came.append(number_and_frame))
        yield
    finally:

        def answer() -> None:
            with ExitStack() as ends:
                for number, frame in reversed(came):
                    ends.callback(handlers[number], number, frame)

        with ExitStack() as ends:  # each call is made, also after one that raises
            ends.callback(answer)  # the last one: until its handler is back, a signal is noted in `came`
            for number, handler in handlers.items():
                ends.callback(signal.signal, number, handler)

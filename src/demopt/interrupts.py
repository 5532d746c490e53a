"""Interrupts that wait: Ctrl-C raises an exception between any two instructions, and half a round may be applied."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """The context in which SIGINT and SIGTERM wait: their handlers, which may raise, run at its end.

    Only the main thread runs handlers; in others there is nothing to do.

    Examples:
        >>> with uninterrupted():
        ...     pass
    """
    handlers, came = dict[int, Any](), list[tuple[int, Any]]()
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers = {number: handler for number, handler in found.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, lambda *number_and_frame: came.append(number_and_frame))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in came:
            handlers[number](number, frame)

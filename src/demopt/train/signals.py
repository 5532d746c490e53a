"""Signals that ask a worker, or the launcher of workers, to save and stop."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_signals(request: Callable[[], None] = lambda: None, after: str = "this step") -> Iterator[list[int]]:
    """Yields the signals that have come: the first is a request to stop, the second ends this process at once.

    With the launcher end its workers. They have POSIX sessions of their own, so Ctrl-C in a terminal spares them.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        stopped = "stopped at once" if len(received) > 1 else f"stopping after {after}; once more to stop at once"
        if os.environ.get("RANK", "0") == "0":
            print(f"demopt: {stopped}", file=sys.stderr, flush=True)
        if len(received) > 1:
            os._exit(128 + number)
        request()

    kinds = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    handlers = {kind: signal.signal(kind, handle) for kind in kinds}
    try:
        yield received
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)

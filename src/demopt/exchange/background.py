"""Runs calls in order on a separate thread, so that a message travels while its rank computes."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Background:
    """One daemon thread, so that a call that waits for a lost peer does not keep the process from exiting.

    Examples:
        >>> Background().submit(lambda: 6 * 7).result()
        42
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] | None = None

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Returns a future of `call`'s result or error; calls run in the order of submission."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            weakref.finalize(self, self._calls.put, _stop).atexit = False  # an exiting process ends it anyway
            threading.Thread(target=_serve, args=(self._calls,), daemon=True, name="demopt exchange").start()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # raised in the thread that waits for the result
                future.set_exception(error)

        self._calls.put(run)
        return future


def _serve(calls: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while (call := calls.get()) is not _stop:
        call()
        del call  # while the thread waits for the next one, it would keep this one's optimizer, and so itself, alive


def _stop() -> None:
    """Ends the thread."""

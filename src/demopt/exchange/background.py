"""Calls on other threads: in order on one, while its rank computes; on a few; or each on its own."""

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from demopt.kernels.step import room_for_kernels

T = TypeVar("T")
_LAST_CALLS = 5.0  # seconds, at most, that the end of a process waits for calls under way


class SideStream:
    """An accelerator's stream for exchanges: backward's kernels do not queue behind them. Events keep the order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)
        self._done = torch.Event(device)

    def behind(self, call: Callable[[], T], message: Tensor) -> Callable[[], T]:
        """Returns the call to run in the background, after what this thread has launched so far."""
        written = torch.Event(message.device)
        written.record(torch.accelerator.current_stream(message.device))

        def travel() -> T:
            torch.accelerator.set_stream(self._stream)  # of the background's own thread; also its device
            self._stream.wait_event(written)
            message.record_stream(self._stream)
            result = call()
            self._done.record(self._stream)
            return result

        return travel

    def receive(self, tensors: Iterable[Tensor]) -> None:
        """Makes this thread's stream wait for the tensors that the last call has made."""
        here = torch.accelerator.current_stream(self._stream.device)
        here.wait_event(self._done)
        for tensor in tensors:
            if not tensor.is_cpu:
                tensor.record_stream(here)


class Background:
    """One daemon thread, so that a call that waits for a lost peer does not keep the process from exiting."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Returns a future of `call`'s result or error; calls run in the order of submission."""
        if self._calls is None:
            calls = queue.SimpleQueue[Callable[[], None] | None]()
            thread = threading.Thread(target=_serve, args=(calls,), daemon=True, name="demopt exchange")
            with room_for_kernels():
                thread.start()
            self._calls = calls  # only now: where the machine has no more threads, the next call tries again
            weakref.finalize(self, self._calls.put, None).atexit = False  # an exiting process ends it anyway
            atexit.register(_let_end, self._calls, thread)
        future: Future[T] = Future()
        self._calls.put(partial(_fulfil, future, call))
        return future


class Daemons:
    """At most `most` daemon threads for calls; a process waits for them for only some seconds at its end."""

    def __init__(self, most: int) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = threading.BoundedSemaphore(most)
        atexit.register(_let_work_end, self._free, most, os.getpid())

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Returns a future of `call`'s result or error."""
        future: Future[T] = Future()
        self._calls.put(partial(_fulfil, future, call))
        if self._free.acquire(blocking=False):
            in_thread(self._work)
        return future

    def _work(self) -> None:
        while True:
            with suppress(queue.Empty):
                while True:
                    self._calls.get_nowait()()
            self._free.release()
            if self._calls.empty() or not self._free.acquire(blocking=False):  # a call may have come before the release
                return


def in_thread(call: Callable[[], T]) -> "Future[T]":
    """Returns a future of a call in a daemon thread of its own, which no process waits for at its end."""
    future: Future[T] = Future()
    thread = threading.Thread(target=_fulfil, args=(future, call), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # early Python 3.12 starts none while it ends
        _fulfil(future, call)
    return future


def _fulfil(future: "Future[T]", call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # raised in the thread that waits for the result
        future.set_exception(error)


def _serve(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # while the thread waits for the next one, it would keep this one's optimizer, and so itself, alive


def _let_end(calls: "queue.SimpleQueue[Callable[[], None] | None]", thread: threading.Thread) -> None:
    """At exit: waits some seconds for the call under way, because torch aborts a process that ends in a collective."""
    if thread.is_alive():
        calls.put((done := threading.Event()).set)
        done.wait(_LAST_CALLS)


def _let_work_end(free: threading.Semaphore, most: int, process: int) -> None:
    """The same for the calls of `most` threads; a forked process has none of them."""
    end, most = time.monotonic() + _LAST_CALLS, most if os.getpid() == process else 0
    taken = [free.acquire(timeout=max(0.0, end - time.monotonic())) for _ in range(most)]
    for _ in filter(None, taken):
        free.release()  # functions that were registered earlier run later, and may still make calls

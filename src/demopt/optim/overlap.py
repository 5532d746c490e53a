"""Hooks that notice when backward has all gradients of a bucket."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from demopt.optim.bucket import Bucket, Round, gradient_version
from demopt.optim.gradients import Scaling


class Overlap:
    """Tracks which gradients backward has accumulated; sends buckets in a fixed order, the same on all ranks.

    Example:
        >>> with Overlap().paused():
        ...     pass
    """

    def __init__(self) -> None:
        self._awaited: list[set[int]] = []  # per bucket, the parameters without a gradient so far
        self._buckets: list[tuple[int, ...]] = []
        self._sent = 0
        self._paused = False
        self._handles: list[Any] = []
        self._send: Callable[[int], None] = _nobody

    def watch(self, buckets: list[Bucket], send: Callable[[int], None]) -> None:
        """Calls `send` with a bucket's number as soon as its gradients, and those of all before it, are ready."""
        for handle in self._handles:
            handle.remove()
        self._send = _weak(send)
        self._buckets = [tuple(id(parameter) for parameter in bucket.parameters) for bucket in buckets]
        hooks = [(number, parameter) for number, bucket in enumerate(buckets) for parameter in bucket.parameters]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), number))
            for number, parameter in hooks
        ]
        self.forget()

    def forget(self) -> None:
        """Forgets this step's gradients: the next step begins."""
        self._awaited = [set(bucket) for bucket in self._buckets]
        self._sent = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignores gradients that are accumulated inside this context: more will follow in the same step."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def accumulated(self, number: int, parameter: Tensor) -> None:
        """Notes that a parameter has its gradient; sends the buckets that are now complete."""
        if self._paused or number >= len(self._awaited):
            return
        if number < self._sent:
            raise RuntimeError(
                "backward came to a parameter whose gradient has been sent already; with overlap, all backward passes "
                "of a step but the last belong into `with optimizer.no_sync():`"
            )
        self._awaited[number].discard(id(parameter))
        while self._sent < len(self._awaited) and not self._awaited[self._sent]:
            self._sent += 1  # before sending, which may rebuild the buckets and reset this to 0
            self._send(self._sent - 1)

    def check(self, begun: Round, scaling: Scaling) -> None:
        """Raises RuntimeError if gradients changed after they were sent."""
        if not begun.versions:
            return
        if scaling.grad_scale is not None:
            raise RuntimeError("GradScaler unscales gradients after they have been sent; use overlap=0 with it")
        for parameter, version in begun.versions.items():
            if gradient_version(parameter) != version:
                raise RuntimeError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} was changed after it had been sent "
                    "(clip_grad_norm_?); use overlap=0, or delay=1, which allows it"
                )


def _hook(overlap: "weakref.ref[Overlap]", number: int) -> Callable[[Tensor], None]:
    """Returns a hook that does not keep the optimizer alive: parameters may outlive it."""

    def accumulated(parameter: Tensor) -> None:
        alive = overlap()
        if alive is not None:
            alive.accumulated(number, parameter)

    return accumulated


def _nobody(number: int) -> None:
    del number


def _weak(method: Callable[[int], None]) -> Callable[[int], None]:
    reference = weakref.WeakMethod(method)

    def call(number: int) -> None:
        alive = reference()
        if alive is not None:
            alive(number)

    return call

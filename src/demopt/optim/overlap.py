"""Hooks that tell when backward has accumulated a gradient."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from demopt.optim.plan import Bucket

#: (number of the bucket, parameter) -> None
Ready = Callable[[int, Tensor], None]


class Overlap:
    """Calls back for each gradient that backward has accumulated, unless it is paused.

    Examples:
        >>> with Overlap().paused():
        ...     pass
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._paused = False

    def watch(self, buckets: tuple[Bucket, ...], ready: Ready) -> None:
        """Calls the method `ready` for each trained parameter from now on, and for no others."""
        for handle in self._handles:
            handle.remove()
        weak = weakref.WeakMethod(ready)  # parameters may outlive the optimizer
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(weak, number))
            for number, bucket in enumerate(buckets)
            for parameter in bucket.parameters
        ]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignores gradients that are accumulated inside this context: more will follow in the same step."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _hook(self, ready: "weakref.WeakMethod[Ready]", number: int) -> Callable[[Tensor], None]:
        mine = weakref.ref(self)

        def accumulated(parameter: Tensor) -> None:
            overlap, call = mine(), ready()
            if overlap is not None and call is not None and not overlap._paused:
                call(number, parameter)

        return accumulated

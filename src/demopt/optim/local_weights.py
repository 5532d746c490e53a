"""The weights of LocalDeMo: each rank's own, the shared ones, and where a movement is counted from.

What a round does to them (own: this rank's weights; e: the codec's error; D = start - own: the movement):

| after a round that was | shared | own | e | the movement D is |
|---|---|---|---|---|
| applied | moved | shared | b (e + T(D) - sent) | in shared and e |
| skipped or failed | as before | as before | as before | in own: the next round carries it |
| skipped, where D was not finite | as before | shared | as before | dropped, by this rank alone |
| sent, with delay=1 | moved by the round before | shared - D; so is start | e + T(D) - sent | on its way |
| in flight when it failed, with delay=1 | as before | as before | e + T(D) | in e: the next round carries it |

"As before" is up to rounding for e, from which T(D) is subtracted again.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from demopt.exchange.collective import true_in_all_shards
from demopt.optim.gradients import all_usable, gradients_of, usable_gradients


class LocalWeights:
    """The weights of the parameters `own`, in their order; start is the shared weights, unless a round is delayed."""

    def __init__(self, own: list[Tensor]) -> None:
        self.own = list(own)
        self.shared: list[torch.nn.Parameter] = [wide(parameter) for parameter in own]
        self.start: list[Tensor] | None = None
        self.apart = False  # after a skipped round, own weights are not the shared ones though no step was taken since
        self._fresh = True  # no step was taken, and nothing was loaded
        self._aside: list[Tensor] | None = None  # own weights, inside `shown`

    def add(self, own: list[Tensor], shared: list[torch.nn.Parameter]) -> None:
        """Takes in the parameters of a new group."""
        self.own += own
        self.shared += shared

    def notice_loaded(self) -> None:
        """Before the first step: shared <- own, because weights may have been loaded into the model."""
        if self._fresh and self._aside is None:
            _copy(self.own, self.shared)

    def begin(self) -> None:
        """The first step comes: from now on the shared weights move by rounds alone."""
        self.notice_loaded()
        self._fresh = False

    def adopt(self) -> None:
        """own <- shared: the weights of a peer came."""
        self.start, self.apart = None, False
        _copy(self.shared, self.own)

    # Movements

    def measure(self) -> None:
        """D = start - own, as the gradients of the shared weights."""
        for own, shared, start in self._triples():
            shared.requires_grad_(own.requires_grad)
            shared.grad = _as(start, shared) - _as(own, shared) if own.requires_grad else None

    @property
    def movement(self) -> list[Tensor | None]:
        """What `measure` has found, until the round has ended."""
        return [shared.grad for shared in self.shared]

    @movement.setter
    def movement(self, measured: list[Tensor | None]) -> None:
        for shared, each in zip(self.shared, measured, strict=True):
            shared.grad = each

    def forget_movement(self) -> None:
        """Gives the memory of D back."""
        self.movement = [None] * len(self.shared)

    def go_on(self, skipped: bool, in_flight: bool) -> None:
        """After a round: own and start become what the table at the top says."""
        finite = true_in_all_shards(all_usable(gradients_of(self.shared)), self.shared)
        self.apart = skipped and not in_flight  # on all ranks alike
        if in_flight:
            self.start = self.start or [torch.empty_like(own) for own in self.own]
            for own, shared, start in self._triples():
                own.copy_(shared - shared.grad if finite and shared.grad is not None else shared)
                start.copy_(own)
        elif not (skipped and finite):
            self.start = None
            _copy(self.shared, self.own)
        self.forget_movement()

    def land(self) -> None:
        """With delay, no round in flight any more: own <- shared - the movement that was not sent."""
        if self.start is not None:
            for own, shared, start in self._triples():
                own.copy_(shared - (_as(start, shared) - _as(own, shared)))
            self.start = None

    @contextmanager
    def gradients_shown(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """The context in which the codec sees the gradients: movements can be equal without anybody's synchronising."""
        usable_gradients(self.own, groups)
        self.movement = [
            None if own.grad is None else _as(own.grad, shared)
            for own, shared in zip(self.own, self.shared, strict=True)
        ]
        try:
            yield
        finally:
            self.forget_movement()

    # Evaluating and saving

    @property
    def are_shown(self) -> bool:
        """Whether the model has the shared weights at the moment."""
        return self._aside is not None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The context in which the model has the shared weights."""
        if self._aside is not None:
            yield
            return
        self.notice_loaded()
        aside = [parameter.detach().clone() for parameter in self.own]
        _copy(self.shared, self.own)
        self._aside = aside
        try:
            yield
        finally:
            self._aside = None
            _copy(aside, self.own)

    def saved(self, apart: bool) -> list[dict[str, Any]]:
        """Returns each parameter's part of a saved state; `apart`: with this rank's own weights."""
        self.notice_loaded()
        found = []
        for (_, shared, start), own in zip(self._triples(), self._aside or self.own, strict=True):
            found.append({"shared": shared.detach()})
            found[-1] |= {"own": own.detach()} if apart else {}
            found[-1] |= {"start": start} if self.start is not None else {}
        return found

    def restore(self, saved: list[Mapping[str, Any]]) -> None:
        """Takes the weights back from what `saved` has returned."""
        delayed = bool(saved) and "start" in saved[0]
        self.start = [torch.empty_like(own) for own in self.own] if delayed else None
        for (own, shared, start), entry in zip(self._triples(), saved, strict=True):
            shared.detach().copy_(entry["shared"])
            own.detach().copy_(entry.get("own", shared))
            if delayed:
                start.copy_(entry["start"])
        self.apart, self._fresh = bool(saved) and "own" in saved[0], False

    def _triples(self) -> Iterator[tuple[Tensor, torch.nn.Parameter, Tensor]]:
        """Yields each parameter, its shared weights, and where its movement is counted from, in its own dtype."""
        for place, (own, shared) in enumerate(zip(self.own, self.shared, strict=True)):
            yield own, shared, (shared.detach().to(own.dtype) if self.start is None else self.start[place])


def _copy(source: list[Any], target: list[Any]) -> None:
    with torch.no_grad():
        for one, other in zip(source, target, strict=True):
            other.copy_(one)


def wide(parameter: Tensor) -> torch.nn.Parameter:
    """Returns a copy of a parameter, at least float32: movements of a round are smaller than bfloat16 resolves."""
    wide = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
    return torch.nn.Parameter(wide, requires_grad=parameter.requires_grad)


def _as(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.detach().to(like.dtype)

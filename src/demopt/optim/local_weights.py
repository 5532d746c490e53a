"""The weights of LocalDeMo: each rank's local ones, the global ones, and the start of a pseudo-gradient.

A round changes them as follows. D = start - local is the pseudo-gradient, e the replicator's error; a is `alpha`, b is
`error_decay`.

| a round that was | global | local | e | D is |
|---|---|---|---|---|
| applied | moved | global | b (e + T(D) - a sent) | in global and e |
| skipped or failed | as before | as before; so is start | e + T(D) | in e: a later round carries it |
| skipped, where D was not finite | as before | global | as before | dropped, by this rank alone |
| sent, with delay=1 | moved by the round before | global - D; so is start | e + T(D) | on its way |
| in flight when it failed, with delay=1 | as before | as before | e + T(D) | in e: a later round carries it |

"So is start": the next pseudo-gradient counts from the local weights of that moment. Otherwise it counts from the
global weights.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from demopt.exchange.dtensor import to_local
from demopt.wire.checksum import fingerprint


class LocalWeights:
    """The local weights, which are the model's parameters, and the global weights of those that train."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.global_of: dict[Tensor, torch.nn.Parameter] = {}
        self.start_of: dict[Tensor, Tensor] = {}  # empty: the global weights
        self._fresh = True  # no step was taken, and nothing was loaded
        self.aside: dict[Tensor, Tensor] = {}  # local weights, while the model has the global ones: inside `shown`
        self.create()

    def create(self, also: Collection[Tensor] = ()) -> bool:
        """Creates global weights of parameters that train for the first time, or are in `also`; whether there are any.

        They are at least float32, because the update of a round is smaller than bfloat16 resolves.
        """
        before = self.global_of
        wanted = [each for each in self.parameters if each.requires_grad or each in before or each in also]
        if len(wanted) > len(before):  # in the order of the parameters, which is the same on all ranks
            self.global_of = {local: before[local] if local in before else _wide(local) for local in wanted}
        for local, shared in self.global_of.items():
            if shared.device != local.device:
                raise RuntimeError(
                    f"a parameter is on {local.device}, its global weights are on {shared.device}: build LocalDeMo "
                    "after model.to(device)"
                )
            if shared.shape != local.shape:
                place = [*map(id, self.parameters)].index(id(local))
                raise ValueError(
                    f"parameter {place} had shape {list(shared.shape)} and has {list(local.shape)}: its data was "
                    "replaced; build LocalDeMo anew"
                )
            if shared.requires_grad != local.requires_grad:
                shared.requires_grad_(local.requires_grad)
        return len(wanted) > len(before)

    @property
    def untouched(self) -> bool:
        """Whether no step was taken, and no state loaded: the weights are those of the model."""
        return self._fresh

    @property
    def are_apart(self) -> bool:
        """Whether the local weights carry a pseudo-gradient from before the last round."""
        return bool(self.start_of)

    def fingerprint(self) -> int:
        """Returns a hash of this rank's local weights."""
        return fingerprint([to_local(each.detach()) for each in self.parameters])

    def notice_loaded(self) -> None:
        """Before the first step: global <- local, because weights may have been loaded into the model."""
        if self._fresh and not self.aside:
            _copy(self.global_of.items())

    def begin(self) -> None:
        """Before the first step: from then on the global weights move by rounds alone."""
        if self._fresh:
            self.notice_loaded()
            self._fresh = False

    def adopt(self) -> None:
        """local <- global, after a round, or when the weights of a peer came."""
        self.start_of = {}
        _copy((shared, local) for local, shared in self.global_of.items())

    def starts_and_locals(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Returns, for each global weight, start and local weight, whose difference is its pseudo-gradient D.

        None where it does not train. Of DTensors it is this process's part.
        """
        starts: list[Tensor | None] = []
        weights: list[Tensor | None] = []
        for local, shared in self.global_of.items():
            starts.append(to_local(self._start(local, shared)) if local.requires_grad else None)
            weights.append(to_local(local.detach()) if local.requires_grad else None)
        return starts, weights

    def keep(self, finite: bool = True) -> None:
        """After a round that was skipped or failed: D is in the error, and the next one counts from here.

        If D was not finite, it is dropped: local <- global.
        """
        if not finite:
            self.adopt()
            return
        self.start_of = {local: torch.empty_like(local) for local in self.global_of}
        _copy(self.start_of.items())

    def depart(self, finite: bool) -> None:
        """With delay, after a round was sent: local <- global - D, and the next pseudo-gradient counts from here."""
        for local, shared in self.global_of.items():
            moved = shared - self._pseudo_gradient(local, shared) if finite and local.requires_grad else shared
            local.detach().copy_(moved)
        self.keep()

    def land(self) -> None:
        """With delay, after the last round in flight: local <- global - the pseudo-gradient that was not sent."""
        if self.start_of:
            for local, shared in self.global_of.items():
                local.detach().copy_(shared - self._pseudo_gradient(local, shared))
            self.start_of = {}

    # Evaluating and saving

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The context in which the model has the global weights."""
        if self.aside or not self.global_of:
            yield
            return
        self.notice_loaded()
        aside = {local: torch.empty_like(local) for local in self.global_of}
        _copy(aside.items())
        _copy((shared, local) for local, shared in self.global_of.items())
        self.aside = aside
        try:
            yield
        finally:
            self.aside = {}
            _copy((kept, local) for local, kept in aside.items())

    def saved(self, local: Tensor, apart: bool) -> dict[str, Tensor]:
        """Returns a parameter's part of a saved state; `apart`: with this rank's local weights."""
        self.notice_loaded()
        found: dict[str, Tensor] = {"global": self.global_of[local].detach()}
        found |= {"local": self.aside.get(local, local).detach()} if apart else {}
        return found | ({"start": self.start_of[local]} if local in self.start_of else {})

    def restore(self, saved: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Restores the weights from the result of `saved`, by parameter; others, frozen then, are the model's."""
        self.notice_loaded()
        self.start_of, self._fresh = {}, False
        for local, shared in self.global_of.items():
            if local not in saved:
                shared.detach().copy_(local)
                continue
            entry = saved[local]
            shared.detach().copy_(entry["global"])
            local.detach().copy_(entry.get("local", shared))
            if "start" in entry:
                self.start_of[local] = torch.empty_like(local).copy_(entry["start"])

    def _start(self, local: Tensor, shared: Tensor) -> Tensor:
        start = self.start_of.get(local)  # none of a parameter that has begun to train since
        start = shared.detach().to(local.dtype) if start is None else start
        return start.to(shared.dtype)

    def _pseudo_gradient(self, local: Tensor, shared: Tensor) -> Tensor:
        return self._start(local, shared) - local.detach().to(shared.dtype)


def _wide(local: Tensor) -> torch.nn.Parameter:
    wide = local.detach().to(torch.promote_types(local.dtype, torch.float32), copy=True)
    return torch.nn.Parameter(wide, requires_grad=local.requires_grad)


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies each first tensor to the second, in few operations: an accelerator pays for each."""
    sources, targets = [], []
    with torch.no_grad():
        for source, target in pairs:
            if target.is_cpu:
                target.copy_(source)
            else:
                sources.append(to_local(source.detach()))
                targets.append(to_local(target.detach()))
        if sources:
            torch._foreach_copy_(targets, sources)

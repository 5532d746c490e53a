"""What stands behind the steps of LocalDeMo: the handshake, local steps, rounds, and copies of all of it."""

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from demopt.exchange.collective import true_in_all_shards
from demopt.optim.codec import Codec
from demopt.optim.gradients import Scaling, all_usable, fill_gradients, usable_gradients
from demopt.optim.interrupts import allowed
from demopt.optim.local_weights import LocalWeights
from demopt.optim.stats import Stats

_FIELDS = (  # of a copy: a scheduler's wrapper around `step`, for one, stays with the original
    "inner", "_sync_every", "local_steps", "_weights", "_movement_aside", "_stats", "_warned", "_codec",
)  # fmt: skip


class LocalParts(torch.optim.Optimizer):
    """The part of `LocalDeMo` that nobody calls: it meets the other ranks, steps, and begins and ends rounds."""

    inner: list[torch.optim.Optimizer]
    local_steps: int  # since the last round
    _sync_every: int
    _weights: LocalWeights
    _movement_aside: list[Tensor | None]  # of a round that was set aside
    _stats: Stats
    _all_states: dict[int, dict[str, Any]] | None  # consolidated, until the state changes
    _warned: bool  # that a state was saved between rounds
    _codec: Codec

    def _meet(self) -> None:
        """Runs the handshake before a local step: ranks that start from other weights take rank 0's."""
        if self._codec.agreed:
            if not self._codec.in_flight:
                self._look()
            return
        self._weights.begin()
        before = self._codec.fingerprint()
        with self._weights.gradients_shown(self.param_groups):
            self._codec.agree()
        if self._codec.fingerprint() != before:  # rank 0's weights came
            self._weights.adopt()

    def _look(self) -> None:
        """Looks for synchronised gradients once more, if all of them were zero so far."""
        if not self._codec.looked:
            with self._weights.gradients_shown(self.param_groups):
                self._codec.look()

    def _local_step(self, closure: Callable[[], float] | None) -> float | None:
        scaling = Scaling.of(self)
        loss = None
        if closure is not None:
            with torch.enable_grad(), allowed():
                loss = closure()
        trained = [parameter for parameter in self._weights.own if parameter.requires_grad]
        exchange = self._codec.exchange_between_ranks
        if exchange.intra_node is not None:
            fill_gradients(trained)
        gradients = usable_gradients(trained, self.param_groups)
        if scaling.factor != 1.0:
            for gradient in gradients:
                gradient.mul_(scaling.factor)
        if exchange.intra_node is not None:
            exchange.average(gradients)
        if true_in_all_shards(not scaling.found_infinite and all_usable(gradients), trained):
            for each in self.inner:
                each.step()
        return loss

    def _round(self) -> None:
        applied = Stats()
        if self._codec.in_flight:  # the round before, which had the local steps since to travel
            self._codec.flush()
            applied = self._codec.stats
            self._look()
        self._weights.measure()
        try:
            self._codec.step()
        except BaseException:
            self._weights.forget_movement()
            raise
        sent = self._codec.stats
        self._stats = sent.with_exchange_of(applied) if self._codec.in_flight else sent
        self._go_on()

    def _go_on(self) -> None:
        self._weights.go_on(self._stats.skipped, self._codec.in_flight)
        self.local_steps = 0

    @property
    def _is_apart(self) -> bool:
        """Whether this rank's weights are not the shared ones."""
        return bool(self.local_steps or self._weights.start is not None or self._weights.apart)

    def _inner_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.inner for group in each.param_groups]

    def _follow_inner(self) -> None:
        """Takes the inner optimizers' groups anew: loading a state into one replaces them."""
        groups = self._inner_groups()
        if [id(p) for group in groups for p in group["params"]] != [*map(id, self._weights.own)]:
            raise RuntimeError(
                "an inner optimizer has other parameters than at the start; use LocalDeMo.add_param_group"
            )
        self.param_groups[:] = groups

    def _show_state(self) -> None:
        """Fills `state`: what finds it empty, such as torch.distributed.checkpoint, would run a step to fill it."""
        for own, shared in zip(self._weights.own, self._weights.shared, strict=True):
            self.state[own] = {"shared": shared.detach()}

    def _require_own(self, wanted: str) -> None:
        """Raises RuntimeError inside `shared`; what follows changes the state, so a consolidated one is forgotten."""
        self._require_outside(wanted)
        self._all_states = None

    def _require_outside(self, wanted: str) -> None:
        if self._weights.are_shown:
            raise RuntimeError(
                f"{wanted} came inside `with optimizer.shared():`, where the weights are not this rank's own"
            )

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        self._require_outside("copying or pickling")  # nothing would ever take a copy out of it again
        return {name: getattr(self, name) for name in ("defaults", *_FIELDS)}

    def __setstate__(self, packed: dict[str, Any]) -> None:
        self.inner, self._all_states = packed["inner"], None
        super().__setstate__({**packed, "state": defaultdict(dict), "param_groups": self._inner_groups()})
        self._show_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalParts":
        twin: LocalParts = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

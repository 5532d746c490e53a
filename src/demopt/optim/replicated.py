"""The base of `DeMo` and `LocalDeMo`: a replicator, and loading a state through torch's hooks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from demopt.replicator.replicator import Replicator
from demopt.state.reshard import StateDict
from demopt.state.saved import own_part


class ReplicatedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `replicator` keeps parameters equal on all ranks."""

    _step_supports_amp_scaling = True  # makes torch.amp.GradScaler call step on every rank, infinite gradients or not

    replicator: Replicator
    _all_states: Mapping[int, StateDict] | None = None  # consolidated, until the state changes

    @torch.no_grad()
    def exchange(self, message: Tensor) -> Tensor:
        """Sends the message on the route and returns the result, for "gather" the messages of all ranks, uint8 [W, B].

        The only stage that uses the network between nodes. The first call also runs the handshake; with two levels
        `extract` has done so.
        """
        return self.replicator.exchange(message)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but the state keeps its dtype (bfloat16 parameters have float32 momentum).

        Of a consolidated state, each rank takes its part; if more or fewer ranks saved it, its share. Warns
        if the state is another rank's, or a mixture.
        ValueError or TypeError, with nothing changed, if the state is another optimizer's, has other shapes or invalid
        settings.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._load(own_part(state_dict, *self.replicator.rank_and_size))
        self._all_states = None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load(self, state_dict: StateDict) -> None:
        """Replaces groups and state by those of this rank, or raises with nothing changed."""
        raise NotImplementedError

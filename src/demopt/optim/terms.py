"""What the ranks of a run must have in common."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demopt.core.update import rule_of
from demopt.optim import handshake, state
from demopt.optim.chunk_group import local
from demopt.optim.options import Options

MACHINE = "its machine (update='muon' wants like ones; others, such as 'signum', take unlike ones)"


@dataclass(frozen=True)
class Terms:
    """Options, parameter groups, and the parameters' states.

    Example:
        >>> Terms(Options("auto", 100, 0, 0), [], {}).facts()["route"]
        'auto'
    """

    options: Options
    groups: list[dict[str, Any]]
    states: MutableMapping[Tensor, dict[str, Any]]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all groups, in order."""
        return [parameter for group in self.groups for parameter in group["params"]]

    def facts(self) -> dict[str, str]:
        """Returns what must be equal on all ranks, by name; a difference in it cannot be repaired."""
        options = {name: str(value) for name, value in vars(self.options).items()}
        if self.options.route == "shared":
            options["torch (route 'shared' draws its positions from it)"] = torch.__version__
        # settings before the machine, because an error names the first difference
        return {**options, **handshake.describe(self.groups), **self._machine()}

    def replicated(self) -> list[Tensor]:
        """Returns the update rules' state, which is equal on all ranks, as the parameters are."""
        return state.replicated(self.states)

    def _machine(self) -> dict[str, str]:
        """Returns what determines the bits of matrix products, if a rule uses any: different machines would drift."""
        if not any(rule_of(group["update"]).like_machines for group in self.groups if group["params"]):
            return {}
        device = local(self.parameters[0]).device
        kind = f"{torch.backends.cpu.get_cpu_capability()} with {torch.get_num_threads()} threads"
        if device.type == "cuda":
            kind = torch.cuda.get_device_name(device)
        return {MACHINE: f"{kind}, torch {torch.__version__}"}

"""What the ranks of a run must have in common."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from demopt.optim import handshake, state
from demopt.optim.options import Options


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
        """Of all groups, in order."""
        return [parameter for group in self.groups for parameter in group["params"]]

    def facts(self) -> dict[str, str]:
        """What must be equal on all ranks, by name; differences cannot be mended."""
        options = {name: str(value) for name, value in vars(self.options).items()}
        return {**options, **handshake.describe(self.groups)}

    def kept(self) -> list[Tensor]:
        """What update rules keep: equal on all ranks, as the parameters are."""
        return state.replicated(self.states)

"""Updates of sharded matrices by a rule that needs whole ones, such as Muon."""

from collections import deque

import torch
from torch import Tensor

from demopt.codec.decompress import scaled_direction
from demopt.codec.hyperparameters import Hyperparameters
from demopt.core.rounding import decay_and_add
from demopt.exchange.dtensor import shard_as, to_local, whole_of


class ShardedMatrices:
    """Updates U of sharded matrices (FSDP2, tensor parallelism) for a rule that needs whole ones.

    The ranks of a node gather each U together and each computes all of phi(U), so they must go in one order: that of
    the parameters, because chunk groups may differ between shards. A U waits here until all earlier ones are applied.

    `members` are the number, the parameter and the number of the parameter group of each such matrix.
    """

    def __init__(self, members: list[tuple[int, Tensor, int]], settings: list[Hyperparameters]) -> None:
        self.settings = settings  # by parameter group; the wiring replaces it when a hyper-parameter changes
        self._members = {number: (parameter, group) for number, parameter, group in members}
        self._order: deque[int] = deque()
        self._waiting: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Begins a step, also after one that failed."""
        self._order, self._waiting = deque(self._members), {}

    def take(self, number: int, local_U: Tensor, round_number: int) -> bool:
        """Takes this rank's part of a parameter's U, and applies all that are next; False if that is not sharded."""
        if number not in self._members:
            return False
        self._waiting[number] = local_U.clone()
        while self._order and self._order[0] in self._waiting:
            self._apply(round_number)
        return True

    def finish(self, round_number: int) -> None:
        """Applies the rest: parameters of which this rank holds an empty shard."""
        while self._order:
            self._apply(round_number)

    def _apply(self, round_number: int) -> None:
        """X <- X - lr wd X - lr phi(U): the ranks that hold shards of it gather U, and each computes all of phi."""
        number = self._order.popleft()
        parameter, group = self._members[number]
        local, settings = to_local(parameter.detach()), self.settings[group]
        local_U = self._waiting.pop(number, local.to(torch.promote_types(parameter.dtype, torch.float32)))  # empty
        direction = scaled_direction(settings, whole_of(local_U, like=parameter))
        decay = 1 - settings.lr * settings.weight_decay
        decay_and_add(local, shard_as(direction, like=parameter), decay, (round_number, number))

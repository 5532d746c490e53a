"""A worker's sequences per step: --batch times --accumulate, or its part of --global-batch, by measured speed."""

from collections.abc import Mapping

from demopt.train.config import TrainConfig
from demopt.unequal import fit_batches

_MEMORY = 0.7  # of the measured speed, per step: one slow step changes little


class Share:
    """The sequences of this worker's next step.

    Examples:
        >>> share = Share(TrainConfig(batch=4, global_batch=16))
        >>> share.fit({"laptop": 5.0, "desktop": 20.0}, "desktop")
        >>> share.passes()
        [4, 4, 4, 1]
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.sequences = config.batch * config.accumulate
        self.speed = 0.0  # sequences per second while computing; 0: not measured yet
        self._batches: dict[str, int] = {}

    def fit(self, speeds: Mapping[str, float], worker: str) -> None:
        """With --global-batch: takes the part of `worker`, this one, by the speeds of all that train."""
        if self.config.global_batch is not None:
            self._batches = fit_batches(speeds, self.config.global_batch, self._batches)
            self.sequences = self._batches[worker]

    def measured(self, seconds: float) -> None:
        """Notes that the step's sequences took so long to compute."""
        speed = self.sequences / max(seconds, 1e-9)
        self.speed = _MEMORY * self.speed + (1 - _MEMORY) * speed if self.speed else speed

    def passes(self) -> list[int]:
        """Returns the sequences of each forward pass: at most --batch, which is what fits the memory."""
        whole, rest = divmod(self.sequences, self.config.batch)
        return [self.config.batch] * whole + [rest] * bool(rest)

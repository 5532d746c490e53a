"""The size of a comparison: model, data, steps, workers; everything that all methods share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from demopt.train.config import InputError, TrainConfig

EVALUATIONS = 10  # points of a curve
HEAD = 32  # width of an attention head


@dataclass(frozen=True)
class Scale:
    """The settings that all methods of a comparison share.

    Examples:
        >>> Scale(width=64).config(seed=1, batch=2).mlp
        176
    """

    steps: int = 300
    workers: int = 4
    batch: int = 4
    layers: int = 2
    width: int = 128
    sequence: int = 128
    warmup: int = 40
    clip: float = 1.0
    eval_sequences: int = 256

    def __post_init__(self) -> None:
        """Raises InputError for values that no run can use."""
        for field in dataclasses.fields(self):
            least = 0 if field.name in ("warmup", "clip") else 1
            if getattr(self, field.name) < least:
                name = field.name.replace("_", "-")
                raise InputError(f"--{name} is {getattr(self, field.name)}, wanted at least {least}")
        if self.width % HEAD:
            raise InputError(f"--width is {self.width}, wanted a multiple of {HEAD}")

    @property
    def eval_every(self) -> int:
        """Steps between evaluations."""
        return max(1, self.steps // EVALUATIONS)

    def config(self, seed: int, batch: int) -> TrainConfig:
        """Returns model, data and schedule of a run as a `demopt train` config; tokens are bytes."""
        mlp = -(-8 * self.width // 3 // 8) * 8
        return TrainConfig(
            preset="tiny", layers=self.layers, width=self.width, heads=self.width // HEAD, mlp=mlp, vocab_size=256,
            sequence=self.sequence, batch=batch, steps=self.steps, warmup=self.warmup, clip=self.clip, seed=seed,
            eval_every=self.eval_every, eval_sequences=self.eval_sequences,
        )  # fmt: skip

    def flags(self) -> list[str]:
        """Returns the command-line flags of the values that differ from the defaults.

        Examples:
            >>> Scale(steps=20).flags()
            ['--steps', '20']
        """
        words: list[str] = []
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != field.default:
                words += [f"--{field.name.replace('_', '-')}", str(getattr(self, field.name))]
        return words


QUICK = Scale(steps=200, width=64, sequence=64, warmup=25, eval_sequences=128)


def scale_of(quick: bool, given: dict[str, Any]) -> Scale:
    """Returns the default scale, or that of --quick, overridden by the given values.

    Examples:
        >>> scale_of(quick=True, given={"steps": None, "workers": 2}).workers
        2
    """
    return replace(QUICK if quick else Scale(), **{name: value for name, value in given.items() if value is not None})

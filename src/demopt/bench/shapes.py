"""The parameter shapes that a step is measured on."""

from __future__ import annotations

from pathlib import Path

from demopt.core.names import wanted
from demopt.plan.model import Model, Shape, gpt2, of_config, of_file, of_shapes
from demopt.train.config import InputError, TrainConfig

NAMES = ("gpt2", "demo-300m", "demo-1b", "quick")
EMBEDDING = 16  # times as long as wide: shapes alone do not say what an embedding is


def model_of(name: str) -> Model:
    """Return the shapes of that name, or of a file.

    Examples:
        >>> model_of("gpt2").parameters
        124439808
    """
    if name == "gpt2":
        return of_shapes(name, gpt2())
    if name == "quick":
        return of_shapes(name, [(512, 128), (128, 128), (300, 128), (128,), (50,)])
    if name in NAMES:
        return of_config(TrainConfig(preset=name))
    if not Path(name).is_file():
        raise InputError(f"--shapes is {wanted(name, NAMES, ', or a file of shapes')}")
    return of_file(Path(name))


def is_for_muon(shape: Shape) -> bool:
    """Return whether a parameter of this shape counts as a matrix for Muon: not a vector, and not a vocabulary.

    Examples:
        >>> [is_for_muon(shape) for shape in ((768, 3072), (50257, 768), (768,))]
        [True, False, False]
    """
    return len(shape) == 2 and max(shape) < EMBEDDING * min(shape)

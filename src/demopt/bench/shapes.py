"""The parameter shapes that a step is measured on."""

from __future__ import annotations

from pathlib import Path

from demopt.plan.model import Model, Shape, of_config, of_file, of_shapes
from demopt.train.config import InputError, TrainConfig

NAMES = ("gpt2", "demo-300m", "demo-1b", "quick")
_WIDTH, _LAYERS, _VOCABULARY, _CONTEXT = 768, 12, 50257, 1024


def model_of(name: str) -> Model:
    """Return the shapes of that name, or of a file.

    Example:
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
        raise InputError(f"--shapes is {name!r}, wanted one of {', '.join(NAMES)}, or a file of shapes")
    return of_file(Path(name))


def gpt2() -> list[Shape]:
    """Return the shapes of all parameters of GPT-2 small, with a tied output embedding.

    Example:
        >>> len(gpt2())
        148
    """
    matrices = [(3 * _WIDTH, _WIDTH), (_WIDTH, _WIDTH), (4 * _WIDTH, _WIDTH), (_WIDTH, 4 * _WIDTH)]
    biases = [(rows,) for rows, _ in matrices]
    norms = [(_WIDTH,)] * 4
    layer: list[Shape] = [*matrices, *biases, *norms]
    return [(_VOCABULARY, _WIDTH), (_CONTEXT, _WIDTH), *_LAYERS * layer, (_WIDTH,), (_WIDTH,)]

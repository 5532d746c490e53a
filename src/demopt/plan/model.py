"""The shapes of a model's parameters, which is all that a plan needs."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demopt.train.config import InputError, TrainConfig
from demopt.train.model import PRESETS, resolve

Shape = tuple[int, ...]

BYTE_TOKENS = 256  # embedding rows with the "bytes" tokenizer
GPT2 = "gpt2"  # a preset here, though not of demopt train
_WIDTH, _LAYERS, _VOCABULARY, _CONTEXT = 768, 12, 50257, 1024
_FLOATS = ("F64", "F32", "F16", "BF16")
_HEADER_LIMIT = 100_000_000  # bytes, as in safetensors itself


@dataclass(frozen=True)
class Model:
    """Trained parameters. `parameters` is their true count, also where the shapes are rounded up to whole chunks.

    Examples:
        >>> Model("mine", ((64, 64), (10,)), 4106).parameters
        4106
    """

    name: str
    shapes: tuple[Shape, ...]
    parameters: int


def of_shapes(name: str, shapes: list[Shape]) -> Model:
    """Build a model with parameters of these shapes.

    Examples:
        >>> of_shapes("mine", [(64, 64), (10,)]).parameters
        4106
    """
    return Model(name, tuple(shapes), sum(map(math.prod, shapes)))


def of_count(count: int, chunk: int) -> Model:
    """Build a model of `count` parameters in chunks of `chunk` x `chunk`, all of them full.

    Examples:
        >>> of_count(10_000, chunk=64).shapes
        ((64, 192),)
    """
    return Model(f"{count:,} parameters", ((chunk, chunk * -(-count // chunk**2)),), count)


def of_config(config: TrainConfig) -> Model:
    """Return the shapes of the decoder that `demopt train` would build.

    Examples:
        >>> of_config(TrainConfig(preset="demo-300m")).parameters
        319946752
    """
    config = resolve(config)
    rows = config.vocab_size or BYTE_TOKENS
    assert config.layers is not None
    assert config.width is not None
    assert config.mlp is not None
    width, mlp, norm = config.width, config.mlp, PRESETS[config.preset].family == "llama"
    attention: list[Shape] = [(width, width)] * 4
    gated: list[Shape] = [(mlp, width), (mlp, width), (width, mlp)]
    norms: list[Shape] = [(width,)] * 2 if norm else []  # olmo's norms have no parameters
    last: list[Shape] = [(width,)] if norm else []
    return of_shapes(config.preset, [(rows, width), *(attention + gated + norms) * config.layers, *last])


def gpt2() -> list[Shape]:
    """Return the shapes of all parameters of GPT-2 small, with a tied output embedding.

    Examples:
        >>> len(gpt2())
        148
    """
    matrices = [(3 * _WIDTH, _WIDTH), (_WIDTH, _WIDTH), (4 * _WIDTH, _WIDTH), (_WIDTH, 4 * _WIDTH)]
    biases = [(rows,) for rows, _ in matrices]
    norms = [(_WIDTH,)] * 4
    layer: list[Shape] = [*matrices, *biases, *norms]
    return [(_VOCABULARY, _WIDTH), (_CONTEXT, _WIDTH), *_LAYERS * layer, (_WIDTH,), (_WIDTH,)]


def of_file(path: Path) -> Model:
    """Read a JSON list of shapes, or the header of a safetensors file, without its tensors."""
    try:
        shapes = _json_shapes(path) if path.suffix == ".json" else _safetensors_shapes(path)
    except OSError as error:
        raise InputError(f"--shapes {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        reason = str(error) if type(error) is ValueError else "neither a JSON list of shapes nor a safetensors file"
        raise InputError(f"--shapes {path}: {reason}") from None
    if not math.fsum(map(math.prod, shapes)):
        raise InputError(f"--shapes {path}: no parameters in it")
    return of_shapes(path.name, shapes)


def _json_shapes(path: Path) -> list[Shape]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, list):
        raise ValueError("wanted a list of shapes, such as [[50304, 1024], [1024]]")
    return [_shape(entry, f"entry {number}: ") for number, entry in enumerate(found, 1)]


def _safetensors_shapes(path: Path) -> list[Shape]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _HEADER_LIMIT:
            raise KeyError
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return [_shape(tensor["shape"]) for tensor in header.values() if tensor["dtype"] in _FLOATS]


def _shape(entry: Any, where: str = "") -> Shape:
    """Check a list of sizes, or an object that has one as "shape", and return it as a shape."""
    sides = entry.get("shape") if isinstance(entry, dict) else entry
    if not isinstance(sides, list) or not all(type(side) is int and side >= 0 for side in sides):
        raise ValueError(f"{where}{entry!r} is no shape; wanted a list of sizes, such as [1024, 64]")
    return tuple(sides)

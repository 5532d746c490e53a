"""Value codecs: what a kept coefficient is worth on the wire.

What a codec decodes to is what the sender feeds back (error feedback includes the quantisation).

Shapes: C chunks, K kept.
"""

import torch
from torch import Tensor

from demopt.wire.indices import Plane

_FLOATS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}

VALUES = tuple(_FLOATS)


def planes(values: str, keep: int) -> tuple[Plane, ...]:
    """The planes of a codec for K values a chunk.

    Example:
        >>> planes("bfloat16", 32)
        (Plane(count=64, bits=8),)
    """
    return (Plane(keep * _FLOATS[values].itemsize, 8),)


def encode(values: str, values_CK: Tensor) -> list[Tensor]:
    """Planes, uint8, of the values [C, K].

    Example:
        >>> encode("bfloat16", torch.tensor([[1.0]]))
        [tensor([128,  63], dtype=torch.uint8)]
    """
    return [values_CK.to(_FLOATS[values]).reshape(-1).view(torch.uint8)]


def decode(values: str, encoded: list[Tensor], chunks: int, keep: int) -> Tensor:
    """Values [..., C, K], float64 from float64 and float32 otherwise, of planes [..., bytes]; unchecked.

    Example:
        >>> decode("bfloat16", encode("bfloat16", torch.tensor([[1.0, -0.5]])), chunks=1, keep=2)
        tensor([[ 1.0000, -0.5000]])
    """
    dtype = _FLOATS[values]
    # cloned, because a view as another dtype needs an aligned start
    raw = encoded[0].clone(memory_format=torch.contiguous_format)
    return raw.view(dtype).view(*raw.shape[:-1], chunks, keep).to(torch.promote_types(dtype, torch.float32))


def value_bits(values: str) -> int:
    """Bits a value, scales not counted.

    Example:
        >>> value_bits("bfloat16")
        16
    """
    return _FLOATS[values].itemsize * 8

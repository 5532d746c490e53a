"""Refusing bodies with impossible contents, before anything of them is used.

Shapes: W ranks, C chunks, N elements in a chunk, K kept.
"""

import torch
from torch import Tensor

from demopt.errors import MessageError
from demopt.wire.layout import Section


def check_coefficients(section: Section, positions_WCK: Tensor, values_WCK: Tensor) -> None:
    """MessageError, with the rank, unless positions ascend strictly within [0, N) and values are finite.

    Example:
        >>> section = Section(chunks=1, length=10, keep=2, values="float32")
        >>> check_coefficients(section, torch.tensor([[[3, 12]]]), torch.ones(1, 1, 2))
        Traceback (most recent call last):
        demopt.errors.MessageError: message of rank 0: index out of range: 12 in a chunk of 10
    """
    if section.chunks == 0:
        return
    if int(positions_WCK[..., -1].max()) >= section.length:
        rank = _first(positions_WCK[..., -1] >= section.length)
        raise MessageError(f"index out of range: {int(positions_WCK[rank].max())} in a chunk of {section.length}", rank)
    unordered = positions_WCK[..., 1:] <= positions_WCK[..., :-1]
    if bool(unordered.any()):
        raise MessageError("indices of a chunk do not ascend", _first(unordered))
    if not bool(torch.isfinite(values_WCK.sum())):
        infinite = ~torch.isfinite(values_WCK)
        if bool(infinite.any()):
            raise MessageError("a value is NaN or infinite", _first(infinite))


def _first(bad_W: Tensor) -> int:
    """The first rank with something bad."""
    return int(bad_W.flatten(1).any(dim=1).nonzero()[0])

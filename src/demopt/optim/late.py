"""With delay: the round that is under way as tensors, so that a checkpoint can hold it."""

from dataclasses import astuple

import torch
from torch import Tensor

from demopt.optim.segment import Round, Segment, Sending
from demopt.optim.stages import Extracted
from demopt.wire.frame import Header

_PARTS = ("positions", "values", "data")


def packed(late: Round) -> dict[str, Tensor]:
    """The header, the message, and what was taken out of each bucket's momentum.

    Not what arrives: whoever takes it up sends the message again, and gets the same answer.
    """
    sending = late.sendings[0]
    assert sending is not None
    numbers = [number - 2**64 if number >= 2**63 else number for number in astuple(late.headers[0])]
    found = {"header": torch.tensor(numbers, dtype=torch.int64), "message": sending.message}
    for number, extracted in enumerate(sending.extracted):
        found |= {f"{part}{number}": getattr(extracted, part) for part in _PARTS}
    return found


def unpacked(saved: dict[str, Tensor], segment: Segment) -> Round:
    """The round again, of the only segment; ValueError where it was of other settings or another number of ranks."""
    route = segment.route
    if saved["message"].numel() != route.widths[0]:
        raise ValueError(
            f"the state holds a message of {saved['message'].numel()} bytes under way, but with these settings and "
            f"ranks it has {route.widths[0]}; call flush() on all ranks before saving"
        )
    header = Header(*(number % 2**64 for number in saved["header"].tolist()))
    extracted = [
        Extracted(*(saved[f"{part}{number}"].to(bucket.kind.device) for part in _PARTS))
        for number, bucket in enumerate(route.buckets)
        if f"data{number}" in saved  # nothing was taken out where a gradient was not finite
    ]
    return Round([header], [Sending(extracted, saved["message"].to(route.device))], (0, 0))

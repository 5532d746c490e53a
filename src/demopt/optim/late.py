"""With delay: returns a failed round to the momenta, and saves and restores the round in flight."""

from collections.abc import Mapping
from dataclasses import astuple, fields
from typing import Any

import torch
from torch import Tensor

from demopt.optim.bucket import Bucket, Round, Sending
from demopt.optim.chunk_group import ChunkGroup
from demopt.optim.compress import Extracted, restore
from demopt.optim.options import Options
from demopt.optim.routes.interface import Team
from demopt.wire.frame import Header

_PARTS = ("positions", "values", "data")


def give_back(buckets: list[Bucket], late: Round, pending: Round | None) -> None:
    """Returns to the momenta what a late round took out of them, as if it had never been taken.

    If `pending`, the next round, is already extracted, the momenta have decayed once since: this returns decayed
    values, and adds them to those that a rollback of `pending` would restore.
    """
    rounds = zip(buckets, late.sendings, pending.sendings if pending else [None] * len(buckets), strict=True)
    for bucket, sending, since in rounds:
        taken = sending.extracted if sending else []  # empty if a gradient was not finite
        for number, extracted in enumerate(taken):
            chunk_group = bucket.route.chunk_groups[number]
            if since and since.extracted:
                _give_back_decayed(chunk_group, extracted, since.extracted[number])
            else:
                restore(chunk_group, extracted)


def _give_back_decayed(chunk_group: ChunkGroup, extracted: Extracted, since: Extracted) -> None:
    share = float(chunk_group.group["alpha"]) * float(chunk_group.group["momentum"])
    sent = chunk_group.section.sent(extracted.data).to(chunk_group.key.dtype)
    momentum = chunk_group.flat_momentum
    before = momentum.gather(1, since.positions)
    momentum.scatter_add_(1, extracted.positions, sent.mul_(share))
    since.values.add_(momentum.gather(1, since.positions).sub_(before))


def packed(late: Round) -> dict[str, Tensor]:
    """Returns the header, the message, and what was taken out of each chunk group's momentum.

    Leaves out the result: after loading, the ranks send their messages again and get the same result.
    """
    sending = late.sendings[0]
    assert sending is not None
    numbers = [number - 2**64 if number >= 2**63 else number for number in astuple(late.headers[0])]
    found = {"header": torch.tensor(numbers, dtype=torch.int64), "message": sending.message}
    for number, extracted in enumerate(sending.extracted):
        found |= {f"{part}{number}": getattr(extracted, part) for part in _PARTS}
    return found


def check(saved: Mapping[str, Any], options: Options, team: Team) -> None:
    """Raises ValueError if this rank cannot resume a saved round."""
    header, message = saved.get("header"), saved.get("message")
    if not (isinstance(header, Tensor) and header.numel() == len(fields(Header)) and isinstance(message, Tensor)):
        raise ValueError(
            'the state\'s entry "late" is no update in flight: its header or message is missing or damaged'
        )
    rank = _header(saved).rank
    if rank != team.rank:
        raise ValueError(
            f"the state was saved by rank {rank} with an update in flight, and this is rank {team.rank}; load each "
            "rank's own state, or call flush() on all ranks before saving"
        )
    if options.overlap:
        raise ValueError(
            "the state was saved with delay=1 and an update in flight, which overlap cannot go on with; call flush() "
            "on all ranks before saving, or load it with overlap=0"
        )


def unpacked(saved: Mapping[str, Tensor], bucket: Bucket) -> Round:
    """Rebuilds the saved round; with delay there is only one bucket."""
    extracted = [
        Extracted(*(saved[f"{part}{number}"].to(chunk_group.key.device) for part in _PARTS))
        for number, chunk_group in enumerate(bucket.route.chunk_groups)
        if f"data{number}" in saved  # missing if a gradient was not finite
    ]
    return Round([_header(saved)], [Sending(extracted, saved["message"].to(bucket.route.device))], (0, 0))


def fits(late: Round, bucket: Bucket, team: Team) -> bool:
    """Whether the current ranks can exchange a saved round's message; the answer is the same on all of them."""
    header, sending = late.headers[0], late.sendings[0]
    assert sending is not None
    same = header.world_size == team.world_size and header.layout == bucket.route.layout.digest
    return same and sending.message.numel() == bucket.route.widths[0]


def _header(saved: Mapping[str, Tensor]) -> Header:
    return Header(*(number % 2**64 for number in saved["header"].tolist()))

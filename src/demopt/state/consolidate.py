"""Brings the per-rank parts of the state to one rank."""

import io
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from demopt.errors import MessageError, first_line
from demopt.replicator.replicator import Replicator
from demopt.state.reshard import StateDict
from demopt.state.saved import is_own

PIECE_BYTES = 1 << 24  # sent at once
MANY_STEPS = 100


def consolidate(
    replicator: Replicator, state: StateDict, to: int, every: int
) -> tuple[dict[int, StateDict] | None, str]:
    """Returns, on rank `to`, each rank's part of the state by rank, on the CPU, and a warning if that was much.

    All ranks call it together. They send the bytes of `torch.save` in pieces, which `torch.load` reads with
    `weights_only`, so no code travels. The cost is then in the replicator's stats; much is the traffic of more than
    MANY_STEPS steps, of which `every` have one round. Other ranks get None.

    Raises:
        ValueError: there is no rank `to`. TypeError: an inner optimizer has state of another type. MessageError:
            the data of a rank is damaged.
    """
    exchange, wiring = replicator.session.exchange, replicator.wiring()
    if not 0 <= to < exchange.world_size:
        raise ValueError(f"to is {to}; there are ranks 0 to {exchange.world_size - 1}")
    exchange.await_all("consolidate_state_dict()")
    before = exchange.sent_bytes + exchange.received_bytes
    file = io.BytesIO()
    torch.save(_own_part(state), file)
    mine = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    sizes = exchange.all_gather(torch.tensor([len(mine)], device="cpu").view(torch.uint8).to(wiring.device))
    lengths = sizes.cpu().contiguous().view(torch.int64).flatten().tolist()
    here = exchange.rank == to and exchange.is_leader
    received = [bytearray(length) for length in lengths] if here else []
    for start in range(0, max(lengths), PIECE_BYTES):
        piece = torch.zeros(min(PIECE_BYTES, max(lengths) - start), dtype=torch.uint8, device=wiring.device)
        part = mine[start : start + len(piece)]
        piece[: len(part)] = part
        rows = exchange.gather(piece, to)
        for row, data in zip(rows if rows is not None else (), received, strict=True):
            left = torch.frombuffer(data, dtype=torch.uint8)[start : start + len(piece)]
            left.copy_(row[: len(left)])
    moved = exchange.sent_bytes + exchange.received_bytes - before
    replicator.stats = replace(replicator.stats, consolidated_bytes=moved)
    usual = wiring.route.bytes_each_way / every
    if not here:
        return None, ""
    much = (
        (
            f"rank {to} received {moved:,} bytes of states, as many as in {moved / usual:,.0f} steps; on a slow link "
            "save less often, or let every rank write its own state: one file per rank, or, with "
            "torch.distributed.checkpoint, demopt.checkpoint.OptimizerState(optimizer); see docs/checkpoints.md"
        )
        if moved > MANY_STEPS * usual
        else ""
    )
    return {rank: _loaded(rank, data) for rank, data in enumerate(received)}, much


def _own_part(state: StateDict) -> StateDict:
    """Returns a rank's own entries on the CPU; TypeError if one is neither a plain tensor nor a number."""
    own: dict[Any, dict[str, Any]] = {}
    for number, entry in state["state"].items():
        own[number] = {name: value for name, value in entry.items() if is_own(name, entry)}
        for name, value in own[number].items():
            if type(value) is Tensor:
                own[number][name] = value.detach().cpu().clone()  # a view would be saved with all that it looks at
            elif not (value is None or isinstance(value, bool | int | float | str)):
                raise TypeError(
                    f"the state of parameter {number} holds {name}, a {type(value).__name__}, which cannot be "
                    "consolidated; save demopt.checkpoint.OptimizerState(optimizer), or one file per rank"
                )
    return {"state": own}


def _loaded(rank: int, data: bytearray) -> StateDict:
    try:
        state: StateDict = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # of zip, pickle or torch: none is documented
        raise MessageError(f"the state that came to be consolidated is damaged ({first_line(error)})", rank) from None
    return state

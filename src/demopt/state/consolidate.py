"""Brings the per-rank parts of the state to one rank, as bytes: a description in JSON, then tensors in pieces.

Shapes: W ranks, B bytes in a piece.
"""

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from demopt.errors import MessageError
from demopt.exchange import Exchange
from demopt.replicator.replicator import Replicator
from demopt.state.reshard import StateDict
from demopt.state.saved import is_own
from demopt.validation import warn

PIECE_BYTES = 1 << 24  # extra memory of the sending ranks
MANY_STEPS = 100


def consolidate(replicator: Replicator, state: StateDict, to: int, every: int = 1) -> dict[int, StateDict] | None:
    """Returns the result of `gather_states`, whose cost is then in the replicator's stats.

    Rank `to` warns if it receives more than in MANY_STEPS steps, of which `every` have one round.
    """
    exchange = replicator.session.exchange
    before = exchange.sent_bytes + exchange.received_bytes
    states = gather_states(exchange, state, to, replicator.plan().device)
    moved = exchange.sent_bytes + exchange.received_bytes - before
    replicator.stats = replace(replicator.stats, consolidated_bytes=moved)
    usual = replicator.plan().route.bytes_each_way / every
    if states is not None and moved > MANY_STEPS * usual:
        warn(
            f"rank {to} received {moved:,} bytes of states, as many as in {moved / usual:,.0f} steps; on a slow link "
            "save less often, or let every rank write its own state: one file per rank, or, with "
            "torch.distributed.checkpoint, demopt.checkpoint.OptimizerState(optimizer); see docs/checkpoints.md"
        )
    return states


def gather_states(
    exchange: Exchange, state: StateDict, to: int, device: torch.device, piece_bytes: int = PIECE_BYTES
) -> dict[int, StateDict] | None:
    """Returns, on rank `to`, each rank's part of the state by rank, on the CPU; None elsewhere.

    All ranks call it together. Rank `to` receives and holds the parts of all other ranks. During the transfer each rank
    also holds a piece of `piece_bytes`, and rank `to` one per rank. Tensors and numbers travel, without pickle.

    Raises:
        ValueError: there is no rank `to`. TypeError: an inner optimizer has state of another type. MessageError:
            the data of a rank is damaged.
    """
    if not 0 <= to < exchange.world_size:
        raise ValueError(f"to is {to}; there are ranks 0 to {exchange.world_size - 1}")
    described, tensors = _described(state)
    head = torch.frombuffer(bytearray(json.dumps(described).encode()), dtype=torch.uint8)
    sizes = torch.tensor([len(head), sum(tensor.nbytes for tensor in tensors)])
    rows = exchange.all_gather(sizes.view(torch.uint8).to(device)).cpu().contiguous()
    lengths = rows.view(torch.int64)  # [W, 2]: of the description, and of all tensors together
    here = exchange.rank == to and exchange.is_leader
    heads = [[torch.empty(length, dtype=torch.uint8)] for length in lengths[:, 0].tolist()] if here else []
    _gather(exchange, [head], heads, int(lengths[:, 0].max()), to, device, piece_bytes)
    found, bodies = {}, []
    for rank, (text,) in enumerate(heads):
        found[rank], tensors_of_rank = _room(rank, text, int(lengths[rank, 1]))
        bodies.append(tensors_of_rank)
    _gather(exchange, tensors, bodies, int(lengths[:, 1].max()), to, device, piece_bytes)
    return found if here else None


def _described(state: StateDict) -> tuple[list[Any], list[Tensor]]:
    """Returns [parameter, name, dtype, shape] per tensor or [parameter, name, value] per number; and the tensors."""
    described: list[Any] = []
    tensors = []
    for number, entry in state["state"].items():
        for name, value in entry.items():
            if not is_own(name, entry):
                continue
            if type(value) is Tensor and value.layout == torch.strided:
                described.append([number, name, str(value.dtype).removeprefix("torch."), list(value.shape)])
                tensors.append(value.detach())
            elif value is None or isinstance(value, bool | int | float | str):
                described.append([number, name, value])
            else:
                raise TypeError(
                    f"the state of parameter {number} holds {name}, a {type(value).__name__}, which cannot be "
                    "consolidated; save demopt.checkpoint.OptimizerState(optimizer), or one file per rank"
                )
    return described, tensors


def _room(rank: int, text: Tensor, size: int) -> tuple[StateDict, list[Tensor]]:
    """Returns a rank's part with tensors to receive, and these; MessageError if they are not of `size` bytes."""
    state: dict[Any, dict[str, Any]] = {}
    tensors: list[Tensor] = []
    try:
        for number, name, *value in json.loads(bytes(text.tolist())):
            entry = state.setdefault(number, {})
            if len(value) == 1:
                (entry[name],) = value
                continue
            dtype, shape = getattr(torch, value[0]), torch.Size(value[1])
            size -= shape.numel() * dtype.itemsize
            if size < 0:
                raise ValueError("it describes more than came")
            entry[name] = torch.empty(shape, dtype=dtype)
            tensors.append(entry[name])
    except (ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise MessageError(f"the state that came to be consolidated is damaged ({error})", rank) from None
    return {"state": state}, tensors


def _gather(
    exchange: Exchange,
    tensors: list[Tensor],
    received: list[list[Tensor]],
    length: int,
    to: int,
    device: torch.device,
    piece_bytes: int,
) -> None:
    """Fills rank `to`'s room for each rank; all send as many pieces as the longest, `length` bytes, needs."""
    mine, theirs = _Bytes(tensors), [_Bytes(each) for each in received]
    for start in range(0, length, piece_bytes):
        piece = torch.zeros(min(piece_bytes, length - start), dtype=torch.uint8, device=device)
        mine.give(piece)
        rows = exchange.gather(piece, to)
        if rows is not None:
            for row, parts in zip(rows, theirs, strict=True):
                parts.take(row)


class _Bytes:
    """Tensors as one run of bytes, from the first to the last, once."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._rest = deque(tensor for tensor in tensors if tensor.numel())
        self._done = 0  # bytes of the first

    def give(self, piece_B: Tensor) -> None:
        """Fills a piece with the next bytes, as far as there are any."""
        for part, here in self._parts(piece_B):
            here.copy_(part)

    def take(self, piece_B: Tensor) -> None:
        """Overwrites the next bytes with those of a piece."""
        for part, here in self._parts(piece_B):
            part.copy_(here)

    def _parts(self, piece_B: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        filled = 0
        while self._rest and filled < len(piece_B):
            flat = self._rest[0].contiguous().view(-1).view(torch.uint8)
            part = flat[self._done : self._done + len(piece_B) - filled]
            yield part, piece_B[filled : filled + len(part)]
            filled, self._done = filled + len(part), self._done + len(part)
            if self._done == len(flat):
                self._rest.popleft()
                self._done = 0

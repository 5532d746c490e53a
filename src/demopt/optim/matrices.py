"""Rules that need whole matrices, such as Muon: their updates wait here until a matrix is decoded, or its share comes.

Most matrices are updated as soon as they are decoded. Where several ranks of a node could work on one, they share the
work (sharing.py): a batch of matrices at a time, in the order of the parameters, which is the same on all ranks.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from demopt.core.chunk import decay_and_add, to_local
from demopt.core.update import Rule
from demopt.exchange import Collective, Exchange
from demopt.exchange.collective import cuts_of
from demopt.optim.chunk_group import ChunkGroup
from demopt.optim.sharing import Cut, Part, shared_out

_BATCH_ELEMENTS = 1 << 24  # a rank's, of a batch: few collectives, bounded memory


@dataclass(frozen=True)
class Member:
    """A parameter whose work is shared."""

    parameter: Tensor
    chunk_group: ChunkGroup
    exchanges: tuple[Exchange, ...]
    cuts: tuple[Cut | None, ...]

    @property
    def local(self) -> Tensor:
        """What this rank has of it."""
        return to_local(self.parameter.detach())

    @property
    def cost(self) -> int:
        """Of phi, in multiplications, up to a factor."""
        return self.parameter.numel() * min(self.parameter.shape[-2:])


@dataclass
class Batch:
    """Parameters whose work is shared out together, and what is decoded of their updates U."""

    members: list[Member]
    updates: dict[int, Tensor] = field(default_factory=dict)  # by the parameter's id
    missing: set[int] = field(default_factory=set)


class Matrices:
    """All parameters of a plan whose work is shared. Call `begin`, for each of them `decoded`, then `finish`."""

    def __init__(self, chunk_groups: Iterable[ChunkGroup], order: Iterable[Tensor], node: Exchange | None) -> None:
        whole = [group for group in chunk_groups if group.rule.whole]
        groups = {id(parameter): group for group in whole for parameter, _ in group.members}
        members = list(_members([(p, groups[id(p)]) for p in order if id(p) in groups], node))
        self.batches = list(_batches(members))
        self._of = {id(member.parameter): batch for batch in self.batches for member in batch.members}
        self._waiting: list[Batch] = []
        for group in whole:
            group.matrices = self

    def begin(self) -> None:
        """Forgets what an apply that failed has left."""
        for batch in self.batches:
            batch.updates = {}
            batch.missing = {id(each.parameter) for each in batch.members if each.local.numel()}
        self._waiting = list(self.batches)

    def buffer(self, parameter: Tensor, chunk_group: ChunkGroup) -> Tensor | None:
        """Returns where to decode a parameter's U, shaped like what this rank has of it; None if it is not shared."""
        batch = self._of.get(id(parameter))
        if batch is None:
            return None
        if id(parameter) not in batch.updates:
            shape, key = to_local(parameter).shape, chunk_group.key
            batch.updates[id(parameter)] = torch.empty(shape, dtype=key.dtype, device=key.device)
        return batch.updates[id(parameter)]

    def decoded(self, parameter: Tensor) -> None:
        """Notes that all of a parameter's U is in its buffer, and applies the batches that are complete, in order."""
        self._of[id(parameter)].missing.discard(id(parameter))
        while self._waiting and not self._waiting[0].missing:
            self._apply(self._waiting.pop(0))

    def finish(self) -> None:
        """Applies what is left: batches of which this rank has nothing, but others do."""
        while self._waiting:
            self._apply(self._waiting.pop(0))

    def _apply(self, batch: Batch) -> None:
        rule, exchanges = batch.members[0].chunk_group.rule, batch.members[0].exchanges
        parts = [Part(self._update(batch, each), each.cuts, each.cost) for each in batch.members]
        results = shared_out(lambda whole: update_of(rule, whole), parts, exchanges)
        for each, result in zip(batch.members, results, strict=True):
            step(each.chunk_group, each.parameter, result.clone())  # what came from other ranks is to be read only

    def _update(self, batch: Batch, member: Member) -> Tensor:
        """Returns U of a member, and lets go of it: empty if this rank has nothing of the parameter."""
        found = batch.updates.pop(id(member.parameter), None)
        key = member.chunk_group.key
        return torch.empty(member.local.shape, dtype=key.dtype, device=key.device) if found is None else found


def update_of(rule: Rule, whole: Tensor) -> Tensor:
    """Returns phi(U) of a whole matrix [R, S], or of each of a batch of matrices [E, R, S].

    Examples:
        >>> from demopt.core.update import Muon
        >>> update_of(Muon(), torch.randn(3, 4, 2)).shape
        torch.Size([3, 4, 2])
    """
    if whole.dim() == 2:
        return rule(whole, whole.new_empty(0), {})
    if not whole.numel():
        return whole.clone()
    return torch.stack([rule(matrix, matrix.new_empty(0), {}) for matrix in whole])


def step(chunk_group: ChunkGroup, parameter: Tensor, direction: Tensor) -> None:
    """Step 8 after phi, for all that this rank has of a parameter: X <- X - lr wd X - lr direction, overwritten."""
    lr, weight_decay = float(chunk_group.group["lr"]), float(chunk_group.group["weight_decay"])
    local = to_local(parameter.detach())
    decay_and_add(local, direction.mul_(-lr), 1 - lr * weight_decay, chunk_group.seed(parameter))


def _members(parameters: list[tuple[Tensor, ChunkGroup]], node: Exchange | None) -> Iterator[Member]:
    exchanges: dict[Any, Exchange] = {}  # one for each process group, so that equal ones are the same object
    for parameter, chunk_group in parameters:
        found: list[tuple[Exchange, Cut | None]] = [] if node is None else [(node, None)]
        for group, dimension, lengths in cuts_of(parameter):
            exchange = exchanges.setdefault(group, Collective(group))
            found.append((exchange, Cut(dimension, lengths)))
        if found and parameter.numel():
            yield Member(parameter, chunk_group, tuple(e for e, _ in found), tuple(cut for _, cut in found))


def _batches(members: list[Member]) -> Iterator[Batch]:
    """Yields runs of members that the same ranks share, large enough to keep them busy."""
    batch, elements = Batch([]), 0
    for member in members:
        first = batch.members[0] if batch.members else member
        full = elements >= _BATCH_ELEMENTS and len(batch.members) >= _ranks(first)
        if full or _key(member) != _key(first):
            yield batch
            batch, elements = Batch([]), 0
        batch.members.append(member)
        elements += member.parameter.numel() // _ranks(member)
    if batch.members:
        yield batch


def _key(member: Member) -> tuple[Any, ...]:
    key = member.chunk_group.key
    return (*map(id, member.exchanges), key.dtype, key.device, str(member.chunk_group.rule))


def _ranks(member: Member) -> int:
    return math.prod(exchange.world_size for exchange in member.exchanges)

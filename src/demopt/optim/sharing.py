"""Ranks of a node share the work of a rule that needs whole matrices: each computes phi of some, and hands it back.

A parameter may be cut over the ranks (FSDP2, tensor parallelism), once or several times, or each of them may have all
of it. Ranks then collect whole matrices by an all-to-all, or have them already; each computes phi of its own; and they
hand the results back by another all-to-all, or by an all-gather. Of several cuts, the last one is undone first.

Shapes: W ranks of an exchange inside the node; R, S rows and columns of a matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from demopt.exchange import Exchange

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """A dimension of a tensor that ranks have cut among them, into parts of these lengths.

    Examples:
        >>> Cut(0, (2, 1)).part(torch.arange(3), rank=1)
        tensor([2])
    """

    dimension: int
    lengths: tuple[int, ...]

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Returns a rank's part of a tensor, a view."""
        return whole.narrow(self.dimension, sum(self.lengths[:rank]), self.lengths[rank])

    def shape(self, of_any: Shape, rank: int) -> Shape:
        """Returns the shape of a rank's part, given that of any part."""
        return (*of_any[: self.dimension], self.lengths[rank], *of_any[self.dimension + 1 :])


@dataclass(frozen=True)
class Part:
    """What this rank has of a tensor, its cuts (the last one first; None: each rank has all), and what phi costs."""

    tensor: Tensor
    cuts: tuple[Cut | None, ...]
    cost: int


def shared_out(phi: Callable[[Tensor], Tensor], parts: list[Part], exchanges: tuple[Exchange, ...]) -> list[Tensor]:
    """Returns this rank's parts of phi of each tensor; there is one exchange for each cut. All its ranks call this.

    Examples:
        >>> shared_out(torch.neg, [Part(torch.ones(2), (), cost=1)], ())
        [tensor([-1., -1.])]
    """
    if not exchanges:
        return [phi(part.tensor) for part in parts]
    exchange, *inner = exchanges
    owners = assign([part.cost for part in parts], exchange.world_size)
    mine = [replace(part, cuts=part.cuts[1:]) for part in _collect(parts, owners, exchange)]
    return _hand_back(shared_out(phi, mine, tuple(inner)), parts, owners, exchange)


def assign(costs: list[int], world_size: int) -> list[int]:
    """Returns which rank does what, so that all have about as much to do: the largest first, to who has least so far.

    Examples:
        >>> assign([1, 4, 2, 3], world_size=2)
        [0, 0, 1, 1]
    """
    loads, owners = [0] * world_size, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return owners


def _collect(parts: list[Part], owners: list[int], exchange: Exchange) -> list[Part]:
    """Returns the parts that this rank owns, whole along their first cut."""
    ranks, mine = range(exchange.world_size), _owned(parts, owners, exchange.rank)
    if _uncut(parts):
        return mine
    outgoing = [[part.tensor for part in _owned(parts, owners, rank)] for rank in ranks]
    came = _swap(exchange, outgoing, [[_shape(part, rank) for part in mine] for rank in ranks], parts, owners)
    whole = [torch.cat(pieces, dim=_cut(part).dimension) for part, *pieces in zip(mine, *came, strict=True)]
    return [replace(part, tensor=tensor) for part, tensor in zip(mine, whole, strict=True)]


def _hand_back(done: list[Tensor], parts: list[Part], owners: list[int], exchange: Exchange) -> list[Tensor]:
    """Returns the results of all parts, cut as the parts are; `done` are those that this rank owns, whole."""
    ranks, mine = range(exchange.world_size), _owned(parts, owners, exchange.rank)
    shapes = [[tuple(part.tensor.shape) for part in _owned(parts, owners, rank)] for rank in ranks]
    if _uncut(parts):
        width = max(_elements(of_rank) for of_rank in shapes)
        gathered = exchange.all_gather(_row(done, width, parts).view(torch.uint8)).view(parts[0].tensor.dtype)
        came = [_split(row, of_rank) for row, of_rank in zip(gathered, shapes, strict=True)]
    else:
        outgoing = [[_cut(part).part(each, rank) for part, each in zip(mine, done, strict=True)] for rank in ranks]
        came = _swap(exchange, outgoing, shapes, parts, owners)
    queues = [iter(of_rank) for of_rank in came]
    return [next(queues[owner]) for owner in owners]


def _swap(
    exchange: Exchange, outgoing: list[list[Tensor]], shapes: list[list[Shape]], parts: list[Part], owners: list[int]
) -> list[list[Tensor]]:
    """Sends `outgoing[s]` to rank s; returns what came from each rank, which has `shapes`. One all-to-all."""
    ranks = range(exchange.world_size)
    # the same on all ranks, and both ways: what any rank has of all that any other owns
    width = max(_elements([_shape(part, a) for part in _owned(parts, owners, b)]) for a in ranks for b in ranks)
    rows = torch.stack([_row(tensors, width, parts) for tensors in outgoing])
    came = exchange.all_to_all(rows.view(torch.uint8)).view(rows.dtype)
    return [_split(row, of_rank) for row, of_rank in zip(came, shapes, strict=True)]


def _row(tensors: list[Tensor], width: int, like: list[Part]) -> Tensor:
    """Returns tensors one after the other, padded to `width` elements."""
    row, start = like[0].tensor.new_zeros(width), 0
    for tensor in tensors:
        row[start : start + tensor.numel()] = tensor.reshape(-1)
        start += tensor.numel()
    return row


def _split(row: Tensor, shapes: list[Shape]) -> list[Tensor]:
    """The inverse of `_row`, views."""
    ends = accumulate(map(_elements, ([shape] for shape in shapes)), initial=0)
    return [row[a:b].view(shape) for (a, b), shape in zip(pairwise(ends), shapes, strict=True)]


def _elements(shapes: list[Shape]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def _owned(parts: list[Part], owners: list[int], rank: int) -> list[Part]:
    return [part for part, owner in zip(parts, owners, strict=True) if owner == rank]


def _uncut(parts: list[Part]) -> bool:
    return parts[0].cuts[0] is None


def _cut(part: Part) -> Cut:
    cut = part.cuts[0]
    assert cut is not None
    return cut


def _shape(part: Part, rank: int) -> Shape:
    return _cut(part).shape(tuple(part.tensor.shape), rank)

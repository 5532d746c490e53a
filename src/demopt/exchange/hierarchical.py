"""Two-level exchange: gradients are averaged over a node's fast links, and each node counts as one rank.

Shapes: B bytes; W ranks here are nodes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from demopt.exchange.interface import Exchange

_ELEMENTS_AT_ONCE = 1 << 22  # of gradients in one all_reduce: 16 MiB


class Hierarchical(Exchange):
    """Makes each node one rank: `inter_node` connects the first ranks of all nodes, `intra_node` all ranks of this one.

    The first rank of a node communicates with the other nodes and broadcasts the result inside its own. The node's
    other ranks never call `inter_node`: there it may be any exchange with the same rank and world size.

    Examples:
        >>> from demopt.exchange import SingleRank
        >>> nodes = Hierarchical(inter_node=SingleRank(), intra_node=SingleRank())
        >>> nodes.rank, nodes.world_size, nodes.is_leader
        (0, 1, True)
    """

    def __init__(self, inter_node: Exchange, intra_node: Exchange) -> None:
        self.inter_node = inter_node
        self._intra_node = intra_node
        self.rank = inter_node.rank
        self.world_size = inter_node.world_size
        self.global_ranks = inter_node.global_ranks | intra_node.global_ranks
        self.is_leader = intra_node.rank == 0
        self.tag_bytes = inter_node.tag_bytes

    @property
    def intra_node(self) -> Exchange:
        return self._intra_node

    def all_gather(self, message_B: Tensor) -> Tensor:
        if self.is_leader:
            gathered = self.inter_node.all_gather(message_B)
        else:
            gathered = message_B.new_empty(self.world_size, message_B.numel())
        self._intra_node.broadcast(gathered.view(-1), 0)
        return gathered

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        received = self.inter_node.all_to_all(parts_WB) if self.is_leader else torch.empty_like(parts_WB)
        self._intra_node.broadcast(received.view(-1), 0)
        return received

    def all_reduce(self, values: Tensor) -> None:
        if self.is_leader:
            self.inter_node.all_reduce(values)
        self._intra_node.broadcast(values.view(-1), 0)

    def broadcast(self, data_B: Tensor, src: int) -> None:
        if self.is_leader:
            self.inter_node.broadcast(data_B, src)
        self._intra_node.broadcast(data_B, 0)

    def gather(self, message_B: Tensor, dst: int) -> Tensor | None:
        return self.inter_node.gather(message_B, dst) if self.is_leader else None

    def duplicate(self, device: torch.device) -> Exchange:
        del device
        raise ValueError("nodes cannot exchange in the background yet; use overlap=0 and delay=0")

    def average(self, gradients: list[Tensor]) -> None:
        for group in _grouped(gradients):
            double = any(gradient.dtype == torch.float64 for gradient in group)
            flat = torch.cat(
                [gradient.reshape(-1).to(torch.float64 if double else torch.float32) for gradient in group]
            )
            self._intra_node.all_reduce(flat)
            flat.div_(self._intra_node.world_size)
            for gradient, mean in zip(group, flat.split([g.numel() for g in group]), strict=True):
                gradient.copy_(mean.view(gradient.shape))


def _grouped(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the tensors in order, in groups large enough that latency does not matter."""
    group: list[Tensor] = []
    for tensor in tensors:
        group.append(tensor)
        if sum(member.numel() for member in group) >= _ELEMENTS_AT_ONCE:
            yield group
            group = []
    if group:
        yield group

"""Two-level exchange: gradients are averaged over a node's fast links, and each node counts as one rank."""

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from demopt.exchange.interface import Exchange

_BYTES_AT_ONCE = 1 << 24  # of gradients that are averaged together, so that latency does not matter


class Hierarchical(Exchange):
    """Makes each node one rank: `inter_node` connects the first ranks of all nodes, `intra_node` all ranks of this one.

    The first rank of a node communicates with the other nodes and broadcasts the result inside the node. Its other
    ranks never call `inter_node`: there it may be any exchange with the same rank and world size.

    Examples:
        >>> from demopt.exchange import SingleRank
        >>> nodes = Hierarchical(inter_node=SingleRank(), intra_node=SingleRank())
        >>> nodes.rank, nodes.world_size, nodes.is_leader
        (0, 1, True)
    """

    def __init__(self, inter_node: Exchange, intra_node: Exchange) -> None:
        for name, given in (("inter_node", inter_node), ("intra_node", intra_node)):
            if not isinstance(given, Exchange):
                raise TypeError(f"{name} is {given!r}; give an Exchange")
        self.inter_node = inter_node
        self.intra_node: Exchange = intra_node
        self.rank = inter_node.rank
        self.world_size = inter_node.world_size
        self.global_ranks = inter_node.global_ranks | intra_node.global_ranks

    def all_gather(self, message_B: Tensor) -> Tensor:
        gathered = message_B.new_empty(self.world_size, message_B.numel())
        if self.is_leader:
            gathered = self.inter_node.all_gather(message_B).to(message_B.device)  # gloo leaves results on the host
        self.intra_node.broadcast(gathered.view(-1), 0)
        return gathered

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        received = torch.empty_like(parts_WB)
        if self.is_leader:
            received = self.inter_node.all_to_all(parts_WB).to(parts_WB.device)
        self.intra_node.broadcast(received.view(-1), 0)
        return received

    def broadcast(self, data_B: Tensor, src: int) -> None:
        if self.is_leader:
            self.inter_node.broadcast(data_B, src)
        self.intra_node.broadcast(data_B, 0)

    def gather(self, message_B: Tensor, dst: int) -> Tensor | None:
        return self.inter_node.gather(message_B, dst) if self.is_leader else None

    def await_all(self, call: str) -> None:
        self.intra_node.await_all(call)
        if self.is_leader:
            self.inter_node.await_all(call)


def average(gradients: list[Tensor], intra_node: Exchange) -> None:
    """Overwrites gradients with their mean in a node, bit-identical there: summed in float32 or wider, rounded once."""
    ranks = intra_node.world_size
    for bucket in _take_tensors([each for each in gradients if each.numel()], _BYTES_AT_ONCE):
        values_E = _flatten_dense_tensors(bucket)
        dtype, count = values_E.dtype, values_E.numel()
        parts = torch.nn.functional.pad(values_E, (0, -count % ranks)).view(ranks, -1)
        received = intra_node.all_to_all(parts.view(torch.uint8)).view(dtype)
        mine = received.sum(0, dtype=torch.promote_types(dtype, torch.float32)).div_(ranks).to(dtype)
        mean = intra_node.all_gather(mine.view(torch.uint8)).view(dtype).view(-1)[:count]
        for gradient, part in zip(bucket, _unflatten_dense_tensors(mean, bucket), strict=True):
            gradient.copy_(part)

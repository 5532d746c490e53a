"""The exchange of a single rank, without a network."""

from torch import Tensor

from demopt.exchange.interface import Exchange


class SingleRank(Exchange):
    """The exchange of a single process.

    Examples:
        >>> import torch
        >>> SingleRank().all_gather(torch.zeros(3, dtype=torch.uint8)).shape
        torch.Size([1, 3])
    """

    rank = 0
    world_size = 1

    def all_gather(self, message_B: Tensor) -> Tensor:
        """Returns the message itself, as the only row."""
        return message_B.unsqueeze(0)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        """Returns the only part."""
        return parts_WB

    def all_reduce(self, values: Tensor) -> None:
        """Does nothing."""

    def broadcast(self, data_B: Tensor, src: int) -> None:
        """Does nothing."""

"""The exchange of a single rank, without a network."""

from torch import Tensor

from demopt.exchange.interface import Exchange


class Alone(Exchange):
    """The exchange of a single process.

    Example:
        >>> import torch
        >>> Alone().all_gather(torch.zeros(3, dtype=torch.uint8)).shape
        torch.Size([1, 3])
    """

    rank = 0
    world = 1

    def all_gather(self, message_B: Tensor) -> Tensor:
        """Returns the message itself, as the only row."""
        return message_B.unsqueeze(0)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        """Returns the only part."""
        return parts_WB

    def all_reduce(self, values: Tensor) -> None:
        """Does nothing."""

    def broadcast(self, data_B: Tensor, source: int) -> None:
        """Does nothing."""

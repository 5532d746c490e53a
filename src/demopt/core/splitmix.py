"""The finaliser of splitmix64 (Steele, Lea, Flood 2014): whole numbers that look drawn at random."""

from torch import Tensor


def splitmix64(x: Tensor) -> Tensor:
    """Mixes each int64; the same on every device, and no two numbers become one.

    Examples:
        >>> import torch
        >>> splitmix64(torch.tensor([1, 2])) % 2**16
        tensor([1509, 5258])
    """
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)

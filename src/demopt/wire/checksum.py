"""A 64-bit checksum of tensors (docs/wire-format.md): sums modulo 2**64, the same in any order, so on every device.

The top bit of every word weighs 2**63: two of them that flip, with nothing else changed, cancel. Mixing each word
before the product would cost another pass over the message. It guards against accidents, not attacks.
"""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from demopt.core.constants import constant
from demopt.core.rounding import splitmix64

BLOCK = 1 << 16  # words; longer inputs are summed block by block, then the block sums are summed in the same way


def checksum(data: Tensor) -> Tensor:
    """Returns int64 [...] for uint8 [..., n], n a multiple of 8, or for int64 words."""
    return combined(block_sums(data.view(torch.int64)))


def block_sums(words: Tensor) -> Tensor:
    """Returns the sum of each block of words int64 [..., n]; `combined` makes a checksum of them."""
    weights = _weights(words.device)
    if words.shape[-1] <= BLOCK:
        blocks, weights = words.unsqueeze(-2), weights[: words.shape[-1]]
    else:
        if spare := -words.shape[-1] % BLOCK:
            zero = constant((0,), torch.int64, words.device)
            words = torch.cat((words, zero.expand(*words.shape[:-1], spare)), dim=-1)
        blocks = words.unflatten(-1, (-1, BLOCK))
    return (blocks * weights).sum(-1)


def combined(sums: Tensor, without: tuple[int, Tensor] | None = None) -> Tensor:
    """Returns the checksum int64 [...] of block sums. `without`: number and value of a left-out word of block 0."""
    if without is not None:
        number, words = without
        sums = sums.clone()
        sums[..., 0] -= words * _weights(sums.device)[number]
    while sums.shape[-1] > 1:
        sums = block_sums(splitmix64(sums))  # otherwise word i of block j and word j of block i would weigh the same
    return sums.squeeze(-1)


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Returns a number in [0, 2**64) that depends on every bit of the tensors and on their order."""
    sums = []
    for tensor in tensors:
        for part in byte_view(tensor).split(64 * BLOCK):
            sums.append(checksum(torch.nn.functional.pad(part, (0, -part.numel() % 8))).reshape(1))
    if not sums:
        return 0
    on_host = torch.empty(len(sums), dtype=torch.int64, device="cpu")
    for device in {each.device for each in sums}:  # one copy from each device, for all of its sums
        there = [number for number, each in enumerate(sums) if each.device == device]
        on_host[there] = torch.cat([sums[number] for number in there]).cpu()
    return int(checksum(splitmix64(on_host))) % 2**64


def byte_view(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor's elements in their order, uint8 [n]; maybe a view of its memory."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)  # views have other bytes in memory
    # the stride of a single element, or of none, may be anything
    flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


@functools.lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """Fixed odd int64 numbers: splitmix64 of 1, 2, 3, ..."""
    numbers = torch.arange(1, BLOCK + 1, dtype=torch.int64, device="cpu")
    return (splitmix64(numbers * -0x61C8864680B583EB) | 1).to(device)

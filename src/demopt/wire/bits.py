"""Packs small unsigned integers into bytes, least significant bit first.

Eight values of b bits fill b bytes, so value n starts on a byte boundary if n is a multiple of 8.
"""

import torch
from torch import Tensor

from demopt.kernels import codec


def packed_bytes(count: int, bits: int) -> int:
    """Returns the bytes that `count` values of `bits` bits take.

    Example:
        >>> packed_bytes(count=9, bits=3)
        4
    """
    return (count * bits + 7) // 8


def pack(values: Tensor, bits: int) -> Tensor:
    """Packs integers [n] in [0, 2**bits), bits <= 32, into uint8 [packed_bytes(n, bits)]; unused bits are zero.

    Example:
        >>> pack(torch.tensor([1, 0, 1, 1]), bits=1)
        tensor([13], dtype=torch.uint8)
    """
    if codec.covers(values):
        return codec.pack(values, bits)
    wide = torch.int32 if bits <= 16 else torch.int64
    groups = torch.zeros((values.numel() + 7) // 8, 8, dtype=wide, device=values.device)
    groups.view(-1)[: values.numel()] = values.reshape(-1)
    columns = groups.T.contiguous()
    packed = torch.empty(bits, groups.shape[0], dtype=torch.uint8, device=values.device)
    for byte in range(bits):
        lane = torch.zeros_like(columns[0])
        for value in range(8 * byte // bits, (8 * byte + 7) // bits + 1):
            shift = value * bits - 8 * byte
            lane |= columns[value] << shift if shift >= 0 else columns[value] >> -shift
        packed[byte] = lane.bitwise_and_(255)
    return packed.T.reshape(-1)[: packed_bytes(values.numel(), bits)]


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks int64 [..., count] from uint8 [..., packed_bytes(count, bits)].

    Example:
        >>> unpack(pack(torch.tensor([5, 2, 7]), bits=3), bits=3, count=3)
        tensor([5, 2, 7])
    """
    if codec.covers(packed):
        return codec.unpack(packed, bits, count)
    wide = torch.int32 if bits <= 16 else torch.int64
    whole_groups = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % bits))
    lanes = whole_groups.unflatten(-1, (-1, bits)).movedim(-1, 0).to(wide)
    values = torch.empty(8, *lanes.shape[1:], dtype=torch.int64, device=packed.device)
    for value in range(8):
        first, last = value * bits // 8, (value * bits + bits - 1) // 8
        total = torch.zeros_like(lanes[0])
        for byte in range(first, last + 1):
            shift = 8 * byte - value * bits
            total |= lanes[byte] << shift if shift >= 0 else lanes[byte] >> -shift
        values[value] = total.bitwise_and_((1 << bits) - 1)
    return values.movedim(0, -1).flatten(-2)[..., :count]

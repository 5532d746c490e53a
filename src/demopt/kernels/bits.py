"""The kernels of bits.c: integers as bits, and unary maps of positions, as `wire.bits` defines them."""

import torch
from torch import Tensor

from demopt.kernels.gate import address, as_contiguous, library


def pack(values: Tensor, bits: int) -> Tensor:
    """Packs integers [...] of `bits` bits, at most 32, into uint8 [n]."""
    wide = as_contiguous("values", values, torch.int64)
    packed = torch.empty((wide.numel() * bits + 7) // 8, dtype=torch.uint8, device="cpu")
    pointers = address("values", wide, torch.int64), address("packed", packed, torch.uint8)
    library().demopt_pack(pointers[0], wide.numel(), bits, pointers[1])
    return packed


def unpack(packed_Wn: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks the first `count` integers int64 [W, count] of each row."""
    need, rows = (count * bits + 7) // 8, _rows(packed_Wn)
    if packed_Wn.shape[1] < need or not 0 < bits <= 32:
        raise ValueError(f"{count} values of {bits} bits take {need} bytes; packed has shape {list(packed_Wn.shape)}")
    values = torch.empty(len(rows), count, dtype=torch.int64, device="cpu")
    source, target = address("packed", rows, torch.uint8, by_row=True), address("values", values, torch.int64)
    for row in range(len(rows)):
        library().demopt_unpack(source + row * rows.stride(0), count, bits, target + row * count * values.itemsize)
    return values


def pack_unary(positions_CK: Tensor, low: int, width: int) -> Tensor:
    """Packs the high parts of ascending positions as maps of `width` bits per chunk; ValueError if they do not fit."""
    positions, (chunks, keep) = as_contiguous("positions", positions_CK, torch.int64), positions_CK.shape
    maps = torch.zeros((chunks * width + 7) // 8, dtype=torch.uint8, device="cpu")
    pointers = address("positions", positions, torch.int64), address("maps", maps, torch.uint8)
    if not library().demopt_pack_unary(pointers[0], chunks, keep, low, width, pointers[1]):
        raise ValueError("a position is out of the chunk")
    return maps


def unpack_unary(maps_Wn: Tensor, chunks: int, keep: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns the high parts int64 [W, C, K], and, bool [W, 1], which rows have a map without exactly K ones."""
    rows, sound = _rows(maps_Wn), []
    if maps_Wn.shape[1] < (chunks * width + 7) // 8:
        raise ValueError(f"{chunks} maps of {width} bits do not fit in shape {list(maps_Wn.shape)}")
    high = torch.zeros(len(rows), chunks, keep, dtype=torch.int64, device="cpu")
    source, target = address("maps", rows, torch.uint8, by_row=True), address("positions", high, torch.int64)
    for row in range(len(rows)):
        places = source + row * rows.stride(0), chunks, keep, width, target + row * chunks * keep * high.itemsize
        sound.append([library().demopt_unpack_unary(*places)])
    return high, torch.tensor(sound, device="cpu").view(-1, 1) == 0


def _rows(packed_Wn: Tensor) -> Tensor:
    """Returns the bytes with each row contiguous."""
    if packed_Wn.dim() != 2:
        raise ValueError(f"packed has shape {list(packed_Wn.shape)}; the kernel expects rows of bytes")
    return packed_Wn if packed_Wn.stride(1) == 1 else as_contiguous("packed", packed_Wn, torch.uint8)

"""Index codes: encode the kept positions of a chunk as bits. The positions of a chunk ascend strictly.

"every" sends nothing, because all N are kept. "fixed" sends ceil(log2 N) bits per index. "elias-fano" (Elias 1974,
Fano 1971), in its fixed-length form, sends l = floor(log2(N / K)) low bits per index and the high parts in unary: a
bitmap in which bit high_i + i is set for the i-th index.

Shapes: C chunks, N elements in a chunk, K kept.
"""

import torch
from torch import Tensor

from demopt.errors import MessageError
from demopt.kernels import codec
from demopt.wire.bits import pack, unpack
from demopt.wire.planes import Plane


def index_code(keep: int, length: int) -> str:
    """Returns the name of the shortest code for K of N positions.

    Example:
        >>> index_code(32, 4096), index_code(1, 64), index_code(64, 64)
        ('elias-fano', 'fixed', 'every')
    """
    if keep == length:
        return "every"
    fixed, elias_fano = (sum(plane.count * plane.bits for plane in planes) for planes in _both(keep, length))
    return "fixed" if fixed <= elias_fano else "elias-fano"


def index_planes(keep: int, length: int) -> tuple[Plane, ...]:
    """Returns the planes of the shortest code.

    Example:
        >>> index_planes(32, 4096)
        (Plane(count=32, bits=7), Plane(count=63, bits=1))
    """
    if keep == length:
        return ()
    fixed, elias_fano = _both(keep, length)
    return fixed if index_code(keep, length) == "fixed" else elias_fano


def _both(keep: int, length: int) -> tuple[tuple[Plane, ...], tuple[Plane, ...]]:
    low = _low_bits(keep, length)
    unary = Plane(keep + (length - 1 >> low), 1)
    return (Plane(keep, (length - 1).bit_length()),), ((Plane(keep, low), unary) if low else (unary,))


def _low_bits(keep: int, length: int) -> int:
    return (length // keep).bit_length() - 1


def encode_indices(positions_CK: Tensor, length: int) -> list[Tensor]:
    """Encodes ascending positions (int64) as uint8 tensors, one per plane.

    Example:
        >>> encode_indices(torch.tensor([[1, 6, 7, 12]]), length=16)  # l = 2: low parts 1 2 3 0, high parts 0 1 1 3
        [tensor([57], dtype=torch.uint8), tensor([77], dtype=torch.uint8)]
    """
    chunks, keep = positions_CK.shape
    code = index_code(keep, length)
    if code == "every":
        return []
    if code == "fixed":
        return [pack(positions_CK, (length - 1).bit_length())]
    low = _low_bits(keep, length)
    *_, unary = index_planes(keep, length)
    lows = [pack(positions_CK & (1 << low) - 1, low)] if low else []
    if codec.covers(positions_CK):
        return [*lows, codec.pack_unary(positions_CK, low, unary.count)]
    ones = (positions_CK >> low) + torch.arange(keep, device=positions_CK.device)
    bitmap = torch.zeros(chunks, unary.count, dtype=torch.int32, device=positions_CK.device).scatter_(1, ones, 1)
    return [*lows, pack(bitmap, 1)]


def decode_indices(planes: list[Tensor], chunks: int, keep: int, length: int) -> Tensor:
    """Decodes planes [W, bytes] to positions int64 [W, C, K]. The caller checks that they ascend and are below N.

    Raises MessageError, with the row as the rank, if a unary map does not have K ones.

    Example:
        >>> planes = [plane.unsqueeze(0) for plane in encode_indices(torch.tensor([[1, 6, 7, 12]]), length=16)]
        >>> decode_indices(planes, chunks=1, keep=4, length=16)
        tensor([[[ 1,  6,  7, 12]]])
    """
    code = index_code(keep, length)
    if code == "fixed":
        flat = unpack(planes[0], (length - 1).bit_length(), chunks * keep)
        return flat.view(len(planes[0]), chunks, keep)
    low = _low_bits(keep, length)
    *_, unary = index_planes(keep, length)
    if codec.covers(planes[-1]):
        positions, bad = codec.unpack_unary(planes[-1], chunks, keep, low, unary.count)
    else:
        positions, bad = _unpack_unary(planes[-1], chunks, keep, low, unary.count)
    if bad:
        raise MessageError(f"an index map does not have {keep} ones", bad[0])
    if low:
        positions += unpack(planes[0], low, chunks * keep).view(len(planes[0]), chunks, keep)
    return positions


def _unpack_unary(maps_WB: Tensor, chunks: int, keep: int, low: int, width: int) -> tuple[Tensor, list[int]]:
    """Returns the high parts, shifted left by `low`, int64 [W, C, K], and the rows where a map does not have K ones."""
    bitmap = unpack(maps_WB, 1, chunks * width).view(len(maps_WB), chunks, width)
    wrong = bitmap.sum(-1) != keep
    if bool(wrong.any()):
        return bitmap, wrong.any(1).nonzero().view(-1).tolist()
    ones = bitmap.nonzero()[:, -1].view(len(maps_WB), chunks, keep)
    return (ones - torch.arange(keep, device=ones.device)) << low, []

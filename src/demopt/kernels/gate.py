"""The gate before C: loads the compiled kernels, and checks all tensors, because C trusts addresses and sizes."""

import ctypes
import functools
import hashlib
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY = Path(__file__).with_name("cpu.so.1")


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """Returns the compiled C files of this folder, or None if there are none: torch then does the same work, slower.

    A library that was built from other sources, as after editing an editable install, is not used.
    """
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None
    loaded.demopt_source.restype = ctypes.c_char_p
    texts = b"".join(path.read_bytes() for path in sorted(LIBRARY.parent.glob("*.[ch]")))
    source = hashlib.blake2b(texts, digest_size=8).hexdigest()
    if loaded.demopt_source().decode() != source:
        warnings.warn("the CPU kernels are older than their sources; install demopt again", stacklevel=2)
        return None
    for name, numbers in (("pack", 2), ("unpack", 2), ("pack_unary", 4), ("unpack_unary", 3)):
        function = getattr(loaded, f"demopt_{name}")
        function.argtypes = [ctypes.c_void_p, *numbers * [ctypes.c_int64], ctypes.c_void_p]
        function.restype = ctypes.c_int64 if name.endswith("unary") else None
    loaded.demopt_level.restype = ctypes.c_int64
    return loaded


def address(
    what: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None, by_row: bool = False
) -> int:
    """Returns the address of a contiguous tensor in host memory, after checking that it has C's dtype and shape.

    `by_row`: its rows may have gaps between them, since C gets their stride. TypeError: another dtype or device, or not
    dense. ValueError: another shape, gaps between elements, or freed memory, as after `storage.resize_(0)`.
    """
    check_in_host_memory(what, tensor)
    if tensor.dtype != dtype:
        raise TypeError(f"{what} is {tensor.dtype}; the kernel expects {dtype}")
    if shape is not None and tensor.shape != torch.Size(shape):
        raise ValueError(f"{what} has shape {list(tensor.shape)}; the kernel expects {list(shape)}")
    whole = tensor[0] if by_row and len(tensor) else tensor
    if tensor.is_neg():
        raise ValueError(f"{what} is a view of the negative of its memory; give the kernel its resolve_neg()")
    if not whole.is_contiguous():
        raise ValueError(f"{what} has strides {list(tensor.stride())}; the kernel expects it contiguous")
    return tensor.data_ptr()


def check_in_host_memory(what: str, tensor: Tensor) -> None:
    """Raises TypeError or ValueError unless the tensor is dense, and all of its elements are in host memory."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        came = f"{tensor.layout} on {tensor.device}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise TypeError(f"{what} is {came}; the kernel expects a dense tensor on the CPU")
    end = tensor.storage_offset() * tensor.itemsize + extent(tensor)
    if tensor.numel() and (tensor.untyped_storage().nbytes() < end or not tensor.data_ptr()):
        raise ValueError(f"{what}, shape {list(tensor.shape)}, has no memory any more: its storage was resized")


def as_contiguous(what: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor in host memory as contiguous `dtype`, of the same kind of numbers; raises as `address` does."""
    check_in_host_memory(what, tensor)
    if tensor.is_complex() or tensor.is_floating_point() != dtype.is_floating_point:
        raise TypeError(f"{what} is {tensor.dtype}; the kernel expects {dtype}")
    return tensor.to(dtype).resolve_neg().contiguous()


def check_apart(written: Iterable[Tensor], read: Iterable[Tensor] = ()) -> None:
    if not apart(written, read):
        raise ValueError("tensors share memory that the kernel writes; give it copies")


def apart(written: Iterable[Tensor], read: Iterable[Tensor] = ()) -> bool:
    """Whether no written tensor shares memory with another one: threads write and read them at the same time."""
    spans = [(each.data_ptr(), extent(each), kind) for kind, group in enumerate((written, read)) for each in group]
    ends = [0, 0]  # the furthest end of the written ones, and of the read ones
    for start, size, kind in sorted(spans):
        if size and (start < ends[0] or (kind == 0 and start < ends[1])):
            return False
        ends[kind] = max(ends[kind], start + size)
    return True


def extent(tensor: Tensor) -> int:
    """Returns the bytes from a tensor's first element to the end of its last."""
    if tensor.is_contiguous():  # the usual case, and fast
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize if tensor.numel() else 0

"""The Triton kernels as one module that implements `choice.Kernels`."""

import torch

from demopt.kernels.triton_apply import apply, directions, writable
from demopt.kernels.triton_device import LONGEST_SIDE, runs_on
from demopt.kernels.triton_extract import extract, readable

__all__ = ["apply", "covers", "directions", "extract", "readable", "writable"]


def covers(chunk_shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels cover chunks of this shape, momentum dtype and device.

    Examples:
        >>> covers((64, 64), torch.float32, torch.device("cpu"))
        False
    """
    return dtype == torch.float32 and max(chunk_shape) <= LONGEST_SIDE and runs_on(device)

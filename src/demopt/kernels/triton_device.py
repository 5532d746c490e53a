"""The devices and chunks that the Triton kernels support."""

import importlib.util

import torch

LONGEST_SIDE = 64  # a chunk, its momentum and both bases stay in registers and shared memory
_LEAST_CAPABILITY = (8, 0)  # TF32 products on tensor cores


def runs_on(device: torch.device) -> bool:
    """Whether Triton is installed and the device is an NVIDIA GPU of the Ampere generation or later.

    Examples:
        >>> runs_on(torch.device("cpu"))
        False
    """
    if device.type != "cuda" or torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def block_side(side: int) -> int:
    """Returns the smallest power of two that holds a chunk's side and that `tl.dot` accepts.

    Examples:
        >>> block_side(1), block_side(17), block_side(64)
        (16, 32, 64)
    """
    return max(16, 1 << (side - 1).bit_length())

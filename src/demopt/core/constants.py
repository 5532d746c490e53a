"""What is made or found once for each device, and kept: small tensors, which nobody may modify, and its dtypes."""

import functools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=256)
def constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device)


@functools.lru_cache(maxsize=256)
def places(count: int, dtype: torch.dtype, device: torch.device, step: int = 1) -> Tensor:
    """Returns the numbers 0, `step`, 2 `step`, ..., `count` of them: shifts, or the starts of equal parts."""
    return (torch.arange(count, device="cpu") * step).to(dtype).to(device)


@functools.lru_cache(maxsize=16)
def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64: MPS and some of XPU do not."""
    try:
        torch.ones(2, device=device).to(torch.float64).add_(1.0)
    except (TypeError, RuntimeError):
        return False
    return True

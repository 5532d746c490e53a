"""Small tensors that are made once for each device, and kept. Do not modify them."""

import functools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=256)
def constant(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device)


@functools.lru_cache(maxsize=256)
def places(count: int, dtype: torch.dtype, device: torch.device, step: int = 1) -> Tensor:
    """Returns the numbers 0, `step`, 2 `step`, ..., `count` of them: to shift by, or where equal parts begin."""
    return (torch.arange(count, device="cpu") * step).to(dtype).to(device)

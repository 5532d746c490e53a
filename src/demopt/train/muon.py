"""Muon with its matrix products in float32, for CPUs. Needs torch 2.9, the first with torch.optim.Muon."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from demopt.core.update import Muon


class Float32Muon(torch.optim.Muon):
    """torch.optim.Muon with its scale "match_rms_adamw", and the Newton-Schulz iteration in float32.

    torch's iteration is in bfloat16, for tensor cores. A CPU without bfloat16 instructions takes 21 to 104 times as
    long for a step (decision 28). The settings, the state and the saved state are torch's.

    Examples:
        >>> matrix = nn.Parameter(torch.zeros(4, 9))
        >>> matrix.grad = torch.randn(4, 9)
        >>> Float32Muon([matrix], lr=1.0, weight_decay=0.0).step()
        >>> matrix.detach().square().mean().sqrt().round(decimals=1)
        tensor(0.2000)
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        if adjust_lr_fn != "match_rms_adamw":
            raise ValueError(f"adjust_lr_fn is {adjust_lr_fn!r}; Float32Muon has 'match_rms_adamw' alone")
        super().__init__(params, lr, weight_decay, momentum, nesterov, adjust_lr_fn=adjust_lr_fn)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move all matrices that have a gradient; return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._move(matrix, matrix.grad, group)
        return loss

    def _move(self, matrix_RS: nn.Parameter, gradient_RS: Tensor, group: dict[str, Any]) -> None:
        state, lr, momentum = self.state[matrix_RS], group["lr"], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient_RS)
        average = state["momentum_buffer"].lerp_(gradient_RS, 1 - momentum)
        ahead = gradient_RS.lerp(average, momentum) if group["nesterov"] else average
        direction = Muon()(ahead.float(), torch.empty(0), {})
        matrix_RS.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)

"""Tries to capture a step as a CUDA graph."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from demopt.errors import one_line


def try_capture(optimizer: Optimizer) -> str:
    """Return 'captured', or why not. Do it last: a capture that fails may leave the optimizer unusable."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            optimizer.step()
    except Exception as error:  # the error is the answer
        return f"not captured: {one_line(error)}"
    return "captured"

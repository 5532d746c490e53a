"""Whether a step can be captured as a CUDA graph."""

from __future__ import annotations

import torch
from torch.optim import Optimizer


def try_capture(optimizer: Optimizer) -> str:
    """'captured', or why not. The last thing to do with an optimizer: a capture that fails may leave it unusable."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            optimizer.step()
    except Exception as error:  # whatever stands in the way is the answer
        return f"not captured: {' '.join(str(error).split())[:200]}"
    return "captured"

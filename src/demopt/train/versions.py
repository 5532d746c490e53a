"""The versions of the software that decides what a run computes, and that all machines of a run should share."""

from __future__ import annotations

import platform


def versions() -> dict[str, str]:
    """Return the versions of demopt, Python and torch. The first call imports torch.

    Examples:
        >>> sorted(versions())
        ['demopt', 'python', 'torch']
    """
    import torch

    import demopt

    return {"demopt": demopt.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}

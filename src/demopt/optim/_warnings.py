"""Warnings that point at the user's own line."""

import sys
import warnings
from pathlib import Path

import torch

#: torch wraps `step` and no_grad functions, so its frames also lie between the user's and demopt's.
_INSIDE = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


def warn(text: str) -> None:
    """Issues a UserWarning at the nearest caller outside demopt and torch.

    Example:
        >>> with warnings.catch_warnings(record=True) as seen:
        ...     warnings.simplefilter("always")
        ...     warn("ranks differ")
        >>> str(seen[0].message)
        'ranks differ'
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)

"""Warnings that point at the user's own line; what is the same on all ranks is said by one of them."""

import contextlib
import sys
import warnings
from pathlib import Path

import torch

from demopt.exchange import Exchange

#: torch wraps `step` and no_grad functions, and contextlib those that hold interrupts back, so their frames also lie
#: between the user's and demopt's.
_INSIDE = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), str(contextlib.__file__))


def warn(text: str) -> None:
    """Issues a UserWarning at the nearest caller outside demopt, torch and contextlib.

    Examples:
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


def warn_for_all(text: str, exchange: Exchange) -> None:
    """Issues a warning about what is the same on all ranks of an exchange: on the first process of the first rank."""
    if speaks(exchange):
        warn(text)


def speaks(exchange: Exchange) -> bool:
    """Whether this process is the one that says what is the same on all ranks of an exchange.

    Examples:
        >>> from demopt.exchange import SingleRank
        >>> speaks(SingleRank())
        True
    """
    return exchange.rank == 0 and exchange.is_leader

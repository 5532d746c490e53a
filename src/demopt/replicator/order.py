"""The order of the parameters, which must be the same on all ranks: by their names, otherwise by their first values.

Rounds know a parameter by its place. Were one rank's order another one, such as that of a set, layers would be swapped.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from demopt.errors import SettingsError
from demopt.wire.checksum import fingerprint

_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def names_of(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of all parameters, without those of wrappers; nothing unless all groups have names.

    Examples:
        >>> names_of([{"params": [0, 1], "param_names": ["module._orig_mod.head.weight", "submodule.bias"]}])
        ['head.weight', 'submodule.bias']
    """
    found = [_WRAPPERS.sub("", str(name)) for group in groups for name in group.get("param_names") or ()]
    return found if len(found) == sum(len(group["params"]) for group in groups) else []


def marks_of(tensors: Sequence[Tensor]) -> list[int]:
    """Returns a fingerprint of each tensor, negative if its elements are all equal: several tensors may begin so."""
    return [fingerprint([tensor]) if varies(tensor) else ~fingerprint([tensor]) for tensor in tensors]


def check_order(who: str, there: str, theirs: Sequence[Any], mine: Sequence[Any]) -> None:
    """Raises SettingsError if a name or mark in `mine` is at another place in `theirs`, and that place differs, too.

    A negative mark counts only if all that differ are those of `theirs` in another order.

    `who` has `mine`, and `there` says who has `theirs`.

    Examples:
        >>> check_order("rank 1 has", "rank 0", ["head", "body"], ["neck", "body"])
        >>> check_order("rank 1 has", "rank 0", ["head", "body"], ["body", "head"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        demopt.errors.SettingsError: rank 1 has parameter 0 'body' where rank 0 has it at place 1: ...
    """
    differing = [place for place, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b]
    place_of = {theirs[place]: place for place in differing}
    permuted = Counter(theirs[place] for place in differing) == Counter(mine[place] for place in differing)
    for place in differing:
        if mine[place] in place_of and (permuted or isinstance(mine[place], str) or mine[place] >= 0):
            name = f" {mine[place]!r}" if isinstance(mine[place], str) else ""
            raise SettingsError(
                f"{who} parameter {place}{name} where {there} has it at place {place_of[mine[place]]}: give the "
                "parameters in the same order everywhere, such as that of model.named_parameters(), not of a set"
            )


def varies(tensor: Tensor) -> bool:
    """Whether not all elements of a tensor are equal."""
    if tensor.numel() < 2:
        return False
    low, high = torch.aminmax(tensor.detach())
    return bool(low != high)

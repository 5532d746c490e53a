"""The settings in an optimizer's parameter groups, apart from the state that it keeps there.

A setting is a value that the user gave at construction or has changed since, and that can be compared: a number, a
bool, text, None, or a list or tuple of them. A value that the optimizer changes in its own step is state, such as a
counter of steps or the d of Prodigy; of it, only what the user gave is a setting. Functions, objects, sets and tensors
of several elements are neither.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]
IN_GROUP = "in_group"  # in a parameter's saved state: the state that the inner optimizer keeps in its group
#: The parameters, a scheduler's note, and torch's choices between implementations, which change no result.
_NO_SETTINGS = ("params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable")


@dataclass
class _Values:
    """The values of one parameter group: those that the user gave, and all as they were when last looked at."""

    group: Group
    given: Group = field(default_factory=dict)
    seen: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # with a mark, by which to see a change in place
    state: set[str] = field(default_factory=set)  # the names of what the optimizer changes

    def __post_init__(self) -> None:
        self.first = {*self.group}

    def changed(self) -> Iterator[tuple[str, Any]]:
        """Yields what is new or has changed since the last call."""
        before, self.seen = self.seen, {}
        for name, value in self.group.items():
            if name not in _NO_SETTINGS:
                with suppress(RecursionError):  # a list that holds itself is no setting
                    self.seen[name] = value, _mark(value)
                    if name not in before or before[name][1] != self.seen[name][1]:
                        yield name, value


class GroupSettings:
    """The settings of parameter groups, followed from step to step."""

    def __init__(self) -> None:
        self._values: list[_Values] = []

    def follow(self, groups: list[Group]) -> None:
        """Takes over the changes between two steps, which are the user's, and new groups."""
        for number, group in enumerate(groups):
            if number == len(self._values):
                self._values.append(_Values(group))
            each = self._values[number]
            loaded, each.group = group is not each.group, group  # loading replaces the groups, with the state in them
            for name, value in each.changed():
                if not (loaded and name in each.state):
                    each.given[name] = _copy(value)
        del self._values[len(groups) :]

    def stepped(self) -> None:
        """Takes note, right after a step, of the changes in it, which are the optimizer's."""
        for each in self._values:
            each.state.update(name for name, _ in each.changed())

    def restart(self) -> None:
        """Sets the optimizers' state in the groups back to what the user gave."""
        for each in self._values:
            for name in each.state & {*each.group}:
                if name in each.given:
                    each.group[name] = _copy(each.given[name])
                else:
                    del each.group[name]
            for _ in each.changed():
                pass

    def texts(self, added: bool = True) -> Iterator[tuple[int, str, str]]:
        """Yields the group's number, the name and the text of each setting; texts of 1, 1.0 and a tensor are equal.

        `added`: also of those whose names came into the group later.
        """
        for number, each in enumerate(self._values):
            for name, value in each.given.items():
                if (added or name in each.first) and (text := text_of(value)):
                    yield number, name, text

    def packed_state(self, number: int) -> Tensor | None:
        """Returns the names of the state in a group, with the values that are plain, for a saved state: uint8 [n]."""
        each = self._values[number]
        found = {name: [value for value in [each.group.get(name)] if _is_plain(value)] for name in sorted(each.state)}
        return torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8, device="cpu") if found else None

    def loaded(self, groups: list[Group], packed: Sequence[Sequence[Tensor]]) -> None:
        """Takes over groups that were loaded; `packed` holds results of `packed_state` for each."""
        for each, states in zip(self._values, packed, strict=False):
            each.state.update(*map(_names, states[:1]))
        self.follow(groups)


def unpacked(packed: Sequence[Tensor]) -> Group:
    """Returns the plain values of a group's state, which are this rank's own."""
    return {name: value for state in packed[:1] for name, held in _names(state).items() for value in held}


def _names(packed: Tensor) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = json.loads(bytes(packed.tolist()))
    return found


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(_copy, value)) if type(value) in (list, tuple) else value


def _mark(value: Any) -> Any:
    """Returns something that changes with the value, without waiting for a device; None for what is no setting."""
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if isinstance(value, list | tuple):
        return [_mark(each) for each in value]
    return repr(value) if value is None or isinstance(value, Real | str) else None


def text_of(value: Any) -> str:
    """Returns the text of a setting; nothing for what is none."""
    if getattr(value, "ndim", None) == 0 and getattr(value, "device", None) != torch.device("meta"):
        value = value.item()  # of torch or numpy
    if isinstance(value, list | tuple):
        texts = [text_of(each) for each in value]
        return f"({', '.join(texts)}{',' * (len(texts) == 1)})" if all(texts) else ""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, str):
        return repr(str.__str__(value))  # of an Enum of texts, too
    whole = int(value) if isinstance(value, int) else None
    if not isinstance(value, Real):
        return ""
    try:
        number = float(value) + 0.0  # -0.0 is 0.0
    except OverflowError:
        number = math.nan
    return repr(number) if whole in (None, number) else repr(whole)

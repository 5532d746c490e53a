"""The inner optimizers of LocalDeMo, which take its local steps: their checks, settings and state.

A setting is a value that the user gave at construction or has changed since, and that can be compared: a number, a
bool, text, None, or a list or tuple of them. A value that the optimizer changes in its own step is state, such as a
counter of steps or the d of Prodigy; of it, only what the user gave is a setting. Functions, objects, sets and tensors
of several elements are neither.
"""

import ctypes
import inspect
import io
import json
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, MutableMapping
from contextlib import suppress
from functools import partial
from itertools import islice
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from demopt.codec.gradients import all_usable, check_apart, check_parameters
from demopt.codec.hyperparameters import IMPLEMENTATIONS
from demopt.errors import first_line
from demopt.exchange.dtensor import cut_of, is_made_of_others, placed_as, shard_of, to_local, unlike_memory
from demopt.optim.mistakes import NOT_MOVED
from demopt.optim.replicated import ReplicatedOptimizer
from demopt.replicator.session import varies
from demopt.state import load_file
from demopt.validation import warn

Group = dict[str, Any]
#: Names in a parameter's saved state for what the inner optimizer keeps elsewhere: in the parameter's group, and, with
#: the first parameter, in neither. So each rank's own stays in a consolidated state, which has one copy of the groups.
IN_GROUP, BESIDE = "demopt.in_group", "demopt.in_optimizer"
#: The parameters, a scheduler's note, and torch's choices.
_NO_SETTINGS = ("params", "param_names", "initial_lr", *IMPLEMENTATIONS)
_PLAIN = bool | int | float | str | None  # values of a group's state that are saved per rank
_COUNTERS = ("step", "t")  # of an optimizer's steps, in its state or groups
_COPYING = ("AccSGD", "MirrorMADGRAD")  # by name, too: their copies never have the bits of the weights
_SYNCHRONIZING = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")  # by name: not imported here
_watched: "weakref.WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle]" = weakref.WeakKeyDictionary()


class InnerOptimizers:
    """Torch optimizers, one or a list, which refuse steps called by others; TypeError or ValueError if one is unfit."""

    def __init__(self, given: Any) -> None:
        self.optimizers = _checked(given)
        self._starts = [_starts(each) for each in self.optimizers]
        self.is_stepping = False  # a local step is under way
        self._lent: dict[str, dict[str, Tensor]] = {}  # another worker's moments, for parameters without a step yet
        self._told = False  # that the state of an optimizer inside one is not saved
        self._places: dict[Tensor, torch.device] = {}  # of parameters, and so of their state
        if copy := self.copy_of_weights():
            raise TypeError(f"inner: {copy}, {NOT_MOVED}")
        self._settings: list[GroupSettings] = []
        self._follow()
        self.move()
        self.watch()

    def watch(self) -> None:
        """Makes the optimizers refuse steps called by others."""
        mine = weakref.ref(self)

        def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            inner = mine()
            if inner is None or inner.is_stepping or all(group.get("lr", 0) == 0 for group in optimizer.param_groups):
                return  # with lr=0: torch.distributed.checkpoint and torchtitan create the state by such a step
            raise RuntimeError(
                f"step() of the {type(optimizer).__name__} inside a LocalDeMo was called, and ranks would drift apart; "
                "call step() of the LocalDeMo, which calls it"
            )

        for each in self.optimizers:
            if each in _watched:  # by a LocalDeMo that this one replaces
                _watched[each].remove()
            _watched[each] = each.register_step_pre_hook(refuse)

    @property
    def classes(self) -> str:
        """The names of the optimizers' classes, or of those that they stand for on this device."""
        return ", ".join(getattr(each, "stands_for", type(each).__name__) for each in self.optimizers)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups as they are now: loading a state into an optimizer replaces them."""
        if len(self.optimizers) == 1:
            return self.optimizers[0].param_groups  # the list itself, so that a group that a user appends trains
        return [group for each in self.optimizers for group in each.param_groups]

    def _follow(self) -> list["GroupSettings"]:
        """Takes over the changes between two steps, which are the user's, and new groups; returns the settings."""
        groups = self.groups
        del self._settings[len(groups) :]
        self._settings += map(GroupSettings, groups[len(self._settings) :])
        for settings, group in zip(self._settings, groups, strict=True):
            settings.follow(group)
        return self._settings

    @property
    def takes_closure(self) -> bool:
        """Whether there is a single optimizer whose step can compute the gradients itself, as SAM's has to."""
        return len(self.optimizers) == 1 and "closure" in inspect.signature(self.optimizers[0].step).parameters

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Takes a step of each; one that `takes_closure` gets a closure that computes the gradients."""
        self._follow()
        self.is_stepping = True

        def evaluate() -> Any:
            self._note_own_changes()
            try:
                return closure and closure()
            finally:
                self._follow()  # what the closure has changed is the user's

        try:
            for each in self.optimizers:
                each.step() if closure is None else each.step(evaluate)
        finally:
            self.is_stepping = False
            self._note_own_changes()
        if self._lent:
            self._take_lent()

    def _note_own_changes(self) -> None:
        """Notes that the changes of settings in a step are the optimizer's, not the user's."""
        for settings in self._settings:
            settings.state_names.update(settings.changed())

    def copy_of_weights(self, global_of: Mapping[Tensor, Tensor] | None = None) -> str:
        """Names an entry of the state that has the bits of a parameter's weights; an empty text if there is none.

        Looks at each optimizer's first parameter on a CPU with a state and unequal elements: it waits for no device.
        `global_of`: the weights at the last round, or before all steps: MADGRAD and DAdaptAdaGrad keep a copy of these.
        """
        for each in self.optimizers:
            if isinstance(each, torch.optim.ASGD):  # its average is an output, from which no step goes on
                continue
            on_cpu = [p for group in each.param_groups for p in group["params"] if p.is_cpu]
            inside = _inside(each)  # as timm's Lookahead has it
            states = [each.state, *([inside.state] if inside else [])]
            first: Any = next((p for p in on_cpu if any(state.get(p) for state in states) and varies(p)), None)
            entries = [state.get(first) or {} for state in states] if first is not None else []
            for name, value in (pair for entry in entries for pair in entry.items()):
                is_alike = type(value) is Tensor and _is_plain(value) and value.shape == first.shape
                if not (is_alike and value.is_floating_point()) or value.data_ptr() == first.data_ptr():
                    continue
                before = None if name == "p0" else (global_of or {}).get(first)  # Prodigy's only measures the way
                if before is not None and not varies(before):  # zeros are like a moment that is not used yet
                    before = None
                if any(torch.equal(value, each.to(value)) for each in (first, before) if each is not None):
                    return f"{type(each).__name__} keeps a second copy of the weights (its state {name!r})"
        return ""

    def restart(self) -> None:
        """Drops the state, which may not be finite."""
        for each, starts in zip(self.optimizers, self._starts, strict=True):
            if starts is not None:  # it would not make its state again
                _set_back(each.state, starts)
            else:
                each.state.clear()
                if inside := _inside(each):  # as SAM's, whose moments are there
                    inside.state.clear()
        defaults = [each.defaults for each in self.optimizers for _ in each.param_groups]
        for settings, names in zip(self._settings, defaults, strict=False):
            settings.restart(names)

    @property
    def is_finite(self) -> bool:
        """Whether all moments are finite. NaN in those of torch's classes shows in the weights; Lion moves by signs.

        Waits for the device, if an optimizer is not torch's.
        """
        others = [each for each in self.optimizers if not type(each).__module__.startswith(("torch.optim.", "demopt."))]
        pairs = [pair for each in others for pair in each.state.items()]
        pairs = [pair for pair in pairs if isinstance(pair[0], Tensor) and isinstance(pair[1], Mapping)]
        return all_usable(to_local(value) for p, entry in pairs for value in entry.values() if _is_moment(value, p))

    def facts(self, but: Collection[str] | None = None) -> dict[str, str]:
        """Returns the facts that ranks must share, by name; with `but`, without these and those that schedulers add."""
        facts = {"inner": self.classes}
        for number, settings in enumerate(self._follow()):
            for name, value in settings.given.items():
                if (but is None or (name in settings.first and name not in but)) and (text := text_of(value)):
                    facts[f"inner param_groups[{number}][{name!r}]"] = text
        return facts

    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Returns a copy of each parameter's entries, with the state that its optimizer keeps in the group."""
        found: dict[Tensor, dict[str, Any]] = {}
        for each in self.optimizers:
            found |= {key: dict(entry) for key, entry in each.state.items() if isinstance(key, Tensor)}
            if (beside := _packed_beside(each)) is not None:
                parameters = [parameter for group in each.param_groups for parameter in group["params"]]
                first = next((parameter for parameter in parameters if parameter in found), parameters[0])
                found.setdefault(first, {})[BESIDE] = beside
            if (held := _inside(each)) and not self._told:
                self._told = True
                holds = f"{type(each).__name__} holds a {type(held).__name__}, whose state is not in its own"
                warn(f"{holds}: it is not saved, and begins anew after loading")
        for settings in self._follow():
            in_group = settings.packed_state()
            parameters = settings.group["params"] if in_group is not None else []
            for parameter in [each for each in parameters if each in found] or parameters[:1]:
                found.setdefault(parameter, {})[IN_GROUP] = in_group
        return found

    def as_given(self, saved: list[Group]) -> list[Group]:
        """Returns saved groups with the user's values: those of the optimizer are in the entries of `state`."""
        return [settings.as_given(group) for settings, group in zip(self._follow(), saved, strict=True)]

    def move(self) -> None:
        """Moves state along with parameters moved since the last call, as by model.to(device) after construction."""
        before, self._places = self._places, {p: p.device for group in self.groups for p in group["params"]}
        if before == self._places:
            return
        for each in self.optimizers:
            for group in each.param_groups:
                all_move = group.get("fused") or group.get("capturable")  # otherwise "step" stays on the host
                for parameter in group["params"]:
                    entry, was = each.state.get(parameter, {}), before.get(parameter)
                    for name, value in entry.items():
                        if isinstance(value, Tensor) and value.device == was and (name != "step" or all_move):
                            entry[name] = value.to(parameter.device)

    def moments(self) -> dict[str, Tensor]:
        """Returns all state by "number of parameter.name", to lend it; nothing if some of it is no tensor."""
        entries = {
            f"{number}.{name}": value
            for number, parameter in enumerate(p for group in self.groups for p in group["params"])
            for each in self.optimizers
            for name, value in each.state.get(parameter, {}).items()
        }
        return entries if all(isinstance(value, Tensor) for value in entries.values()) else {}

    def borrow(self, moments: Mapping[str, Tensor]) -> None:
        """Takes the `moments` of another worker, each after its parameter's first step: only that shows what fits."""
        self._lent = _by_parameter(moments)

    def _take_lent(self) -> None:
        mine = _by_parameter(self.moments())
        pairs = [(mine[number], self._lent.pop(number)) for number in mine.keys() & self._lent.keys()]
        if any(_forms(held) != _forms(lent) for held, lent in pairs):
            self._lent = {}
            warn(f"the moments that the run lends do not fit the state of {self.classes}, which begins empty")
            return
        for held, lent in pairs:
            for name, value in held.items():
                to_local(value).copy_(lent[name])

    def load(self, groups: list[dict[str, Any]], state: Mapping[int, dict[str, Any]]) -> str:
        """Loads groups, with the entries of their parameters by number; returns a warning, if some state is lacking."""
        self._follow()
        state = {number: _renamed(entry) for number, entry in state.items()}
        states_in_groups = [_unpacked_state(group, state) for group in groups]
        values = [{name: kept[0] for name, kept in in_group.items() if kept} for in_group in states_in_groups]
        whole_groups = [group | its_values for group, its_values in zip(groups, values, strict=True)]
        numbers = [number for group in groups for number in group["params"]]  # or names
        entries = {}
        for number, parameter in zip(numbers, (p for group in self.groups for p in group["params"]), strict=True):
            held = {name: value for name, value in state.get(number, {}).items() if name not in (IN_GROUP, BESIDE)}
            entries[number] = tree_map(partial(_copied, like=parameter), held)
        unread, before = iter(whole_groups), [(each.state, each.param_groups) for each in self.optimizers]
        try:
            for each in self.optimizers:
                its_groups = [*islice(unread, len(each.param_groups))]
                numbers = [number for group in its_groups for number in group["params"]]
                mine = {number: entries[number] for number in numbers if entries[number]}
                packed = (state.get(number, {}).get(BESIDE) for number in numbers)
                loose, rest = _unpacked_beside(next((value for value in packed if value is not None), None))
                needed = [{*group} & each.defaults.keys() for group in each.param_groups]
                each.load_state_dict({**rest, "state": {**loose, **mine}, "param_groups": its_groups})
                for names, group in zip(needed, each.param_groups, strict=True):
                    if lacking := names - {*group, *_NO_SETTINGS}:
                        raise LookupError(f"its groups lack {', '.join(sorted(lacking))}")
                _check_loaded(each, [(number, mine.get(number, {})) for number in numbers])
        except BaseException as error:
            for each, (state_before, groups_before) in zip(self.optimizers, before, strict=True):
                each.state, each.param_groups = state_before, groups_before
            if isinstance(error, LookupError | AttributeError | RuntimeError | OverflowError):
                raise ValueError(f"the state is not of these inner optimizers ({self.classes}): {error!r}") from error
            raise
        self._lent, lost = {}, set[str]()
        for settings, in_group, group in zip(self._settings, states_in_groups, whole_groups, strict=True):
            settings.state_names.update(in_group)
            lost |= {*in_group} - {*group}  # not plain, so in the group, of which DCP loads only known names
        self._follow()
        told = f"the state lacks {', '.join(sorted(lost))} of an inner optimizer's group, which begins anew; "
        return f"{told}save one file per rank" if lost else ""


def _copied(value: Any, like: Tensor) -> Any:
    """Returns a copy of a saved value: otherwise torch would train in the caller's tensors, which may lie in a file."""
    if not isinstance(value, Tensor) or is_made_of_others(to_local(value)):
        return value
    cuts_nothing = value.shape == like.shape and not (cut_of(value) or cut_of(like))  # as a plain tensor, or one shard
    if cuts_nothing or (hasattr(value, "placements") and value.placements == getattr(like, "placements", ())):
        return placed_as(to_local(value).clone(), like)  # it may be on a mesh of another world
    return value.clone()


def _starts(optimizer: torch.optim.Optimizer) -> dict[Any, Any] | None:
    """Returns the state at construction, for `_set_back`; None if the optimizer makes its state in its first step.

    Of torch's, only Adagrad makes it before. Equal elements are one number. After a training before, a new one's.
    """
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    if not optimizer.state or (is_torchs and not isinstance(optimizer, torch.optim.Adagrad)):
        return None
    pairs = [pair for pair in optimizer.state.items() if isinstance(pair[0], Tensor) and isinstance(pair[1], Mapping)]
    entries = {parameter: dict(held) for parameter, held in pairs}
    counts = [each.get(name, 0) for each in (*entries.values(), *optimizer.param_groups) for name in _COUNTERS]
    moments = [value for p, entry in pairs for value in entry.values() if _is_moment(value, p)]
    is_used = any(map(_is_set, counts)) and any(map(_is_set, moments))
    if is_used or any(p.is_meta for p in entries):
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Adagrad) else ()
        return {p: {"sum": group["initial_accumulator_value"]} for group in groups for p in group["params"]}

    def start(value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor) or not value.numel():
            return value
        local = to_local(value)
        first = local.flatten()[0].item() if _is_plain(local) else 0
        if not _is_plain(local) or bool((local == first).all() & local.isfinite().all()):
            return first
        return 0 if _is_moment(value, parameter) else local.clone()

    return {p: {name: tree_map(partial(start, parameter=p), v) for name, v in entries[p].items()} for p in entries}


def _is_set(value: Any) -> bool:
    """Whether a counter or moment is not zero."""
    return bool(to_local(value).any()) if _is_plain(value) else isinstance(value, int | float) and value != 0


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor with elements to look at, here, unlike sparse or quantized ones, or of float8."""
    if not isinstance(value, Tensor) or unlike_memory(local := to_local(value)) or is_made_of_others(local):
        return False
    return value.itemsize > 1 or not value.is_floating_point()


def _is_moment(value: Any, parameter: Tensor) -> bool:
    """Whether a value in a parameter's state is a plain tensor of floats shaped like it."""
    return _is_plain(value) and value.is_floating_point() and value.shape == parameter.shape


def _set_back(held: Any, starts: Any) -> None:
    """Sets a state back in place; numbers that were not there at the start become zero, in tensors and counters."""
    for name, value in [*(held.items() if isinstance(held, Mapping) else enumerate(held))]:
        was = starts.get(name) if isinstance(starts, Mapping) else None
        if isinstance(starts, list | tuple) and name < len(starts):
            was = starts[name]
        if isinstance(value, Tensor):
            local = to_local(value)
            if isinstance(was, Tensor) and was.shape == local.shape:
                local.copy_(was)
            elif isinstance(was, bool | int | float) and was:
                local.fill_(was)
            elif was is not None or local.dtype != torch.bool:  # masks stay
                local.zero_()
        elif isinstance(value, Mapping | list | tuple | deque):
            _set_back(value, was)
        elif isinstance(value, int | float) and isinstance(held, MutableMapping | list):
            usual = 0 if name in _COUNTERS else value
            held[name] = was if isinstance(was, int | float) else usual


def _by_parameter(moments: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    found = defaultdict[str, dict[str, Tensor]](dict)
    for key, value in moments.items():
        number, _, name = key.partition(".")
        found[number][name] = value
    return found


def _forms(entry: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns shapes and dtypes, to compare two entries; all floats are alike: they are lent in another precision."""
    tensors = {name: to_local(value) for name, value in entry.items()}
    return {name: (value.shape, value.is_floating_point() or value.dtype) for name, value in tensors.items()}


def _check_loaded(optimizer: torch.optim.Optimizer, loaded: list[tuple[int, dict[str, Any]]]) -> None:
    """Raises ValueError if a parameter, by number, got a state that the optimizer's step cannot use.

    Restores saved numbers, such as NAdam's mu_product, which torch has rounded to the parameter's dtype.
    """
    rest, kind = iter(loaded), type(optimizer).__name__
    for group in optimizer.param_groups:
        dimensions = {1, *(parameter.dim() for parameter in group["params"])}
        needed = {each: _state_of_step(optimizer, group, each) for each in dimensions}
        # A parameter that is a number itself has moments that are numbers, too: those have its dtype.
        numbers = {name for name, value in needed[1].items() if not value.dim()}
        for parameter, (number, saved) in zip(group["params"], rest, strict=False):
            if not (entry := optimizer.state.get(parameter)):
                continue
            for name, value in saved.items():
                is_number = isinstance(value, Tensor) and value.dim() == 0 and isinstance(entry.get(name), Tensor)
                if is_number and (parameter.dim() or name in numbers):
                    entry[name] = value.to(entry[name].device, copy=True)
            if lacking := ", ".join(needed[parameter.dim()].keys() - entry.keys()):
                raise ValueError(f"the state of parameter {number} lacks {lacking}, which {kind} needs")
            for name, example in needed[parameter.dim()].items():
                value, is_alike = entry[name], example.shape == _example_shape(parameter.dim())
                told = f"the state of parameter {number} has {name}"
                if not isinstance(value, Tensor):
                    if example.dim() or not isinstance(value, Real):
                        raise ValueError(f"{told} of type {type(value).__name__}; {kind} needs a tensor")
                elif is_alike or not example.dim():
                    wanted = parameter if is_alike else example
                    if value.shape not in (wanted.shape, to_local(wanted).shape):
                        raise ValueError(f"{told} of shape {[*value.shape]}; {kind} needs {[*wanted.shape]}")


def _state_of_step(optimizer: torch.optim.Optimizer, group: Group, dimensions: int) -> dict[str, Tensor]:
    """Returns the tensors that a step gives a parameter of `_example_shape`.

    Nothing for other packages' optimizers: their step may communicate, and their state may depend on more.
    """
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] not in ("torch", "demopt"):
        return {}
    example = torch.nn.Parameter(torch.zeros(_example_shape(dimensions), dtype=torch.float32, device="cpu"))
    example.grad = torch.zeros_like(example)
    settings = {name: value for name, value in group.items() if name not in _NO_SETTINGS}
    settings |= dict.fromkeys({"foreach", "fused", "capturable", "differentiable"} & group.keys(), False)
    settings["lr"] = 0.0
    stepping = object.__new__(kind)
    try:
        torch.optim.Optimizer.__init__(stepping, [{**settings, "params": [example]}], settings)
        getattr(kind.step, "__wrapped__", kind.step)(stepping)  # without torch's hooks on every optimizer's step
    except Exception:  # it needs more than its groups, as Adagrad does
        return {}
    return {name: value for name, value in stepping.state[example].items() if isinstance(value, Tensor)}


def _example_shape(dimensions: int) -> torch.Size:
    return torch.Size(range(2, 2 + dimensions))


def _inside(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Returns the optimizer inside another one, if the inner one has a state of its own."""
    held = (value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer) and value.state)
    return next((each for each in held if each.state is not optimizer.state), None)


def _renamed(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry with current names; early 0.3.0 wrote `IN_GROUP` as "in_group", and that as "own.in_group"."""
    before = entry.get("in_group")
    if IN_GROUP in entry or not (isinstance(before, Tensor) and before.dtype == torch.uint8):
        return entry
    return {{"in_group": IN_GROUP, "own.in_group": "in_group"}.get(name, name): value for name, value in entry.items()}


def _packed_beside(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Returns the state of no parameter, which MADGRAD and Ranger21 have, as uint8 [n]; warns if it cannot be saved."""
    loose = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    rest = {name: value for name, value in optimizer.state_dict().items() if name not in ("state", "param_groups")}
    if not (loose or rest):
        return None
    file = io.BytesIO()
    try:
        torch.save({"state": loose, "rest": rest}, file)
        load_file(file)
    except Exception as error:  # of pickle, or of the values: they may be anything
        name = type(optimizer).__name__
        warn(f"{name} has state beside that of parameters, which is not saved, and begins anew: {first_line(error)}")
        return None
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _unpacked_beside(packed: Any) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Reverses `_packed_beside`; ValueError if the bytes are damaged."""
    if packed is None:
        return {}, {}
    try:
        held = packed.cpu().contiguous()
        found = load_file(io.BytesIO((ctypes.c_char * held.nbytes).from_address(held.data_ptr()).raw))
        return {**found["state"]}, {**found["rest"]}
    except Exception as error:  # it may hold anything
        raise ValueError(f"the state is damaged: its entry {BESIDE!r} cannot be read: {first_line(error)}") from None


def _fault(given: Any) -> str:
    """Returns why an inner optimizer cannot take local steps; empty if it can."""
    if not isinstance(given, torch.optim.Optimizer):
        return "; give a torch optimizer, such as torch.optim.AdamW(model.parameters(), lr=3e-4), or a list of them"
    if isinstance(given, ReplicatedOptimizer) or any(k.__name__ in _SYNCHRONIZING for k in type(given).__mro__):
        return ", which synchronizes the ranks itself; give a local optimizer"
    if callable(getattr(given, "train", None)) and callable(getattr(given, "eval", None)):
        switch = "train() and eval() switch the model between two copies of the weights, as schedule-free optimizers do"
        return f", whose {switch}: one is in its state, {NOT_MOVED}"
    if not hasattr(given, "_optimizer_step_pre_hooks"):  # as Opacus's
        how = "wraps an optimizer without torch's constructor, so that its steps cannot be watched"
        return (
            f", which {how}; give the optimizer inside it to LocalDeMo, and that to the wrapper, unless that keeps a "
            "copy of the weights, as Lookahead does"
        )
    if not {"state", "param_groups"} <= (saved := given.state_dict()).keys():
        lacks = f"state_dict has {', '.join(map(str, saved))} and no state by parameter, so it could not be saved"
        return f", whose {lacks}; give the optimizer inside it"
    if type(given).__name__ in _COPYING:
        return f", which keeps a second copy of the weights, {NOT_MOVED}"
    if isinstance(given, torch.optim.LBFGS):
        return ", which evaluates the loss several times a step; give another optimizer"
    return ""


def _checked(given: Any) -> list[torch.optim.Optimizer]:
    found = list(given) if isinstance(given, list | tuple) else [given]
    if found and all(isinstance(each, dict | Tensor) for each in found):  # also from Trainer's optimizer_cls_and_kwargs
        raise TypeError(
            "inner is parameters; LocalDeMo wraps an optimizer of them: LocalDeMo(torch.optim.AdamW(parameters, "
            "lr=3e-4)). To transformers.Trainer give optimizers=(optimizer, None) instead of optimizer_cls_and_kwargs"
        )
    if not found:
        raise ValueError("inner is an empty list; give at least one torch optimizer")
    for each in found:
        if fault := _fault(each):
            raise TypeError(f"inner is a {type(each).__name__}{fault}")
    holders: dict[int, int] = {}
    for number, each in enumerate(found):
        for group in each.param_groups:
            check_parameters(group["params"])
            if type(each).__name__ == "Muon" and any(shard_of(p)[1] > 1 for p in group["params"]):
                warn(
                    "torch.optim.Muon got sharded matrices (FSDP2, tensor parallelism): its iteration communicates, "
                    "and its bits are not those of whole matrices. Use demopt.muon_adamw, which gathers each once"
                )
            for parameter in group["params"]:
                if (first := holders.setdefault(id(parameter), number)) != number:
                    both = f"inner[{first}] and inner[{number}] both have a parameter of shape {list(parameter.shape)}"
                    raise ValueError(f"{both}; give each parameter to one optimizer")
    check_apart(parameter for each in found for group in each.param_groups for parameter in group["params"])
    return found


class GroupSettings:
    """The settings of one parameter group, followed from step to step."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.first = {*group}  # the names that came with the group
        self.given: Group = {}  # the values that the user gave
        self.state_names: set[str] = set()  # the names whose values the optimizer changes
        self._seen: dict[str, tuple[Any, Any]] = {}  # values, each with a mark that shows a change in place

    def changed(self) -> Group:
        """Returns the values that are new or have changed since the last call."""
        before, self._seen, found = self._seen, {}, {}
        for name, value in self.group.items():
            if name not in _NO_SETTINGS:
                with suppress(RecursionError):  # a list that holds itself is no setting
                    self._seen[name] = value, _mark(value)
                    if name not in before or before[name][1] != self._seen[name][1]:
                        found[name] = value
        return found

    def follow(self, group: Group) -> None:
        """Takes over the changes between two steps, which are the user's."""
        loaded, self.group = group is not self.group, group  # loading replaces the groups, with the state in them
        for name, value in self.changed().items():
            if not (loaded and name in self.state_names):
                self.given[name] = _copy(value)

    def restart(self, defaults: Collection[str]) -> None:
        """Sets the optimizer's state in the group back to what the user gave, but counters of earlier steps to zero."""
        for name in self.state_names & {*self.group}:
            if name in self.given:
                self.group[name] = _copy(self.given[name])
                if name in _COUNTERS and name not in defaults and isinstance(self.group[name], int | Tensor):
                    self.group[name] *= 0  # a new optimizer's group lacks it
            else:
                del self.group[name]
        self.changed()  # so that these changes do not count as the user's

    def as_given(self, saved: Group) -> Group:
        """Returns a saved group with the values that the user gave in place of those that `packed_state` has.

        All ranks load the groups of one of them. A rank whose optimizer has not changed a value yet would take that of
        another rank for the user's.
        """
        plain = {name for name in self.state_names if isinstance(name, str) and isinstance(saved.get(name), _PLAIN)}
        given = {name: self.given[name] for name in plain & {*self.given}}
        return {name: value for name, value in saved.items() if name not in plain} | given

    def packed_state(self) -> Tensor | None:
        """Returns the names of the state in the group, with the values that are plain, for a saved state: uint8 [n]."""
        there = self.state_names & {*self.group}  # `restart` takes some out of the group
        names = sorted(name for name in there if isinstance(name, str))
        found = {name: [self.group[name]] if isinstance(self.group[name], _PLAIN) else [] for name in names}
        return torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8, device="cpu") if found else None


def _unpacked_state(group: Group, state: Mapping[int, dict[str, Any]]) -> dict[str, list[Any]]:
    """Returns what `packed_state` has saved with a group's parameters: by name [value], or [] if it is not plain."""
    for number in group["params"]:
        if (packed := state.get(number, {}).get(IN_GROUP)) is not None:
            found: Any = None
            if isinstance(packed, Tensor) and packed.dim() == 1 and packed.dtype == torch.uint8:
                with suppress(ValueError, RuntimeError):
                    found = json.loads(bytes(packed.tolist()))
            if not (isinstance(found, dict) and all(isinstance(held, list) for held in found.values())):
                raise ValueError(f"the state of parameter {number} is damaged: its entry {IN_GROUP!r} is no settings")
            return found
    return {}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return type(value)(map(_copy, value)) if type(value) in (list, tuple) else value


def _mark(value: Any) -> Any:
    """Returns something that changes with the value, without waiting for a device; None if it is no setting."""
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if isinstance(value, list | tuple):
        return [_mark(each) for each in value]
    return repr(value) if value is None or isinstance(value, Real | str) else None


def text_of(value: Any) -> str:
    """Returns the text of a setting; an empty one for any other value."""
    if getattr(value, "ndim", None) == 0 and getattr(value, "device", None) != torch.device("meta"):
        value = value.item()  # of torch or numpy
    if isinstance(value, list | tuple):
        texts = [text_of(each) for each in value]
        return f"({', '.join(texts)}{',' * (len(texts) == 1)})" if all(texts) else ""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, str):
        return repr(str.__str__(value))  # of an Enum of texts, too
    if isinstance(value, int):
        value = int(value)  # of an Enum, too
    elif not isinstance(value, Real):
        return ""
    with suppress(OverflowError):
        number = float(value) + 0.0  # -0.0 is 0.0
        if number == value or not isinstance(value, int):
            return repr(number)
    return repr(value)  # a whole number with more digits than a float has

"""The base of `DeMo` and `LocalDeMo`: a replicator, and loading a state through torch's hooks."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from demopt.optim.mistakes import note_optimizer
from demopt.replicator.replicator import Replicator, Stats
from demopt.replicator.rounds import Rounds
from demopt.state import StateDict, check_form, collect, consolidated, own_part, savers_of
from demopt.validation import warn

_MANY_IDLE = 100  # rounds
_MANY_STEPS = 100  # whose traffic a consolidated state may equal without a warning

P = ParamSpec("P")
T = TypeVar("T")


def unrecorded(method: Callable[P, T]) -> Callable[P, T]:
    """Makes a method run without autograd, and its tensors ordinary ones also inside `torch.inference_mode()`."""
    return torch.inference_mode(False)(torch.no_grad()(method))


def refuse_change(*_: Any, **__: Any) -> None:
    """Raises RuntimeError where a script changes a state that is put together anew at each access."""
    raise RuntimeError(
        "the state of a LocalDeMo cannot be replaced, nor an entry of it: load_state_dict loads one, "
        "optimizer.inner[0].state takes changes, and optimizer.inner[0].state.clear() restarts an inner optimizer. For "
        "new parameters build LocalDeMo anew"
    )


class ReadOnly(defaultdict[Any, Any]):
    """A state, or a parameter's entry, that refuses changes: they would be lost. Its tensors are the optimizer's."""

    __delitem__ = __ior__ = clear = pop = popitem = update = refuse_change  # type: ignore[assignment]

    def __setitem__(self, key: Any, value: Any) -> None:
        if not _is_alike(self.get(key, {}), value):
            refuse_change()
        super().__setitem__(key, value)

    def setdefault(self, key: Any, *_: Any) -> Any:
        return self[key] if key in self else refuse_change()

    def copy(self) -> Any:  # which a script may change
        return dict(self)

    __copy__ = copy

    def __reduce__(self) -> tuple[Any, ...]:  # of a deep copy, or a file, which torch reads with weights_only
        return OrderedDict, (), None, None, iter(self.items())


def _is_alike(before: Any, value: Any) -> bool:
    """Whether an entry is the same as before, or only on another device, as when Lightning moves a state."""
    if isinstance(value, Mapping) and isinstance(before, Mapping):
        return before.keys() == value.keys() and all(_is_alike(before[name], value[name]) for name in value)
    if not (isinstance(value, Tensor) and isinstance(before, Tensor)):
        return value is before
    return value is before or value.device != before.device or torch.equal(value, before)


class ReplicatedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `replicator` keeps parameters equal on all ranks."""

    _step_supports_amp_scaling = True  # makes torch.amp.GradScaler call step on every rank, infinite gradients or not

    replicator: Replicator
    _rounds: Rounds
    sync_every: int = 1  # steps from one round to the next
    _warned: frozenset[str] = frozenset()  # the subjects of warnings so far
    _is_trained: bool = False  # some parameter has had a gradient
    _idle_rounds: int = 0  # in a row without a gradient, since then
    _has_begun: bool = False  # a round has begun

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        note_optimizer(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        note_optimizer(self)

    def __copy__(self) -> "ReplicatedOptimizer":
        """Returns an object that shares all parts, and so this one, to which some refer weakly."""
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self), _copied_from=self)
        return copied

    @property
    def _all_states(self) -> Mapping[int, StateDict] | None:
        """The result of `collect`. The replicator keeps it: Lightning's wrappers are copies, which share only parts."""
        return self.replicator.all_states

    @_all_states.setter
    def _all_states(self, states: Mapping[int, StateDict] | None) -> None:
        if hasattr(self, "replicator"):  # not while torch's constructor adds groups
            self.replicator.all_states = states

    @property
    def stats(self) -> Stats:
        """The cost of the last step; a local step of `LocalDeMo` sends nothing."""
        return self.replicator.stats

    @unrecorded
    def exchange(self, message: Tensor) -> Tensor:
        """Sends the message on the route and returns the result, for "gather" the messages of all ranks, uint8 [W, B].

        The only stage that uses the network between nodes. The first call also runs the handshake; with two levels
        `extract` has done so.
        """
        return self.replicator.exchange(message)

    @unrecorded
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but the state keeps its dtype (bfloat16 parameters have float32 momentum).

        Of a consolidated state, each rank takes its part; if more or fewer ranks saved it, its share. Warns
        if the state is another rank's, or a mixture.
        ValueError or TypeError, with nothing changed, if the state is another optimizer's, has other shapes or invalid
        settings.
        """
        check_form(state_dict)
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_form(state_dict)
        self._load(own_part(state_dict, *self.replicator.rank_and_size))
        self._all_states = None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @unrecorded
    def state_dict(self) -> dict[str, Any]:
        """As in torch, but only between steps; never runs a step or a collective.

        It holds this rank's state; after `consolidate_state_dict`, until the next step, that of all ranks.
        """
        found = self.own_state_dict()  # the subclass's, which adds to the one below
        rank, _ = self.replicator.rank_and_size
        if self._all_states and savers_of(found) != savers_of(self._all_states.get(rank, {"state": {}})):
            # `SavedBy` counts entries: a parameter has begun to train since, or a script has cleared the inner state.
            self._all_states = None
        return consolidated(self._all_states, found) if self._all_states else found

    @unrecorded
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collects all ranks' states on rank `to`, whose next `state_dict` then holds all of them.

        As in torch's ZeroRedundancyOptimizer; all ranks call it, between steps. All ranks load the result, and each
        takes its part. Until the next step, rank `to` keeps W - 1 more states in CPU memory. Each rank sends its own
        state once, with `LocalDeMo` the inner optimizers' too: `stats.consolidated_bytes`; rank `to` warns if that is
        the traffic of more than 100 steps.
        """
        self._all_states = None
        mine = self.own_state_dict()
        self.replicator.let_travel()  # one exchange at a time
        self._all_states = collect(self.replicator, mine, to)
        moved, of_step = self.stats.consolidated_bytes, self.replicator.wiring().route.bytes_each_way / self.sync_every
        if self._all_states and moved > _MANY_STEPS * of_step:
            self.warn_once(
                "consolidated",
                f"rank {to} received {moved:,} bytes of states, as many as in {moved / of_step:,.0f} steps; on a slow "
                "link save less often, or let every rank write its own state: one file per rank, or, with "
                "torch.distributed.checkpoint, demopt.checkpoint.OptimizerState(optimizer); see docs/checkpoints.md",
                here=True,
            )

    def _note_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        if any(gradient is not None for gradient in gradients):
            self._is_trained, self._idle_rounds = True, -1  # the round that takes it adds 1

    def _warn_unless_trained(self, compared: bool = True) -> None:
        """Warns, from the second round on, if no parameter that trains has had a gradient, or none for very long.

        `compared`: only if no rank has had one: the first batches of one may have nothing to learn, such as no boxes.
        """
        trains = any(parameter.requires_grad for group in self.param_groups for parameter in group["params"])
        self._idle_rounds += trains  # not while all are frozen, as those of a network that waits for its turn
        if self._is_trained and self._idle_rounds == _MANY_IDLE:
            self.warn_once(
                "idle",
                f"no parameter of this optimizer has had a gradient on this rank in the last {_MANY_IDLE} rounds. Were "
                "they replaced, by load_state_dict(assign=True), a conversion of the model or new layers? Then the "
                "model trains weights that no round moves: build the optimizer anew",
                here=True,
            )
        known = self._is_trained or "frozen" in self._warned
        known = known or (compared and not self.replicator.session.compares_gradients)
        if self._has_begun and not known and trains:
            self.warn_once(
                "untrained",
                "no parameter of this optimizer has had a gradient before the second round. Were they replaced after "
                "it was built, by load_state_dict(assign=True), to_empty or new layers? Build it after that",
            )
        self._has_begun = True

    def _warn_of_frozen(self) -> None:
        """Warns, once, of a parameter with a gradient that is frozen in the step: torch's optimizers would train it."""
        for number, group in enumerate(self.param_groups if "frozen" not in self._warned else ()):
            if any(not p.requires_grad and p.grad is not None and bool(p.grad.any()) for p in group["params"]):
                self.warn_once(
                    "frozen",
                    f"a parameter of param_groups[{number}] has a gradient and requires_grad=False in step(): it is "
                    "frozen, and its gradient is dropped. To train it, freeze it after step(), not between backward() "
                    "and step(); otherwise call zero_grad() after freezing it",
                )

    def warn_once(self, about: str, text: str, here: bool = False) -> None:
        """Warns on the rank that speaks for all, or `here`, unless it has done so about the same thing."""
        if about not in self._warned and (here or self.replicator.session.exchange.speaks):
            self._warned |= {about}
            warn(text)

    @unrecorded
    def own_state_dict(self) -> dict[str, Any]:
        """The state of this rank alone; no tensor is a view of more memory than it holds."""
        self._rounds.settle()
        if not self.replicator.is_open:  # an open round keeps the parameters and settings that it began with
            self.replicator.require_idle("state_dict")
            self._follow_changes()
            self.replicator.wiring()  # the process group may have come since: the state then says whose it is
        found: dict[str, Any] = super().state_dict()  # of `self.state`, which LocalDeMo puts together from its parts
        state = found["state"].items()
        found["state"] = {n: {name: _in_own_storage(value) for name, value in entry.items()} for n, entry in state}
        return found

    def _follow_changes(self) -> Any:
        """Takes over a script's changes since the last call: groups, the state."""
        raise NotImplementedError

    def _load(self, state_dict: StateDict) -> None:
        """Replaces groups and state by those of this rank, or raises with nothing changed."""
        raise NotImplementedError


def _in_own_storage(value: Any) -> Any:
    """Returns a tensor with a storage of its own; all parameters may share a counter on the host."""
    is_counter = type(value) is Tensor and value.dim() == 0 and value.is_cpu
    is_part = type(value) is Tensor and value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if is_counter or is_part else value

"""Mistakes of a script around an optimizer that show nowhere else; each is told once, by the rank that speaks.

`unsync`, `muon_adamw` and `muon_groups` get a model, and `remember` it; in its first step an optimizer looks at those
that have its parameters (`look_at_models`). `Mistakes` watches the script around a LocalDeMo.
"""

import inspect
import multiprocessing
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from demopt.exchange.process_group import collectives_between, resolve
from demopt.optim.local_weights import TO_REPLACE
from demopt.validation import warn

_LOOKED_AT = 10  # local steps, after which the inner optimizers' state is looked at
_SMALL = 0.25  # of the rate that a group was built with; AdamW's best is about a tenth of Muon's
_STILL_ROUNDS = 3  # without a rise of a rate: a warm-up is over
_ALONE_ROUNDS = 20  # in a row in which only the first group has another rate than at first
_COMMUNICATES = (
    "communicates between the ranks whose weights LocalDeMo averages: its traffic comes on top at every step, and "
    "nothing is left for rounds to gain. Give its class for a single device (docs/integrations.md#optimizers)"
)
NOT_MOVED = (
    "which rounds do not move: it would pull this rank back to its own weights. Give the optimizer without the copy; "
    "the mean over the ranks is an average of weights, too"
)
_all: "WeakSet[Any]" = WeakSet()  # all DeMo and LocalDeMo
_change = threading.Lock()  # ranks may be threads
_models: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()  # and the function that got it
_told: WeakSet[nn.Module] = WeakSet()  # normalisations whose buffers were warned of


def check_model(model: Any) -> None:
    """Raises TypeError unless it is a module, as where parameters are given instead."""
    if not isinstance(model, nn.Module):
        several = "; put several into a torch.nn.ModuleList" if isinstance(model, Iterable) else ""
        raise TypeError(f"got a {type(model).__name__} where a torch.nn.Module is expected{several}")


def remember(model: nn.Module, function: str) -> None:
    """Takes note of a model that `function` got; warns of buffers that training changes."""
    with _change:
        _models[model] = function
    exchange = resolve(None)
    if exchange.world_size > 1 and exchange.speaks:
        _warn_of_statistics(model)


def note_optimizer(optimizer: Any) -> None:
    """Takes note of a DeMo or LocalDeMo, whose parameters are kept equal."""
    with _change:
        _all.add(optimizer)


def look_at_models(optimizer: Any) -> None:
    """The checks of an optimizer's first step, most of them by the rank that speaks."""
    if any(p.is_meta for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer has parameters on the meta device: build it after model.to_empty()")
    session = optimizer.replicator.session
    if session.exchange.world_size == 1 or not session.exchange.speaks:
        return
    parameters = _parameters_of(optimizer)
    if multiprocessing.parent_process() is not None and any(p.is_cpu and p.is_shared() for p in parameters):
        warn(
            "the model's weights are in shared memory, as torch.multiprocessing.spawn puts those of a model that it is "
            "given: if several ranks have the same memory, each moves the weights of all. Build the model in each rank"
        )
    with _change:
        optimizers, models = list(_all), list(_models)
    kept = {id(p) for each in optimizers for p in _parameters_of(each)}
    mine, told = {*map(id, parameters)}, False
    for model in [each for each in models if any(id(p) in mine for p in each.parameters())]:
        _warn_of_statistics(model)
        left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in kept]
        if left and not told:
            told, more = True, f" and {len(left) - 1} more" if len(left) > 1 else ""
            warn(
                f"parameter {left[0]!r}{more} of the model that went through {_models[model]} can train, but no DeMo "
                "or LocalDeMo has it: if another optimizer trains it, ranks drift apart. Give it to this optimizer, "
                "too (demopt.muon_groups makes groups for all), or freeze it with requires_grad_(False)"
            )
        if model.training and hasattr(optimizer, "mistakes"):  # else it trains in eval()
            inside = [each.module for each in model.modules() if isinstance(each, DistributedDataParallel)]
            for module in (model, *inside):
                optimizer.mistakes.watch(module)


def _look_at_earlier(optimizer: Any) -> "list[weakref.ref[Any]]":
    """Notices local steps of an optimizer that this LocalDeMo replaces; returns all that have its parameters."""
    if not optimizer._rounds.in_folder and optimizer.replicator.rank_and_size[1] == 1:
        return []
    with _change:
        others = [each for each in _all if each is not optimizer and hasattr(each, "mistakes")]  # a built LocalDeMo
    mine = {*map(id, _parameters_of(optimizer))}
    replaced = [each for each in others if not mine.isdisjoint(map(id, _parameters_of(each)))]
    if left := [each for each in replaced if each.weights_differ and not each._weights.are_replaced]:
        call = "call its finish_round(last=True) on all ranks"
        if left[0]._rounds.in_folder:
            call = "set its run.leaving, and call its finish_round(last=True)"
        optimizer.warn_once(
            "earlier",
            "an earlier LocalDeMo of these parameters has local steps, and maybe an error, that no round has sent: "
            f"{call} before this one is built, or load a state into this one",
        )
    return [weakref.ref(each) for each in replaced]


def _parameters_of(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _warn_of_statistics(model: nn.Module) -> None:
    """Warns once of running statistics of each rank's own data: not SyncBatchNorm's, nor frozen ones."""
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and not isinstance(module, nn.SyncBatchNorm)
        if module.running_mean is not None and module.training and module not in _told
    }
    if found:
        _told.update(found.values())
        kind = type(next(iter(found.values()))).__name__
        warn(
            f"the model has {kind} ({next(iter(found)) or 'itself'}, {len(found)} in all), whose running statistics "
            "every rank takes from its own data: call demopt.broadcast_buffers(model) on all ranks before evaluating "
            "or saving, or use SyncBatchNorm, GroupNorm or LayerNorm"
        )


class _LocalWeightsSeen:
    """A forward pre-hook that warns, once, if a model in eval() runs with the local weights of one rank."""

    def __init__(self, mistakes: "Mistakes | None") -> None:
        self._mistakes = (lambda: None) if mistakes is None else weakref.ref(mistakes)

    def __call__(self, model: nn.Module, *_: Any) -> None:
        if model.training or torch.compiler.is_compiling():  # graphs stay whole
            return
        mistakes = self._mistakes()
        if mistakes is not None:
            mistakes.look_at_evaluation()

    @property
    def __name__(self) -> str:  # torch.jit.script asks for it, before it compiles the hooks
        raise AttributeError(
            "torch.jit.script cannot compile the hook by which LocalDeMo notices a model that is evaluated between two "
            "rounds: call it inside `with optimizer.shared():`, where there is none"
        )

    # Copies, such as the average of an EMA, are not this optimizer's.
    def __deepcopy__(self, _: Any) -> "_LocalWeightsSeen":
        return _LocalWeightsSeen(None)

    # Whoever loads a pickled model may not have demopt. So the pickle has a hook that returns the inputs: an empty
    # dict's `get`, which does not know the module and returns its second argument.
    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ({}, "get")


class Mistakes:
    """What a LocalDeMo has seen of the script around it. `is_new`: its learning rates are those of a run's start."""

    def __init__(self, optimizer: Any, is_new: bool) -> None:
        self._optimizer = weakref.proxy(optimizer)  # weak: it goes when nobody else holds it
        self._earlier = _look_at_earlier(optimizer) if is_new else []
        self._earlier_steps = 0  # theirs, when this one took its first
        self._built = [*map(_chosen_rates, optimizer.inner)] if is_new else []  # rates, until a hint
        self._last = [0.0] * len(optimizer.param_groups)  # rates at the last round
        self._still = 0  # rounds since a rate rose
        self._first: list[float] = []  # rates at the first round
        self._alone = 0  # rounds in a row
        #: The local weights that trained when a state was loaded, and their fingerprint, until the next step. A script
        #: may move frozen ones, as MoCo does.
        self._loaded: tuple[list[Tensor], int] | None = None
        self._steps = 0  # local steps
        self._watched: list[tuple[weakref.ref[nn.Module], RemovableHandle]] = []  # models, and the hook of each

    def watch(self, model: nn.Module) -> None:
        """Notices it if the model runs in eval() with local weights."""
        if isinstance(model, torch.jit.ScriptModule):  # it takes no hook
            return
        if all(found() is not model for found, _ in self._watched):
            self._watched.append((weakref.ref(model), model.register_forward_pre_hook(_LocalWeightsSeen(self))))

    @contextmanager
    def unwatched(self, shared: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """The context of `shared`, without models' hooks: torch.jit.script compiles none, and copies keep them."""
        watched, self._watched = self._watched, []
        for _, hook in watched:
            hook.remove()
        try:
            with shared():
                yield
        finally:
            for model in (found() for found, _ in watched):
                if model is not None:
                    self.watch(model)

    def note_state(self, has_local_weights: bool) -> None:
        """After a state was loaded, or the run's weights came: forgets rates, which are small late in a run."""
        self._built, self._first = [], []
        weights = self._optimizer._weights
        trained = [each for each in weights.global_of if each.requires_grad]
        self._loaded = (trained, weights.fingerprint(trained)) if has_local_weights else None

    def look_at_loaded(self) -> None:
        """Before the weights move for the first time after a state was loaded."""
        if self._loaded is not None and self._optimizer._weights.fingerprint(self._loaded[0]) != self._loaded[1]:
            self._optimizer.warn_once(
                "loaded",
                "the weights were changed after load_state_dict, which had put this rank's local ones into the model: "
                "its steps since the last round are lost. Load the model, wrap it in DistributedDataParallel, which "
                "copies rank 0's weights to all, and only then load the optimizer",
                here=True,
            )
        self._loaded = None

    def look_at_replaced(self, effect: str = "that counts as a local step, of which each round sends a part") -> None:
        """Before weights that the script has changed are lost, or count as a local step."""
        if "replaced" not in self._optimizer._warned and self._optimizer._weights.are_replaced:
            self._optimizer.warn_once(
                "replaced",
                f"the model's weights were changed after the last round, outside the optimizer: {effect}. {TO_REPLACE}",
                here=True,
            )

    def look_after_step(self, collectives: int | None) -> None:
        """After a local step; `collectives`: their number before the inner optimizers' step, if that ran alone."""
        inner = self._optimizer._inner
        if collectives is not None and self.collectives() > collectives:
            self._optimizer.warn_once("communicates", f"the step of {inner.classes} {_COMMUNICATES}")
        self._steps += 1
        if self._steps <= _LOOKED_AT:
            weights = self._optimizer._weights
            # Not in the first step: some keep the weights of the step before, only to measure its length.
            before = weights.global_of if weights.steps_since > 1 else None
            if copy := inner.copy_of_weights(before):
                self._optimizer.warn_once("copy", f"{copy}, {NOT_MOVED}")
            self._look_at_common()

    def _look_at_common(self) -> None:
        """In the first local steps: notices another LocalDeMo that goes on with parameters of this one."""
        earlier = sum(each.mistakes._steps for found in self._earlier if (each := found()) is not None)
        if self._steps == 1:
            self._earlier_steps = earlier
        elif earlier > self._earlier_steps:
            self._optimizer.warn_once(
                "apart",
                "another LocalDeMo takes steps with some of these parameters, too: a round of one takes what the other "
                "has changed for its own. Give common parameters to one LocalDeMo, which skips those without a "
                "gradient, or use DeMo",
            )

    def collectives(self) -> int:
        """The number of collectives between the ranks so far, in steps before the first round."""
        replicator = self._optimizer.replicator
        looks = replicator.session.compares_gradients and not replicator.in_flight  # a first round sends some itself
        return collectives_between(replicator.session.exchange.global_ranks) if looks else 0

    def look_at_rates(self) -> None:
        """At a round: notices a script that writes its own rate over the one that an inner optimizer was built with.

        An inner optimizer is suspect until some group's rate comes near the one it was built with: others may have a
        part of it, as with layer-wise decay. A scheduler of torch scales the rate it finds, and sets `initial_lr`.
        """
        self._look_at_other_groups()
        rates, suspects, first = [_rate(group) for group in self._optimizer.param_groups], [], 0
        self._still = 0 if any(rate > last for rate, last in zip(rates, self._last, strict=False)) else self._still + 1
        self._last = rates
        for each, built in zip(self._optimizer.inner, self._built, strict=False):
            pairs = [*zip(each.param_groups, built, strict=False)]
            if not any(_rate(group) >= _SMALL * chosen > 0 for group, chosen in pairs):
                found = enumerate(pairs, start=first)
                suspects += [(n, chosen) for n, (group, chosen) in found if chosen and "initial_lr" not in group]
            first += len(each.param_groups)
        if not suspects:
            self._built = []
        elif self._still >= _STILL_ROUNDS:
            (number, chosen), self._built = suspects[0], []
            self._optimizer.warn_once(
                "rate",
                f"the learning rate of inner group {number} is {rates[number]:g}; it was built with {chosen:g}, and no "
                "scheduler of torch lowered it. If the script writes its own rate into param_groups, write the "
                "optimizer's (Muon's is about 10 times AdamW's) there and wherever else it has one, such as min_lr",
            )

    def _look_at_other_groups(self) -> None:
        """Notices a script that writes its rate only into the first group, because its own optimizer had no other."""
        groups = self._optimizer.param_groups
        rates = [_rate(group) for group in groups]
        self._first = self._first if len(self._first) == len(rates) else rates
        moved = [rate != first for rate, first in zip(rates, self._first, strict=True)]
        alone = any(self._first[1:]) and moved[0] and not any(moved[1:]) and "initial_lr" not in groups[0]
        alone = alone and len(self._optimizer.inner[0].param_groups) == 1  # else its script knows of several
        self._alone = self._alone + 1 if alone else 0
        if self._alone == _ALONE_ROUNDS:
            self._optimizer.warn_once(
                "alone",
                "the script has changed the learning rate of param_groups[0], and those of the other "
                f"{len(groups) - 1} are as at first. If its own optimizer had one group: write the rate into each of "
                "optimizer.param_groups, of which muon_adamw makes two or more",
            )

    def look_at_evaluation(self) -> None:
        rank = self._optimizer.replicator.rank_and_size[0]
        remedy = "evaluate inside `with optimizer.shared():`, where it has the global weights, the same on all ranks"
        self._warn_of_local("evaluated", "the model ran in eval()", f"with the local weights of rank {rank}: {remedy}")

    def look_at_saving(self) -> None:
        if not self._optimizer.weights_differ:
            self.look_at_replaced("the state has the global weights, without that")
        remedy = "save inside `with optimizer.shared():`, or right after a round, with delay after flush()"
        self._warn_of_local("saved", "the state was saved", f"when the model has this rank's local weights; {remedy}")

    def _warn_of_local(self, about: str, what: str, why: str) -> None:
        optimizer, steps = self._optimizer, self._optimizer.local_steps
        if optimizer.weights_differ and not optimizer._weights.aside:
            when = f"{steps} step{'s' * (steps != 1)} after the last round" if steps else "before its round was applied"
            optimizer.warn_once(about, f"{what} {when}, {why}")


def _chosen_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Returns the rate of each group as it was built; 0 where it is the default of the class, which nobody chose."""
    by_class = inspect.signature(type(optimizer)).parameters.get("lr")
    rates = [_rate(group) for group in optimizer.param_groups]
    return [0.0 if by_class is not None and rate == by_class.default else rate for rate in rates]


def _rate(group: dict[str, Any]) -> float:
    return float(group.get("lr") or 0.0)  # None: the optimizer finds it itself, as Adafactor does

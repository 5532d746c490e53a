"""LocalDeMo: every rank takes steps of its own optimizer, and the ranks exchange how far they have moved.

The method: each rank takes H steps of an ordinary optimizer on its own weights. Its movement since the last round,
D = shared - own (DiLoCo's pseudo-gradient), is the gradient of a DeMo optimizer over the shared weights, whose momentum
is then the error of what was not sent. So the codec, the routes and the rounds are those of `DeMo`:

    e <- b e + T(D);   the K strongest of each chunk leave;   e <- e - sent
    shared <- shared - T^-1(mean over the senders);   own <- shared

Shapes: W ranks, H steps between rounds (`sync_every`), K kept.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from demopt.core.update import Nesterov
from demopt.optim._warnings import warn
from demopt.optim.demo import DeMo
from demopt.optim.gradients import Scaling, all_usable, gradients_of
from demopt.optim.plan import Options
from demopt.optim.stats import Stats

Optimizer = torch.optim.Optimizer
_NEEDED = ("shared", "error", "round", "local_steps")  # what LocalDeMo adds to the inner optimizers' state
_ADDED = (*_NEEDED, "own", "start")


class LocalDeMo(Optimizer):
    """Wraps the optimizer that you have: its steps stay local, and every `sync_every` steps the ranks exchange.

    Give `inner` the parameters of the plain model (without DistributedDataParallel). Learning rates, their schedules
    and weight decay are those of `inner`, whose parameter groups are also this optimizer's. Between rounds ranks have
    different weights: evaluate and save inside `with optimizer.shared():`. After every round the weights are the same
    bits on all ranks.

    Args:
        inner: any torch optimizer, or a list of them, such as Muon for matrices and AdamW for the rest.
        sync_every: H, steps from one round to the next.
        top_k: coefficients kept per full chunk x chunk block in a round, for all of its H steps.
        error_decay: b, in [0, 1): how much of what was not sent is still there a round later.
        outer_lr: factor on the mean movement, > 0.
        outer_momentum: Nesterov momentum of the mean movement, in [0, 1); 0: none.
        delay: 1: a round travels during the next H steps and is applied after them; see `flush`. 0: at once.
        alpha, chunk, transform, values, reduction, exact, clip_to_median, relay_top_k, route, fingerprint_every,
            kernels, process_group: as in `DeMo`; fingerprints are counted in rounds.

    Raises:
        ValueError, TypeError: an argument, parameter or gradient that cannot be used. SettingsError, ExchangeError,
            MessageError, DriftError: as in `DeMo`. A failed round is not applied: each rank goes on from its own
            weights, and the next round carries the movement of both.

    A rank whose gradient is not finite skips that local step. If its movement is not finite, all ranks skip the round,
    and it goes on from the shared weights.

    Source: pseudo-gradients: arXiv 2311.08105 (DiLoCo), section 2; the codec: arXiv 2411.19870, section 3; a short
    memory of the error: docs/experiments.md.

    Example:
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = LocalDeMo(torch.optim.AdamW(model.parameters(), lr=3e-4), sync_every=2)
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(4, 8)).square().mean().backward()
        ...     optimizer.step()
        >>> optimizer.local_steps, optimizer.stats.kept > 0
        (0, True)
    """

    _step_supports_amp_scaling = True  # otherwise GradScaler would leave out steps, and ranks their rounds

    def __init__(
        self,
        inner: Optimizer | list[Optimizer],
        sync_every: int = 5,
        top_k: int = 160,
        *,
        error_decay: float = 0.25,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        delay: int = 0,
        process_group: Any = None,
        **settings: Any,
    ) -> None:
        self.inner = _checked(inner)
        if not isinstance(sync_every, int) or isinstance(sync_every, bool) or sync_every < 1:
            raise ValueError(
                f"sync_every is {sync_every!r}; give a number of steps from one round to the next, 1 or more"
            )
        unknown = [name for name in settings if name not in _CODEC_SETTINGS]
        if unknown:
            raise TypeError(f"LocalDeMo has no argument {unknown[0]!r}; it has {', '.join(sorted(_ARGUMENTS))}")
        self.sync_every = sync_every
        self.local_steps = 0  # since the last round
        self._codec_settings = {
            **settings,
            "lr": outer_lr,
            "momentum": error_decay,
            "top_k": top_k,
            "gradient_scale": "sum",
            "update": Nesterov(beta=outer_momentum) if outer_momentum else "sgd",
        }
        super().__init__([group for each in self.inner for group in each.param_groups], {})
        self._shared = [[_wide(p) for p in group["params"]] for group in self.param_groups]
        # With delay, or nothing: where this rank's movement is counted from, if that is not the shared weights.
        self._start: list[list[Tensor]] | None = None
        self._stats = Stats()
        self._warned = False
        self._outside: list[Tensor] | None = None  # inside `shared`: this rank's own weights
        self._codec = _Codec(
            [{"params": shared} for shared in self._shared],
            delay=delay,
            process_group=process_group,
            **self._codec_settings,
        )

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step of the inner optimizers, then, every `sync_every` steps, a round with the other ranks."""
        if self._outside is not None:
            raise RuntimeError("step came inside `with optimizer.shared():`, where the weights are not this rank's own")
        self._meet()
        loss = self._local_step(closure)
        self.local_steps += 1
        self._stats = Stats(route=self._codec.stats.route)
        if self.due:
            self._stats = Stats()
            self._round()
        return loss

    @property
    def due(self) -> bool:
        """Whether the local steps since the last round are `sync_every` or more: the next thing to do is a round."""
        return self.local_steps >= self.sync_every

    @torch.no_grad()
    def extract(self) -> Tensor:
        """Measures the movement and returns this rank's message, uint8 [B]. Follow it with `apply` or `rollback`."""
        self._measure()
        return self._codec.extract()

    def exchange(self, message: Tensor) -> Tensor:
        """Sends the message and returns the result, as `DeMo.exchange` does: the only stage that uses the network."""
        return self._codec.exchange(message)

    @torch.no_grad()
    def apply(self, messages: Tensor) -> None:
        """Checks all of the result, moves the shared weights, and goes on from them. No network."""
        self._codec.apply(messages)
        self._continue()

    @torch.no_grad()
    def rollback(self) -> None:
        """Takes the movement back out of the error; this rank goes on from its own weights, as if without a round."""
        self._codec.rollback()
        self._forget_movement()

    @torch.no_grad()
    def flush(self) -> None:
        """With delay: applies the round in flight. Call it on all ranks before saving, evaluating or stopping."""
        if not self._codec.in_flight:
            return
        self._codec.flush()
        self._stats = self._codec.stats
        # own = shared - what was not counted yet: the movement since `start`
        for own, shared, start in self._triples():
            own.copy_(shared - (_as(start, shared) - _as(own, shared)))
        self._start = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The context in which the model has the shared weights, the same on all ranks, to evaluate and save them."""
        if self._outside is not None:
            yield
            return
        self._outside = [parameter.detach().clone() for parameter in self._parameters()]
        try:
            with torch.no_grad():
                for parameter, shared, _ in self._triples():
                    parameter.copy_(shared)
            yield
        finally:
            outside, self._outside = self._outside, None
            with torch.no_grad():
                for parameter, own in zip(self._parameters(), outside, strict=True):
                    parameter.copy_(own)

    def fingerprint(self) -> int:
        """Returns a 64-bit hash of the shared weights; if it differs between ranks, they have drifted."""
        return self._codec.fingerprint()

    @torch.no_grad()
    def resync(self, src: int = 0) -> None:
        """Copies shared weights and outer state of rank `src` to all ranks, which all call it and go on from them."""
        self._codec.resync(src)
        self._start, self.local_steps = None, 0
        for own, shared, _ in self._triples():
            own.copy_(shared)

    @torch.no_grad()
    def regroup(self, process_group: Any) -> None:
        """Goes on among other ranks, between two rounds, as `DeMo.regroup` does."""
        self._codec.regroup(process_group)

    @property
    def stats(self) -> Stats:
        """The cost of the last step; a step without a round sends nothing."""
        return self._stats

    # Parts of a step

    def _meet(self) -> None:
        """Runs the handshake before the first local step: ranks that start from other weights take rank 0's."""
        if self._codec.met:
            return
        for own, shared, _ in self._triples():  # synchronised gradients are found here, not in the movements
            shared.grad = None if own.grad is None else _as(own.grad, shared)
        self._codec.meet()
        for own, shared, _ in self._triples():
            shared.grad = None
            if not self.local_steps and self._start is None:
                own.copy_(shared)

    def _local_step(self, closure: Callable[[], float] | None) -> float | None:
        scaling = Scaling(*(self.__dict__.pop(name, None) for name in ("grad_scale", "found_inf")))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = gradients_of(self._parameters())
        if scaling.factor != 1.0:
            for gradient in gradients:
                gradient.mul_(scaling.factor)
        exchange = self._codec.session.exchange
        if exchange.intra_node is not None:
            exchange.average(gradients)
        if not scaling.found_infinite and all_usable(gradients):
            for each in self.inner:
                each.step()
        return loss

    def _round(self) -> None:
        self._measure()
        try:
            self._codec.step()
        except BaseException:
            self._forget_movement()
            raise
        self._continue()

    def _measure(self) -> None:
        """D = start - own, as the gradients of the shared weights."""
        for own, shared, start in self._triples():
            shared.requires_grad_(own.requires_grad)
            shared.grad = _as(start, shared) - _as(own, shared) if own.requires_grad else None

    def _continue(self) -> None:
        """Goes on from the shared weights; with delay, less the own movement that is not counted yet."""
        self._stats = self._codec.stats
        if self._codec.in_flight:
            self._allocate_start()
            for own, shared, start in self._triples():
                own.copy_(shared if shared.grad is None else shared - shared.grad)
                start.copy_(own)
        elif not self._stats.skipped:
            self._start = None
            for own, shared, _ in self._triples():
                own.copy_(shared)
        else:
            for own, shared, _ in self._triples():
                if shared.grad is not None and not all_usable([shared.grad]):
                    own.copy_(shared)
        self.local_steps = 0
        self._forget_movement()

    def _allocate_start(self) -> None:
        if self._start is None:
            self._start = [[torch.empty_like(p) for p in group["params"]] for group in self.param_groups]

    def _forget_movement(self) -> None:
        for _, shared, _ in self._triples():
            shared.grad = None

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _triples(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields each parameter, its shared weights, and where its movement is counted from, in its own dtype."""
        starts: Any = self._start or [[None] * len(group) for group in self._shared]
        for group, shared, start in zip(self.param_groups, self._shared, starts, strict=True):
            for own, one, begun in zip(group["params"], shared, start, strict=True):
                yield own, one, (one.detach().to(own.dtype) if begun is None else begun)

    # State: groups, checkpoints, copies

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, if there is one inner optimizer. Call it right after a round, on all ranks alike."""
        if not hasattr(self, "_codec"):
            super().add_param_group(param_group)  # from the constructor: the inner optimizer's own group
            return
        if len(self.inner) > 1:
            raise ValueError("there are several inner optimizers: build LocalDeMo anew with the group in one of them")
        if self.local_steps or self._codec.in_flight:
            raise RuntimeError("add_param_group came between two rounds; call it right after one")
        self.inner[0].add_param_group(param_group)
        group = self.inner[0].param_groups[-1]
        super().add_param_group(group)
        self._shared.append([_wide(parameter) for parameter in group["params"]])
        self._codec.add_param_group({"params": self._shared[-1]})

    def state_dict(self, *, in_flight: bool = False) -> dict[str, Any]:
        """As in torch: the inner optimizers' state, with the shared weights, this rank's own, and its error.

        Each rank saves its own. The model's weights are better saved inside `shared()`, where all ranks have the same;
        `load_state_dict` puts this rank's own back into the parameters.
        """
        apart = bool(self.local_steps or self._start)  # this rank's weights are not the shared ones
        if apart and self._outside is None and not self._warned:
            self._warned = True
            warn(
                f"the state was saved {self.local_steps} steps after the last round, when the model has weights of "
                "this rank's own; save right after a round, or inside `with optimizer.shared():`"
            )
        codec = self._codec.state_dict(in_flight=in_flight)
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        at = 0
        for each in self.inner:
            packed = each.state_dict()
            numbers = [number for group in packed["param_groups"] for number in group["params"]]
            moved = {number: at + place for place, number in enumerate(numbers)}
            groups += [{**g, "params": [moved[number] for number in g["params"]]} for g in packed["param_groups"]]
            state |= {moved[number]: dict(entry) for number, entry in packed["state"].items()}
            at += len(numbers)
        outside: Any = self._outside or [None] * len(codec["state"])
        for number, ((own, shared, start), kept) in enumerate(zip(self._triples(), outside, strict=True)):
            entry = codec["state"][number]
            state.setdefault(number, {}).update(
                {f"outer_{name}": value for name, value in entry.items() if name not in ("momentum", "step")}
                | {"shared": shared.detach(), "error": entry["momentum"], "round": entry["step"]}
                | {"local_steps": torch.tensor(self.local_steps)}
                | ({"own": own.detach() if kept is None else kept} if apart else {})
                | ({"start": start} if self._start else {})
            )
        found = {"state": state, "param_groups": groups}
        return {**found, "in_flight": codec["in_flight"]} if "in_flight" in codec else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. ValueError or TypeError if the state does not fit; the codec's part is then unchanged."""
        groups, state = state_dict["param_groups"], state_dict["state"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(groups)} parameter groups, this optimizer has {len(self.param_groups)}"
            )
        numbers = [number for group in groups for number in group["params"]]
        missing = [number for number in numbers if not set(_NEEDED) <= set(state.get(number, {}))]
        if missing:
            raise ValueError(
                f"the state of parameter {missing[0]} has no shared weights and error: another optimizer saved it"
            )
        self._codec.load_state_dict(self._codec_state(state_dict))
        at = 0
        for each in self.inner:
            mine = groups[at : at + len(each.param_groups)]
            kept = [number for group in mine for number in group["params"]]
            inner = {
                number: {
                    name: v for name, v in state[number].items() if name not in _ADDED and not name.startswith("outer_")
                }
                for number in kept
            }
            each.load_state_dict({"state": {n: entry for n, entry in inner.items() if entry}, "param_groups": mine})
            self.param_groups[at : at + len(each.param_groups)] = each.param_groups
            at += len(mine)
        with torch.no_grad():
            for (own, shared, _), number in zip(self._triples(), numbers, strict=True):
                shared.copy_(state[number]["shared"])
                own.copy_(state[number].get("own", shared))
            self._start = None
            if numbers and "start" in state[numbers[0]]:
                self._allocate_start()
                for (_, _, start), number in zip(self._triples(), numbers, strict=True):
                    start.copy_(state[number]["start"])
        self.local_steps = int(state[numbers[0]]["local_steps"]) if numbers else 0

    def _codec_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the part of a saved state that is the codec's, in the codec's words."""
        codec = self._codec.state_dict(in_flight=True)
        state: dict[int, dict[str, Any]] = {}
        for group in state_dict["param_groups"]:
            for number in group["params"]:
                saved = state_dict["state"][number]
                outer = {name.removeprefix("outer_"): v for name, v in saved.items() if name.startswith("outer_")}
                state[len(state)] = {"momentum": saved["error"], "step": saved["round"], **outer}
        found = {"state": state, "param_groups": codec["param_groups"]}
        return {**found, "in_flight": state_dict["in_flight"]} if "in_flight" in state_dict else found

    def __getstate__(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in self.__dict__.items() if name not in ("param_groups", "state")},
            "defaults": self.defaults,
        }

    def __setstate__(self, packed: dict[str, Any]) -> None:
        self.__dict__.update(packed)
        self.state = cast(Any, {})
        self.param_groups = [group for each in self.inner for group in each.param_groups]

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalDeMo":
        twin: LocalDeMo = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin


class _Codec(DeMo):
    """DeMo over the shared weights, whose gradients are movements."""

    def _begin(self, process_group: Any, options: Options) -> None:
        # an undone round leaves no movement in the error: the rank's own weights still have it
        super()._begin(process_group, replace(options, keeps_gradients=False))

    @property
    def session(self) -> Any:
        """Who we are among the others."""
        return self._session

    @property
    def in_flight(self) -> bool:
        """Whether a round is sent, but not applied."""
        return bool(self._in_flight)

    @property
    def met(self) -> bool:
        """Whether the ranks have agreed on the plan."""
        return self._session.agreed(self._current_plan())

    def meet(self) -> None:
        """Runs the handshake now."""
        self._current_round().agree()
        self._round = None


_CODEC_SETTINGS = (
    "alpha", "chunk", "transform", "values", "reduction", "exact", "clip_to_median", "relay_top_k", "route",
    "fingerprint_every", "kernels",
)  # fmt: skip
_ARGUMENTS = (
    "inner", "sync_every", "top_k", "error_decay", "outer_lr", "outer_momentum", "delay", "process_group",
    *_CODEC_SETTINGS,
)  # fmt: skip


def _checked(inner: Any) -> list[Optimizer]:
    found = list(inner) if isinstance(inner, list | tuple) else [inner]
    for each in found:
        if not isinstance(each, Optimizer):
            raise TypeError(
                f"inner is a {type(each).__name__}; give a torch optimizer, such as "
                "torch.optim.AdamW(model.parameters(), lr=3e-4), or a list of them"
            )
        if isinstance(each, DeMo | LocalDeMo):
            raise TypeError(f"inner is a {type(each).__name__}, which synchronises the ranks itself; give a local one")
    if not found:
        raise ValueError("inner is an empty list; give at least one torch optimizer")
    return found


def _wide(parameter: Tensor) -> torch.nn.Parameter:
    """Returns a copy of a parameter, at least float32: movements of a round are smaller than bfloat16 resolves."""
    wide = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
    return torch.nn.Parameter(wide, requires_grad=parameter.requires_grad)


def _as(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.detach().to(like.dtype)

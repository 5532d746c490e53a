"""LocalDeMo: every rank takes steps of its own optimizer, and the ranks exchange how far they have moved.

Each rank takes H steps of an ordinary optimizer on its own weights. Its movement since the last round, D = start - own
(DiLoCo's pseudo-gradient; start is the shared weights), is the gradient of a DeMo optimizer over the shared weights,
whose momentum is then the error e of what was not sent. So codec, routes and rounds are those of `DeMo`:

    e <- e + T(D);   the K strongest of each chunk leave e, as sent;   shared <- shared - T^-1(mean over the senders);
    e <- b e;   own <- shared

| after a round that was | shared | own | e | the movement D is |
|---|---|---|---|---|
| applied | moved | shared | b (e + T(D) - sent) | in shared and e |
| skipped or failed | as before | as before | as before | in own: the next round carries it |
| skipped, where D was not finite | as before | shared | as before | dropped, by this rank alone |
| sent, with delay=1 | moved by the round before | shared - D; so is start | e + T(D) - sent | on its way |
| in flight when it failed, with delay=1 | as before | as before | e + T(D) | in e: the next round carries it |

Shapes: W ranks, H steps between rounds (`sync_every`), K kept.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from demopt.core.limits import check_number
from demopt.core.update import Nesterov
from demopt.exchange import Exchange
from demopt.exchange.collective import true_in_all_shards
from demopt.optim import local_state
from demopt.optim._warnings import warn
from demopt.optim.demo import DeMo
from demopt.optim.gradients import Scaling, all_usable, fill_gradients, gradients_of, usable_gradients
from demopt.optim.plan import Options
from demopt.optim.stats import Stats

Optimizer = torch.optim.Optimizer
Weights = list[list[Tensor]]  # by parameter group
_FIELDS = (  # of a copy: a scheduler's wrapper around `step`, for one, stays with the original
    "inner", "sync_every", "local_steps", "_shared", "_start", "_apart", "_fresh", "_own_aside", "_stats", "_warned",
    "_codec",
)  # fmt: skip


class LocalDeMo(Optimizer):
    """Wraps the optimizer that you have: its steps stay local, and every `sync_every` steps the ranks exchange.

    Give `inner` the parameters of the plain model (without DistributedDataParallel). Learning rates, their schedules
    and weight decay are those of `inner`, whose parameter groups are also this optimizer's. Between rounds ranks have
    different weights: evaluate and save inside `with optimizer.shared():`. After every round the weights are the same
    bits on all ranks. A parameter that is frozen between two rounds goes back to its last shared value.

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
            MessageError, DriftError: as in `DeMo`. What then happens to the movement: see the top of this file.

    A rank whose gradient is not finite skips that local step. If its movement is not finite, all ranks skip the round.

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
                f"sync_every is {sync_every!r}; give a number of steps from a round to the next, 1 or more"
            )
        unknown = [name for name in settings if name not in _CODEC_SETTINGS]
        if unknown:
            raise TypeError(f"LocalDeMo has no argument {unknown[0]!r}; it has {', '.join(sorted(_ARGUMENTS))}")
        check_number("error_decay", error_decay, high=1.0)
        check_number("outer_momentum", outer_momentum, high=1.0)
        check_number("outer_lr", outer_lr, open_low=True)
        self.sync_every = sync_every
        self.local_steps = 0  # since the last round
        super().__init__(self._inner_groups(), {})  # without defaults, which would be put into the groups
        self.defaults = dict(self.inner[0].defaults)  # schedulers look for momentum here
        self._shared: Weights = [[_wide(p) for p in group["params"]] for group in self.param_groups]
        self._start: Weights | None = None  # where movements are counted from, if not the shared weights: with delay
        self._apart = False  # after a skipped round, own weights are not the shared ones though no step was taken since
        self._fresh = True  # no step was taken, and nothing was loaded
        self._own_aside: list[Tensor] | None = None  # inside `shared`
        self._stats = Stats()
        self._warned = False
        self._show_state()
        self._codec = _Codec(
            [{"params": shared} for shared in self._shared],
            also=(("sync_every", str(sync_every)), ("inner", ", ".join(type(each).__name__ for each in self.inner))),
            lr=outer_lr,
            momentum=error_decay,
            top_k=top_k,
            gradient_scale="sum",
            update=Nesterov(beta=outer_momentum) if outer_momentum else "sgd",
            delay=delay,
            process_group=process_group,
            **settings,
        )

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step of the inner optimizers, then, every `sync_every` steps, a round with the other ranks."""
        self._require_own("step")
        self._codec.require_settled("step")
        self._follow_inner()
        self._meet()
        loss = self._local_step(closure)
        self.local_steps += 1
        self._stats = Stats(route=self._codec.stats.route)
        if self.due:
            self._round()
        return loss

    @property
    def due(self) -> bool:
        """Whether there were `sync_every` local steps or more since the last round: the next thing to do is a round."""
        return self.local_steps >= self.sync_every

    @torch.no_grad()
    def extract(self) -> Tensor:
        """Measures the movement and returns this rank's message, uint8 [B]. Follow it with `apply` or `rollback`."""
        self._require_own("extract")
        self._codec.require_settled("extract")
        self._measure()
        return self._codec.extract()

    def exchange(self, message: Tensor) -> Tensor:
        """Sends the message and returns the result, as `DeMo.exchange` does: the only stage that uses the network."""
        return self._codec.exchange(message)

    @torch.no_grad()
    def apply(self, messages: Tensor) -> None:
        """Checks all of the result, moves the shared weights, and goes on from them. No network."""
        self._require_own("apply")
        self._codec.apply(messages)
        self._stats = self._codec.stats
        self._go_on()

    @torch.no_grad()
    def rollback(self) -> None:
        """Takes the movement back out of the error; this rank goes on from its own weights, as if without a round."""
        self._require_own("rollback")
        self._codec.rollback()
        self._forget_movement()

    @torch.no_grad()
    def flush(self) -> None:
        """With delay: applies the round in flight. Call it on all ranks before saving, evaluating or stopping."""
        self._require_own("flush")
        if self._codec.in_flight:
            self._codec.flush()
            self._stats = self._codec.stats
        if self._start is not None:  # own <- shared - the movement that was not sent
            for own, shared, start in self._triples():
                own.copy_(shared - (_as(start, shared) - _as(own, shared)))
            self._start = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """The context in which the model has the shared weights, the same on all ranks, to evaluate and save them."""
        if self._own_aside is not None:
            yield
            return
        aside = [parameter.detach().clone() for parameter in self._parameters()]
        with torch.no_grad():
            for parameter, shared, _ in self._triples():
                parameter.copy_(shared)
        self._own_aside = aside
        try:
            yield
        finally:
            self._own_aside = None
            with torch.no_grad():
                for parameter, own in zip(self._parameters(), aside, strict=True):
                    parameter.copy_(own)

    def fingerprint(self) -> int:
        """Returns a 64-bit hash of the shared weights; if it differs between ranks, they have drifted."""
        return self._codec.fingerprint()

    @torch.no_grad()
    def resync(self, src: int = 0) -> None:
        """Copies shared weights and outer state of rank `src` to all ranks, which all call it and go on from them."""
        self._require_own("resync")
        self._codec.resync(src)
        self._start, self._apart, self.local_steps = None, False, 0
        for own, shared, _ in self._triples():
            own.copy_(shared)

    @torch.no_grad()
    def regroup(self, process_group: Any) -> None:
        """Goes on among other ranks, between two rounds, as `DeMo.regroup` does."""
        self._require_own("regroup")
        self._codec.regroup(process_group)
        self._forget_movement()
        self._apart = True  # its own weights are still worth something, unless the others start from other weights

    @property
    def stats(self) -> Stats:
        """The cost of the last step; a step without a round sends nothing."""
        return self._stats

    # Parts of a step

    def _meet(self) -> None:
        """Runs the handshake before a local step: ranks that start from other weights take rank 0's."""
        if self._codec.agreed:
            return
        if self._fresh:  # weights may have been loaded since construction
            for own, shared, _ in self._triples():
                shared.copy_(own)
        before = self._codec.fingerprint()
        usable_gradients(self._parameters(), self.param_groups)
        for own, shared, _ in self._triples():  # synchronised gradients are found here, not in the movements
            shared.grad = None if own.grad is None else _as(own.grad, shared)
        try:
            self._codec.agree()
        finally:
            self._forget_movement()
        self._fresh = False
        if self._codec.fingerprint() != before:  # rank 0's weights came
            self._start, self._apart = None, False
            for own, shared, _ in self._triples():
                own.copy_(shared)

    def _local_step(self, closure: Callable[[], float] | None) -> float | None:
        scaling = Scaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [parameter for parameter in self._parameters() if parameter.requires_grad]
        exchange = self._codec.exchange_between_ranks
        if exchange.intra_node is not None:
            fill_gradients(trained)
        gradients = usable_gradients(trained, self.param_groups)
        if scaling.factor != 1.0:
            for gradient in gradients:
                gradient.mul_(scaling.factor)
        if exchange.intra_node is not None:
            exchange.average(gradients)
        if true_in_all_shards(not scaling.found_infinite and all_usable(gradients), trained):
            for each in self.inner:
                each.step()
        return loss

    def _round(self) -> None:
        applied = Stats()
        if self._codec.in_flight:  # the round before, which had the local steps since to travel
            self._codec.flush()
            applied = self._codec.stats
        self._measure()
        try:
            self._codec.step()
        except BaseException:
            self._forget_movement()
            raise
        sent = self._codec.stats
        self._stats = sent.with_exchange_of(applied) if self._codec.in_flight else sent
        self._go_on()

    def _measure(self) -> None:
        """D = start - own, as the gradients of the shared weights."""
        for own, shared, start in self._triples():
            shared.requires_grad_(own.requires_grad)
            shared.grad = _as(start, shared) - _as(own, shared) if own.requires_grad else None

    def _go_on(self) -> None:
        """Goes on from where the table at the top says."""
        weights = [shared for _, shared, _ in self._triples()]
        finite = true_in_all_shards(all_usable(gradients_of(weights)), weights)
        self._apart = self._stats.skipped and not self._codec.in_flight  # on all ranks alike
        if self._codec.in_flight:
            self._start = self._start or [[torch.empty_like(p) for p in group["params"]] for group in self.param_groups]
            for own, shared, start in self._triples():
                own.copy_(shared - shared.grad if finite and shared.grad is not None else shared)
                start.copy_(own)
        elif not (self._stats.skipped and finite):
            self._start = None
            for own, shared, _ in self._triples():
                own.copy_(shared)
        self.local_steps = 0
        self._forget_movement()

    def _inner_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.inner for group in each.param_groups]

    def _follow_inner(self) -> None:
        """Takes the inner optimizers' groups anew: loading a state into one replaces them."""
        groups = self._inner_groups()
        if [len(group["params"]) for group in groups] != [len(shared) for shared in self._shared]:
            raise RuntimeError(
                "an inner optimizer has other parameters than at the start; use LocalDeMo.add_param_group"
            )
        self.param_groups[:] = groups

    def _show_state(self) -> None:
        """Fills `state`: what finds it empty, such as torch.distributed.checkpoint, would run a step to fill it."""
        for own, shared in zip(self._parameters(), [p for group in self._shared for p in group], strict=True):
            self.state[own] = {"shared": shared.detach()}

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

    def _require_own(self, wanted: str) -> None:
        if self._own_aside is not None:
            raise RuntimeError(
                f"{wanted} came inside `with optimizer.shared():`, where the weights are not this rank's own"
            )

    # State: groups, checkpoints, copies

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, if there is one inner optimizer. Call it right after a round, on all ranks alike."""
        if not hasattr(self, "_codec"):
            super().add_param_group(param_group)  # from the constructor: the inner optimizer's own group
            return
        self._require_own("add_param_group")
        if len(self.inner) > 1:
            raise ValueError("there are several inner optimizers: build LocalDeMo anew with the group in one of them")
        if self.local_steps or self._codec.in_flight or self._start or self._apart:
            raise RuntimeError(
                "add_param_group came between two rounds; call it right after one, with delay after flush()"
            )
        self.inner[0].add_param_group(param_group)
        group = self.inner[0].param_groups[-1]
        shared: list[Tensor] = [_wide(parameter) for parameter in group["params"]]
        try:
            self._codec.add_param_group({"params": shared})
        except BaseException:
            del self.inner[0].param_groups[-1]
            raise
        super().add_param_group(group)
        self._shared.append(shared)
        self._show_state()

    def state_dict(self, *, in_flight: bool = False) -> dict[str, Any]:
        """As in torch: the inner optimizers' state, with the shared weights, this rank's own, and its error.

        Each rank saves its own. The model's weights are better saved inside `shared()`, where all ranks have the same;
        `load_state_dict` puts this rank's own back into the parameters. `in_flight`: as in `DeMo`.
        """
        apart = bool(self.local_steps or self._start or self._apart)  # this rank's weights are not the shared ones
        if apart and self._own_aside is None and not self._warned:
            self._warned = True
            warn(
                f"the state was saved {self.local_steps} steps after the last round, when the model has weights of "
                "this rank's own; save right after a round, or inside `with optimizer.shared():`"
            )
        codec = self._codec.state_dict(in_flight=in_flight)
        groups, state = local_state.pack_inner(self.inner)
        owns = self._own_aside or self._parameters()
        for number, ((_, shared, start), own) in enumerate(zip(self._triples(), owns, strict=True)):
            added = local_state.from_codec(codec["state"][number]) | {"shared": shared.detach()}
            added["local_steps"] = torch.tensor(self.local_steps)
            added |= {"own": own.detach()} if apart else {}
            added |= {"start": start} if self._start else {}
            state.setdefault(number, {}).update(added)
        found = {"state": state, "param_groups": groups}
        return {**found, "in_flight": codec["in_flight"]} if "in_flight" in codec else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; ValueError or TypeError, with nothing changed, if the state does not fit."""
        self._require_own("load_state_dict")
        groups, state = state_dict.get("param_groups", []), state_dict.get("state", {})
        numbers = local_state.check(groups, state, self.param_groups)
        codec = {name: state_dict[name] for name in ("in_flight",) if name in state_dict}
        codec["param_groups"] = self._codec.state_dict(in_flight=True)["param_groups"]  # settings are not loaded
        self._codec.load_state_dict({**codec, "state": local_state.of_codec(state, numbers)})
        first = 0
        for each in self.inner:
            last = first + len(each.param_groups)
            kept = {n: local_state.of_inner(state[n]) for group in groups[first:last] for n in group["params"]}
            each.load_state_dict({"state": {n: e for n, e in kept.items() if e}, "param_groups": groups[first:last]})
            self.param_groups[first:last] = each.param_groups
            first = last
        self._restore_weights([state[number] for number in numbers])

    @torch.no_grad()
    def _restore_weights(self, saved: list[dict[str, Any]]) -> None:
        self._start = None
        if saved and "start" in saved[0]:
            self._start = [[torch.empty_like(p) for p in group["params"]] for group in self.param_groups]
        for (own, shared, start), entry in zip(self._triples(), saved, strict=True):
            shared.copy_(entry["shared"])
            own.copy_(entry.get("own", shared))
            if self._start is not None:
                start.copy_(entry["start"])
        self.local_steps = int(saved[0]["local_steps"]) if saved else 0
        self._apart, self._fresh = bool(saved) and "own" in saved[0], False

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("defaults", *_FIELDS)}

    def __setstate__(self, packed: dict[str, Any]) -> None:
        self.inner = packed["inner"]
        super().__setstate__({**packed, "state": defaultdict(dict), "param_groups": self._inner_groups()})
        self._show_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalDeMo":
        twin: LocalDeMo = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin


class _Codec(DeMo):
    """DeMo over the shared weights, whose gradients are movements; `also`: what ranks must have in common besides."""

    def __init__(self, groups: Any, also: tuple[tuple[str, str], ...], **settings: Any) -> None:
        self._also = also
        super().__init__(groups, **settings)

    def _begin(self, process_group: Any, options: Options) -> None:
        also = getattr(self, "_also", options.also)
        # an undone round leaves no movement in the error: the rank's own weights still have it
        super()._begin(process_group, replace(options, keeps_gradients=False, also=also))

    @property
    def exchange_between_ranks(self) -> Exchange:
        """The exchange, for what is averaged inside a node."""
        return self._session.exchange

    @property
    def in_flight(self) -> bool:
        """Whether a round is sent, but not applied."""
        return bool(self._in_flight)

    @property
    def agreed(self) -> bool:
        """Whether the ranks have compared settings for the plan as it is now."""
        return self._session.agreed(self._current_plan())

    def agree(self) -> None:
        """Runs the handshake now."""
        try:
            self._current_round().agree()
        finally:
            self._round = None

    def require_settled(self, wanted: str) -> None:
        """Raises RuntimeError between extract and apply."""
        self._require_settled(wanted)


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
        if isinstance(each, torch.optim.LBFGS):
            raise TypeError("inner is LBFGS, which evaluates the loss several times a step; give another optimizer")
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

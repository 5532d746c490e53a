"""LocalDeMo: every rank takes steps of its own optimizer, and the ranks exchange how far they have moved.

Each rank takes H steps of an ordinary optimizer on its own weights. Its movement since the last round, D = start - own
(DiLoCo's pseudo-gradient; start is the shared weights), is the gradient of a DeMo optimizer over the shared weights,
whose momentum is then the error e of what was not sent. So codec, routes and rounds are those of `DeMo`:

    e <- e + T(D);   the K strongest of each chunk leave e, as sent;   shared <- shared - T^-1(mean over the senders);
    e <- b e;   own <- shared

What a round does to weights and error, also when it is skipped or fails: the table of local_weights.py.

Shapes: W ranks, H steps between rounds (`sync_every`), K kept.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports all of dynamo

from demopt.core.update import Nesterov
from demopt.optim import local_state, states
from demopt.optim._warnings import warn
from demopt.optim.codec import Codec
from demopt.optim.consolidate import gather_states
from demopt.optim.gradients import Scaling, check_parameters
from demopt.optim.interrupts import deferred
from demopt.optim.local_arguments import answered, check_settings, checked_inner, checked_steps
from demopt.optim.local_parts import LocalParts
from demopt.optim.local_weights import LocalWeights, wide
from demopt.optim.round import Round
from demopt.optim.stats import Stats

Optimizer = torch.optim.Optimizer


class LocalDeMo(LocalParts):
    """Wraps the optimizer that you have: its steps stay local, and every `sync_every` steps the ranks exchange.

    Give `inner` the parameters of the plain model (without DistributedDataParallel). Learning rates, their schedules
    and weight decay are those of `inner`, whose parameter groups are also this optimizer's. Between rounds ranks have
    different weights: evaluate and save inside `with optimizer.shared():`. After every round the weights are the same
    bits on all ranks (with `delay`, the shared ones are). A parameter frozen between two rounds goes back to its last
    shared value.

    Memory beside `inner`: the shared weights and the error, each as large as the model, in float32 or wider. Rounds
    exchange nothing of `inner`'s own state.

    Args:
        inner: any torch optimizer, or a list of them, such as Muon for matrices and AdamW for the rest.
        sync_every: H, steps from one round to the next.
        top_k: coefficients kept per full chunk x chunk block in a round, for all of its H steps.
        error_decay: b, in [0, 1): how much of what was not sent is still there a round later.
        outer_lr: factor on the movement that all ranks apply (the sum of what was sent, divided by `reduction`), > 0.
        outer_momentum: Nesterov momentum of that movement, in [0, 1); 0: none.
        delay: 1: a round travels during the next H steps and is applied after them; see `flush`. 0: at once.
        process_group: as in `DeMo`.
        settings: as in `DeMo`: alpha, chunk, transform, values, reduction, exact, clip_to_median, relay_top_k (default:
            half as many again as `top_k`), route, kernels, fingerprint_every (counted in rounds). With 16 workers or
            more of small batches try reduction="root": "senders", the default, then moves the weights too far.

    Raises:
        ValueError, TypeError: an argument, parameter or gradient that cannot be used. SettingsError, ExchangeError,
            MessageError, DriftError: as in `DeMo`. What then happens to the movement: see local_weights.py.

    A rank whose gradient is not finite skips that local step. If its movement is not finite, all ranks skip the round.

    Source: pseudo-gradients: arXiv 2311.08105 (DiLoCo), section 2; sparse ones with an error: arXiv 2508.15706
    (SparseLoCo); the codec: arXiv 2411.19870, section 3; a short memory of the error: docs/experiments.md.

    Examples:
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
        top_k: int = 224,
        *,
        error_decay: float = 0.5,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        delay: int = 0,
        process_group: Any = None,
        **settings: Any,
    ) -> None:
        self.inner = checked_inner(inner)
        self._sync_every = checked_steps(sync_every)
        check_settings(settings, error_decay, outer_lr, outer_momentum)
        self.local_steps = 0
        super().__init__(self._inner_groups(), {})  # without defaults, which would be put into the groups
        self.defaults = dict(self.inner[0].defaults)  # schedulers look for momentum here
        self._weights = LocalWeights([p for group in self.param_groups for p in group["params"]])
        self._movement_aside = []
        self._stats = Stats()
        self._all_states = None
        self._warned = False
        self._show_state()
        if settings.get("relay_top_k") is None and isinstance(top_k, int):
            settings["relay_top_k"] = answered(top_k)
        places = iter(self._weights.shared)
        self._codec = Codec(
            [{"params": [next(places) for _ in group["params"]]} for group in self.param_groups],
            also=self._common(),
            lr=outer_lr,
            momentum=error_decay,
            top_k=top_k,
            gradient_scale="sum",
            update=Nesterov(beta=outer_momentum) if outer_momentum else "sgd",
            delay=delay,
            process_group=process_group,
            **settings,
        )

    @property
    def sync_every(self) -> int:
        """H, steps from one round to the next. Change it on all ranks, right after a round."""
        return self._sync_every

    @sync_every.setter
    def sync_every(self, steps: int) -> None:
        self._sync_every = checked_steps(steps)
        self._codec.also(self._common())

    def _common(self) -> tuple[tuple[str, str], ...]:
        """Returns what ranks must have in common besides the codec's settings."""
        inner = ", ".join(type(each).__name__ for each in self.inner)
        return ("sync_every", str(self._sync_every)), ("inner", inner)

    # The step

    @_disable_dynamo  # torch.compile leaves it out of graphs, as it does torch's own optimizers
    @torch.no_grad()
    @deferred()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step of the inner optimizers, then, every `sync_every` steps, a round with the other ranks."""
        self._require_own("step")
        self._codec.require_settled("step")
        self._follow_inner()
        try:
            self._meet()
            loss = self.local_step(closure)
            if self.due:
                self._round()
        except BaseException:
            Scaling.forget(self)
            raise
        return loss

    @torch.no_grad()
    @deferred()
    def local_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes a step of the inner optimizers alone, also when a round is `due`: no network between nodes."""
        self._require_own("local_step")
        self._codec.require_settled("local_step")
        self._follow_inner()
        self._weights.begin()
        loss = self._local_step(closure)
        self.local_steps += 1
        self._stats = Stats(route=self._codec.stats.route)
        return loss

    @property
    def due(self) -> bool:
        """Whether there were `sync_every` local steps or more since the last round: the next thing to do is a round."""
        return self.local_steps >= self.sync_every

    @torch.no_grad()
    @deferred()
    def extract(self) -> Tensor:
        """Measures the movement and returns this rank's message, uint8 [B]. Follow it with `apply` or `rollback`."""
        self._require_own("extract")
        self._codec.require_settled("extract")
        self._weights.begin()
        self._weights.measure()
        try:
            return self._codec.extract()
        except BaseException:
            self._weights.forget_movement()
            raise

    def exchange(self, message: Tensor) -> Tensor:
        """Sends the message and returns the result, as `DeMo.exchange` does: the only stage that uses the network."""
        return self._codec.exchange(message)

    @torch.no_grad()
    def check(self, messages: Tensor) -> None:
        """Raises what `apply` would raise, and changes nothing: call it before a vote."""
        self._codec.check(messages)

    @torch.no_grad()
    @deferred()
    def apply(self, messages: Tensor) -> None:
        """Checks all of the result, moves the shared weights, and goes on from them. No network."""
        self._require_own("apply")
        self._codec.apply(messages)
        self._stats = self._codec.stats
        self._go_on()

    @torch.no_grad()
    @deferred()
    def rollback(self) -> None:
        """Takes the movement back out of the error; this rank goes on from its own weights, as if without a round."""
        self._require_own("rollback")
        self._codec.rollback()
        self._weights.forget_movement()

    def set_aside(self) -> Round:
        """As `DeMo.set_aside`: takes the extracted round out of the way."""
        aside = self._codec.set_aside()
        self._movement_aside = self._weights.movement
        return aside

    @torch.no_grad()
    def resume(self, aside: Round) -> Tensor:
        """As `DeMo.resume`: goes on with a round that was set aside, and returns its message anew."""
        message = self._codec.resume(aside)
        self._weights.movement, self._movement_aside = self._movement_aside, []
        return message

    @torch.no_grad()
    def settle(self, aside: Round) -> None:
        """As `DeMo.settle`: the weights that came from a peer hold what the round sent."""
        self._codec.settle(aside)
        self._movement_aside = []

    @torch.no_grad()
    @deferred()
    def flush(self) -> None:
        """With delay: applies the round in flight. Call it on all ranks before saving, evaluating or stopping."""
        self._require_own("flush")
        if self._codec.in_flight:
            self._codec.flush()
            self._stats = self._codec.stats
        self._weights.land()

    def shared(self) -> AbstractContextManager[None]:
        """The context in which the model has the shared weights, the same on all ranks, to evaluate and save them."""
        return self._weights.shown()

    def fingerprint(self, state: bool = False) -> int:
        """Returns a 64-bit hash of the shared weights; if it differs between ranks, they have drifted.

        `state`: also of the number of rounds and of the outer momentum.
        """
        self._weights.notice_loaded()
        return self._codec.fingerprint(state)

    def facts(self) -> dict[str, str]:
        """Returns what must be equal on all ranks, by name: settings, shapes of parameters, versions."""
        return self._codec.facts()

    def forget(self) -> None:
        """Sets this rank's error to zero: it starts as a new rank, with weights of a peer."""
        self._require_own("forget")
        self._codec.forget()

    @torch.no_grad()
    def resync(self, src: int = 0) -> None:
        """Copies shared weights and outer state of rank `src` to all ranks, which all call it and go on from them."""
        self._require_own("resync")
        self._weights.begin()
        self._codec.resync(src)
        self._weights.adopt()
        self.local_steps = 0

    @torch.no_grad()
    def regroup(self, process_group: Any) -> None:
        """Goes on among other ranks, between two rounds, as `DeMo.regroup` does."""
        self._require_own("regroup")
        self._weights.begin()
        self._codec.regroup(process_group)
        self._weights.forget_movement()
        self._weights.apart = True  # own weights are still worth something, unless others bring theirs

    @property
    def members(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self._codec.members

    @property
    def stats(self) -> Stats:
        """The cost of the last step; a step without a round sends nothing."""
        return self._stats

    # State: groups, checkpoints

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, if there is one inner optimizer. Call it right after a round, on all ranks alike."""
        if not hasattr(self, "_codec"):
            super().add_param_group(param_group)  # from the constructor: the inner optimizer's own group
            return
        self._require_own("add_param_group")
        if len(self.inner) > 1:
            raise ValueError("there are several inner optimizers: build LocalDeMo anew with the group in one of them")
        if self._codec.in_flight or self._is_apart:
            raise RuntimeError(
                "add_param_group came between two rounds; call it right after one, with delay after flush()"
            )
        self.inner[0].add_param_group(param_group)
        group = self.inner[0].param_groups[-1]
        try:
            check_parameters(group["params"])
            shared = [wide(parameter) for parameter in group["params"]]
            self._codec.add_param_group({"params": shared})
        except BaseException:
            del self.inner[0].param_groups[-1]
            raise
        super().add_param_group(group)
        self._weights.add(group["params"], shared)
        self._show_state()

    def state_dict(self, *, in_flight: bool = False) -> dict[str, Any]:
        """As in torch: the inner optimizers' state, with the shared weights, this rank's own, and its error.

        Each rank saves its own, or `consolidate_state_dict` brings them to one. The model's weights are better saved
        inside `shared()`, where all ranks have the same; `load_state_dict` puts this rank's own back into the
        parameters. `in_flight`: as in `DeMo`.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        found = self._state_dict(in_flight)
        if self._all_states:
            found = states.joined(self._all_states, found)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Brings what is each rank's own, its inner states among it, to rank `to`, as `DeMo.consolidate_state_dict`."""
        exchange = self._codec.exchange_between_ranks
        self._all_states = gather_states(exchange, self._state_dict(in_flight=False), to, self._codec.device)

    def _state_dict(self, in_flight: bool) -> dict[str, Any]:
        apart = self._is_apart
        if apart and not self._weights.are_shown and not self._warned and self._codec.speaks:
            self._warned = True
            warn(
                f"the state was saved {self.local_steps} steps after the last round, when the model has weights of "
                "this rank's own; save right after a round, or inside `with optimizer.shared():`"
            )
        codec = self._codec.state_dict(in_flight=in_flight)
        groups, state = local_state.pack_inner(self.inner)
        for number, weights in enumerate(self._weights.saved(apart)):
            added = local_state.from_codec(codec["state"][number]) | weights
            added["local_steps"] = torch.tensor(self.local_steps)
            state.setdefault(number, {}).update(added)
        found: dict[str, Any] = {"state": state, "param_groups": groups}
        return {**found, "in_flight": codec["in_flight"]} if "in_flight" in codec else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; ValueError or TypeError, with nothing changed, if the state does not fit. See also `DeMo`'s."""
        self._require_own("load_state_dict")
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        state_dict = states.own_part(state_dict, self._codec.members)
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
        self._weights.restore([state[number] for number in numbers])
        self.local_steps = int(state[numbers[0]]["local_steps"]) if numbers else 0
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

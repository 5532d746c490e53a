"""LocalDeMo: every rank takes steps of its own optimizer, and the ranks exchange pseudo-gradients.

Each rank takes H steps of an ordinary optimizer on its local weights. The pseudo-gradient D = start - local (DiLoCo;
start is the global weights) is the input of its `Replicator` over the global weights; the replicator's momentum is the
error e. Codec, routes and rounds are those of `DeMo`:

    e <- e + T(D);   the signs of e are sent, and a scale per chunk;   global <- global - T^-1(mean over the ranks);
    e <- b (e - sent);   local <- global

With `top_k`, only the K largest of each chunk are sent, with their signs, and the mean is over the senders.

The table of local_weights.py has the effect of a round on weights and error, also of one that is skipped or fails.

Shapes: W ranks, B bytes in a message, H steps between rounds (`sync_every`), K kept.
"""

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports all of dynamo

from demopt.codec.gradients import NO_SCALING, Scaling, check_parameters, gradients_of
from demopt.codec.hyperparameters import NAMES
from demopt.core.rules import Nesterov
from demopt.errors import DriftError
from demopt.exchange.dtensor import shard_groups, shard_of, to_local, true_in_all
from demopt.optim.demo import DeMo
from demopt.optim.left_out import warn_if_left_out, watch_optimizer
from demopt.optim.local_weights import LocalWeights
from demopt.replicator import handshake
from demopt.replicator.plan import Facts, Options
from demopt.replicator.replicator import SAVED_BY, Replicator, Round
from demopt.replicator.route import OWNER_ERROR, OWNER_START
from demopt.replicator.stats import Stats
from demopt.runs import weights as runs
from demopt.runs.exchange import CoveredError, FolderExchange
from demopt.state.consolidate import consolidate
from demopt.state.saved import check_shapes, joined, own_part, warn_unless_own
from demopt.validation import check_count, check_number, warn

Entry = dict[str, Any]
_KEPT_NAMES = (SAVED_BY, OWNER_ERROR, OWNER_START)
#: The replicator's names of a state, and these here; the rest have "outer_" in front.
_REPLICATOR_NAMES = {"momentum": "error", "step": "round", **{name: name for name in _KEPT_NAMES}}
_NEEDED = ("global", "error", "round", "local_steps")
_ADDED = (*_NEEDED, "local", "start", *_KEPT_NAMES)  # to the inner optimizer's entries of a parameter's state
_SYNCHRONIZING = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")  # of torch.distributed, not imported here
_SCHEDULED = ("lr", "weight_decay", "momentum", "betas")  # in a folder, workers may be at different local steps
_NOT_COMPARED = ("params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable")


class LocalDeMo(torch.optim.Optimizer):
    """Wraps an optimizer: its steps stay local, and every `sync_every` steps the ranks exchange pseudo-gradients.

    Give `inner` the parameters of the plain model, without DistributedDataParallel. Learning rates, schedules and
    weight decay are those of `inner`; this optimizer has the same parameter groups. They must be equal on all ranks.
    Between rounds, ranks have different weights: evaluate and save inside `with optimizer.shared():`. After every
    round, the weights of all ranks are equal, bit for bit (with `delay`, the global ones). A parameter frozen between
    two rounds returns to its last global value.

    Additional memory: per trained parameter, the global weight and the error, in float32 or wider. The state of `inner`
    is not exchanged.

    Args:
        inner: any torch optimizer, or a list of them, such as Muon for matrices and AdamW for the rest.
        sync_every: H, steps from one round to the next.
        top_k: None: one bit per coefficient, its sign. A number: only the top_k largest of each full chunk x chunk
            block, for fewer bytes.
        error_decay: b, in [0, 1]: the fraction of the error that remains after a round. Default: 1, with top_k 0.5.
        outer_lr: factor on the aggregated pseudo-gradient, > 0.
        outer_momentum: Nesterov momentum of the aggregated pseudo-gradient, in [0, 1); 0: none.
        delay: 0: a round is applied at once. 1: it travels during the next H steps and is applied after them (`flush`).
        reduction: as in `DeMo`, with top_k: "senders" by default; with 16 ranks or more try "root", because "senders"
            then overshoots. Without top_k it is always the mean over all ranks.
        samples: this rank's weight in the mean, up to 2**32 - 1; an attribute that may change before every round.
        route: "gather": every rank receives every message. "owner": each rank averages a part of the chunks and answers
            with signs, so that bytes do not grow with W; results differ from those of "gather". "auto": the one that
            receives fewer bytes; `stats.route` names it.
        alpha, chunk, transform, values, exact, clip_to_median, kernels, process_group: as in `DeMo`.
        fingerprint_every: as in `DeMo`, counted in rounds.

    Raises:
        ValueError, TypeError: an invalid argument, parameter or gradient. SettingsError, ExchangeError,
            MessageError, DriftError: as in `DeMo`; the pseudo-gradient of a failed round stays in the error.

    If a gradient was not finite, all ranks skip the round. The rank of that gradient drops its local steps since the
    last one, and its inner optimizers restart without a state.

    Source: pseudo-gradients: arXiv 2311.08105 (DiLoCo), section 2; sparse ones with an error: arXiv 2508.15706
    (SparseLoCo); the codec: arXiv 2411.19870, section 3.

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

    _steps_inner = False  # a local step is under way
    _step_supports_amp_scaling = True  # otherwise GradScaler would leave out steps, and ranks their rounds

    def __init__(
        self,
        inner: torch.optim.Optimizer | list[torch.optim.Optimizer],
        sync_every: int = 5,
        top_k: int | None = None,
        *,
        error_decay: float | None = None,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        delay: int = 0,
        alpha: float = 1.0,
        chunk: int = 64,
        transform: str = "dct",
        values: str = "sign",
        reduction: str | None = None,
        samples: int = 1,
        exact: bool | None = None,
        clip_to_median: bool = False,
        route: str = "auto",
        fingerprint_every: int = 100,
        kernels: str = "auto",
        process_group: Any = None,
    ) -> None:
        if error_decay is None:
            error_decay = 1.0 if top_k is None else 0.5
        if reduction is None:
            reduction = "mean" if top_k is None else "senders"
        given = locals()
        self.inner = _checked_inner(inner)
        self._have_state = [bool(each.state) for each in self.inner]  # from the start, as Adagrad's
        self._sync_every = check_count("sync_every", sync_every)
        if route == "owner" and top_k is not None:
            raise ValueError(
                f"route 'owner' answers with signs of all coefficients, and top_k is {top_k}; use route 'gather', or "
                "leave top_k out"
            )
        if delay not in (0, 1):
            raise ValueError(f"delay is {delay!r}; give 0, or 1 for rounds that are applied one round late")
        check_number("outer_momentum", outer_momentum, high=1.0)
        settings = {name: given[name] for name in NAMES if name in given}
        settings |= {
            "lr": check_number("outer_lr", outer_lr, open_low=True),
            "momentum_decay": check_number("error_decay", error_decay, high=1.0, closed_high=True),
            "gradient_scale": "sum",
            "update": str(Nesterov(beta=outer_momentum)) if outer_momentum else "sgd",
            "weight_decay": 0.0,
            "chunking": "padded",
            "maximize": False,
        }
        self.local_steps = 0
        self._stats = Stats()
        self._all_states: dict[int, Entry] | None = None  # consolidated, until the state changes
        self.run = _folder(process_group)
        self._open_round: Round | None = None  # sent to a folder, and not known to take part
        self._warned = False  # that a state was saved between rounds
        self._settings = settings
        super().__init__(self._inner_groups(), {})  # without defaults, which would be put into the groups
        self.defaults = dict(self.inner[0].defaults)  # schedulers look for momentum here
        self._weights = LocalWeights([p for group in self.param_groups for p in group["params"]])
        options = Options(route, fingerprint_every, kernels, background=delay == 1)
        self.replicator = Replicator(self._replicated_groups(), {}, options, process_group)
        if self.run is not None and route == "owner":
            raise ValueError("in a folder every worker reads every message; use route 'auto' or 'gather'")
        self.replicator.set_config_facts(self._facts())
        self.samples = samples
        self._watch()

    @property
    def samples(self) -> int:
        """This rank's weight in the next round's mean over the ranks, such as the sequences that it has trained on."""
        return self.replicator.samples

    @samples.setter
    def samples(self, samples: int) -> None:
        if check_count("samples", samples) >= 1 << 32:
            raise ValueError(f"samples is {samples}; give at most {(1 << 32) - 1}")
        if samples > 1 and self._settings["top_k"] is not None:
            raise ValueError("samples weigh signs of all coefficients; leave top_k out, or samples")
        self.replicator.samples = samples

    @property
    def sync_every(self) -> int:
        """H, steps from one round to the next. Change it on all ranks, right after a round."""
        return self._sync_every

    @sync_every.setter
    def sync_every(self, steps: int) -> None:
        self._sync_every = check_count("sync_every", steps)

    # The step

    @_disable_dynamo  # torch.compile leaves it out of graphs, as it does torch's own optimizers
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step of the inner optimizers, then, every `sync_every` steps, a round with the other ranks."""
        self._require_local("step")
        try:
            if self._follow_inner():  # a parameter begins to train: a round in flight, which is without it, ends first
                self.replicator.flush()
            if self.run is not None:
                self.join()
            else:
                self._agree()
            loss = self._local_step(closure)
            if self.due:
                self._round()
        except BaseException:
            Scaling.forget(self)
            raise
        return loss

    @torch.no_grad()
    def local_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes a step of the inner optimizers alone, also when a round is `due`.

        Uses no network between nodes, except that with several processes per node the first one runs the handshake.
        """
        self._require_local("local_step")
        self._follow_inner()
        if self.replicator.session.exchange.intra_node is not None:
            self._agree()
        return self._local_step(closure)

    @property
    def due(self) -> bool:
        """Whether `sync_every` local steps or more came since the last round: the next thing to do is a round."""
        return self.local_steps >= self._sync_every

    @torch.no_grad()
    def join(self) -> None:
        """In a folder: starts the run, or takes its weights. The first `step` does it too, but drops its gradient then.

        Call it before the first batch.
        """
        if self.run is None or self.run.joined:
            return
        self._require_local("join")
        self.replicator.set_config_facts(self._facts())
        self._weights.begin()
        try:
            took = runs.join(self.replicator, self.run)
        finally:
            self._weights.adopt()  # global weights may have come even if the rest failed
        if took:
            self.local_steps = 0
            for parameter in self._weights.parameters:
                parameter.grad = None  # it was computed at other weights

    @torch.no_grad()
    def finish_round(self, last: bool = False) -> None:
        """Runs a round now, also before it is `due`. `last`: with delay, also applies it, so that nothing is in flight.

        In a folder set `run.leaving` before the last one: the others do not wait for this worker again.
        """
        self._require_local("finish_round")
        self._round()
        if last:
            self.flush()

    @torch.no_grad()
    def extract(self) -> Tensor:
        """Returns this rank's message, uint8 [B], of its pseudo-gradient. Follow it with `apply` or `rollback`."""
        self._require_local("extract")
        self._weights.begin()
        return self._extract()

    @torch.no_grad()
    def exchange(self, message: Tensor) -> Tensor:
        """Sends the message and returns the result, as `DeMo.exchange` does: the only stage that uses the network."""
        return self.replicator.exchange(message)

    @torch.no_grad()
    def apply(self, messages: Tensor) -> None:
        """Checks all of the result, moves the global weights, and goes on from them. No network."""
        self._require_local("apply")
        sent = self._finite
        self.replicator.apply(messages)
        self._stats = self.replicator.stats
        self._go_on(sent)

    @torch.no_grad()
    def rollback(self) -> None:
        """Forgets the extracted message; the pseudo-gradient stays in the error, and this rank keeps its weights."""
        self._require_local("rollback")
        abandoned, finite = self.replicator.round, self._finite
        self.replicator.undo()
        if abandoned is not None and not abandoned.in_flight:  # after `send`, the weights have gone on already
            self._keep(finite)

    @torch.no_grad()
    def flush(self) -> None:
        """With delay: applies the round in flight. Call it on all ranks before evaluating or stopping."""
        self._require_local("flush")
        if self.replicator.in_flight or self._open_round is not None:
            self._land()
            self._stats = self.replicator.stats
        self._weights.land()

    def shared(self) -> AbstractContextManager[None]:
        """The context in which the model has the global weights, the same on all ranks, to evaluate and save them."""
        return self._weights.shown()

    def fingerprint(self, state: bool = False) -> int:
        """Returns a 64-bit hash of the global weights; if it differs between ranks, they have drifted.

        `state`: also of the number of rounds and of the outer momentum.
        """
        self._weights.notice_loaded()
        return self.replicator.fingerprint(state)

    @torch.no_grad()
    def resync(self, src: int = 0) -> None:
        """Copies global weights and outer state of rank `src` to all ranks, which all call it and go on from them."""
        self._require_local("resync")
        self.flush()
        self._weights.begin()
        if self.run is not None:
            self.join()
            try:
                runs.load_newest(self.replicator, self.run, least=0)
                runs.rejoin(self.replicator, self.run)
            finally:
                self._weights.adopt()
        else:
            self.replicator.resync(src)
        self._weights.adopt()
        self.local_steps = 0

    @torch.no_grad()
    def regroup(self, process_group: Any) -> None:
        """Goes on with other ranks, between two rounds, as `DeMo.regroup` does; local weights stay as they are."""
        self._require_local("regroup")
        self._weights.begin()
        self.replicator.set_config_facts(self._facts())  # a worker that was behind has taken over learning rates
        abandoned, finite = self.replicator.round, self._finite
        self.replicator.regroup(process_group)
        self.run, self._open_round = _folder(process_group), None
        if abandoned is not None and not abandoned.in_flight:
            self._keep(finite)

    @property
    def stats(self) -> Stats:
        """The cost of the last step; a step without a round sends nothing."""
        return self._stats

    def _agree(self) -> None:
        """Runs the handshake before a local step: ranks that start from other weights take rank 0's."""
        replicator, session = self.replicator, self.replicator.session
        if replicator.in_flight:
            return
        plan, mark = replicator.plan(), self._gradient_mark()
        if session.agreed is plan.route:
            if session.compares_gradients:
                session.check_grad_sync(plan, mark)
            return
        if session.begins:
            warn_if_left_out(self)
        replicator.set_config_facts(self._facts())  # as they are now
        self._weights.begin()
        before = replicator.fingerprint()
        replicator.agree(mark)
        if replicator.fingerprint() != before:  # rank 0's weights came
            self._weights.adopt()
        frozen = [to_local(each) for each in self._weights.parameters if each not in self._weights.global_of]
        with session.exchange.paused():
            handshake.check_weights(session.exchange, frozen, replicator.plan().device)

    def _gradient_mark(self) -> list[int] | None:
        """Returns the mark of the gradients, if ranks still have to compare them."""
        if not self.replicator.session.compares_gradients:
            return None
        return handshake.gradient_mark(gradients_of(self._weights.parameters))

    def _local_step(self, closure: Callable[[], float] | None) -> float | None:
        self._weights.begin()
        for parameter in self._weights.parameters:
            if not parameter.requires_grad:
                parameter.grad = None  # left from before it was frozen: the inner optimizers would take it
        loss, scaling = None, Scaling.of(self)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients, left = self.replicator.gradients(self._weights.parameters, scaling)
        if left.factor != 1.0:
            torch._foreach_mul_([gradient for gradient in gradients if gradient is not None], left.factor)
        # without a GradScaler nothing here waits for the device: gradients that are not finite show in the next round
        if scaling is NO_SCALING or true_in_all(shard_groups(self._weights.parameters), not left.found_infinite):
            self._steps_inner = True
            try:
                for each in self.inner:
                    each.step()
            finally:
                self._steps_inner = False
        self.local_steps += 1
        self._stats = Stats(route=self.replicator.stats.route)
        return loss

    def _round(self) -> None:
        """A round: with delay, first the one before is applied, which had the local steps since to travel."""
        replicator = self.replicator
        flushed = replicator.in_flight
        if flushed or self._open_round is not None:
            self._land()
        if flushed and replicator.session.compares_gradients:  # between two exchanges in the background
            replicator.session.check_grad_sync(replicator.plan(), self._gradient_mark())
        applied = replicator.stats
        self._extract()
        sent = self._finite
        try:
            if replicator.options.background:
                replicator.send()
            elif self.run is None:
                replicator.apply(replicator.exchange())
            else:
                self._exchange_and_apply()
        except BaseException:
            replicator.undo()
            self._keep(sent)
            if self._open_round is not None:  # it may move the global weights, and not those that steps start from
                self._weights.keep()
            raise
        self._stats = replicator.stats.with_exchange_of(applied) if flushed else replicator.stats
        self._go_on(sent)
        if self.run is not None and not replicator.in_flight:
            try:
                self._follow()
            finally:
                if not self._weights.are_apart:
                    self._weights.adopt()  # rounds that it caught up with moved the global weights
            if self.run.left_out > 1 and not (self.run.leaving or self.run.stopping):
                self._round()

    def _exchange_and_apply(self) -> None:
        """Runs the extracted round. In a folder an error may leave it open whether a message takes part."""
        replicator, run = self.replicator, self.run
        try:
            replicator.apply(replicator.exchange())
        except CoveredError:
            replicator.apply_elsewhere()
        except DriftError:  # of a manifest, so it is known whether this worker's message takes part
            if run is not None:
                replicator.apply_elsewhere()
            raise
        except BaseException:
            if run is not None and run.sent == int(replicator.rounds):
                self._open_round, replicator.round = replicator.round, None
            raise

    def _land(self) -> None:
        """Applies the round in flight, or one that failed in a folder, and those that were decided without this worker.

        The local steps since then stay local: they are for the next round.
        """
        if self._open_round is not None:
            self.replicator.round, self._open_round = self._open_round, None
        elif not self.replicator.in_flight:
            return
        try:
            self._exchange_and_apply()
        except BaseException:
            self.replicator.undo()
            raise
        self._follow()

    def _follow(self) -> None:
        """In a folder, after a round: takes its turn at checkpoints; if it was left out, catches up with the others.

        A worker that is always late would never be in a round: after two without it, it sends what it has at once.
        """
        run, replicator = self.run, self.replicator
        if run is None:
            return
        save = runs.save_if_due(replicator, run)
        if save is not None:
            run.later(save)
        if run.behind:
            runs.rejoin(replicator, run)

    def _extract(self) -> Tensor:
        self.replicator.set_config_facts(self._facts())
        replicator = self.replicator
        message = replicator.extract(self._weights.starts(), minus=self._weights.locals())
        assert replicator.round is not None
        replicator.round.gradient_mark = self._gradient_mark()
        if not replicator.round.finite:
            for each, has_state in zip(self.inner, self._have_state, strict=True):
                if has_state:  # it would not make one again
                    _zero(each.state)
                else:
                    each.state.clear()
        return message

    @property
    def _finite(self) -> bool:
        """Whether the extracted pseudo-gradient was finite, and so is in the message."""
        current = self.replicator.round
        return current is not None and current.finite

    def _go_on(self, sent: bool) -> None:
        """After a round: sets local weights and start by the table of local_weights.py."""
        if self.replicator.in_flight:
            self._weights.sent(sent)
        elif self._stats.skipped:
            self._keep(sent)
        else:
            self._weights.adopt()
        self.local_steps = 0

    def _keep(self, sent: bool) -> None:
        """After a round that was skipped or failed: the pseudo-gradient is in the error, unless it was not finite."""
        if sent:
            self._weights.keep()
        else:
            self._weights.adopt()

    def _watch(self) -> None:
        """Makes mistakes around this optimizer noticeable."""
        watch_optimizer(self)
        for each in self.inner:
            hooks = each._optimizer_step_pre_hooks
            for handle in [handle for handle, hook in hooks.items() if isinstance(hook, _OnlyInside)]:
                del hooks[handle]  # of a LocalDeMo that this one replaces
            each.register_step_pre_hook(_OnlyInside(self))

    def _inner_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.inner for group in each.param_groups]

    def _replicated_groups(self) -> list[dict[str, Any]]:
        shared = self._weights.global_of
        return [
            {"params": [shared[p] for p in group["params"] if p in shared], **self._settings}
            for group in self.param_groups
        ]

    def _follow_inner(self) -> bool:
        """Takes the inner optimizers' groups anew, because loading a state into one replaces them.

        Returns whether a parameter begins to train.
        """
        groups = self._inner_groups()
        if [id(p) for group in groups for p in group["params"]] != [*map(id, self._weights.parameters)]:
            raise RuntimeError(
                "an inner optimizer has other parameters than at the start; use LocalDeMo.add_param_group"
            )
        self.param_groups[:] = groups
        begins = self._weights.create()
        if begins:
            self.replicator.groups[:] = self._replicated_groups()
        return begins

    def _facts(self) -> Facts:
        """Returns the facts about the inner optimizers that ranks must share, by name."""
        facts = {"sync_every": str(self._sync_every), "inner": ", ".join(type(each).__name__ for each in self.inner)}
        not_compared = _NOT_COMPARED if self.run is None else (*_NOT_COMPARED, *_SCHEDULED)
        for number, group in enumerate(self._inner_groups()):
            for name, value in group.items():
                if name not in not_compared:
                    plain = value.item() if isinstance(value, Tensor) else value
                    number_or_text = float(plain) if isinstance(plain, int) and not isinstance(plain, bool) else plain
                    facts[f"inner param_groups[{number}][{name!r}]"] = repr(number_or_text)
        return tuple(facts.items())

    def _require_local(self, wanted: str) -> None:
        """Raises RuntimeError inside `shared`; changes of the state follow, so a consolidated one is forgotten."""
        if self._weights.are_shown:
            raise RuntimeError(
                f"{wanted} came inside `with optimizer.shared():`, where the weights are not this rank's own"
            )
        self._all_states = None

    # State: groups, checkpoints

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The inner optimizers' state of each parameter, with its global weights, its error, and their counters."""
        found: defaultdict[Tensor, Any] = defaultdict(dict)
        for each in self.inner:
            for parameter, entry in each.state.items():
                found[parameter] = dict(entry)
        apart = self._is_apart
        for local, shared in self._weights.global_of.items():
            kept = self.replicator.state.get(shared, {})
            found[local] |= {_REPLICATOR_NAMES.get(name, f"outer_{name}"): value for name, value in kept.items()}
            found[local] |= self._weights.saved(local, apart)
            found[local]["local_steps"] = torch.tensor(self.local_steps)
            if SAVED_BY in kept:
                found[local][SAVED_BY] = torch.tensor([*kept[SAVED_BY].tolist(), len(found[local])])
        return found

    @state.setter
    def state(self, state: object) -> None:
        """Does nothing: torch's constructor makes a state, but each part of this one has its place."""

    @property
    def _is_apart(self) -> bool:
        """Whether this rank's weights are not the global ones."""
        return bool(self.local_steps or self._weights.are_apart)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, if there is one inner optimizer. Call it right after a round, on all ranks alike."""
        if not hasattr(self, "replicator"):
            super().add_param_group(param_group)  # from the constructor: the inner optimizer's own group
            return
        self._require_local("add_param_group")
        if len(self.inner) > 1:
            raise ValueError("there are several inner optimizers: build LocalDeMo anew with the group in one of them")
        if self.replicator.in_flight or self._is_apart:
            raise RuntimeError(
                "add_param_group came between two rounds; call it right after one, with delay after flush()"
            )
        self.inner[0].add_param_group(param_group)
        groups, weights = self.inner[0].param_groups, self._weights
        count, before = len(weights.parameters), (weights.global_of, list(self.replicator.groups))
        try:
            check_parameters(groups[-1]["params"])
            super().add_param_group(groups[-1])
            weights.parameters += groups[-1]["params"]
            weights.create()
            self.replicator.groups[:] = self._replicated_groups()
            self.replicator.plan()
        except BaseException:
            del groups[-1], weights.parameters[count:]
            self.param_groups[:] = groups
            weights.global_of, self.replicator.groups[:] = before
            raise

    def state_dict(self, *, in_flight: bool = False) -> dict[str, Any]:
        """As in torch: the inner optimizers' state, with the global weights, this rank's local ones, and its error.

        Each rank saves its own, or `consolidate_state_dict` brings them to one. The model's weights are better saved
        inside `shared()`, where all ranks have the same; `load_state_dict` puts this rank's local weights back into the
        parameters. With delay, the content of a round in flight is in the error, and is sent after loading;
        `in_flight=True` stores the round itself, so that a resumed run equals an uninterrupted one bit for bit.
        """
        if not self.replicator.in_flight:
            self.replicator.require_idle("state_dict")
            self.replicator.plan()
        if self._is_apart and not self._weights.are_shown and not self._warned and self.replicator.session.speaks:
            self._warned = True
            warn(
                f"the state was saved {self.local_steps} steps after the last round, when the model has this rank's "
                "local weights; save right after a round, or inside `with optimizer.shared():`"
            )
        if in_flight and self._all_states:
            raise ValueError("a consolidated state has no room for rounds in flight; call flush() on all ranks before")
        found: dict[str, Any] = super().state_dict()
        if in_flight and self.replicator.in_flight:
            found["in_flight"] = self.replicator.pack_in_flight()
        return joined(self._all_states, found) if self._all_states else found

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Brings each rank's own part, its inner states included, to rank `to`, as `DeMo.consolidate_state_dict`."""
        self._all_states = None
        mine, replicator = self.state_dict(), self.replicator
        if replicator.round is not None and replicator.round.work is not None:
            replicator.round.work.exception()  # one exchange at a time
        self._all_states = consolidate(replicator, mine, to, self._sync_every)
        self._stats = replace(self._stats, consolidated_bytes=replicator.stats.consolidated_bytes)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; ValueError or TypeError, with nothing changed, if the state does not fit. See also `DeMo`'s."""
        self._require_local("load_state_dict")
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._follow_inner()
        rank_and_size = self.replicator.rank_and_size
        state_dict = own_part(state_dict, *rank_and_size)
        groups, state = state_dict.get("param_groups", []), state_dict.get("state", {})
        saved = self._loadable(groups, state)
        if "in_flight" in state_dict:
            self.replicator.saved_round(state_dict["in_flight"])  # refuses a damaged one before anything changes
        warn_unless_own(saved, *rank_and_size)
        first = 0
        for each in self.inner:
            last = first + len(each.param_groups)
            kept = {n: _of_inner(state.get(n, {})) for group in groups[first:last] for n in group["params"]}
            each.load_state_dict({"state": {n: e for n, e in kept.items() if e}, "param_groups": groups[first:last]})
            first = last
        self._weights.create(also=saved)
        self.replicator.groups[:] = self._replicated_groups()
        self._follow_inner()
        shared = self._weights.global_of
        self.replicator.restore({shared[local]: _of_replicator(entry) for local, entry in saved.items()})
        self._weights.restore(saved)
        self.local_steps = max((int(entry["local_steps"]) for entry in saved.values()), default=0)
        if "in_flight" in state_dict:
            self.replicator.unpack_in_flight(state_dict["in_flight"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _loadable(self, groups: list[Entry], state: dict[int, Entry]) -> dict[Tensor, Entry]:
        """Returns the saved entries by parameter, of those that have trained; ValueError if they do not fit."""
        sizes = [[len(group["params"]) for group in each] for each in (groups, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"the state has parameter groups of {sizes[0]} parameters, this optimizer of {sizes[1]}")
        saved, settings = {}, self.replicator.plan().settings
        empty = not any(state.values())  # otherwise, an empty entry is of a parameter that was frozen so far
        for place, (group, saved_group) in enumerate(zip(self.param_groups, groups, strict=True)):
            for parameter, number in zip(group["params"], saved_group["params"], strict=True):
                entry = state.get(number, {})
                if not set(_NEEDED) <= set(entry) and (entry or (empty and parameter.requires_grad)):
                    raise ValueError(
                        f"the state of parameter {number} has no global weights and error: another optimizer saved it"
                    )
                came = [list(entry[name].shape) for name in ("global", "local", "start") if name in entry]
                if came != [list(parameter.shape)] * len(came):
                    raise ValueError(
                        f"the state of parameter {number} has shapes {came}, the parameter {list(parameter.shape)}"
                    )
                if entry:
                    check_shapes(_of_replicator(entry), entry["global"], place, settings[place], where=number)
                    saved[parameter] = entry
        return saved

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        if self._weights.are_shown:  # nothing would ever take a copy out of it again
            raise RuntimeError("copying or pickling came inside `with optimizer.shared():`")
        self.replicator.require_idle("copying or pickling")
        names = ["defaults", "inner", "local_steps", "samples"]
        names += ["_have_state", "_sync_every", "_settings", "_weights", "_stats", "_warned"]
        replicator = self.replicator
        state = {p: {name: v.clone() for name, v in entry.items()} for p, entry in replicator.state.items()}
        packed = (replicator.groups, state, replicator.options, replicator.session.lost())
        return {**{name: getattr(self, name) for name in names}, "replicator": packed}

    def __setstate__(self, packed: dict[str, Any]) -> None:
        replicator, samples = packed.pop("replicator"), packed.pop("samples")
        self.inner, self._all_states, self._open_round = packed["inner"], None, None
        self.run = _folder(replicator[3])
        super().__setstate__({**packed, "param_groups": self._inner_groups()})
        self.replicator = Replicator(*replicator)
        self.replicator.samples = samples
        self._watch()

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalDeMo":
        twin: LocalDeMo = type(self).__new__(type(self))
        memo[id(self)] = twin
        packed = copy.deepcopy(self.__getstate__(), memo)
        shared = self.replicator.session.process_group  # it cannot be copied
        twin.__setstate__({**packed, "replicator": (*packed["replicator"][:3], shared)})
        return twin


class _OnlyInside:
    """A hook of an inner optimizer: refuses a step that did not come through LocalDeMo, since no round would follow."""

    def __init__(self, optimizer: LocalDeMo) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, inner: torch.optim.Optimizer, *_: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None or optimizer._steps_inner or not any(group.get("lr") for group in inner.param_groups):
            return  # with lr=0: torch.distributed.checkpoint and torchtitan create the state by such a step
        raise RuntimeError(
            f"step() of the {type(inner).__name__} inside a LocalDeMo was called, and ranks would drift apart; call "
            "step() of the LocalDeMo, which calls it"
        )


def _zero(state: Any) -> None:
    """Sets all tensors in an optimizer's state to zero, also those in lists and dicts."""
    if isinstance(state, Tensor):
        to_local(state).zero_()
    elif isinstance(state, Mapping):
        for value in state.values():
            _zero(value)
    elif isinstance(state, list | tuple):
        for value in state:
            _zero(value)


def _folder(process_group: Any) -> FolderExchange | None:
    """Returns the folder that workers exchange through, if the process group is one."""
    return process_group if isinstance(process_group, FolderExchange) else None


def _of_replicator(entry: Entry) -> Entry:
    """Returns the replicator's part of a parameter's saved state."""
    names = {ours: name for name, ours in _REPLICATOR_NAMES.items()}
    outer = {name.removeprefix("outer_"): value for name, value in entry.items() if name.startswith("outer_")}
    return {names[name]: value for name, value in entry.items() if name in names} | outer


def _of_inner(entry: Entry) -> Entry:
    """Returns the inner optimizer's part of a parameter's saved state."""
    return {name: value for name, value in entry.items() if name not in _ADDED and not name.startswith("outer_")}


def _checked_inner(inner: Any) -> list[torch.optim.Optimizer]:
    """Returns the inner optimizers; TypeError or ValueError if they cannot take local steps."""
    found = list(inner) if isinstance(inner, list | tuple) else [inner]
    if found and all(isinstance(each, dict | Tensor) for each in found):  # also from Trainer's optimizer_cls_and_kwargs
        raise TypeError(
            "inner is parameters; LocalDeMo wraps an optimizer of them: LocalDeMo(torch.optim.AdamW(parameters, "
            "lr=3e-4)). For transformers.Trainer build it yourself, and give optimizers=(optimizer, None) instead of "
            "optimizer_cls_and_kwargs"
        )
    for each in found:
        kind = type(each).__name__
        if not isinstance(each, torch.optim.Optimizer):
            raise TypeError(
                f"inner is a {kind}; give a torch optimizer, such as torch.optim.AdamW(model.parameters(), lr=3e-4), "
                "or a list of them"
            )
        if isinstance(each, torch.optim.LBFGS):
            raise TypeError("inner is LBFGS, which evaluates the loss several times a step; give another optimizer")
        if isinstance(each, DeMo | LocalDeMo) or any(base.__name__ in _SYNCHRONIZING for base in type(each).__mro__):
            raise TypeError(f"inner is a {kind}, which synchronizes the ranks itself; give a local optimizer")
    if not found:
        raise ValueError("inner is an empty list; give at least one torch optimizer")
    holders: dict[int, int] = {}
    for number, each in enumerate(found):
        for group in each.param_groups:
            check_parameters(group["params"])
            if kind == "Muon" and any(shard_of(p)[1] > 1 for p in group["params"]):
                warn(
                    "torch.optim.Muon got sharded matrices (FSDP2, tensor parallelism): its iteration communicates, "
                    "and its results differ from those on whole matrices. Use "
                    "demopt.muon_adamw, which gathers each matrix once"
                )
        for parameter in [p for group in each.param_groups for p in group["params"]]:
            if holders.setdefault(id(parameter), number) != number:
                raise ValueError(
                    f"inner[{holders[id(parameter)]}] and inner[{number}] both have a parameter of shape "
                    f"{list(parameter.shape)}; give each parameter to one optimizer"
                )
    return found

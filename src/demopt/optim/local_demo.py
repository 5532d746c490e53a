"""LocalDeMo: every rank takes steps of its own optimizer, and the ranks exchange pseudo-gradients.

docs/algorithm.md has the steps, local_weights.py the effects of a round that is applied, skipped or failed.
The pseudo-gradient D = start - local is the input of a `Replicator` over the global weights, whose momentum is the
error e. Codec, routes and rounds are those of `DeMo`.

Shapes: W ranks, B bytes in a message, H steps between rounds (`sync_every`), K kept.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports all of dynamo

from demopt.codec.gradients import check_group, check_parameters, forget_scale, remove_scale, unscaling_of
from demopt.codec.hyperparameters import Codec, Hyperparameters, codec_of, without_numpy
from demopt.core.rules import Nesterov
from demopt.core.transform import TRANSFORM_NUMBERS
from demopt.exchange.dtensor import parts_of, shard_groups, true_in_all
from demopt.interrupts import uninterrupted
from demopt.optim.inner import InnerOptimizers
from demopt.optim.local_weights import LocalWeights
from demopt.optim.mistakes import Mistakes, look_at_models
from demopt.optim.replicated import ReadOnly, ReplicatedOptimizer, refuse_change, unrecorded
from demopt.replicator.replicator import Replicator, Round, Stats
from demopt.replicator.rounds import Rounds, VaryingExchange
from demopt.replicator.session import equalize_weights
from demopt.replicator.wiring import Facts, Options
from demopt.state import SavedParameter, check_saved, read_state
from demopt.validation import check_count, check_number, check_rank, warn
from demopt.wire.message import MOST_SAMPLES

_SCHEDULED = ("lr", "weight_decay", "momentum", "betas")  # in a folder, workers may be at different local steps


class LocalDeMo(ReplicatedOptimizer):
    """Wraps an optimizer: its steps stay local, and every `sync_every` steps the ranks exchange pseudo-gradients.

    Give `inner` the parameters of the plain model, without DistributedDataParallel. Parameter groups, learning rates,
    schedules and weight decay are those of `inner`, and must be equal on all ranks.
    Between rounds, ranks have different weights: evaluate and save inside `with optimizer.shared():`. After a round
    that was applied, all ranks have equal weights, bit for bit (with `delay`, equal global weights). A parameter frozen
    between two rounds returns to its last global value.

    Additional memory: per trained parameter, the global weight and the error, in float32 or wider; with delay, or after
    a round that was not applied, also the start of the local steps. The state of `inner` is not exchanged.

    Args:
        inner: a torch optimizer, or a list of them, such as Muon for matrices and AdamW for the rest.
        sync_every: H, steps from one round to the next.
        top_k: None: one bit per coefficient, its sign. A number: only the top_k largest of each full chunk x chunk
            block, for fewer bytes.
        error_decay: b, in [0, 1]: the fraction of the error that remains after a round. Default: 0.9, with top_k 0.5.
        outer_lr: factor on the aggregated pseudo-gradient, > 0.
        outer_momentum: Nesterov momentum of the aggregated pseudo-gradient, in [0, 1); 0: none.
        delay: 0: a round is applied at once. 1: it travels during the next H steps and is applied after them (`flush`).
        samples: this rank's weight in the mean, up to 2**32 - 1; an attribute that may change before every round.
        route: "gather": every rank receives every message. "owner": each rank averages a part of the chunks and answers
            with signs, so that bytes do not grow with W; results differ from those of "gather". "auto":
            "gather" with up to 4 ranks, with top_k or clip_to_median, and in a folder; otherwise the one that receives
            fewer bytes (`stats.route`).
        codec: as in `DeMo`.
        process_group: as in `DeMo`.
        fingerprint_every: as in `DeMo`, counted in rounds.
        state_device: None: global weights, error and outer momentum are beside each parameter. "cpu": in the host's
            memory, where rounds are computed too, so that an accelerator holds nothing more, and only copies its local
            weights. Ranks may differ in it; the bits are those of a rank on a CPU.

    Raises:
        ValueError, TypeError: an invalid argument, parameter or gradient. SettingsError, ExchangeError,
            MessageError, DriftError: as in `DeMo`; if nothing of a round was applied, its pseudo-gradient stays in the
            error.

    If a gradient leaves weights or an inner state not finite, all ranks skip the round; in a folder the others refuse
    only that message. That rank drops its local steps since the last round, and its inner optimizers restart empty.

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

    warns_of_saving = True  # integrations/accelerate.py sets False: it saves the model with the global weights

    @unrecorded
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
        samples: int = 1,
        route: str = "auto",
        codec: Codec = Codec(),  # noqa: B008  it is frozen
        fingerprint_every: int = 100,
        state_device: str | torch.device | None = None,
        process_group: Any = None,
        **of_codec: Any,
    ) -> None:
        self._inner = InnerOptimizers(inner)  # first: for given parameters its error says what to give, also with an lr
        codec = codec_of(LocalDeMo, of_codec, codec)
        if error_decay is None:
            error_decay = 0.9 if top_k is None else 0.5
        check_count("sync_every", sync_every)
        if (delay := check_count("delay", delay, low=0)) > 1:
            raise ValueError(f"delay is {delay!r}; give 0, or 1 for rounds that are applied one round late")
        check_number("outer_momentum", outer_momentum, high=1.0)
        in_folder = isinstance(process_group, VaryingExchange) and route != "owner"
        settings = {
            **codec.hyperparameters(top_k, clips=in_folder),
            "top_k": top_k,
            "alpha": 1.0,
            "lr": check_number("outer_lr", outer_lr, open_low=True),
            "momentum_decay": check_number("error_decay", error_decay, high=1.0, closed_high=True),
            "gradient_scale": "sum",  # the momentum is the error: `Hyperparameters.momentum_is_error`
            "update": str(Nesterov(beta=outer_momentum)) if outer_momentum else "sgd",
            "weight_decay": 0.0,
            "chunking": "padded",
            "maximize": False,
        }
        self._settings = settings
        super().__init__(self._inner.groups, {})  # without defaults, which would be put into the groups
        # Schedulers look for momentum here; those that find `betas` cycle them in all groups.
        self.defaults = dict(self.inner[0].defaults)
        if not all("betas" in each.defaults for each in self.inner):
            self.defaults.pop("betas", None)
        where = None if state_device is None else torch.device("cpu")
        if where is not None and str(state_device) != "cpu":
            raise ValueError(f"state_device is {state_device!r}; give 'cpu', or None: beside the parameters")
        self._weights = LocalWeights([p for group in self.param_groups for p in group["params"]], where)
        self.sync_every = sync_every
        options = Options(route, fingerprint_every, codec.kernels, background=delay == 1)
        self.replicator = Replicator(self._replicated_groups(), {}, options, process_group)
        self._attach_parts(is_new=True)
        self.samples = samples

    @property
    def inner(self) -> list[torch.optim.Optimizer]:
        """The inner optimizers."""
        return self._inner.optimizers

    @property
    def local_steps(self) -> int:
        """The local steps since the last round."""
        return self._weights.steps_since

    @property
    def sync_every(self) -> int:
        """The steps from one round to the next; may change between two rounds, on all ranks alike."""
        return self._weights.sync_every

    @sync_every.setter
    def sync_every(self, steps: int) -> None:
        self._weights.sync_every = check_count("sync_every", steps)

    @property
    def samples(self) -> int:
        """This rank's weight in the next round's mean over the ranks, such as the sequences that it has trained on."""
        return self.replicator.samples

    @samples.setter
    def samples(self, samples: int) -> None:
        samples = check_count("samples", samples)
        if samples > MOST_SAMPLES:
            raise ValueError(f"samples is {samples}; give at most {MOST_SAMPLES}")
        if samples > 1 and self._settings["top_k"] is not None:
            raise ValueError("samples weigh signs of all coefficients; leave top_k out, or samples")
        self.replicator.samples = samples

    # The step

    @_disable_dynamo  # torch.compile leaves it out of graphs, as it does torch's own optimizers
    @unrecorded
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes a step of the inner optimizers, then, every `sync_every` steps, a round with the other ranks."""
        self._before_change("step")
        try:
            self._let_begin()
            self._join()
            loss = self._local_step(closure)
            if self.due:
                self._round()
        except BaseException:
            forget_scale(self)
            raise
        return loss

    @unrecorded
    def local_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Takes only a step of the inner optimizers, also when a round is `due`.

        Uses no network between nodes, except that with several processes per node the first call runs the handshake.
        """
        self._before_change("local_step")
        self._follow_changes()
        if self.replicator.session.exchange.intra_node is not None:
            self._join()
        return self._local_step(closure)

    @property
    def due(self) -> bool:
        """Whether the next thing to do is a round: after `sync_every` local steps, or where an error left one open."""
        return self.local_steps >= self.sync_every or self._must_retry

    @property
    def _must_retry(self) -> bool:  # what an error left open; with delay, a round is open until the next one is due
        return self.replicator.is_open and not self.replicator.options.background

    @unrecorded
    def join(self) -> None:
        """Meets the other ranks: compares settings, or in a folder starts the run, or takes its weights.

        Call it before the first batch. The first `step` does the same, but in a folder it then drops its gradient.
        """
        self._before_change("join")
        self._let_begin()
        self._join()

    @unrecorded
    def observe(self) -> int:
        """In a folder: takes the run's newest weights without joining it, to evaluate or save them; returns its rounds.

        Nothing is written there, and nobody waits for this worker. Call it again for newer ones.
        """
        self._before_change("observe")
        self._weights.begin()
        return self._rounds.observe()

    @unrecorded
    def finish_round(self, last: bool = False) -> None:
        """Runs a round now, also before it is `due`. `last`: with delay, also applies it, so that nothing is in flight.

        In a folder set `run.leaving` before the last round: the others then no longer wait for this worker.
        """
        self._before_change("finish_round")
        self.mistakes.look_at_replaced("that counts as a local step, unless a round in flight drops it")
        self._let_begin()
        if not self._rounds.in_folder:  # there a worker joins before its steps
            self._join()
        self._round()
        if last:
            sent, in_flight = self.stats, self.replicator.in_flight
            self.flush()
            if in_flight:
                self.replicator.stats = self.stats.plus(sent)

    @unrecorded
    def extract(self) -> Tensor:
        """Returns this rank's message, uint8 [B], of its pseudo-gradient. Follow it with `apply` or `rollback`."""
        self._before_change("extract")
        if self._rounds.in_folder:
            raise RuntimeError("a run in a folder takes its rounds whole: call step, or local_step and finish_round")
        self._follow_changes()
        message = self._extract(by_user=True).message
        assert message is not None
        return message

    @unrecorded
    def exchange(self, message: Tensor) -> Tensor:
        if self.replicator.round is not None:  # its handshake compares what trains; frozen weights are compared here
            self._join()
        return super().exchange(message)

    @unrecorded
    def apply(self, messages: Tensor) -> None:
        """Checks all of the result, moves the global weights, and goes on from them. No network."""
        self._before_change("apply")
        with uninterrupted():
            alone = self.replicator.round is None  # as in a replay
            if alone:
                self._weights.begin()
            self.replicator.apply(messages)
            if alone:
                self._weights.adopt()

    @unrecorded
    def rollback(self) -> None:
        """Forgets the extracted message; the pseudo-gradient stays in the error, and this rank keeps its weights.

        Not in a folder: there a round stays open after an error, because its message may be in a manifest.
        """
        self._before_change("rollback")
        if not self._rounds.in_folder:
            self.replicator.rollback()

    @unrecorded
    def flush(self) -> None:
        """With delay: applies the round in flight. Call it on all ranks before evaluating or stopping.

        Without local steps since, all ranks then have the global weights, also after a round that was skipped.
        """
        self._before_change("flush")
        self.mistakes.look_at_loaded()
        self.mistakes.look_at_replaced("flush() drops that, or counts it as a local step")
        self._end_open_round()
        self._weights.land()

    def shared(self) -> AbstractContextManager[None]:
        """The context in which the model has the global weights, the same on all ranks, to evaluate and save them.

        A single rank may enter it: it sends nothing. Before the first step these are the rank's own weights.
        """
        if self._weights.untouched and self._rounds.in_folder:
            self.warn_once("shared", "shared() came before join(): these are this worker's own weights, not the run's")
        self.mistakes.look_at_replaced("shared() shows the global weights, without that")
        return self.mistakes.unwatched(self._weights.shared)

    @unrecorded
    def fingerprint(self, state: bool = False) -> int:
        """Returns a 64-bit hash of the global weights; if it differs between ranks, they have drifted.

        `state`: also of the number of rounds and of the outer momentum.
        """
        self._weights.notice_loaded()
        if state and not self.replicator.is_open:  # a parameter that was frozen since has no outer momentum in it
            self._follow_changes()
        return self.replicator.fingerprint(state)

    @unrecorded
    def resync(self, src: int = 0, model: bool = False) -> None:
        """Copies global weights and outer state of rank `src` to all ranks, which all call it and go on from them.

        `model`: copies the weights its model has now, such as loaded ones. ValueError in a folder: a run has its own.
        """
        self._before_change("resync")
        if model and self._rounds.in_folder:
            raise ValueError("a run in a folder goes on from its own weights: model=True is for ranks on connections")
        if not self._rounds.in_folder:  # before local steps are dropped
            check_rank("src", src, self.replicator.rank_and_size[1])
        if model:
            self.mistakes.note_state(has_local_weights=False)
        else:
            self.mistakes.look_at_replaced("resync() drops that")
        loaded = [p.detach().clone() for group in self.param_groups for p in group["params"]] if model else []
        self.mistakes.look_at_loaded()
        if self.replicator.is_open:  # a catch-up that has failed is not tried again: the newest weights come now
            self._end_open_round()
        self._follow_changes()
        self._weights.begin()
        with ExitStack() as held:

            def drop_steps() -> None:
                held.callback(self._weights.adopt)  # the global weights may have moved even if the rest failed
                self._weights.steps_since = 0
                if model:
                    self._weights.take(loaded)

            self._rounds.resync(src, drop_steps)

    @unrecorded
    def regroup(self, process_group: Any) -> None:
        """Goes on with other ranks, between two rounds, as `DeMo.regroup` does; local weights stay as they are."""
        self._before_change("regroup")
        self._weights.begin()
        is_same = self._rounds.in_folder and process_group is self.replicator.session.process_group
        rounds = self._rounds if is_same else self._rounds_with(process_group)  # first: it may be refused
        self.replicator.regroup(process_group)
        self._rounds = rounds

    def _join(self) -> None:
        """Meets the other ranks before a local step; global weights may come from them, and then local ones, too."""
        if self._rounds.has_joined:
            return
        replicator, weights = self.replicator, self._weights
        is_first = not replicator.session.has_met
        if is_first:
            look_at_models(self)
        weights.begin()
        self.mistakes.look_at_loaded()
        frozen = [each for each in weights.parameters if each not in weights.global_of]
        is_start = is_first and not int(replicator.round_number)  # later they may differ, as MoCo's momentum encoders
        hashed = weights.fingerprint(frozen) if is_start or self._rounds.in_folder else 0
        has_taken = self._rounds.join(hashed)  # a run's weights may replace the global ones; local weights then follow
        # Later a rank may meet the others by itself, as after load_state_dict: they answer its handshake in their next
        # round, where nothing compares frozen weights.
        if is_start:
            exchange = replicator.session.exchange
            with exchange.paused():
                equalize_weights(exchange, [*parts_of(frozen)], hashed, replicator.wiring().device)
        if has_taken:
            self.mistakes.note_state(has_local_weights=False)  # the rounds to catch up with may have moved them
            self._note_gradients([parameter.grad for parameter in weights.parameters])
            for parameter in weights.parameters:
                parameter.grad = None  # it was computed at other weights
            self._inner.borrow(self._rounds.lent_moments())

    def _local_step(self, closure: Callable[[], float] | None) -> float | None:
        if self.replicator.is_open:
            self._weights.hold_start()  # after a D that was not finite, and in some states, there is no start
        else:
            self.replicator.require_idle("a local step")  # otherwise D would have an extracted message's steps again
        self._weights.begin()
        self.mistakes.look_at_loaded()
        self.mistakes.look_at_replaced()
        self._weights.forget()
        if closure is None:  # a closure may still drop the gradients
            self._warn_of_frozen()
        for parameter in self._weights.parameters:
            if not parameter.requires_grad:
                parameter.grad = None  # the inner optimizers would take it
        unscale, loss, collectives = unscaling_of(self), None, None
        if closure is None or unscale is not None or not self._inner.takes_closure:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            finite, collectives = self._take_gradients(unscale), self.mistakes.collectives()
            # without a GradScaler nothing here waits: gradients that are not finite show in the next round
            if unscale is None or true_in_all(shard_groups(self._weights.parameters), finite):
                self._inner.step()
        else:
            loss = self._step_inside(closure)
        self._weights.steps_since += 1
        self._rounds.note_step()
        self._weights.note()
        self.mistakes.look_after_step(collectives)
        self.replicator.stats = Stats(route=self.replicator.stats.route)
        return loss

    def _step_inside(self, closure: Callable[[], float]) -> float | None:
        """Steps an optimizer that computes the gradients itself, as SAM at several places; returns the first loss."""
        losses: list[float] = []

        def evaluate() -> float:
            with torch.enable_grad():
                losses.append(closure())
            self._take_gradients(None)
            return losses[-1]

        self._inner.step(evaluate)
        return losses[0] if losses else None

    def _take_gradients(self, unscale: float | None) -> bool:
        """Averages gradients inside a node and removes GradScaler's scale; returns whether that could be done."""
        gradients, left = self.replicator.gradients(self._weights.parameters, unscale)
        finite, present = left is None or math.isfinite(left), [each for each in gradients if each is not None]
        if left is not None and finite and present:
            remove_scale(present, left)
        if self.replicator.session.compares_gradients:
            self.replicator.session.note_gradients(self._weights.here(present))
        self._note_gradients(gradients)
        return finite

    def _round(self) -> None:
        """Runs a round; with delay, first applies the one before, which has travelled during the local steps since."""
        background = self.replicator.options.background
        if not self.replicator.is_open:  # the stats of a `flush` are no part of this round's
            self.replicator.stats = Stats(route=self.replicator.stats.route)
        if self._end_open_round():  # the run has ended, too
            return
        self.replicator.require_idle("step")  # a round that the user began is not rolled back
        if self.local_steps:  # not for a worker that only asks for sequences to read
            self._warn_unless_trained(compared=not self._rounds.in_folder)
        if background:
            with self._rounds.settled():
                sends = self._weights.are_elsewhere  # then the host is free for it
                if self._extract(sends).work is None:
                    self.replicator.send()
            return
        spent, again = self.replicator.stats, True  # by rounds that have ended in this step
        while again:  # a worker that is late again sends its error at once; D is 0, because no local step came since
            with self._rounds.settled():
                self._extract()
                again = self._rounds.exchange_and_apply()
            self.replicator.stats = spent = self.replicator.stats.plus(spent)  # `_extract` begins them anew

    def _end_open_round(self) -> bool:
        """Ends a round in flight or left open, even if a signal handler saves then; returns whether the run ended."""
        if self.replicator.is_open and self.local_steps:
            self._weights.hold_start()
        with self._rounds.settled():
            return self._rounds.end_open_round()

    def _extract(self, sends: bool = False, by_user: bool = False) -> Round:
        """Begins a round and extracts its message; `sends`: in the background, which also sends it."""
        self._weights.begin()
        self._rounds.set_samples()
        self.mistakes.look_at_loaded()
        self.mistakes.look_at_replaced()
        starts, weights = self._weights.starts_and_locals()  # the pseudo-gradients are D = start - local
        unscale = None if self._inner.is_finite else math.nan  # D is then dropped
        if sends:
            # While it runs, the device takes more steps.
            self.replicator.extract_and_send(starts, minus=weights, unscale=unscale)
        else:
            self.replicator.extract(starts, unscale, minus=weights, by_user=by_user)
        current = self.replicator.round
        assert current is not None
        if not current.finite:
            self._inner.restart()
        self.mistakes.look_at_rates()
        return current

    def _replicated_groups(self) -> list[dict[str, Any]]:
        """Returns the replicator's groups, one for each of `param_groups`, in order, even if nothing of it trains.

        The global weights are then in this order, which is the same on all ranks.
        """
        known, groups = self._weights.global_of, []
        every = (parameter for group in self.param_groups for parameter in group["params"])
        global_of = self._weights.global_of = {local: known[local] for local in every if local in known}
        for group in self.param_groups:
            names = group.get("param_names", [""] * len(group["params"]))
            found = [(name, global_of[p]) for name, p in zip(names, group["params"], strict=True) if p in global_of]
            kept = {"param_names": [name for name, _ in found]} if "param_names" in group else {}
            groups.append({"params": [weight for _, weight in found], **kept, **self._settings})
        return groups

    def _follow_changes(self, saved: Collection[Tensor] = ()) -> bool:
        """Takes the inner optimizers' groups anew: loading a state into one replaces them, and groups may be added.

        Those in a loaded state, `saved`, get global weights even if they are frozen. Returns whether a round in flight
        must end first: a parameter begins to train, has moved to another device, or has become wider.
        """
        self._weights.parameters = self._parameters()
        self._weights.create(saved)
        self._inner.move()
        is_in_flight = self.replicator.round is not None
        if not is_in_flight:
            self._weights.move()
        begins = len(self._weights.global_of) != len(self.replicator.parameters)  # also where an error came in between
        if begins or len(self._inner.groups) != len(self.replicator.groups):
            self.replicator.groups[:] = self._replicated_groups()
        return begins or (is_in_flight and bool(self._weights.unlike))

    def _parameters(self) -> list[Tensor]:
        """Returns the inner optimizers' parameters as they are now, checked."""
        known, found = self._weights.parameters, [p for group in self._inner.groups for p in group["params"]]
        for number, group in enumerate(self._inner.groups):
            if len(names := group.get("param_names", group["params"])) != len(group["params"]):
                raise ValueError(
                    f"param_groups[{number}] has {len(group['params'])} parameters and {len(names)} param_names; add "
                    "parameters by add_param_group"
                )
        if any(p.requires_grad and p not in self._weights.global_of for p in found):
            self._refuse_new()
        if [*map(id, found)] != [*map(id, known)]:
            check_parameters(found)
            if not {*map(id, known)} <= {*map(id, found)}:
                raise RuntimeError(
                    "an inner optimizer has lost parameters; build LocalDeMo anew for those that are left"
                )
        return found

    def _refuse_new(self) -> None:
        if self._rounds.in_folder and not self._weights.untouched:
            raise ValueError(
                "a run in a folder keeps the parameters that it began with: give all to the optimizer at first, those "
                "that train later with a learning rate of 0"
            )

    def _let_begin(self) -> None:
        """Takes new groups; if parameters begin to train, a round in flight ends first, because it lacks them."""
        if self._follow_changes():
            self._end_open_round()
            self._follow_changes()

    def _attach_parts(self, is_new: bool) -> None:
        """Makes rounds and mistakes, and links the replicator to this optimizer: a copy or file has none of them."""
        self._rounds = self._rounds_with(self.replicator.session.process_group)
        self.mistakes = Mistakes(self, is_new)
        facts = weakref.WeakMethod(self._facts)  # weak: an optimizer that nobody holds lets its inner ones step
        self.replicator.options = replace(self.replicator.options, config_facts=lambda: (facts() or tuple)())
        self.replicator.follower = self._weights

    def _rounds_with(self, process_group: Any) -> Rounds:
        if isinstance(process_group, VaryingExchange):
            return process_group.rounds_of(self.replicator, self._inner.moments)
        return Rounds(self.replicator)

    def _facts(self) -> Facts:
        """Returns the settings that ranks must share, beyond the replicator's, as they are now."""
        in_folder, known = self._rounds.in_folder, self._weights.global_of
        shared = {"sync_every": str(self.sync_every), **self._inner.facts(_SCHEDULED if in_folder else None)}
        for number, group in enumerate(() if in_folder else self.param_groups):  # a folder's record has their weights
            frozen = [place for place, parameter in enumerate(group["params"]) if parameter not in known]
            # Also if there are none: where only one rank has frozen some, an error tells the difference by this name.
            shared[f"frozen parameters of param_groups[{number}]"] = str(frozen)
        return tuple(shared.items())

    def _before_change(self, wanted: str) -> None:
        """Raises RuntimeError inside `shared`. Settles a round that has failed; forgets a consolidated state."""
        self._weights.take_back(late=True)
        if self._weights.aside:
            raise RuntimeError(
                f"{wanted} came inside `with optimizer.shared():`, where the weights are not this rank's own"
            )
        self._all_states = None
        self._rounds.settle()

    # State: groups, checkpoints

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizers' groups, as they are now: loading a state into one replaces them."""
        return self._inner.groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Ignores those of torch's constructor, which begins with none; later ones replace the inner optimizer's."""
        if not hasattr(self, "replicator"):
            return
        self._before_change("param_groups")
        if len(self.inner) > 1:
            raise RuntimeError("the groups of a LocalDeMo are those of optimizer.inner: change what is in them")
        before, self.inner[0].param_groups = self.inner[0].param_groups, groups
        try:
            self._parameters()
        except BaseException:
            self.inner[0].param_groups = before
            raise

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The inner optimizers' state of each parameter, with its global weights, its error, and their counters."""
        self.replicator.let_extract()
        self._weights.notice_loaded()
        outer, inner = self.replicator.state, self._inner.state()
        transform = torch.tensor(TRANSFORM_NUMBERS[self._settings["transform"]], device="cpu")  # the error's domain
        # Not one that begins to train in the next round, nor a frozen one that the loaded state lacked.
        ours = {
            local: outer[weight] | self._weights.to_save(local) | {"transform": transform}
            for local, weight in self._weights.global_of.items()
            if weight in outer
        }
        saved = {p: SavedParameter(ours.get(p, {}), inner.get(p, {})) for p in {**inner, **ours}}
        return ReadOnly(ReadOnly, {parameter: ReadOnly(None, each.entry()) for parameter, each in saved.items()})

    @state.setter
    def state(self, _: object) -> None:
        """Ignores that of torch's constructor; refuses later ones: each part of this state has its own place."""
        if hasattr(self, "replicator"):
            refuse_change()

    @property
    def weights_differ(self) -> bool:
        """Whether this rank's weights are not the global ones."""
        return self._weights.differ

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, if there is one inner optimizer. Call it on all ranks alike, at the same step."""
        if not hasattr(self, "replicator"):
            return  # from the constructor: the inner optimizer's own group
        self._before_change("add_param_group")
        check_group(param_group)
        if len(self.inner) > 1:
            raise ValueError("there are several inner optimizers: add the group to one of optimizer.inner")
        self._refuse_new()
        weights = self._weights
        kept = weights.parameters, weights.global_of
        self.inner[0].add_param_group(param_group)
        try:
            check_parameters([p for group in self.param_groups for p in group["params"]])
            if self.replicator.in_flight:  # the round ends first, in the next step
                return
            self._follow_changes()
            self.replicator.wiring()  # refuses what its settings do not allow
        except BaseException:
            del self.inner[0].param_groups[-1]
            weights.parameters, weights.global_of = kept
            self.replicator.groups[:] = self._replicated_groups()
            raise

    @unrecorded
    def state_dict(self) -> dict[str, Any]:
        """As in torch: the inner optimizers' state, with the global weights, this rank's local ones, and its error.

        Each rank saves its own, or `consolidate_state_dict` brings them to one. The model's weights are better saved
        inside `shared()`, where all ranks have the same; `load_state_dict` puts this rank's local weights back into the
        parameters. With delay, call `flush` first: otherwise the content of the round in flight is in the error, and is
        sent after loading.
        """
        if self.warns_of_saving and not self._all_states:  # whoever consolidates has the local weights of all ranks
            self.mistakes.look_at_saving()
        return super().state_dict()

    def own_state_dict(self) -> dict[str, Any]:
        """The state of this rank, with its local weights: it goes on exactly from there, whatever the model has."""
        known = self._weights.global_of.items()
        if self.replicator.in_flight and any(p.requires_grad and w not in self.replicator.state for p, w in known):
            raise RuntimeError("a parameter has begun to train since the round in flight was sent; call flush() first")
        found, folder = super().own_state_dict(), self._rounds.entry()
        groups = [without_numpy(group) for group in self._inner.as_given(found["param_groups"])]
        return {**found, "param_groups": groups, **({"folder": folder} if folder else {})}

    def _load(self, state_dict: dict[str, Any]) -> None:
        self._before_change("load_state_dict")
        self._weights.require_same()
        numbered = read_state(state_dict, self.param_groups, of_local=True)
        settings_of = dict.fromkeys(self._parameters(), Hyperparameters.of(self._settings))
        saved_of = check_saved(numbered, settings_of, self.replicator.rank_and_size, of_local=True)
        folder = self._rounds.read_entry(state_dict.get("folder", {}))
        self.replicator.let_travel()  # here, where a signal can end the wait, rather than in `forget_round` below
        with uninterrupted():
            # Checks before it changes anything; all else is checked already. `numbered` has frozen parameters, too.
            lacks = self._inner.load(state_dict["param_groups"], {number: saved.inner for number, saved in numbered})
            self.replicator.forget_round()  # `_follow_changes` moves weights to other devices only between rounds
            self._follow_changes(saved_of)  # groups may have been added
            global_of = self._weights.global_of
            self.replicator.restore({global_of[local]: saved.ours for local, saved in saved_of.items()})
            ours_of = {local: saved.ours for local, saved in saved_of.items()}
            self._weights.restore(ours_of, may_be_new=folder is None)  # not those of a run
            self.mistakes.note_state(has_local_weights=any("local" in saved.ours for saved in saved_of.values()))
            self._is_trained = self._is_trained or self.local_steps > 0
            self._rounds.restore(folder)
        if lacks:
            warn(lacks)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        self._weights.take_back(late=True)
        if self._weights.aside:  # nothing would ever take a copy out of it again
            raise RuntimeError("copying or pickling came inside `with optimizer.shared():`")
        self._rounds.settle()
        names = ["defaults", "replicator", "_inner", "_settings", "_weights"]
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, packed: dict[str, Any]) -> None:
        if "_inner" not in packed:  # a script that restarts an optimizer, by torch's means
            refuse_change()
        self._inner = packed["_inner"]
        super().__setstate__(packed)
        self._attach_parts(is_new=False)
        self._inner.watch()

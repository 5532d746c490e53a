"""The replicator: gradients of every rank in, the same update of the parameters on every rank out.

Both optimizers have one. `DeMo` gives it gradients, over the model's parameters; `LocalDeMo` gives it pseudo-gradients,
over the global weights. A round is `extract`, `exchange`, `apply`, as ARCHITECTURE.md draws it. Inside a node, ranks
with shards or copies of one parameter work together in `extract` and `apply`. With two levels the first `extract` runs
the handshake.

Shapes: W ranks, B bytes in a message.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from demopt.codec.chunk_group import ChunkGroup
from demopt.codec.gradients import all_usable, check_gradients, gradients_of, remove_scale
from demopt.codec.steps import Workspace, compress
from demopt.errors import RESYNC_RUN, DemoptError, DriftError, ExchangeError, MessageError, first_line
from demopt.exchange import Meter
from demopt.exchange.dtensor import forget_gathered, parts_of, true_in_all
from demopt.exchange.hierarchical import average
from demopt.interrupts import uninterrupted
from demopt.replicator.attach import State, attach
from demopt.replicator.rounds import Follower, Outcome, Stage, VaryingExchange
from demopt.replicator.route import Result, read_result
from demopt.replicator.session import (
    Session,
    check_alike,
    copies_of,
    copy_tensors,
    difference_of_copies,
    tensors_at,
    warn_of_all,
)
from demopt.replicator.wiring import Inputs, Options, Wiring, make_wiring
from demopt.validation import check_rank, warn
from demopt.wire.bits import pack_sections
from demopt.wire.checksum import fingerprint
from demopt.wire.layout import digest
from demopt.wire.message import FINGERPRINT, HEADER_BYTES, NONFINITE, OPTIMIZER, Header, handshake_due

Gradients = Sequence[Tensor | None]
MANY_SKIPS = 20  # in a row: more than a GradScaler needs to find its scale


@dataclass(frozen=True)
class Stats:
    """Bytes, coefficients and seconds of this rank's last step.

    With `LocalDeMo(delay=1)` they are those of the round that the step, or `flush`, applied.

    `payload_bytes` is the length of this rank's message; `sent_bytes` and `received_bytes` count its traffic on the
    chosen route; `kept` is the number of coefficients in the message; `seconds` holds the host's time in "extract",
    "exchange" and "apply"; `skipped` means that no rank applied anything, because some rank's gradient was not finite
    or, in a folder, too few had sent; `route` names the route and the reason for it; `consolidated_bytes` counts the
    traffic of `consolidate_state_dict` since that step.

    Examples:
        >>> Stats(payload_bytes=10).kept
        0
    """

    payload_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    kept: int = 0
    skipped: bool = False
    route: str = ""
    consolidated_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, stage: str, started: float, **changes: Any) -> "Stats":
        """Returns a copy with changes, and the seconds since `started` (time.perf_counter) added to a stage."""
        spent = self.seconds.get(stage, 0.0) + time.perf_counter() - started
        return replace(self, seconds={**self.seconds, stage: spent}, **changes)

    def plus(self, other: "Stats") -> "Stats":
        """Returns a copy with the traffic and seconds of another round in the same step added."""
        stages = {**other.seconds, **self.seconds}
        return replace(
            self,
            payload_bytes=max(other.payload_bytes, self.payload_bytes),  # of one message, not of the link
            sent_bytes=other.sent_bytes + self.sent_bytes,
            received_bytes=other.received_bytes + self.received_bytes,
            seconds={stage: other.seconds.get(stage, 0.0) + self.seconds.get(stage, 0.0) for stage in stages},
        )


@dataclass
class Round:
    """One exchange, from `extract` to `apply` or `rollback`: this rank's message, and the result so far.

    Its stages: "begun", with no message of this rank; "extracted"; then, unless it ends at once, "sent" in the
    background, or "left open", undecided, by an error; at last "applied", "skipped" or, if forgotten, "failed".
    """

    wiring: Wiring
    header: Header
    data: list[Tensor] = field(
        default_factory=list
    )  # the message's body, by chunk group: what it takes from the momentum
    message: Tensor | None = None
    differing_copies: str = ""  # of a parameter inside this node, if fingerprints travel and some differ
    local_weights: Gradients | None = None  # `minus` of `extract`, until the follower has moved them in the next stage
    not_extracted: Sequence[ChunkGroup] = ()  # whose momentum is without D, because an error has ended `extract`
    attached: Any = None  # what goes with the message, where senders vary
    work: "Future[Tensor] | None" = None  # its exchange in the background, which returns the messages
    at_rest: threading.Event | None = None  # if `work` extracts, too: set when it no longer writes the momentum
    outcome: Outcome | None = None  # where senders vary
    result: Result | None = None
    stats: Stats = field(default_factory=Stats)
    exchanged: bool = False  # the exchange and all comparisons after it are done
    stage: Stage = "begun"
    by_user: bool = False  # begun by a user's call of `extract`, not by a step

    @property
    def row(self) -> int | None:
        """The row of this rank's message in the result; None: there is none, or it is not listed."""
        if self.stage == "begun":
            return None
        return self.header.rank if self.outcome is None else self.outcome.row

    @property
    def finite(self) -> bool:
        """Whether this rank's gradients were finite: if so, the momentum has them, and the message has coefficients."""
        return not self.header.flags & NONFINITE


class Replicator:
    """Keeps the parameters of `groups` the same on all ranks; `optimizer.replicator` of a `DeMo` or `LocalDeMo`.

    `groups` are parameter groups with the hyper-parameters of `DeMo`, read anew at every step. `state` gets an entry
    for each parameter that trains: tensors that are views of the chunk groups' buffers.
    """

    def __init__(self, groups: list[dict[str, Any]], state: State, options: Options, process_group: Any) -> None:
        self.groups = groups
        self.state = state
        self.options = options
        self.session = Session(process_group, options.background)
        self.stats = Stats()  # of the last round that was extracted or exchanged; in flight, of the one before
        self.samples = 1  # this rank's weight in a round's mean
        #: Of rounds applied or skipped; in every parameter's state.
        self.round_number = torch.zeros((), dtype=torch.int64, device="cpu")
        self.round: Round | None = None
        self.follower = Follower()
        self.all_states: Mapping[int, dict[str, Any]] | None = None  # of all ranks, consolidated by the optimizer
        self.in_buffers: State = {}  # views of the buffers: a script may have put other tensors into `state`
        self._wiring: Wiring | None = None
        self._skips = 0  # rounds skipped in a row
        self._told_of_skips = False
        self._workspace = Workspace()
        self.wiring()

    # The wiring: settings, parameters and ranks

    def wiring(self) -> Wiring:
        """Returns the wiring; makes it anew, and attaches the state, if groups, settings or ranks have changed."""
        before, exchange = self._wiring, self.session.exchange
        inputs = Inputs.of(self.groups, self.options, exchange.rank, exchange.world_size)
        if before is not None and before.inputs == inputs:
            return before
        new = make_wiring(self.groups, inputs, self._workspace, before)
        if before is None or new.route is not before.route:
            self.require_idle("a change of groups or settings")
            with uninterrupted():  # otherwise the next wiring would find entries without their tensors
                attach(self.state, new, self.round_number)
                self.in_buffers = {parameter: dict(entry) for parameter, entry in self.state.items()}
                self._wiring = new
        self._wiring = new
        return new

    @property
    def step(self) -> Tensor:
        """The earlier name of `round_number`, which other programs still use."""
        return self.round_number

    @property
    def rank_and_size(self) -> tuple[int, int]:
        return self.session.exchange.rank, self.session.exchange.world_size

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all groups, in order; gradients are given in this order."""
        return [parameter for group in self.groups for parameter in group["params"]]

    @property
    def message_bytes(self) -> int:
        """The length of every rank's message."""
        return self.wiring().route.widths[0]

    def header(self, wiring: Wiring) -> Header:
        """Returns the header of this rank's next message, without flags."""
        inputs, texts = wiring.inputs, [each.texts for each in wiring.settings]
        settings = digest(repr([*texts, *inputs.options.config_facts()]))  # all that ranks must share
        settings = (settings & ~OPTIMIZER) | self.session.optimizer_number  # in the digest's last bits
        digests = wiring.route.layout.digest, settings
        return Header(int(self.round_number), inputs.rank, inputs.world_size, *digests, samples=self.samples)

    def require_gather(self) -> None:
        """Makes route "auto" mean "gather"; ValueError for "owner", where a lost worker takes an error along."""
        if self.options.route == "owner":
            raise ValueError(
                "with workers that come and go every worker reads every message, because an owner that leaves takes "
                "its error along; use route 'gather' or 'auto', not 'owner'"
            )
        self.options = replace(self.options, route="gather")

    def require_idle(self, wanted: str) -> None:
        """Raises RuntimeError within a round."""
        if self.round is not None:
            when = "inside step(), as from a signal's handler: set a flag there, and do this after step()"
            if self.is_open:
                when = "while a round is in flight; call flush() on all ranks first"
            elif self.round.by_user:
                when = "between extract and apply; call apply or rollback first"
            raise RuntimeError(f"{wanted} came {when}")

    # Phase 1, extract: gradients -> momentum -> this rank's message

    def extract(
        self,
        gradients: Gradients,
        unscale: float | None = None,
        minus: Gradients | None = None,
        by_user: bool = False,
    ) -> Tensor:
        """Steps 1 to 4: adds gradients to the momentum, selects and encodes the strongest coefficients.

        `gradients` are local tensors in the order of `parameters`; `unscale` (see `unscaling_of`) is a factor on them.
        With `minus`, the gradients are the differences gradients[i] - minus[i]. The rest is as in `DeMo.extract`.
        """
        current, factor = self._prepared(gradients, unscale, minus)
        with uninterrupted():  # so that all that has entered the momentum belongs to a round
            try:
                self._compress(current, gradients, factor, minus)
            except BaseException:  # such as out of memory: what the momentum has of D must not be in the next D, too
                current.stage = "extracted"
                self.enter_stage(current, "failed")
                raise
            self.round, current.by_user, current.stage = current, by_user, "extracted"
            if not self.options.background:
                self.stats = current.stats  # of this round: not `skipped` yet
        assert current.message is not None
        return current.message

    def _prepared(self, gradients: Gradients, unscale: float | None, minus: Gradients | None) -> tuple[Round, float]:
        """Begins a round with checked gradients; also returns the factor on them. Leaves the momentum as it is."""
        self.require_idle("extract")
        started = time.perf_counter()
        wiring = self.wiring()
        for given in (gradients,) if minus is None else (gradients, minus):
            check_gradients(wiring.names, wiring.parameters, given)
        current, factor = self._begin(wiring), 1.0 if unscale is None else unscale
        if minus is None and self.session.compares_gradients:
            self.session.note_gradients(gradients)
        # of differences, only `minus`, the local weights, is checked: if the start is not finite, neither are they
        current.local_weights = minus
        usable = not math.isnan(factor) and all_usable(gradients if minus is None else minus, factor)
        if wiring.shard_groups:  # ranks that hold shards of a parameter send nothing if one of them cannot
            usable = true_in_all(wiring.shard_groups, usable)
        if not usable:  # checked before the momentum takes a gradient, so it stays finite
            current.header = replace(current.header, flags=current.header.flags | NONFINITE)
        stats = Stats(kept=wiring.route.layout.kept, route=wiring.reason, payload_bytes=wiring.route.widths[0])
        current.stats = stats.timed("extract", started)
        return current, factor

    def _begin(self, wiring: Wiring) -> Round:
        """Begins a round; if due, with a hash for the comparison of this rank's weights with the others'."""
        exchange = self.session.exchange
        if exchange.intra_node is not None:  # before copies are compared: ranks that differ would hang there
            self.session.agree(wiring, self.header)
        header = self.header(wiring)
        new, every = Round(wiring, header), self.options.fingerprint_every
        due = every > 0 and header.round_number % every == 0
        if isinstance(exchange, VaryingExchange):
            new.attached = exchange.attachment(wiring, header, self.fingerprint(state=True) if due else None)
        elif due and header.round_number and header.world_size > 1 and self.session.has_met:
            new.differing_copies = difference_of_copies(wiring, exchange)
            fingerprint = self.fingerprint()
            if new.differing_copies:  # a fingerprint that no equal node sends, so that all nodes raise the error
                fingerprint ^= 2**64 - 1
            new.header = replace(header, flags=FINGERPRINT, fingerprint=fingerprint)
        return new

    def _begin_alone(self) -> Round:
        """Begins the round of a rank that sends nothing, as in a replay: the messages may be of any session."""
        new = self._begin(self.wiring())
        new.header = replace(new.header, settings=new.header.settings & ~OPTIMIZER)
        return new

    def _compress(self, current: Round, gradients: Gradients, factor: float, minus: Gradients | None) -> None:
        """Steps 1 to 4 for a prepared round; makes its message."""
        wiring, started = current.wiring, time.perf_counter()
        with record_function("demopt.extract"):
            if current.finite:
                sent = []
                for number, chunk_group in enumerate(wiring.chunk_groups):
                    before = chunk_group.momentum._version
                    try:
                        sent.append(compress(chunk_group, gradients, factor, self._workspace, minus))
                    except BaseException:
                        is_clean = chunk_group.momentum._version == before
                        current.not_extracted = wiring.chunk_groups[number if is_clean else number + 1 :]
                        raise
                current.data = pack_sections(sent)
            current.message = wiring.route.message(current.header, current.data)
        current.stats = current.stats.timed("extract", started)

    # Phase 2, exchange: this rank's message -> the route's result

    def exchange(self, message: Tensor | None = None) -> Tensor:
        """Step 5, as `DeMo.exchange`."""
        current, started = self._current(), time.perf_counter()
        if message is not None:
            came = f"{message.dtype} {[*message.shape]}" if isinstance(message, Tensor) else repr(message)
            if came != (wanted := f"torch.uint8 {[current.wiring.route.widths[0]]}"):
                raise ValueError(f"the message is {came}; extract returned {wanted}")
            current.message = message
        number, exchange = current.header.round_number, self.session.exchange
        varies = isinstance(exchange, VaryingExchange)
        try:
            self.session.agree(current.wiring, self.header)  # in a folder with itself
            messages = self._travel(current, exchange) if current.work is None else self._arrived(current, current.work)
            messages = messages if varies else self._compare(current, exchange, messages)
        except ExchangeError as error:
            raise ExchangeError(f"round {number + 1}: {error}" if varies else f"step {number}: {error}") from error
        if self.round is not current:
            raise RuntimeError(
                "this round was forgotten while it travelled, as by rollback() in a signal's handler: nothing of it is "
                "applied here. In a handler set a flag, and do this after step()"
            )
        self.stats, current.exchanged = current.stats.timed("exchange", started), True
        current.stats = self.stats
        return messages

    def _travel(self, current: Round, exchange: Meter) -> Tensor:
        """Exchanges the message, maybe in the background; returns the messages. Changes nothing but the round."""
        assert current.message is not None
        sent, received = exchange.sent_bytes, exchange.received_bytes
        with record_function("demopt.exchange"):
            if isinstance(exchange, VaryingExchange):
                outcome = exchange.exchange_round(current.wiring, current.header, current.message, current.attached)
                assert outcome.result is not None
                current.outcome, current.result, messages = outcome, outcome.result, outcome.result.messages
            else:
                messages = current.wiring.route.exchange(current.message, exchange, current.header)
        travelled = Stats(sent_bytes=exchange.sent_bytes - sent, received_bytes=exchange.received_bytes - received)
        current.stats = current.stats.plus(travelled)  # a round may travel twice
        return messages

    def _compare(self, current: Round, exchange: Meter, messages: Tensor) -> Tensor:
        """Runs the comparisons of a fixed set of ranks; returns the messages, sent anew if a handshake was due."""
        if current.result is None or current.result.messages is not messages:
            current.result = None
            with suppress(MessageError):  # its rows are no messages, which `check` reports
                current.result = read_result(current.wiring.route, messages)
        # another rank may have a new layout, or other settings
        if current.result is not None and handshake_due(current.result.headers):
            if current.work is not None:  # if settings differ, it travels again, as that rank's message does
                self._reopen(current)
            self.session.compare(current.wiring, current.header.round_number)
            messages = self._travel(current, exchange)
        if self.session.compares_gradients:
            self.session.compare_gradients(current.wiring)
        return messages

    def _arrived(self, current: Round, work: "Future[Tensor]") -> Tensor:
        """Waits for the messages of a round in flight. One that failed may travel again."""
        try:
            with record_function("demopt.wait"):
                messages = work.result()
        except BaseException:  # also an interrupt: the round is then still in flight
            if work.done() and work.exception() is not None:
                self._reopen(current)
            raise
        self.session.receive([messages, *(current.result.tensors if current.result is not None else ())])
        return messages

    @uninterrupted()
    def _reopen(self, current: Round) -> None:
        """Takes a round out of the background: it travels once more, or is forgotten."""
        current.work = None
        if current.message is None:  # `extract_and_send` failed before the message was made, as when out of memory
            self.round = None
        self.enter_stage(current, "left open" if self.round is current else "failed")

    def _current(self) -> Round:
        if self.round is None:
            raise RuntimeError("there is no message; call extract first")
        return self.round

    # Phase 3, apply: the result, checked -> the same update on every rank

    def check(self, messages: Tensor) -> None:
        """Decodes and checks all of the result, once, and changes nothing: call it before a vote.

        Raises the errors of `apply`: MessageError, DriftError.
        """
        self._checked(self.round or self._begin_alone(), messages)

    def _checked(self, current: Round, messages: Tensor) -> Result:
        """Returns the round's result, decoded and checked; decodes and checks it only once.

        In a folder each message was checked when it came (`check_message`), and the round holds the result.
        """
        result = current.result
        if result is None or result.messages is not messages or result.version != messages._version:
            result = current.result = read_result(current.wiring.route, messages)
        if result.checked:
            return result
        flags, decoded = current.wiring.route.check(result, current.header)
        headers = result.headers
        if all(header.flags & FINGERPRINT for header in headers):
            drifted = [rank for rank, header in enumerate(headers) if header.fingerprint != headers[0].fingerprint]
            if drifted or current.differing_copies:
                raise DriftError(headers[0].round_number, drifted, current.differing_copies)
        result.decoded, result.skipped, result.checked = decoded, bool(flags & NONFINITE), True
        return result

    @uninterrupted()
    def apply(self, messages: Tensor) -> None:
        """Steps 6 to 8, as `DeMo.apply`."""
        started = time.perf_counter()
        current = self.round or self._begin_alone()
        result, left = self._checked(current, messages), ""
        current.wiring.require_unchanged()
        if not result.skipped:
            wiring, number = current.wiring, current.header.round_number
            with record_function("demopt.apply"):
                try:
                    wiring.route.apply(result.decoded, number)
                except (MemoryError, RuntimeError) as error:  # some chunk groups have moved, others have not
                    self.mark_applied(current)  # on the other ranks it is, so what was sent leaves the momentum
                    told = f"applying the round has failed on this rank ({first_line(error)})"
                    remedy = "Call resync(src) on all ranks, where src is a rank without this error"
                    if isinstance(self.session.exchange, VaryingExchange):
                        remedy = RESYNC_RUN
                    raise DriftError(number, [], told, remedy, "its parameters are those of no round") from error
                if current.row is not None:  # if it is not listed, a later round sends it
                    left = wiring.route.subtract_sent(current.data, result.decoded, current.row)
        self.round = None
        self.round_number.add_(1)
        self.enter_stage(current, "skipped" if result.skipped else "applied")
        self.stats = current.stats.timed("apply", started, skipped=result.skipped)
        self._count_skips(result)
        _warn_of_dropped(left)

    def _count_skips(self, result: Result) -> None:
        """Warns, once, if round after round is skipped: nothing else shows that nothing is trained."""
        ranks = [str(rank) for rank, header in enumerate(result.headers) if header.flags & NONFINITE]
        self._skips = self._skips + 1 if ranks else 0
        if self._skips == MANY_SKIPS and self.session.exchange.speaks and not self._told_of_skips:
            self._told_of_skips = True
            warn(
                f"the last {MANY_SKIPS} rounds were skipped, because gradients of rank {', '.join(ranks)} were not "
                "finite: nothing is trained. Look at its data and loss, or lower its learning rate or loss scale"
            )

    def apply_missed(self, result: Result, received_bytes: int) -> None:
        """Applies the checked messages of a round in which this rank sent nothing: its momentum stays as it is.

        `received_bytes`, those of the messages, are added to `stats`; else these stay those of the step's own round.
        """
        self.require_idle("apply_missed")
        wiring, skipped, received_bytes = self.wiring(), self.stats.skipped, self.stats.received_bytes + received_bytes
        stats = replace(self.stats, received_bytes=received_bytes)
        self.round = Round(wiring, self.header(wiring), result=result, stats=stats, stage="begun")
        self.apply(result.messages)
        self.stats = replace(self.stats, skipped=skipped)

    def rollback(self) -> None:
        """Forgets the round, if there is one: the momentum keeps all of it. Waits for an exchange under way."""
        self.let_extract()
        with uninterrupted():
            forgotten, self.round = self.round, None
            self.enter_stage(forgotten, "failed")
        self._await(forgotten)

    def _await(self, forgotten: Round | None) -> None:
        """Waits for the exchange of a forgotten round, if it is under way."""
        if forgotten is None or forgotten.work is None:
            return
        if forgotten.work.exception() is None and not forgotten.exchanged:
            self.session.leave()

    def enter_stage(self, current: Round | None, stage: Stage) -> None:
        """Moves a round with this rank's message to a stage, and tells the follower. Call it with `uninterrupted`."""
        if current is not None and current.stage != "begun":
            before, current.stage = current.stage, stage
            self.follower.follow(current, before)
            current.local_weights = None

    # Phases 1 and 2 in the background, while this rank computes

    def send(self) -> None:
        """Begins step 5: the message travels in the background until `exchange`."""
        current = self._current()
        self.session.agree(current.wiring, self.header)
        exchange = self.session.exchange  # as it is now: `regroup` may replace it before the background thread begins
        with uninterrupted():
            current.work = self.session.submit(lambda: self._travel(current, exchange), current.message)
            self.enter_stage(current, "sent")

    def extract_and_send(self, gradients: Gradients, minus: Gradients, unscale: float | None = None) -> None:
        """Begins steps 1 to 5: only checks run here; the rest, also decoding, in the background until `exchange`.

        The tensors must be on the host, and nothing may write them before then.
        """
        wiring = self.wiring()
        self.session.agree(wiring, self.header)
        current, factor = self._prepared(gradients, unscale, minus)
        exchange, at_rest = self.session.exchange, threading.Event()

        def work() -> Tensor:
            with torch.no_grad():
                try:
                    self._compress(current, gradients, factor, minus)
                finally:
                    at_rest.set()
                messages = self._travel(current, exchange)
                with suppress(DemoptError):  # if something is wrong with them, `exchange` and `apply` find it
                    self._checked(current, messages)
                return messages

        current.at_rest = at_rest
        with uninterrupted():
            self.round, current.stage = current, "extracted"  # D is fixed; the background adds it to the momentum
            try:
                current.work = self.session.submit(work, None)
            except BaseException:  # such as no more threads: nothing adds D
                current.not_extracted = wiring.chunk_groups
                at_rest.set()
                raise
            self.enter_stage(current, "sent")

    def let_extract(self) -> None:
        """Waits until the background has extracted the round in flight: then the momentum is at rest."""
        if self.round is not None and self.round.at_rest is not None:
            self.round.at_rest.wait()

    def let_travel(self) -> None:
        """Waits until the exchange of the round in flight has come to its end."""
        if self.round is not None and self.round.work is not None:
            self.round.work.exception()

    @property
    def in_flight(self) -> bool:
        """Whether a round was sent in the background, and has neither been applied nor failed."""
        return self.round is not None and self.round.stage == "sent"

    @property
    def is_open(self) -> bool:
        """Whether a round may have been sent, and is not applied: it is in flight, or was left open by an error."""
        return self.round is not None and self.round.stage in ("sent", "left open")

    # Between ranks, apart from rounds

    def gradients(
        self, parameters: Sequence[Tensor], unscale: float | None
    ) -> tuple[list[Tensor | None], float | None]:
        """Returns the parameters' gradients, averaged inside a node, and the factor still to be applied to them."""
        exchange = self.session.exchange
        if exchange.intra_node is None:
            return gradients_of(parameters), unscale
        wiring = self.wiring()
        self.session.agree(wiring, self.header)  # first: ranks of a node that differ would hang
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in trained:  # so that all ranks of a node have equally many
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        present = [gradient for gradient in gradients_of(trained) if gradient is not None]
        if present and unscale is not None and not math.isnan(unscale):  # with an infinite gradient, the scale stays
            remove_scale(present, unscale)  # ranks of a node may have different scales
        average(present, exchange.intra_node)
        infinite = unscale is not None and not all_usable(present)  # the same in the whole node
        return gradients_of(parameters), math.nan if infinite else None

    def fingerprint(self, state: bool = False) -> int:
        """Returns a 64-bit hash of all parameters; `state`: also of the number of rounds, and of the rules' state."""
        if state:
            return fingerprint([*self.wiring().replicated_tensors(), self.round_number.view(1)])
        return fingerprint([*parts_of(self.parameters)])

    def resync(self, src: int = 0, drop_steps: Callable[[], None] = lambda: None) -> None:
        """As `DeMo.resync`. Calls `drop_steps` before the first copy, once nothing can be refused."""
        self.require_idle("resync")
        wiring, exchange = self.wiring(), self.session.exchange
        check_rank("src", src, exchange.world_size)
        self.session.compare_as_owed(wiring)
        exchange.await_all("resync()")
        number = self.round_number.to(wiring.device, copy=True).view(1)
        tensors = [*wiring.replicated_tensors(), number]
        facts = {f"tensor {n} to copy": f"{each.dtype} {list(each.shape)}" for n, each in enumerate(tensors)}
        with exchange.paused():
            check_alike(exchange, facts, wiring.device)  # different lengths would make gloo end the process
        drop_steps()
        forget_gathered(self.parameters)
        copy_tensors(exchange, tensors, src)
        for held, places in copies_of(wiring, exchange):
            copy_tensors(held, tensors_at(places, wiring, momenta=True), src=0)
        self.round_number.copy_(number[0])
        if not all_usable(parts_of(each for each in wiring.parameters if each.requires_grad)):
            text = f"resync took weights of rank {src} that are not finite; load others there, or take another rank's"
            warn_of_all(exchange, text, wiring.device)

    def regroup(self, process_group: Any) -> None:
        """As `DeMo.regroup`; a round in flight is undone."""
        session = Session(process_group, self.options.background)
        _ = session.exchange  # refuses what is no group, before anything changes
        self.let_extract()
        with uninterrupted():
            forgotten, self.round = self.round, None  # without waiting: a peer that is gone would hold us up
            self.enter_stage(forgotten, "failed")
        self.session = session
        self._workspace = Workspace()
        if self._wiring is not None:  # makes the next wiring take new routes: an exchange under way still uses these
            self._wiring = replace(self._wiring, inputs=replace(self._wiring.inputs, world_size=0))

    # Fault tolerance

    def detach_round(self) -> Round:
        """Takes the extracted round out of the way, so that members may change or weights come from a peer.

        Then give it to `attach_round`, or to `mark_applied` if the weights that came already include it.
        """
        if self.options.background:
            raise ValueError("a round in the background cannot be detached; use delay=0")
        detached, self.round = self._current(), None
        return detached

    def attach_round(self, detached: Round) -> Tensor:
        """Goes on with a detached round, between the current ranks at the current step; returns its new message.

        Nothing is extracted again: no gradient enters the momentum twice, and none is lost.
        """
        self.require_idle("attach_round")
        wiring = self.wiring()
        new = self._begin(wiring)
        flags = new.header.flags | detached.header.flags & NONFINITE
        new.header, new.data = replace(new.header, flags=flags), detached.data
        new.stage, new.by_user = detached.stage, detached.by_user
        new.local_weights, new.message = detached.local_weights, wiring.route.message(new.header, new.data)
        self.round = new
        new.stats = replace(detached.stats, route=wiring.reason, payload_bytes=new.message.numel())
        return new.message

    @uninterrupted()
    def mark_applied(self, detached: Round | None = None) -> None:
        """Ends the round, or a detached one, without moving weights: what was sent leaves the momentum.

        That is nothing if the message is not listed. Weights and number that include it come from elsewhere.
        """
        current, self.round = detached or self._current(), None
        left = "" if current.row is None else current.wiring.route.subtract_sent(current.data)
        self.enter_stage(current, "applied")
        _warn_of_dropped(left)

    def resume_round(self, message: Tensor, attached: Any) -> None:
        """Goes on with the round of a message from before a restart; the momentum still has the message's content."""
        wiring = self.wiring()
        if message.numel() != wiring.route.widths[0]:
            raise MessageError(f"the saved message has {message.numel():,} bytes, and this layout's another length")
        data = wiring.route.layout.bodies(message[HEADER_BYTES:])
        header = self.header(wiring)
        self.round = Round(wiring, header, message=message, attached=attached, data=data, stage="left open")

    def clear_momentum(self) -> None:
        """Sets the momenta to zero: this rank starts as a new one, with weights of a peer."""
        self.require_idle("clear_momentum")
        for chunk_group in self.wiring().chunk_groups:
            chunk_group.momentum.zero_()

    # State

    def forget_round(self) -> None:
        """Forgets the round, without a word to the follower: weights and state that are about to come replace all."""
        forgotten, self.round = self.round, None
        self._await(forgotten)

    def restore(self, entries: State) -> None:
        """Replaces states by saved ones, by parameter, in their own dtype; groups may have new settings since."""
        self.forget_round()
        with uninterrupted():
            self.state.clear()  # also of parameters that have no entry: they were frozen when it was saved
            self.state.update(entries)
            self.round_number = torch.zeros_like(self.round_number)  # `attach` sets it; entries may hold the old one
            self._wiring = None
            self.wiring()  # makes buffers, and copies the entries into them

    def __getstate__(self) -> tuple[Any, ...]:
        self.require_idle("copying or pickling")
        # without views: pickle would write a shared buffer once per parameter
        state = {p: {name: value.clone() for name, value in entry.items()} for p, entry in self.state.items()}
        options = replace(self.options, config_facts=tuple)  # the copy's optimizer gives its own
        return self.groups, state, options, self.session, self.samples

    def __setstate__(self, packed: tuple[Any, ...]) -> None:
        groups, state, options, session, samples = packed
        self.__init__(groups, state, options, session.process_group)  # type: ignore[misc]
        self.samples = samples


def _warn_of_dropped(left: str) -> None:
    """Warns, once the round is applied, that the error `left` has kept sent values in momenta, which were dropped."""
    if left:
        warn(
            f"the round is applied, and what it has sent could not leave all momenta of this rank ({left}): those were "
            "dropped, so that nothing counts twice. Free some memory"
        )

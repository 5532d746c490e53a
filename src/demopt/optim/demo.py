"""DeMo, Decoupled Momentum Optimization (Peng, Quesnelle, Kingma, arXiv 2411.19870): the path of a step.

Shapes: W ranks, B bytes in a message, C chunks, K kept.
"""

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.optim.optimizer import ParamsT

from demopt.errors import DriftError, ExchangeError
from demopt.exchange import Background
from demopt.optim import handshake, settings, stages, state
from demopt.optim.bucket import build, local
from demopt.optim.gradients import all_usable, check_gradients, check_parameter, fill_gradients
from demopt.optim.meeting import Meeting, lost
from demopt.optim.options import Options
from demopt.optim.overlap import Overlap
from demopt.optim.routes.choice import check_route, make_route
from demopt.optim.routes.interface import Route
from demopt.optim.segment import Round, Segment, Sending, cut, give_back, gradient_version, split, undo
from demopt.optim.stats import Stats
from demopt.wire import frame
from demopt.wire.checksum import fingerprint


class DeMo(torch.optim.Optimizer):
    """Optimizer whose ranks send each other only the strongest transform coefficients of their momenta.

    Give it the plain model's parameters (no DistributedDataParallel: DeMo is what synchronises) and call `step` on
    every rank. Each rank's momentum, in the transform domain, is `state[p]["momentum"]` [tiles, N], float32 (float64
    for float64 parameters).

    Args:
        params: parameters or parameter groups; every hyper-parameter below can be given per group.
        lr: learning rate, >= 0.
        momentum: decay b of the momentum, in [0, 1).
        alpha: share of what was sent that is taken out of the momentum, in (0, 1].
        top_k: coefficients kept of a full chunk x chunk tile; smaller tiles keep proportionally fewer, at least 1.
        chunk: side of the tiles.
        transform: "dct", "hadamard", "random" (orthogonal) or "identity".
        update: "signum" (sign of the decoded update) or "sgd" (the decoded update itself).
        reduction: "senders" (mean over the ranks that sent a coefficient) or "mean" (over all ranks).
        values: what values are on the wire: integers with one scale a chunk, "sign" (+-1), "2-bit" (+-1, +-2), "int8",
            or floats, "bfloat16", "float32", "float64".
        weight_decay: decoupled, times lr.
        gradient_scale: how gradients enter the momentum: "ema", times 1 - momentum, or "lr", times lr (v1).
        tiling: "padded", or "divisor": v1's rule, with top_k whatever a tile's size.
        exact: whether decoding runs in integers, so that unlike machines compute the same bits; None is where values
            and transform allow it.
        clip_to_median: no rank's chunk counts for more than the median rank's: a bound on what a hostile peer can do.
        relay_top_k: coefficients that route "relay" sends back of a full tile.
        maximize: ascend instead of descend.
        route: how messages travel: "gather", "owner", "relay", "shared" (docs/routes.md), or "auto", the cheaper of
            gather and owner, whose results are the same bits.
        fingerprint_every: steps between comparisons of all ranks' parameters (DriftError where they differ); 0: never.
        overlap: segments that the parameters are cut into, each sent while backward still works on the others; 0: all
            is sent by step. Gradients may not be changed, as by clipping, between backward and step; see `no_sync`.
        delay: 1 applies each exchange a step late, so that it has a whole step of time; see `flush`. 0: at once.
        process_group: ranks that train together: a ProcessGroup, a DeviceMesh of one dimension, or of two (nodes, ranks
            of a node: gradients are averaged inside, a node sends once), or an Exchange; None is the default group
            where torch.distributed is initialised at the first step, and a single rank otherwise.

    Raises:
        ValueError, TypeError: a hyper-parameter, parameter or gradient that cannot be used.
        SettingsError: at the first step, where ranks differ; ExchangeError: a peer is gone; MessageError: a message was
            refused. After each of these no parameter has changed, and what was to be sent is back in the momentum.

    Source: arXiv 2411.19870, v1 section 3 and v2 section 3.

    Example:
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = DeMo(model.parameters(), lr=1e-3)
        >>> model(torch.ones(4, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.stats.kept
        3
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then calls step on every rank, infinite gradients or not

    stats: Stats
    _meeting: Meeting
    _signature: list[Any] | None  # what buckets and layout were made from
    _segments: list[Segment]
    _options: Options
    _why: str  # the route was picked
    _step: Tensor  # int64, on the CPU; shared by all parameters' states
    _round: Round | None  # between extract and apply
    _late: Round | None  # with delay: the step before's, still under way
    _workspace: stages.Workspace
    _hooks: Overlap

    def __init__(
        self,
        params: ParamsT,
        lr: float = 4e-4,
        momentum: float = 0.999,
        alpha: float = 1.0,
        top_k: int = 32,
        chunk: int = 64,
        transform: str = "dct",
        update: str = "signum",
        reduction: str = "senders",
        values: str = "sign",
        weight_decay: float = 0.0,
        gradient_scale: str = "ema",
        tiling: str = "padded",
        exact: bool | None = None,
        clip_to_median: bool = False,
        relay_top_k: int = 64,
        maximize: bool = False,
        route: str = "auto",
        fingerprint_every: int = 100,
        overlap: int = 0,
        delay: int = 0,
        process_group: Any = None,
    ) -> None:
        given = locals()
        defaults = {name: given[name] for name in settings.NAMES}
        settings.check(defaults)
        self._begin(
            Meeting(process_group, apart=overlap + delay > 0), Options(route, fingerprint_every, overlap, delay)
        )
        super().__init__(params, defaults)
        self._refresh()

    # The step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """apply(exchange(extract())), after the closure where there is one.

        On an error nothing is applied, and what was to be sent is back in the momentum.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            message = self.extract()
            if self._options.delay:
                self._apply_late()
                self._start_round()
            else:
                self.apply(self.exchange(message))
        except BaseException:
            self.rollback()
            for name in ("grad_scale", "found_inf"):  # GradScaler removes them only after a step that succeeded
                self.__dict__.pop(name, None)
            raise
        finally:
            self._hooks.forget()
        return loss

    @torch.no_grad()
    def extract(self) -> Tensor:
        """Takes the gradients into the momentum, and what is to be sent out of it: this rank's message, uint8 [B].

        No network. Follow it with `apply`, or with `rollback`. Where a gradient is not finite the momentum stays as
        it is, and the message says so. With overlap, backward has done the most of it, and some is on its way.
        """
        if self._round is not None and self._round.handed_out:
            self._require_settled("extract")
        started = time.perf_counter()
        begun = self._begin_round()
        self._hooks.check(begun, scaled=getattr(self, "grad_scale", None) is not None)
        for number in range(len(self._segments)):
            if begun.sendings[number] is None:
                self._extract(begun, number)
        begun.handed_out = True
        messages = [begun.message_of(number) for number in range(len(self._segments))]
        message = messages[0] if len(messages) == 1 else torch.cat(messages)
        kept = sum(segment.route.layout.kept for segment in self._segments)
        self.stats = Stats(payload_bytes=message.numel(), kept=kept, route=self._why)
        self._note("extract", started)
        return message

    def exchange(self, message: Tensor) -> Tensor:
        """What all ranks make of the messages, by the route: for "gather" the messages, uint8 [W, B].

        The only stage with a network. The first call also runs the handshake.
        """
        started = time.perf_counter()
        begun = self._require_round()
        messages = message.split([segment.route.widths[0] for segment in self._segments])
        results = self._results(begun, list(messages))
        self._count(begun)
        self._note("exchange", started)
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    @torch.no_grad()
    def apply(self, messages: Tensor) -> None:
        """Updates the parameters from what `exchange` returned; all of it is checked first. No network.

        Where a rank's gradient was not finite nothing is applied, and what was sent goes back into the momentum.
        """
        begun = self._require_round()
        if self._apply(begun, split(messages, [segment.route.widths[1] for segment in self._segments])):
            undo(self._segments, begun.sendings)
        self._round = None
        self._step.add_(1)

    @torch.no_grad()
    def rollback(self) -> None:
        """Undoes the sending of `extract`: what it took out of the momentum is put back. Nothing to do otherwise.

        The gradients stay in the momentum, so a failed or vetoed round loses nothing of them.
        """
        if self._round is not None:
            self._round.settle()
            undo(self._segments, self._round.sendings)
        self._round = None

    @torch.no_grad()
    def flush(self) -> None:
        """With delay: applies what is still under way, on all ranks; before saving, evaluating or stopping."""
        self._apply_late()

    def no_sync(self) -> AbstractContextManager[None]:
        """With overlap: for all backward passes of a step but the last, whose gradients add up."""
        return self._hooks.paused()

    def fingerprint(self) -> int:
        """A 64-bit hash of all parameters: where it differs between ranks, the replicas have drifted."""
        return fingerprint([local(parameter) for parameter in self._parameters()])

    @torch.no_grad()
    def resync(self, source: int = 0) -> None:
        """Gives every rank the parameters and the step of rank `source`. All ranks call it; momenta stay their own."""
        self._require_settled("resync")
        self._apply_late()
        self._refresh()
        meter = self._meeting.meter
        if not 0 <= source < meter.world:
            raise ValueError(f"source is {source}; there are ranks 0 to {meter.world - 1}")
        parameters = [local(parameter) for parameter in self._parameters()]
        step = self._step.to(parameters[0].device, copy=True).view(1)
        handshake.copy_parameters(meter, [*parameters, step], source)
        self._step.copy_(step[0])

    # What the step needs

    def _begin(self, meeting: Meeting, options: Options) -> None:
        options.check()
        self.stats = Stats()
        self._options = options
        self._meeting = meeting
        self._signature = None
        self._round = self._late = None
        self._workspace = stages.Workspace()
        self._hooks = Overlap()
        self._background = Background()

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _refresh(self) -> None:
        """Builds buckets and layout anew where groups, K, dtypes, devices or frozen parameters have changed."""
        team = self._meeting.team
        signature = state.signature(self.param_groups, team)
        for group in self.param_groups:
            settings.check(group)
        if signature == self._signature:
            return
        self._require_settled("a change of groups or settings")
        self._apply_late()
        state.check_fixed(self._signature, signature)
        self._segments, buckets = [], []
        for parameters in cut(self.param_groups, self._options.overlap or 1):
            mine = build(self.param_groups, parameters)
            active = [bucket for bucket in mine if bucket.tiles and not bucket.kind.frozen]
            route, self._why = make_route(self._options.route, active, team, self._workspace)
            trained = tuple(parameter for parameter in parameters if parameter.requires_grad)
            self._segments.append(Segment(route, trained))
            buckets += mine
        self._step = state.attach(self.state, buckets)
        self._signature = signature
        if self._options.overlap:
            self._hooks.watch(self._segments, self._send_early)

    def _begin_round(self) -> Round:
        """The round of this step, unless backward has begun it."""
        self._refresh()
        if self._round is None:
            mark = self.fingerprint() if self._fingerprint_due() else None
            meter = self._meeting.meter
            headers = [self._header(segment, mark) for segment in self._segments]
            self._round = Round(headers, [None] * len(self._segments), (meter.sent_bytes, meter.received_bytes))
        return self._round

    def _extract(self, begun: Round, number: int) -> None:
        """The gradients of a segment become its message."""
        segment, header = self._segments[number], begun.headers[number]
        with record_function("demopt.extract"):
            unscale, finite = self._gradients(segment)
            segment.route.begin(header.step)
            sending = begun.sendings[number] = Sending([], torch.empty(0, dtype=torch.uint8))
            for bucket in segment.route.buckets if finite else []:
                sending.extracted.append(stages.extract(bucket, unscale, self._workspace, segment.route.chosen))
            header = begun.headers[number] = replace(header, flags=header.flags | (0 if finite else frame.NONFINITE))
            sending.message = segment.route.message(header, [extracted.data for extracted in sending.extracted])

    def _start(self, begun: Round, number: int) -> None:
        """The exchange of a segment, in the background."""
        sending, segment, header = begun.sendings[number], self._segments[number], begun.headers[number]
        assert sending is not None
        meter, message = self._meeting.meter, sending.message

        def exchange() -> Tensor:
            with record_function("demopt.exchange"):
                return segment.route.exchange(message, meter, header)

        sending.arriving = self._background.submit(exchange)

    @torch.no_grad()
    def _send_early(self, number: int) -> None:
        """Backward has all gradients of a segment: its message leaves, unless the ranks have yet to meet."""
        if self._meeting.agreed(self._routes()):
            begun = self._begin_round()
            self._extract(begun, number)
            begun.versions |= {p: gradient_version(p) for p in self._segments[number].parameters}
            self._start(begun, number)

    def _start_round(self) -> None:
        """With delay: all of the round is sent, and applied by the next step."""
        started = time.perf_counter()
        begun = self._require_round()
        self._agree(begun)
        for number in range(len(self._segments)):
            self._start(begun, number)
        self._late, self._round = begun, None
        self._step.add_(1)
        self._note("exchange", started)

    def _apply_late(self) -> None:
        """With delay: waits for the step before's exchange and applies it; the time counts as exchange and apply."""
        late, self._late = self._late, None
        if late is None:
            return
        started = time.perf_counter()
        try:
            results = self._results(late, [late.message_of(number) for number in range(len(self._segments))])
            self._count(late)
            self._note("exchange", started)
            skipped = self._apply(late, results)
        except BaseException:
            late.settle()
            give_back(self._segments, late.sendings)
            raise
        if skipped:
            give_back(self._segments, late.sendings)

    def _results(self, begun: Round, messages: list[Tensor]) -> list[Tensor]:
        """What all ranks make of the messages of each segment."""
        meter, routes = self._meeting.meter, self._routes()
        try:
            self._agree(begun)
            results = []
            for route, message, header, sending in zip(routes, messages, begun.headers, begun.sendings, strict=True):
                arriving = sending.arriving if sending else None
                results.append(arriving.result() if arriving else route.exchange(message, meter, header))
            if any(frame.announced(result) for result in results):  # by another rank: once settings have been
                self._meeting.handshake(self._facts(), self.param_groups)  # compared, the round is made anew
                rounds = zip(routes, messages, begun.headers, strict=True)
                results = [route.exchange(message, meter, header) for route, message, header in rounds]
        except ExchangeError as error:
            raise ExchangeError(f"step {begun.headers[0].step}: {error}") from error
        return results

    def _agree(self, begun: Round) -> None:
        """The handshake, where there is need of one; its bytes are not the step's."""
        meter, routes = self._meeting.meter, self._routes()
        if not self._meeting.agreed(routes):
            self._meeting.agree(routes, begun.headers[0], self._facts(), self.param_groups)
            begun.started = meter.sent_bytes, meter.received_bytes

    def _apply(self, begun: Round, results: list[Tensor]) -> bool:
        """Checks everything, then updates the parameters; True where a rank's gradient was not finite: all skip."""
        started = time.perf_counter()
        headers: list[frame.Header] = []
        for route, result, header in zip(self._routes(), results, begun.headers, strict=True):
            route.begin(header.step)
            headers += route.check(result, header)
        self._check_drift(headers[: headers[0].world], begun.headers[0].step)
        skipped = any(header.flags & frame.NONFINITE for header in headers)
        if not skipped:
            begun.sendings = [None] * len(results)  # from here on there is no way back
            with record_function("demopt.apply"):
                for route, result in zip(self._routes(), results, strict=True):
                    route.apply(result)
        self.stats = replace(self.stats, skipped=skipped)
        self._note("apply", started)
        return skipped

    def _gradients(self, segment: Segment) -> tuple[float, bool]:
        """What gradients are multiplied by, and whether all can be used; inside a node they are averaged.

        GradScaler leaves its scale, and whether it found an infinity, in two attributes.
        """
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        gradients = check_gradients(self.param_groups, segment.parameters)
        meter = self._meeting.meter
        if meter.inside is not None:
            gradients = fill_gradients(self.param_groups)
            for gradient in gradients:
                gradient.mul_(unscale)  # ranks of a node may have different scales
            unscale = 1.0
            meter.average(gradients)
        return unscale, (found is None or not bool(found)) and all_usable(gradients)

    def _routes(self) -> list[Route]:
        return [segment.route for segment in self._segments]

    def _fingerprint_due(self) -> bool:
        step, every = int(self._step), self._options.fingerprint_every
        return every > 0 and step > 0 and step % every == 0 and self._meeting.met  # until then weights may be unlike

    def _check_drift(self, headers: list[frame.Header], step: int) -> None:
        if all(header.flags & frame.FINGERPRINT for header in headers):
            ranks = [rank for rank, header in enumerate(headers) if header.fingerprint != headers[0].fingerprint]
            if ranks:
                raise DriftError(step, ranks)

    def _header(self, segment: Segment, mark: int | None) -> frame.Header:
        meter = self._meeting.meter
        digest = handshake.settings_digest(self.param_groups)
        flags, layout = 0 if mark is None else frame.FINGERPRINT, segment.route.layout.digest
        return frame.Header(int(self._step), meter.rank, meter.world, layout, digest, flags, fingerprint=mark or 0)

    def _facts(self) -> dict[str, str]:
        """What must be equal on all ranks beside the parameter groups."""
        return {name: str(value) for name, value in vars(self._options).items()}

    def _require_settled(self, wanted: str) -> None:
        if self._round is not None:
            raise RuntimeError(f"{wanted} came between extract and apply; call apply or rollback first")

    def _require_flushed(self, wanted: str) -> None:
        self._require_settled(wanted)
        if self._late is not None:
            raise RuntimeError(f"{wanted} came while an exchange is under way; call flush() on all ranks first")

    def _require_round(self) -> Round:
        if self._round is None:
            raise RuntimeError("there is no message under way; call extract first")
        return self._round

    def _count(self, begun: Round) -> None:
        meter, (sent, received) = self._meeting.meter, begun.started
        self.stats = replace(
            self.stats, sent_bytes=meter.sent_bytes - sent, received_bytes=meter.received_bytes - received
        )

    def _note(self, stage: str, started: float) -> None:
        before = self.stats.seconds.get(stage, 0.0)
        seconds = {**self.stats.seconds, stage: before + time.perf_counter() - started}
        self.stats = replace(self.stats, seconds=seconds)

    # State: groups, checkpoints, copies

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, with every key and value checked; allowed at any time between steps, on all ranks alike."""
        settings.check_names(param_group)
        settings.check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                check_parameter(parameter)
            if self._signature is not None:
                self._refresh()
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but the momentum keeps its dtype (bfloat16 parameters have float32 momentum).

        ValueError, with nothing changed, where the state is not DeMo's or of other shapes.
        """
        if self._late is not None:
            self._late.settle()  # the momenta that it was taken out of are about to be replaced
            self._late = None
        saved: dict[int, dict[str, Any]] = {}

        def remember(_: torch.optim.Optimizer, final: dict[str, Any]) -> None:
            for group in final["param_groups"]:
                merged = {**self.defaults, **group}
                settings.check({name: merged[name] for name in settings.NAMES})
                check_route(self._options.route, merged["update"], merged["values"])
            saved.update(state.loadable(final, self.param_groups))

        handle = self.register_load_state_dict_pre_hook(remember)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for number, parameter in enumerate(self._parameters()):
            for name in state.SHARED:
                if name in self.state[parameter]:
                    state.adopt(saved[number], name, self.state[parameter][name])

    def state_dict(self) -> dict[str, Any]:
        """As in torch; between steps only, and with delay after `flush`. Never runs a step or a collective."""
        self._require_flushed("state_dict")
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._require_flushed("copying or pickling")
        packed = super().__getstate__()
        return {
            **packed,
            "state": state.unshared(self.state),
            "process_group": lost(self._meeting.process_group),
            "team": self._meeting.team,
            "options": self._options,
        }

    def __setstate__(self, packed: dict[str, Any]) -> None:
        if "process_group" in packed:  # a pickle or a copy; otherwise this is load_state_dict at work
            options = packed.pop("options")
            apart = options.overlap + options.delay > 0
            self._begin(Meeting(packed.pop("process_group"), packed.pop("team"), apart), options)
        super().__setstate__(packed)
        for group in self.param_groups:
            for name in settings.NAMES:
                group.setdefault(name, self.defaults[name])
        self._round = None
        self._signature = None
        self._refresh()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeMo":
        twin: DeMo = type(self).__new__(type(self))
        memo[id(self)] = twin
        packed = copy.deepcopy(self.__getstate__(), memo)
        twin.__setstate__({**packed, "process_group": self._meeting.process_group})  # shared, as it cannot be copied
        return twin

"""DeMo, Decoupled Momentum Optimization (Peng, Quesnelle, Kingma, arXiv 2411.19870): the path of a step.

Shapes: W ranks, B bytes in a message, C chunks, K kept.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from demopt.errors import DriftError, ExchangeError
from demopt.optim import handshake, settings, stages, state
from demopt.optim.bucket import build, local
from demopt.optim.gradients import all_usable, check_gradients, check_parameter, fill_gradients
from demopt.optim.meeting import Meeting, lost
from demopt.optim.routes.choice import ROUTES, check_route, make_route
from demopt.optim.routes.interface import Route
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
    _route: Route
    _route_name: str
    _why: str  # the route was picked
    _fingerprint_every: int
    _mark: int | None  # fingerprint of the parameters, in the steps that send it
    _step: Tensor  # int64, on the CPU; shared by all parameters' states
    _pending: list[stages.Extracted] | None  # between extract and apply: what was taken out of the momentum
    _workspace: stages.Workspace

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
        process_group: Any = None,
    ) -> None:
        given = locals()
        defaults = {name: given[name] for name in settings.NAMES}
        settings.check(defaults)
        self._begin(process_group, route, fingerprint_every)
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
            self.apply(self.exchange(message))
        except BaseException:
            self.rollback()
            for name in ("grad_scale", "found_inf"):  # GradScaler removes them only after a step that succeeded
                self.__dict__.pop(name, None)
            raise
        return loss

    @torch.no_grad()
    def extract(self) -> Tensor:
        """Takes the gradients into the momentum, and what is to be sent out of it: this rank's message, uint8 [B].

        No network. Follow it with `apply`, or with `rollback`. Where a gradient is not finite the momentum stays as
        it is, and the message says so.
        """
        self._require_settled("extract")
        started = time.perf_counter()
        self._refresh()
        unscale, finite = self._gradients()
        self._route.begin(int(self._step))
        self._mark = self.fingerprint() if self._fingerprint_due() else None
        self._pending = []
        for bucket in self._route.buckets if finite else []:
            self._pending.append(stages.extract(bucket, unscale, self._workspace, self._route.chosen))
        header = self._header(flags=0 if finite else frame.NONFINITE)
        message = self._route.message(header, [extracted.data for extracted in self._pending])
        self.stats = Stats(payload_bytes=message.numel(), kept=self._route.layout.kept, route=self._why)
        self._note("extract", started)
        return message

    def exchange(self, message: Tensor) -> Tensor:
        """What all ranks make of the messages, by the route: for "gather" the messages, uint8 [W, B].

        The only stage with a network. The first call also runs the handshake.
        """
        started = time.perf_counter()
        meter = self._meeting.meter
        sent, received = meter.sent_bytes, meter.received_bytes
        try:
            self._meeting.agree(self._route, self._header, self._facts(), self.param_groups)
            sent, received = meter.sent_bytes, meter.received_bytes
            messages = self._route.exchange(message, meter, self._header())
            if frame.announced(messages):  # by another rank: once settings have been compared, the round is made anew
                self._meeting.handshake(self._facts(), self.param_groups)
                messages = self._route.exchange(message, meter, self._header())
        except ExchangeError as error:
            raise ExchangeError(f"step {int(self._step)}: {error}") from error
        self.stats = replace(
            self.stats, sent_bytes=meter.sent_bytes - sent, received_bytes=meter.received_bytes - received
        )
        self._note("exchange", started)
        return messages

    @torch.no_grad()
    def apply(self, messages: Tensor) -> None:
        """Updates the parameters from what `exchange` returned; all of it is checked first. No network.

        Where a rank's gradient was not finite nothing is applied, and what was sent goes back into the momentum.
        """
        started = time.perf_counter()
        self._route.begin(int(self._step))
        headers = self._route.check(messages, self._header())
        self._check_drift(headers)
        skipped = any(header.flags & frame.NONFINITE for header in headers)
        if skipped:
            self.rollback()
        else:
            self._route.apply(messages)
        self._pending = None
        self._step.add_(1)
        self.stats = replace(self.stats, skipped=skipped)
        self._note("apply", started)

    @torch.no_grad()
    def rollback(self) -> None:
        """Undoes the sending of `extract`: what it took out of the momentum is put back. Nothing to do otherwise.

        The gradients stay in the momentum, so a failed or vetoed round loses nothing of them.
        """
        if self._pending:
            for bucket, extracted in zip(self._route.buckets, self._pending, strict=False):  # extract may have failed
                stages.restore(bucket, extracted)
        self._pending = None

    def fingerprint(self) -> int:
        """A 64-bit hash of all parameters: where it differs between ranks, the replicas have drifted."""
        return fingerprint([local(parameter) for parameter in self._parameters()])

    @torch.no_grad()
    def resync(self, source: int = 0) -> None:
        """Gives every rank the parameters and the step of rank `source`. All ranks call it; momenta stay their own."""
        self._require_settled("resync")
        self._refresh()
        meter = self._meeting.meter
        if not 0 <= source < meter.world:
            raise ValueError(f"source is {source}; there are ranks 0 to {meter.world - 1}")
        parameters = [local(parameter) for parameter in self._parameters()]
        step = self._step.to(parameters[0].device, copy=True).view(1)
        handshake.copy_parameters(meter, [*parameters, step], source)
        self._step.copy_(step[0])

    # What the step needs

    def _begin(self, process_group: Any, route: str, fingerprint_every: int) -> None:
        if route not in (*ROUTES, "auto"):
            raise ValueError(f"route is {route!r}; choose one of 'auto', {', '.join(map(repr, ROUTES))}")
        if not isinstance(fingerprint_every, int) or fingerprint_every < 0:
            raise ValueError(f"fingerprint_every is {fingerprint_every!r}; give a number of steps, or 0 for never")
        self.stats = Stats()
        self._route_name = route
        self._fingerprint_every = fingerprint_every
        self._mark = None
        self._meeting = Meeting(process_group)
        self._signature = None
        self._pending = None
        self._workspace = stages.Workspace()

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
        state.check_fixed(self._signature, signature)
        buckets = build(self.param_groups)
        active = [bucket for bucket in buckets if bucket.tiles and not bucket.kind.frozen]
        self._route, self._why = make_route(self._route_name, active, team, self._workspace)
        self._step = state.attach(self.state, buckets)
        self._signature = signature

    def _gradients(self) -> tuple[float, bool]:
        """What gradients are multiplied by, and whether all can be used; inside a node they are averaged.

        GradScaler leaves its scale, and whether it found an infinity, in two attributes.
        """
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        gradients = check_gradients(self.param_groups)
        meter = self._meeting.meter
        if meter.inside is not None:
            gradients = fill_gradients(self.param_groups)
            for gradient in gradients:
                gradient.mul_(unscale)  # ranks of a node may have different scales
            unscale = 1.0
            meter.average(gradients)
        return unscale, (found is None or not bool(found)) and all_usable(gradients)

    def _fingerprint_due(self) -> bool:
        step, every = int(self._step), self._fingerprint_every
        return every > 0 and step > 0 and step % every == 0 and self._meeting.met  # until then weights may be unlike

    def _check_drift(self, headers: list[frame.Header]) -> None:
        if all(header.flags & frame.FINGERPRINT for header in headers):
            ranks = [rank for rank, header in enumerate(headers) if header.fingerprint != headers[0].fingerprint]
            if ranks:
                raise DriftError(int(self._step), ranks)

    def _header(self, flags: int = 0) -> frame.Header:
        meter = self._meeting.meter
        settings_digest = handshake.settings_digest(self.param_groups)
        flags |= 0 if self._mark is None else frame.FINGERPRINT
        layout = self._route.layout.digest
        return frame.Header(
            int(self._step), meter.rank, meter.world, layout, settings_digest, flags, fingerprint=self._mark or 0
        )

    def _facts(self) -> dict[str, str]:
        """What must be equal on all ranks beside the parameter groups."""
        return {"route": self._route_name, "fingerprint_every": str(self._fingerprint_every)}

    def _require_settled(self, wanted: str) -> None:
        if self._pending is not None:
            raise RuntimeError(f"{wanted} came between extract and apply; call apply or rollback first")

    def _note(self, stage: str, started: float) -> None:
        self.stats = replace(self.stats, seconds={**self.stats.seconds, stage: time.perf_counter() - started})

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
        saved: dict[int, dict[str, Any]] = {}

        def remember(_: torch.optim.Optimizer, final: dict[str, Any]) -> None:
            for group in final["param_groups"]:
                merged = {**self.defaults, **group}
                settings.check({name: merged[name] for name in settings.NAMES})
                check_route(self._route_name, merged["update"], merged["values"])
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
        """As in torch; between steps only. Never runs a step or a collective."""
        self._require_settled("state_dict")
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._require_settled("copying or pickling")
        packed = super().__getstate__()
        return {
            **packed,
            "state": state.unshared(self.state),
            "process_group": lost(self._meeting.process_group),
            "team": self._meeting.team,
            "route": self._route_name,
            "fingerprint_every": self._fingerprint_every,
        }

    def __setstate__(self, packed: dict[str, Any]) -> None:
        if "process_group" in packed:  # a pickle or a copy; otherwise this is load_state_dict at work
            self._begin(packed.pop("process_group"), packed.pop("route"), packed.pop("fingerprint_every"))
            self._meeting = Meeting(self._meeting.process_group, packed.pop("team"))
        super().__setstate__(packed)
        for group in self.param_groups:
            for name in settings.NAMES:
                group.setdefault(name, self.defaults[name])
        self._pending = None
        self._signature = None
        self._refresh()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeMo":
        twin: DeMo = type(self).__new__(type(self))
        memo[id(self)] = twin
        packed = copy.deepcopy(self.__getstate__(), memo)
        twin.__setstate__({**packed, "process_group": self._meeting.process_group})  # shared, as it cannot be copied
        return twin

"""DeMo, Decoupled Momentum Optimization (Peng, Quesnelle, Kingma, arXiv 2411.19870): the path of a step.

Shapes: W ranks, B bytes in a message, C chunks, K kept.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NoReturn, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports all of dynamo
from torch.optim.optimizer import ParamsT

from demopt.core.chunk import to_local
from demopt.core.update import Rule
from demopt.optim import checkpoint, copies, handshake, settings, states
from demopt.optim.compress import Workspace
from demopt.optim.consolidate import gather_states
from demopt.optim.gradients import Scaling, check_matrices, check_parameters
from demopt.optim.interrupts import allowed, deferred
from demopt.optim.plan import Options
from demopt.optim.planned import Planned
from demopt.optim.reshard import SAVED_BY
from demopt.optim.round import Round
from demopt.optim.routes.choice import check_route
from demopt.optim.session import Session, replicated
from demopt.optim.stats import Stats
from demopt.wire.checksum import fingerprint


class DeMo(Planned):
    """Optimizer whose ranks send each other only the strongest transform coefficients of their momenta.

    Give it the parameters of the plain model (without DistributedDataParallel: DeMo synchronises the ranks) and call
    `step` on every rank. Each rank's momentum, in the transform domain, is `state[p]["momentum"]` [chunks, N], float32
    (float64 for float64 parameters). Buffers such as BatchNorm's running statistics are not synchronised: call
    `demopt.broadcast_buffers(model)` before evaluating or saving. FSDP2, tensor parallelism: docs/parallelism.md.

    Args:
        params: parameters or parameter groups; every hyper-parameter below can be given per group.
        lr: learning rate, >= 0.
        momentum: decay b of the momentum, in [0, 1).
        alpha: fraction of the sent values that is subtracted from the momentum, in (0, 1].
        top_k: coefficients kept per full chunk x chunk block, at most all of them; smaller chunks keep proportionally
            fewer, at least 1.
        chunk: side of the chunks.
        transform: "dct", "hadamard", "random" (orthogonal) or "identity".
        update: how the decoded update, the same on all ranks, becomes a step: "signum" (its sign), "sgd" (unchanged),
            "nesterov", "lion", "adamw" (divided by the root of its second moment) or "muon" (matrices only: see
            `demopt.muon_groups`); or a rule with its settings, such as `demopt.Lion(beta1=0.95)`, which the group holds
            as text. docs/update-rules.md gives learning rates.
        reduction: what divides the sum of a coefficient: "senders" (S, the ranks that sent it), "mean" (W, all ranks),
            or "root" (sqrt(S W), for many ranks).
        values: encoding of the values in messages: integers with one scale per chunk, "sign" (+-1), "2-bit" (+-1, +-2)
            or "int8"; or floats, "bfloat16", "float32" or "float64".
        weight_decay: decoupled weight decay, multiplied by lr.
        gradient_scale: factor on gradients that enter the momentum: "ema", 1 - momentum, or "lr", lr itself (v1). "sum"
            is LocalDeMo's error: factor 1, and the decay comes after the round.
        chunking: "padded", or "divisor", v1's rule, which also keeps top_k coefficients for any chunk size.
        exact: whether decoding runs in integers, so that different hardware computes the same bits; None: if values,
            transform and dtype allow it.
        clip_to_median: no rank's chunk counts for more than the median rank's, which bounds what a hostile peer can do.
        relay_top_k: coefficients per full chunk that owners send back on route "relay".
        maximize: ascend instead of descend.
        route: how messages travel: "gather", "owner", "relay" (docs/routes.md), or "auto", the cheaper of
            gather and owner, whose results are the same bits.
        fingerprint_every: steps between comparisons of all ranks' parameters (DriftError if they differ); 0: never.
        overlap: number of buckets that the parameters are cut into; backward sends each as soon as its gradients are
            ready. 0: step sends everything. Do not change gradients (for example by clipping) between backward and
            step; see `no_sync`.
        delay: 1 applies each exchange one step late, so that it may take as long as a step, and costs loss; see
            `flush`. 0: at once.
        kernels: "auto" (compiled kernels on CPUs), "triton" (also Triton's on GPUs, which have not run on
            hardware so far), or "torch" (torch operations alone). Replicas stay equal whichever a rank uses.
        process_group: the ranks that train together: a ProcessGroup, a DeviceMesh of one dimension, or of two (nodes,
            ranks of a node: gradients are averaged inside a node, which then counts as one rank), or an Exchange. None:
            the default group if torch.distributed is initialised by the first step, otherwise a single rank.

    Raises:
        ValueError, TypeError: a hyper-parameter, parameter or gradient that cannot be used.
        SettingsError: settings differ between ranks (at the first step, or after a change); ExchangeError: a peer is
            gone; MessageError: a message was refused. In each case the failed exchange is not applied, and what it
            took out of the momentum is back.

    Source: arXiv 2411.19870, v1 section 3 and v2 section 3.

    Examples:
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = DeMo(model.parameters(), lr=1e-3)
        >>> model(torch.ones(4, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.stats.kept
        3
    """

    _step_supports_amp_scaling = True  # makes torch.amp.GradScaler call step on every rank, infinite gradients or not

    def __init__(
        self,
        params: ParamsT,
        lr: float = 4e-4,
        *,
        momentum: float = 0.99,
        alpha: float = 1.0,
        top_k: int = 32,
        chunk: int = 64,
        transform: str = "dct",
        update: str | Rule = "signum",
        reduction: str = "senders",
        values: str = "sign",
        weight_decay: float = 0.0,
        gradient_scale: str = "ema",
        chunking: str = "padded",
        exact: bool | None = None,
        clip_to_median: bool = False,
        relay_top_k: int = 64,
        maximize: bool = False,
        route: str = "auto",
        fingerprint_every: int = 100,
        overlap: int = 0,
        delay: int = 0,
        kernels: str = "auto",
        process_group: Any = None,
        **unknown: NoReturn,
    ) -> None:
        given = locals()
        settings.check_caller()
        settings.check_arguments(unknown)
        defaults = {name: given[name] for name in settings.NAMES}
        settings.check(defaults)
        defaults = settings.plain(defaults)
        self._begin(process_group, Options(route, fingerprint_every, overlap, delay, kernels))
        super().__init__(params, defaults)
        self._current_plan()

    # The step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_disable_dynamo  # torch.compile leaves it out of graphs, as it does torch's own optimizers
    @torch.no_grad()
    @deferred()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Runs the closure, if any, then apply(exchange(extract())). The numbers are those of docs/algorithm.md.

        On an error the failed exchange is not applied, and what it took out of the momentum is back. An interrupt
        (Ctrl-C) is such an error while the step waits for other ranks; otherwise it comes after the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad(), allowed():
                loss = closure()
        if self._round is not None and self._round.extracted:
            self._require_settled("step")
        new = self._current_round()
        try:
            self._extract(new)  # 1 to 4: gradients into the momentum, its strongest coefficients out of it
            self._in_flight.append(new)
            while len(self._in_flight) > self._options.delay:
                self._complete(self._in_flight.popleft())  # 5 to 8: exchange, check, aggregate, update
            if self._in_flight:
                new.send()  # 5, begun: with delay, the messages travel during the next step
        except BaseException:
            self.rollback()
            Scaling.forget(self)
            raise
        self._end_round()
        return loss

    @torch.no_grad()
    @deferred()
    def extract(self) -> Tensor:
        """Adds the gradients to the momentum, takes out what to send, and returns this rank's message, uint8 [B].

        No network, except that with two levels the ranks of a node average their gradients. Follow it with `apply` or
        `rollback`. If a gradient is not finite, the momentum stays unchanged and a flag in the message reports it.
        With overlap, most of this already happened during backward.
        """
        if self._round is not None and self._round.extracted:
            raise RuntimeError("extract came between extract and apply; call apply or rollback first")
        if self._in_flight:
            raise RuntimeError("extract came while an exchange is in flight; call flush() on all ranks first")
        new = self._current_round()
        return self._extract(new)

    def exchange(self, message: Tensor) -> Tensor:
        """Sends the message on the route and returns the result, for "gather" the messages of all ranks, uint8 [W, B].

        The only stage that uses the network, unless there are two levels. The first call also runs the handshake.
        """
        extracted = self._extracted_round()
        result = extracted.exchange(message)
        self._stats = extracted.stats
        self._look()
        return result

    @torch.no_grad()
    def check(self, messages: Tensor) -> None:
        """Raises what `apply` would raise for what `exchange` returned, and changes nothing: call it before a vote."""
        self._current_round().check(messages)

    @torch.no_grad()
    @deferred()
    def apply(self, messages: Tensor) -> None:
        """Checks all of what `exchange` returned, then updates the parameters from it. No network between nodes.

        If any rank's gradient was not finite, applies nothing and puts what was sent back into the momentum. A rank
        that sends nothing, as in a replay, needs only this call.
        """
        current = self._current_round()
        current.apply(messages)
        self._stats = current.stats
        self._end_round()

    @torch.no_grad()
    @deferred()
    def follow(self, leader: "DeMo") -> None:
        """Replaces `apply` on a rank that shares its parameters with `leader`, which has just applied the round.

        For simulation: replicas are equal, so many ranks can share one; this only updates the rank's own state.
        """
        extracted = self._extracted_round()
        extracted.follow(leader.stats.skipped)
        self._stats = extracted.stats
        self._end_round()

    @torch.no_grad()
    @deferred()
    def rollback(self) -> None:
        """Puts what `extract` took out back into the momentum; does nothing if no round is in flight.

        The gradients stay in the momentum, so a failed or vetoed round does not lose them.
        """
        abandoned, self._round = self._round, None
        if abandoned is not None:
            if abandoned in self._in_flight:
                self._in_flight.remove(abandoned)
            abandoned.undo()

    def set_aside(self) -> Round:
        """Takes the extracted round out of the way, so that members may change or weights come from a peer.

        Then give it to `resume`, or to `settle` if the weights that came already hold what it sent.
        """
        aside = self._extracted_round()
        if self._options.in_background:
            raise ValueError("a round in the background cannot be set aside; use overlap=0 and delay=0")
        self._round = None
        return aside

    @torch.no_grad()
    def resume(self, aside: Round) -> Tensor:
        """Goes on with a round that was set aside, among the ranks and at the step of now; returns its message anew.

        Nothing is extracted again: no gradient enters the momentum twice, and none is lost.
        """
        self._require_settled("resume")
        plan = self._current_plan()
        self._round = aside.readdressed(plan, self._session, int(self._step), self._due_fingerprint())
        return self._round.message

    @torch.no_grad()
    def settle(self, aside: Round) -> None:
        """Ends a round that was set aside as one that was applied: the weights, which came from a peer, hold it."""
        aside.follow(skipped=False)

    @torch.no_grad()
    @deferred()
    def flush(self) -> None:
        """With delay: applies the exchange in flight. Call it on all ranks before saving, evaluating or stopping."""
        while self._in_flight:
            self._complete(self._in_flight.popleft())

    def no_sync(self) -> AbstractContextManager[None]:
        """With overlap: the context for all backward passes of a step but the last, to accumulate gradients."""
        return self._overlap.paused()

    def fingerprint(self, state: bool = False) -> int:
        """Returns a 64-bit hash of all parameters; if it differs between ranks, the replicas have drifted.

        `state`: also of the step and of what update rules keep, which are the same on all ranks too.
        """
        tensors = [to_local(parameter) for group in self.param_groups for parameter in group["params"]]
        return fingerprint([*tensors, self._step.view(1), *replicated(self._current_plan())] if state else tensors)

    def facts(self) -> dict[str, str]:
        """Returns what must be equal on all ranks, by name: settings, shapes of parameters, versions."""
        return self._current_plan().facts()

    @torch.no_grad()
    def forget(self) -> None:
        """Sets this rank's own state, the momenta, to zero: it starts as a new rank, with weights of a peer."""
        self._require_flushed("forget")
        self._all_states = None
        plan = self._current_plan()
        for chunk_group in plan.chunk_groups:
            chunk_group.momentum.zero_()
        for route in plan.routes:
            for _, entries in route.state():
                for tensor in entries.values():
                    tensor.zero_()

    @torch.no_grad()
    def resync(self, src: int = 0) -> None:
        """Copies parameters, step and rules' state of rank `src` to all ranks, which all call it; momenta stay.

        Ranks of a node that hold copies of a parameter all take those of the first, with its momentum.
        """
        self._require_settled("resync")
        self.flush()
        plan, exchange = self._current_plan(), self._session.exchange
        if not 0 <= src < exchange.world_size:
            raise ValueError(f"src is {src}; there are ranks 0 to {exchange.world_size - 1}")
        parameters = plan.parameters
        step = self._step.to(parameters[0].device, copy=True).view(1)
        handshake.copy_parameters(exchange, [*parameters, step, *replicated(plan)], src)
        for held in copies.copies(plan, exchange):
            handshake.copy_parameters(held.exchange, copies.tensors(plan, held, momenta=True), src=0)
        self._step.copy_(step[0])
        self._all_states = None

    @torch.no_grad()
    def regroup(self, process_group: Any) -> None:
        """Goes on among other ranks: between two rounds, also after an error. Parameters and momenta stay as they are.

        Only what was in flight among the old ranks, with delay, is put back into the momenta. The next step runs the
        handshake, in which ranks whose parameters differ take those of rank 0. All ranks must be at the same step: if
        one is new, or stopped earlier, all call `resync` first.
        """
        abandoned, self._round = self._round, None
        for older in self._in_flight:
            older.undo(abandoned, wait=False)  # a peer that is gone would hold us up
        self._in_flight.clear()
        if abandoned is not None:
            abandoned.undo(wait=False)
        self._session = Session(process_group, self._options.in_background)
        self._all_states = None
        self._route_workspace = Workspace()  # an abandoned exchange may still write to the old one
        if self._plan is not None:  # so new routes take it, even if rank and world size are as before
            self._plan = replace(self._plan, inputs=replace(self._plan.inputs, world_size=0))

    @property
    def members(self) -> tuple[int, int]:
        """This rank, and the number of ranks."""
        return self._session.members

    @property
    def stats(self) -> Stats:
        """The cost of the last step."""
        return self._stats

    # State: groups, checkpoints

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, but checks every key and value. Call it between steps, on all ranks alike."""
        settings.check_names(param_group)
        settings.check({**self.defaults, **param_group})
        super().add_param_group(settings.plain(param_group))
        try:
            check_parameters(self.param_groups[-1]["params"])
            check_matrices(self.param_groups[-1]["update"], self.param_groups[-1]["params"])
            if self._plan is not None:
                self._current_plan()
        except BaseException:
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but the state keeps its dtype (bfloat16 parameters have float32 momentum).

        Of a consolidated state, each rank takes its own part; if more or fewer ranks saved it, its share of all. Warns
        if the state is another rank's, or a mixture.
        ValueError or TypeError, with nothing changed, if the state is not DeMo's, has other shapes or invalid settings.
        """
        saved: dict[Tensor, dict[str, Any]] = {}
        members = self._session.members

        def remember(_: torch.optim.Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            final = states.own_part(final, members)
            for own, group in zip(self.param_groups, final["param_groups"], strict=False):
                merged = {**self.defaults, **group}
                settings.check({name: merged[name] for name in settings.NAMES})
                check_route(self._options.route, merged)
                check_matrices(merged["update"], own["params"])
            saved.update(checkpoint.loadable(final, self.param_groups))
            if "in_flight" in final:
                checkpoint.check_in_flight(final["in_flight"], self._options, *members)
            states.warn_unless_own(saved, members)
            return final

        handle = self.register_load_state_dict_pre_hook(remember)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        plan = self._current_plan()
        checkpoint.restore(self.state, plan, saved)
        if "in_flight" in state_dict:
            if self._options.delay and checkpoint.fits(state_dict["in_flight"], plan):
                resumed = checkpoint.unpack(state_dict["in_flight"], plan, self._session, self._workspace)
                self._in_flight.append(resumed)  # the next step sends it again
            else:  # it is sent later, from the momenta
                checkpoint.put_back(state_dict["in_flight"], self.state, self.param_groups)

    def state_dict(self, *, in_flight: bool = False) -> dict[str, Any]:
        """As in torch, but only between steps, and with delay only after `flush`. Never runs a step or a collective.

        It is this rank's, unless `consolidate_state_dict` has brought the others' here since the last step.
        `in_flight`: do not require a flush; store the exchange in flight, which `load_state_dict` resumes.
        """
        if not in_flight:
            self._require_flushed("state_dict")
        self._require_settled("state_dict")
        self._keep_momentum()  # and no more: a new plan could need an exchange
        found: dict[str, Any] = super().state_dict()
        found["param_groups"] = [settings.plain(group) for group in found["param_groups"]]
        members, parameters = self._session.members, (p for group in self.param_groups for p in group["params"])
        for number, parameter in enumerate(parameters):
            mark = states.mark(members, parameter)
            found["state"][number] = {**found["state"][number], SAVED_BY: mark}
        if self._in_flight:
            return {**found, "in_flight": checkpoint.pack(self._in_flight[0])}
        return states.joined(self._all_states, found) if self._all_states else found

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Brings what is each rank's own to rank `to`, whose next `state_dict` then holds the state of all ranks.

        As in torch's ZeroRedundancyOptimizer; all ranks call it, between steps. What it holds is for all ranks to load:
        each takes its own part. Until the next step, rank `to` keeps the momenta of the other W - 1 ranks in CPU
        memory, W - 1 times the size of its own; each rank sends its own once.
        """
        self._all_states = None
        mine, device = self.state_dict(), self._current_plan().device
        self._all_states = gather_states(self._session.exchange, mine, to, device)

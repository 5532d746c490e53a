"""DeMo, Decoupled Momentum Optimization (Peng, Quesnelle, Kingma, arXiv 2411.19870): the path of a step.

Shapes: W ranks, B bytes in a message, C chunks, K kept.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from demopt.core.update import Rule
from demopt.optim import settings, state
from demopt.optim.gradients import Scaling, check_matrices, check_parameter
from demopt.optim.meeting import Meeting, lost
from demopt.optim.options import Options
from demopt.optim.rounds import Rounds
from demopt.optim.routes.choice import check_route
from demopt.optim.routes.interface import Team
from demopt.optim.stats import Stats


class DeMo(torch.optim.Optimizer):
    """Optimizer whose ranks send each other only the strongest transform coefficients of their momenta.

    Give it the parameters of the plain model (without DistributedDataParallel: DeMo synchronises the ranks) and call
    `step` on every rank. Each rank's momentum, in the transform domain, is `state[p]["momentum"]` [chunks, N], float32
    (float64 for float64 parameters). Buffers such as BatchNorm's running statistics are not synchronised; broadcast
    rank 0's before evaluating or saving.

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
        reduction: "senders" (mean over the ranks that sent a coefficient) or "mean" (over all ranks).
        values: encoding of the values in messages: integers with one scale per chunk, "sign" (+-1), "2-bit" (+-1, +-2)
            or "int8"; or floats, "bfloat16", "float32" or "float64".
        weight_decay: decoupled weight decay, multiplied by lr.
        gradient_scale: factor on gradients that enter the momentum: "ema", 1 - momentum, or "lr", lr itself (v1).
        chunking: "padded", or "divisor", v1's rule, which also keeps top_k coefficients for any chunk size.
        exact: whether decoding runs in integers, so that different hardware computes the same bits; None: if values,
            transform and dtype allow it.
        clip_to_median: no rank's chunk counts for more than the median rank's, which bounds what a hostile peer can do.
        relay_top_k: coefficients per full chunk that owners send back on route "relay".
        maximize: ascend instead of descend.
        route: how messages travel: "gather", "owner", "relay", "shared" (docs/routes.md), or "auto", the cheaper of
            gather and owner, whose results are the same bits.
        fingerprint_every: steps between comparisons of all ranks' parameters (DriftError if they differ); 0: never.
        overlap: number of buckets that the parameters are cut into; backward sends each as soon as its gradients are
            ready. 0: step sends everything. Do not change gradients (for example by clipping) between backward and
            step; see `no_sync`.
        delay: 1 applies each exchange one step late, so that it may take as long as a step; see `flush`. 0: at once.
        process_group: the ranks that train together: a ProcessGroup, a DeviceMesh of one dimension, or of two (nodes,
            ranks of a node: gradients are averaged inside a node, which then counts as one rank), or an Exchange. None:
            the default group if torch.distributed is initialised by the first step, otherwise a single rank.

    Raises:
        ValueError, TypeError: a hyper-parameter, parameter or gradient that cannot be used.
        SettingsError: settings differ between ranks (at the first step, or after a change); ExchangeError: a peer is
            gone; MessageError: a message was refused. In each case the failed exchange is not applied, and what it
            took out of the momentum is back.

    Source: arXiv 2411.19870, v1 section 3 and v2 section 3.

    Example:
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = DeMo(model.parameters(), lr=1e-3)
        >>> model(torch.ones(4, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.stats.kept
        3
    """

    _step_supports_amp_scaling = True  # makes torch.amp.GradScaler call step on every rank, infinite gradients or not

    _rounds: Rounds

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
        process_group: Any = None,
        **unknown: NoReturn,
    ) -> None:
        given = locals()
        settings.check_arguments(unknown)
        defaults = {name: given[name] for name in settings.NAMES}
        settings.check(defaults)
        defaults = settings.plain(defaults)
        self._begin(process_group, Options(route, fingerprint_every, overlap, delay))
        super().__init__(params, defaults)
        self._refresh()

    # The step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Runs the closure, if any, then apply(exchange(extract())).

        On an error the failed exchange is not applied, and what it took out of the momentum is back.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            message = self.extract()
            if self._rounds.options.delay:
                self._rounds.apply_late()
                self._rounds.start()
            else:
                self.apply(self.exchange(message))
        except BaseException:
            self.rollback()
            for name in ("grad_scale", "found_inf"):  # GradScaler removes them only after a successful step
                self.__dict__.pop(name, None)
            raise
        return loss

    @torch.no_grad()
    def extract(self) -> Tensor:
        """Adds the gradients to the momentum, takes out what to send, and returns this rank's message, uint8 [B].

        No network, except that with two levels the ranks of a node average their gradients. Follow it with `apply` or
        `rollback`. If a gradient is not finite, the momentum stays unchanged and a flag in the message reports it.
        With overlap, most of this already happened during backward.
        """
        self._refresh()
        scaling = Scaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        return self._rounds.extract(scaling)

    def exchange(self, message: Tensor) -> Tensor:
        """Sends the message on the route and returns the result, for "gather" the messages of all ranks, uint8 [W, B].

        The only stage that uses the network, unless there are two levels. The first call also runs the handshake.
        """
        return self._rounds.exchange(message)

    @torch.no_grad()
    def apply(self, messages: Tensor) -> None:
        """Checks all of what `exchange` returned, then updates the parameters from it. No network.

        If any rank's gradient was not finite, applies nothing and puts what was sent back into the momentum.
        """
        self._rounds.apply(messages)

    @torch.no_grad()
    def follow(self, leader: "DeMo") -> None:
        """Replaces `apply` on a rank that shares its parameters with `leader`, which has just applied the round.

        For simulation: replicas are equal, so many ranks can share one; this only updates the rank's own state.
        """
        self._rounds.follow(leader._rounds)

    @torch.no_grad()
    def rollback(self) -> None:
        """Puts what `extract` took out back into the momentum; does nothing if no round is in flight.

        The gradients stay in the momentum, so a failed or vetoed round does not lose them.
        """
        self._rounds.rollback()

    @torch.no_grad()
    def flush(self) -> None:
        """With delay: applies the exchange in flight. Call it on all ranks before saving, evaluating or stopping."""
        self._rounds.apply_late()

    def no_sync(self) -> AbstractContextManager[None]:
        """With overlap: the context for all backward passes of a step but the last, to accumulate gradients."""
        return self._rounds.hooks.paused()

    def fingerprint(self) -> int:
        """Returns a 64-bit hash of all parameters; if it differs between ranks, the replicas have drifted."""
        return self._rounds.fingerprint()

    @torch.no_grad()
    def resync(self, src: int = 0) -> None:
        """Copies parameters, step and rules' state of rank `src` to all ranks, which all call it; momenta stay."""
        self._rounds.resync(src)

    @property
    def stats(self) -> Stats:
        """The cost of the last step."""
        return self._rounds.stats

    # State: groups, checkpoints, copies

    def _begin(self, process_group: Any, options: Options, team: Team | None = None) -> None:
        self._rounds = Rounds(Meeting(process_group, team, options.in_background), options)
        self._refreshed = False

    def _refresh(self) -> None:
        self._rounds.refresh(self.param_groups, self.state)
        self._refreshed = True

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, but checks every key and value. Call it between steps, on all ranks alike."""
        settings.check_names(param_group)
        settings.check({**self.defaults, **param_group})
        super().add_param_group(settings.plain(param_group))
        try:
            for parameter in self.param_groups[-1]["params"]:
                check_parameter(parameter)
            check_matrices(self.param_groups[-1]["update"], self.param_groups[-1]["params"])
            if self._refreshed:
                self._refresh()
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but the state keeps its dtype (bfloat16 parameters have float32 momentum).

        ValueError or TypeError, with nothing changed, if the state is not DeMo's, has other shapes or invalid settings.
        """
        saved: dict[int, dict[str, Any]] = {}

        def remember(_: torch.optim.Optimizer, final: dict[str, Any]) -> None:
            for own, group in zip(self.param_groups, final["param_groups"], strict=False):
                merged = {**self.defaults, **group}
                settings.check({name: merged[name] for name in settings.NAMES})
                check_route(self._rounds.options.route, merged)
                check_matrices(merged["update"], own["params"])
            saved.update(state.loadable(final, self.param_groups))
            if "late" in final:
                self._rounds.check_late(final["late"])

        handle = self.register_load_state_dict_pre_hook(remember)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for number, parameter in enumerate(self._parameters()):
            state.restore(self.state[parameter], saved[number])
        if "late" in state_dict:
            self._rounds.take_up(state_dict["late"])

    def state_dict(self, *, under_way: bool = False) -> dict[str, Any]:
        """As in torch, but only between steps, and with delay only after `flush`. Never runs a step or a collective.

        `under_way`: do not require a flush; store the exchange in flight as "late", which `load_state_dict` resumes.
        """
        if not under_way:
            self._rounds.require_flushed("state_dict")
        self._rounds.require_settled("state_dict")
        found, late = super().state_dict(), self._rounds.late_state()
        found["param_groups"] = [settings.plain(group) for group in found["param_groups"]]
        return {**found, "late": late} if late else found

    def __getstate__(self) -> dict[str, Any]:
        self._rounds.require_flushed("copying or pickling")
        packed = super().__getstate__()
        return {
            **packed,
            "state": state.unshared(self.state),
            "process_group": lost(self._rounds.meeting.process_group),
            "team": self._rounds.meeting.team,
            "options": self._rounds.options,
        }

    def __setstate__(self, packed: dict[str, Any]) -> None:
        if "process_group" in packed:  # a pickle or a copy; otherwise load_state_dict calls this
            self._begin(packed.pop("process_group"), packed.pop("options"), packed.pop("team"))
        super().__setstate__(packed)
        for group in self.param_groups:
            for name in settings.NAMES:
                group.setdefault(name, self.defaults[name])
        self._rounds.renew()
        self._refresh()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DeMo":
        twin: DeMo = type(self).__new__(type(self))
        memo[id(self)] = twin
        packed = copy.deepcopy(self.__getstate__(), memo)
        shared = self._rounds.meeting.process_group  # it cannot be copied
        twin.__setstate__({**packed, "process_group": shared})
        return twin

"""DeMo, Decoupled Momentum Optimization (Peng, Quesnelle, Kingma, arXiv 2411.19870): the path of a step.

Shapes: W ranks, B bytes in a message, C chunks, K kept.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

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
        update: what is applied of the decoded update, the same on all ranks: "signum" (its sign), "sgd" (itself),
            "nesterov", "lion", "adamw" (its second moment) or "muon" (matrices: see `demopt.muon_groups`);
            docs/update-rules.md has their rates.
        reduction: "senders" (mean over the ranks that sent a coefficient) or "mean" (over all ranks).
        values: what values are on the wire: integers with one scale a chunk, "sign" (+-1), "2-bit" (+-1, +-2), "int8",
            or floats, "bfloat16", "float32", "float64".
        weight_decay: decoupled, times lr.
        gradient_scale: how gradients enter the momentum: "ema", times 1 - momentum, or "lr", times lr (v1).
        tiling: "padded", or "divisor": v1's rule, with top_k whatever a tile's size.
        exact: whether decoding runs in integers, so that unlike machines compute the same bits; None is where values
            and transform allow it.
        clip_to_median: no rank's chunk counts for more than the median rank's: a bound on what a hostile peer can do.
        beta1: decay of what "nesterov" and "lion" keep, in [0, 1): how much of it is mixed into the update.
        beta2: decay of the mean that "lion", of the second moment that "adamw" keeps, in [0, 1).
        eps: of "adamw", beside the root of the second moment.
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
        update: str = "signum",
        reduction: str = "senders",
        values: str = "sign",
        weight_decay: float = 0.0,
        gradient_scale: str = "ema",
        tiling: str = "padded",
        exact: bool | None = None,
        clip_to_median: bool = False,
        beta1: float = 0.9,
        beta2: float = 0.99,
        eps: float = 1e-8,
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
        """apply(exchange(extract())), after the closure where there is one.

        On an error nothing is applied, and what was to be sent is back in the momentum.
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
            for name in ("grad_scale", "found_inf"):  # GradScaler removes them only after a step that succeeded
                self.__dict__.pop(name, None)
            raise
        finally:
            self._rounds.hooks.forget()
        return loss

    @torch.no_grad()
    def extract(self) -> Tensor:
        """Takes the gradients into the momentum, and what is to be sent out of it: this rank's message, uint8 [B].

        No network. Follow it with `apply`, or with `rollback`. Where a gradient is not finite the momentum stays as
        it is, and the message says so. With overlap, backward has done the most of it, and some is on its way.
        """
        self._refresh()
        scaling = Scaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        return self._rounds.extract(scaling)

    def exchange(self, message: Tensor) -> Tensor:
        """What all ranks make of the messages, by the route: for "gather" the messages, uint8 [W, B].

        The only stage with a network. The first call also runs the handshake.
        """
        return self._rounds.exchange(message)

    @torch.no_grad()
    def apply(self, messages: Tensor) -> None:
        """Updates the parameters from what `exchange` returned; all of it is checked first. No network.

        Where a rank's gradient was not finite nothing is applied, and what was sent goes back into the momentum.
        """
        self._rounds.apply(messages)

    @torch.no_grad()
    def follow(self, leader: "DeMo") -> None:
        """As `apply`, where `leader`, a rank that shares this one's parameters, has just applied the round to them.

        For simulation: replicas are equal, so that many ranks can share one; only their own states are brought forward.
        """
        self._rounds.follow(leader._rounds)

    @torch.no_grad()
    def rollback(self) -> None:
        """Undoes the sending of `extract`: what it took out of the momentum is put back. Nothing to do otherwise.

        The gradients stay in the momentum, so a failed or vetoed round loses nothing of them.
        """
        self._rounds.rollback()

    @torch.no_grad()
    def flush(self) -> None:
        """With delay: applies what is still under way, on all ranks; before saving, evaluating or stopping."""
        self._rounds.apply_late()

    def no_sync(self) -> AbstractContextManager[None]:
        """With overlap: for all backward passes of a step but the last, whose gradients add up."""
        return self._rounds.hooks.paused()

    def fingerprint(self) -> int:
        """A 64-bit hash of all parameters: where it differs between ranks, the replicas have drifted."""
        return self._rounds.fingerprint()

    @torch.no_grad()
    def resync(self, source: int = 0) -> None:
        """Gives every rank the parameters, step and update rules' state of rank `source`. All call it; momenta stay."""
        self._rounds.resync(source)

    @property
    def stats(self) -> Stats:
        """What the last step cost."""
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
        """As in torch, with every key and value checked; allowed at any time between steps, on all ranks alike."""
        settings.check_names(param_group)
        settings.check({**self.defaults, **param_group})
        super().add_param_group(param_group)
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

        ValueError, with nothing changed, where the state is not DeMo's or of other shapes.
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
        """As in torch; between steps only, and with delay after `flush`. Never runs a step or a collective.

        `under_way`: instead of a flush, "late" holds what is under way, for `load_state_dict` to go on with.
        """
        if not under_way:
            self._rounds.require_flushed("state_dict")
        self._rounds.require_settled("state_dict")
        found, late = super().state_dict(), self._rounds.late_state()
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
        if "process_group" in packed:  # a pickle or a copy; otherwise this is load_state_dict at work
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

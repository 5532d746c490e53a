"""DeMo, Decoupled Momentum Optimization (Peng, Quesnelle, Kingma, arXiv 2411.19870)."""

import copy
from collections.abc import Callable, Iterable
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports all of dynamo
from torch.optim.optimizer import ParamsT

from demopt.codec.gradients import check_group, check_matrices, check_parameters, forget_scale, unscaling_of
from demopt.codec.hyperparameters import GRADIENT_SCALES, Codec, Hyperparameters, check_names, codec_of, plain
from demopt.core.rules import Rule
from demopt.interrupts import uninterrupted
from demopt.optim.mistakes import look_at_models
from demopt.optim.replicated import ReplicatedOptimizer, unrecorded
from demopt.replicator.replicator import Replicator
from demopt.replicator.rounds import Rounds, VaryingExchange
from demopt.replicator.wiring import Options
from demopt.state import check_saved, read_state
from demopt.validation import check_choice

#: arXiv 2411.19870 v1 and its code: gradients times `lr` enter the momentum, and K is fixed for any chunk.
V1: dict[str, Any] = {
    "momentum_decay": 0.999, "alpha": 1.0, "gradient_scale": "lr", "chunking": "divisor",
    "top_k": 32, "update": "signum", "codec": Codec(values="float32", reduction="senders"),
}  # fmt: skip

#: arXiv 2411.19870 v2: the momentum is an exponential moving average; a fifth of the sent part is subtracted from it.
V2: dict[str, Any] = {
    "momentum_decay": 0.995, "alpha": 0.2, "gradient_scale": "ema", "chunking": "padded",
    "top_k": 32, "update": "signum", "codec": Codec(values="float32", reduction="mean"),
}  # fmt: skip

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


class DeMo(ReplicatedOptimizer):
    """Optimizer whose ranks exchange only the largest transform coefficients of their momenta.

    Pass the parameters of the plain model, without DistributedDataParallel, and call `step` on every rank. The
    momentum, in the transform domain, is `state[p]["momentum"]` [chunks, N], float32 (float64 for float64 parameters).
    Buffers such as BatchNorm's running statistics are not synchronized: call `demopt.broadcast_buffers(model)` before
    evaluating or saving. FSDP2 and tensor parallelism: docs/parallelism.md.

    Args:
        params: parameters or parameter groups; every hyper-parameter up to `maximize` can be given per group.
        lr: learning rate, >= 0.
        momentum_decay: decay b of the momentum, in [0, 1).
        alpha: fraction of the sent values that is subtracted from the momentum, in (0, 1].
        top_k: coefficients kept per full chunk x chunk block, at most all of them; smaller chunks keep proportionally
            fewer, at least 1.
        update: the rule that turns the decoded update, the same on all ranks, into a step: "signum" (its sign), "sgd"
            (unchanged), "nesterov", "lion", "adamw" (divided by the root of its second moment) or "muon" (matrices
            only: see `demopt.muon_groups`); or a rule with settings, such as `demopt.Lion(beta1=0.95)`, which the
            group holds as text. docs/algorithm.md gives learning rates.
        weight_decay: decoupled weight decay, multiplied by lr.
        gradient_scale: factor on gradients that enter the momentum: "ema", 1 - momentum_decay, or "lr", lr itself (v1).
        chunking: "padded", or "divisor", v1's rule, which also keeps top_k coefficients for any chunk size.
        maximize: ascend instead of descend.
        codec: a `Codec`: chunks, transform, encoding and reduction. Its fields may be given by their own names, too.
            In a parameter group, all of them but `kernels` count.
        fingerprint_every: steps between comparisons of all ranks' parameters (DriftError if they differ); 0: never.
        process_group: the ranks that train together: a ProcessGroup, a DeviceMesh of one dimension, or of two (nodes,
            ranks of a node: gradients are averaged inside a node, which then counts as one rank), or an Exchange. None:
            the default group, or a single rank if torch.distributed is not initialised by the first step.

    Raises:
        ValueError, TypeError: an invalid hyper-parameter, parameter or gradient.
        SettingsError: settings differ between ranks (at the first step, or after a change). ExchangeError: a peer is
            lost. MessageError: a message was refused. DriftError: see `fingerprint_every`. In each case nothing was
            applied, and the gradients that have entered the momentum stay there. Except after an error in the middle of
            `apply` (a DriftError): all of the round has left the momentum, and the parameters have only a part of it.

    Source: arXiv 2411.19870, v1 section 3 and v2 section 3.

    Examples:
        >>> model = torch.nn.Linear(8, 2)
        >>> optimizer = DeMo(model.parameters(), lr=1e-3)
        >>> model(torch.ones(4, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.stats.kept
        3
    """

    @unrecorded
    def __init__(
        self,
        params: ParamsT,
        lr: float = 4e-4,
        *,
        momentum_decay: float = 0.99,
        alpha: float = 1.0,
        top_k: int | None = 32,
        update: str | Rule = "signum",
        weight_decay: float = 0.0,
        gradient_scale: str = "ema",
        chunking: str = "padded",
        maximize: bool = False,
        codec: Codec = Codec(),  # noqa: B008  it is frozen
        fingerprint_every: int = 100,
        process_group: Any = None,
        **of_codec: Any,
    ) -> None:
        codec = codec_of(DeMo, of_codec, codec)
        if any(frame.f_globals.get("__name__") == _ZERO for frame, _ in walk_stack(None)):
            raise TypeError(
                "ZeroRedundancyOptimizer gives each rank other parameters, and DeMo exchanges between ranks that have "
                "the same: give DeMo all of the model's parameters, without ZeroRedundancyOptimizer"
            )
        is_model = isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList)
        if is_model or not isinstance(params, Iterable):
            raise TypeError(f"params is a {type(params).__name__}; give parameters, such as model.parameters()")
        defaults = {
            "lr": lr, "momentum_decay": momentum_decay, "alpha": alpha, "top_k": top_k, "update": update,
            "weight_decay": weight_decay, "gradient_scale": gradient_scale, "chunking": chunking, "maximize": maximize,
            **codec.hyperparameters(),
        }  # fmt: skip
        _settings_of(defaults)
        super().__init__(params, plain(defaults))
        check_parameters([p for group in self.param_groups for p in group["params"]])
        _refuse_folder(process_group)
        options = Options("auto", fingerprint_every, codec.kernels)
        self.replicator = Replicator(self.param_groups, self.state, options, process_group)
        self._rounds = Rounds(self.replicator)

    @_disable_dynamo  # torch.compile leaves it out of graphs, as it does torch's own optimizers
    @unrecorded
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Runs the closure, if any, then a round. On an error (see `DeMo`), gradients stay in the momentum."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._rounds.settle()
        self.replicator.require_idle("step")
        try:
            with self._rounds.settled():
                self._extract()
                self.apply(self.replicator.exchange())
        except BaseException:
            forget_scale(self)
            raise
        return loss

    @unrecorded
    def extract(self) -> Tensor:
        """Adds the gradients to the momentum, and returns this rank's message, uint8 [B]: its largest coefficients.

        No network between nodes, except that with two levels the first call runs the handshake. Follow it with `apply`
        or `rollback`. If a gradient is not finite, the momentum stays unchanged and a flag in the message reports it.
        """
        return self._extract(by_user=True)

    def _extract(self, by_user: bool = False) -> Tensor:
        self._all_states = None
        self._follow_changes()
        if not self.replicator.session.has_met:
            look_at_models(self)
        self._warn_of_frozen()
        gradients, unscale = self.replicator.gradients(self.replicator.parameters, unscaling_of(self))
        self._note_gradients(gradients)
        self._warn_unless_trained()
        return self.replicator.extract(gradients, unscale, by_user=by_user)

    @unrecorded
    def apply(self, messages: Tensor) -> None:
        """Checks all of the result of `exchange`, then updates the parameters from it. No network between nodes.

        If any rank's gradient was not finite, nothing is applied. A rank that sends nothing needs only this call.
        """
        self._all_states = None
        self.replicator.apply(messages)

    @unrecorded
    def rollback(self) -> None:
        """Forgets the extracted message, if any. Gradients stay in the momentum: a vetoed round does not lose them."""
        self.replicator.rollback()

    @unrecorded
    def fingerprint(self, state: bool = False) -> int:
        """Returns a 64-bit hash of all parameters, the same on equal ranks; `state`: also of steps and rules' state."""
        return self.replicator.fingerprint(state)

    @unrecorded
    def resync(self, src: int = 0) -> None:
        """Copies parameters, step and rules' state of rank `src` to all ranks, which all call it; momenta stay.

        Ranks of a node that hold copies of a parameter all take those of the first, with its momentum.
        """
        self._all_states = None
        self._follow_changes()
        self.replicator.resync(src)

    @unrecorded
    def regroup(self, process_group: Any) -> None:
        """Continues with other ranks: between two rounds, also after an error. Parameters and momenta stay as they are.

        The next step runs the handshake, in which ranks whose parameters differ take those of rank 0. All ranks must be
        at the same step: if one is new, or stopped earlier, all call `resync` first.
        """
        _refuse_folder(process_group)
        self._all_states = None
        self.replicator.regroup(process_group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, but checks every key and value. Call it between steps, on all ranks alike."""
        check_group(param_group)
        if isinstance(codec := param_group.get("codec"), Codec):
            rest = {name: value for name, value in param_group.items() if name != "codec"}
            param_group = {**codec.hyperparameters(), **rest}
        check_names(param_group)
        _settings_of({**self.defaults, **param_group})
        self._all_states = None
        with uninterrupted():  # otherwise the state of its parameters would stay without the group
            super().add_param_group(plain(param_group))
            if not hasattr(self, "replicator"):  # torch's constructor adds the first groups; ours checks them together
                return
            try:
                check_parameters([p for group in self.param_groups for p in group["params"]])
                self.replicator.wiring()
            except BaseException:
                del self.param_groups[-1]
                raise

    def own_state_dict(self) -> dict[str, Any]:
        """The state of this rank alone, with update rules as text."""
        found = super().own_state_dict()
        return {**found, "param_groups": [plain(group) for group in found["param_groups"]]}

    def _follow_changes(self) -> None:
        """Takes groups, and momenta in `state`, that a script has replaced; dropped ones start at zero, as in torch."""
        replicator = self.replicator
        if replicator.round is not None:
            return
        if replicator.groups is not self.param_groups:
            check_parameters([p for group in self.param_groups for p in group["params"]])
            replicator.groups = self.param_groups
        replicator.wiring()  # a parameter may begin to train only now
        trained = [parameter for parameter in replicator.parameters if parameter.requires_grad]
        entries = [(self.state.get(parameter, {}), replicator.in_buffers[parameter]) for parameter in trained]
        are_views = all(entry.get(name) is value for entry, held in entries for name, value in held.items())
        if self.state is not replicator.state or not are_views:
            for number, parameter in enumerate(replicator.parameters):
                entry, held = self.state.get(parameter, {}), replicator.in_buffers.get(parameter, {})
                for name in entry.keys() & held.keys() - {"step"}:
                    if (came := getattr(entry[name], "shape", None)) != (wanted := held[name].shape):
                        whose = f"{name!r} in the state of parameter {number} has shape {came and [*came]}"
                        raise ValueError(f"{whose}; give {[*wanted]}, or delete it: then it begins at zero")
            replicator.state = self.state
            replicator.restore({parameter: entry for parameter, entry in self.state.items() if entry})

    def _load(self, state_dict: dict[str, Any]) -> None:
        numbered = read_state(state_dict, self.param_groups, of_local=False)
        groups, settings_of = [], dict[Tensor, Hyperparameters]()
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            loaded = {name: value for name, value in {**self.defaults, **saved_group}.items() if name != "params"}
            groups.append(plain(copy.deepcopy(loaded)))  # a learning rate may be a tensor, into which schedulers write
            settings = _settings_of(groups[-1])
            check_matrices(settings.update, group["params"])
            settings_of |= dict.fromkeys(group["params"], settings)
        saved_of = check_saved(numbered, settings_of, self.replicator.rank_and_size, of_local=False)
        with uninterrupted():
            groups_before = [dict(group) for group in self.param_groups]
            state_before = {parameter: dict(entry) for parameter, entry in self.replicator.state.items()}
            try:
                for group, loaded in zip(self.param_groups, groups, strict=True):
                    group.update(loaded)
                self.replicator.restore({parameter: saved.ours for parameter, saved in saved_of.items()})
            except BaseException:  # settings that do not fit together, such as exact sums of float64
                for group, before in zip(self.param_groups, groups_before, strict=True):
                    group.clear()
                    group.update(before)
                self.replicator.restore(state_before)
                raise

    def __getstate__(self) -> dict[str, Any]:
        self._rounds.settle()
        self._follow_changes()
        return {"defaults": self.defaults, "replicator": self.replicator}

    def __setstate__(self, packed: dict[str, Any]) -> None:
        if replicator := packed.get("replicator"):  # otherwise a script replaces parts, such as the state
            packed = {**packed, "param_groups": replicator.groups, "state": replicator.state}
            self._rounds = Rounds(replicator)
        super().__setstate__(packed)


def _refuse_folder(process_group: Any) -> None:
    if isinstance(process_group, VaryingExchange):
        raise ValueError("DeMo exchanges messages at every step, too often for a folder; give it to LocalDeMo")


def _settings_of(group: dict[str, Any]) -> Hyperparameters:
    """Checks a parameter group with all hyper-parameters; also refuses a scale that only LocalDeMo has."""
    check_choice("gradient_scale", group["gradient_scale"], GRADIENT_SCALES)
    return Hyperparameters.of(group)

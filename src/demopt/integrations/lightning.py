"""Lightning: a strategy that leaves all synchronisation of gradients to the optimizer."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim.swa_utils import AveragedModel

from demopt.exchange.dtensor import parts_of
from demopt.exchange.process_group import resolve
from demopt.integrations import require_demo
from demopt.optim.local_demo import LocalDeMo
from demopt.parallel import broadcast_buffers, unsync
from demopt.replicator.session import copy_tensors


class DeMoStrategy(DDPStrategy):
    """DDPStrategy, with its launchers, samplers and devices, but without DistributedDataParallel.

        Trainer(strategy=DeMoStrategy(), accelerator="cpu", devices=2)

    `configure_optimizers` returns a DeMo or LocalDeMo. All models start as rank 0's. Checkpoints hold all ranks' states
    of the optimizer, because Lightning calls its `consolidate_state_dict`. Arguments are DDPStrategy's; those for
    DistributedDataParallel have no effect. TypeError if `configure_optimizers` returns another optimizer.

    A LocalDeMo's global weights are what Lightning validates, tests, averages (`WeightAveraging`) and saves; when
    training ends, a last round makes the weights of all ranks equal. TypeError with `StochasticWeightAveraging`, which
    would average each rank's local weights.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = ExitStack()  # holds `shared()` open during an evaluation
        self._of_fit = ExitStack()  # undoes a fit's changes to its Trainer

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers, and refuses those that would let the ranks drift apart."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            require_demo(optimizer, "with DeMoStrategy", 'use strategy="ddp", or return a DeMo or LocalDeMo')
        if isinstance(self.precision_plugin, MixedPrecision):
            self._make_clip(self.precision_plugin)
        if self._local_demos:
            if any(isinstance(each, StochasticWeightAveraging) for each in trainer.callbacks):
                raise TypeError(
                    "StochasticWeightAveraging would average each rank's local weights; with LocalDeMo give the "
                    "Trainer WeightAveraging or EMAWeightAveraging, which DeMoStrategy shows the global ones"
                )
            last = _LastRound(self._local_demos)
            trainer.callbacks.insert(0, last)
            self._of_fit.callback(trainer.callbacks.remove, last)

    def _make_clip(self, precision: MixedPrecision) -> None:
        """Makes `precision` clip for optimizers that GradScaler lets unscale gradients in their step, which it refuses.

        In manual optimization it still refuses float16: one optimizer's step makes GradScaler forget that it has
        unscaled another's gradients.
        """
        refusing = precision.clip_gradients

        def clip_gradients(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if precision.scaler is not None:
                if not self.lightning_module.automatic_optimization:
                    return refusing(optimizer, *args, **kwargs)
                precision.scaler.unscale_(optimizer)
            return Precision.clip_gradients(precision, optimizer, *args, **kwargs)

        precision.clip_gradients = clip_gradients

    def on_train_start(self) -> None:
        """Makes `WeightAveraging` average the global weights, which are the same on all ranks."""
        averages = [getattr(each, "_average_model", None) for each in self.lightning_module.trainer.callbacks]
        for average in averages if self._local_demos else ():
            if isinstance(average, AveragedModel):
                vars(average)["update_parameters"] = self._shown(average.update_parameters)

    def _shown(self, update: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def update_parameters(model: nn.Module) -> None:
            with ExitStack() as shared:
                for optimizer in self._local_demos:
                    shared.enter_context(optimizer.shared())
                update(model)

        return update_parameters

    def on_validation_start(self) -> None:
        """Gives the model the global weights."""
        self._share(self._shared)

    def on_validation_end(self) -> None:
        """Gives the model this rank's local weights back."""
        self._shared.close()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the model's state with the global weights."""
        with ExitStack() as shared:
            self._share(shared)
            found: dict[str, Any] = super().lightning_module_state_dict()
            return copy.deepcopy(found) if self._local_demos else found  # local weights come back into the tensors

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As in Lightning, with the model on the optimizer's device: after training the model is on the host."""
        module, device = self.lightning_module, self.lightning_module.device
        if device != self.root_device:
            module.to(self.root_device)
        try:
            found: dict[str, Any] = super().optimizer_state(optimizer)
            return found
        finally:
            if device != self.root_device:
                module.to(device)

    def teardown(self) -> None:
        """Undoes a fit's changes, even if it failed."""
        self._shared.close()
        self._of_fit.close()
        super().teardown()

    def _share(self, shared: ExitStack) -> None:
        """Enters each `shared()`, but only in a fit: afterwards the model may have other weights, as a checkpoint's."""
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            return
        for optimizer in self._local_demos:
            if optimizer.replicator.in_flight:
                optimizer.flush()
            if optimizer.weights_differ:
                shared.enter_context(optimizer.shared())

    @property
    def _local_demos(self) -> list[LocalDeMo]:
        plain = (getattr(each, "_optimizer", each) for each in self.optimizers)
        return [each for each in plain if isinstance(each, LocalDeMo)]

    def configure_ddp(self) -> None:
        """Starts all models as rank 0's, as DistributedDataParallel would, and wraps nothing."""
        assert self.model is not None
        unsync(self.model)  # which changes nothing in it, and lets DeMo notice parameters that it does not have
        copy_tensors(resolve(None), [*parts_of(self.model.parameters())], src=0)
        broadcast_buffers(self.model)


class _LastRound(Callback):
    """Runs the last round before other callbacks end training: they may export the model, or put averages into it."""

    def __init__(self, optimizers: list[LocalDeMo]) -> None:
        self._optimizers = optimizers

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        for optimizer in self._optimizers:
            if optimizer.local_steps or optimizer.replicator.in_flight:
                optimizer.finish_round(last=True)

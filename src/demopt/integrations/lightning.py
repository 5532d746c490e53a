"""Lightning: a strategy that leaves all synchronisation of gradients to the optimizer."""

import copy
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy

from demopt.integrations import require_demo
from demopt.optim.local_demo import LocalDeMo
from demopt.parallel import unsync


class DeMoStrategy(DDPStrategy):
    """DDPStrategy, with its launchers, samplers and devices, but without DistributedDataParallel.

        Trainer(strategy=DeMoStrategy(), accelerator="cpu", devices=2)

    `configure_optimizers` returns a DeMo or LocalDeMo. All models start as rank 0's. Checkpoints hold all ranks' states
    of the optimizer, because Lightning calls its `consolidate_state_dict`. Arguments are DDPStrategy's; those for
    DistributedDataParallel have no effect. TypeError if `configure_optimizers` returns another optimizer.

    A LocalDeMo's global weights are what Lightning validates, tests and saves; when training ends, a last round makes
    the weights of all ranks equal.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = ExitStack()  # holds `shared()` open during an evaluation

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers, and refuses those that would leave ranks to drift apart."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            require_demo(optimizer, "with DeMoStrategy", 'use strategy="ddp", or return a DeMo or LocalDeMo')
        if isinstance(self.precision_plugin, MixedPrecision):
            self._make_clip(self.precision_plugin)

    def _make_clip(self, precision: MixedPrecision) -> None:
        """Makes it clip gradients of optimizers that GradScaler lets unscale them in their step, which it refuses.

        Before a step by hand it refuses float16 as before: one optimizer's step makes GradScaler forget what it has
        unscaled for another.
        """
        refusing = precision.clip_gradients

        def clip_gradients(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if precision.scaler is not None:
                if not self.lightning_module.automatic_optimization:
                    return refusing(optimizer, *args, **kwargs)
                precision.scaler.unscale_(optimizer)
            return Precision.clip_gradients(precision, optimizer, *args, **kwargs)

        precision.clip_gradients = clip_gradients

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

    def on_train_end(self) -> None:
        """Runs the last round."""
        for optimizer in self._local_demos:
            if optimizer.local_steps or optimizer.replicator.in_flight:
                optimizer.finish_round(last=True)

    def _share(self, shared: ExitStack) -> None:
        for optimizer in self._local_demos:
            if optimizer.replicator.in_flight:
                optimizer.flush()
            shared.enter_context(optimizer.shared())

    @property
    def _local_demos(self) -> list[LocalDeMo]:
        plain = (getattr(each, "_optimizer", each) for each in self.optimizers)
        return [each for each in plain if isinstance(each, LocalDeMo)]

    def configure_ddp(self) -> None:
        """Starts all models as rank 0's, as DistributedDataParallel would, and wraps nothing."""
        assert self.model is not None
        unsync(self.model)  # which changes nothing in it, and lets DeMo notice parameters that it does not have
        for tensor in self.model.state_dict().values():
            whole = tensor.contiguous()
            torch.distributed.broadcast(whole, src=0)
            tensor.copy_(whole)

"""Lightning: a strategy that leaves all synchronisation of gradients to the optimizer."""

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from demopt.integrations.require import require_demo
from demopt.parallel import unsync


class DeMoStrategy(DDPStrategy):
    """DDPStrategy, with its launchers, samplers and devices, but without DistributedDataParallel.

        Trainer(strategy=DeMoStrategy(), accelerator="cpu", devices=2)

    `configure_optimizers` returns a DeMo or LocalDeMo. All models start as rank 0's. Checkpoints hold all ranks' states
    of the optimizer, because Lightning calls its `consolidate_state_dict`. Arguments are DDPStrategy's; those for
    DistributedDataParallel have no effect. TypeError if `configure_optimizers` returns another optimizer.
    """

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers, and refuses those that would leave ranks to drift apart."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            require_demo(optimizer, "with DeMoStrategy", 'use strategy="ddp", or return a DeMo or LocalDeMo')

    def configure_ddp(self) -> None:
        """Starts all models as rank 0's, as DistributedDataParallel would, and wraps nothing."""
        assert self.model is not None
        unsync(self.model)  # which changes nothing in it, and lets DeMo notice parameters that it does not have
        for tensor in self.model.state_dict().values():
            whole = tensor.contiguous()
            torch.distributed.broadcast(whole, src=0)
            tensor.copy_(whole)

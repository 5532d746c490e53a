"""Lightning: a strategy that leaves all synchronisation of gradients to the optimizer."""

import torch
from lightning.pytorch.strategies import DDPStrategy


class DeMoStrategy(DDPStrategy):
    """DDPStrategy, with its launchers, samplers and devices, but without DistributedDataParallel.

        Trainer(strategy=DeMoStrategy(), accelerator="cpu", devices=2)

    `configure_optimizers` returns a DeMo or LocalDeMo. All models start as rank 0's. Checkpoints hold all ranks' states
    of the optimizer, because Lightning calls its `consolidate_state_dict`. Arguments are DDPStrategy's; those for
    DistributedDataParallel have no effect.
    """

    def configure_ddp(self) -> None:
        """Starts all models as rank 0's, as DistributedDataParallel would, and wraps nothing."""
        assert self.model is not None
        for tensor in self.model.state_dict().values():
            whole = tensor.contiguous()
            torch.distributed.broadcast(whole, src=0)
            tensor.copy_(whole)

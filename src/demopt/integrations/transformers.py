"""transformers: `Trainer` without dense synchronisation, with every rank's momentum in its checkpoints."""

import gc
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from demopt.integrations.require import require_demo
from demopt.parallel import unsync


class DeMoCallback(TrainerCallback):
    """Callback that a `Trainer` with DeMo or LocalDeMo needs, on all ranks.

        Trainer(..., optimizers=(optimizer, None), callbacks=[DeMoCallback()])
        Trainer(..., optimizer_cls_and_kwargs=(DeMo, {"lr": 1e-3}), callbacks=[DeMoCallback()])

    When training begins, it stops dense gradient synchronisation (`demopt.unsync`). With delay=1, it applies the round
    in flight before each save and evaluation. After each save, `optimizer.pt` gets all ranks' states in place of rank
    0's, so that resuming restores each rank. TypeError if the Trainer has another optimizer, such as its default AdamW.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Stops dense synchronisation."""
        _checked(parts["optimizer"])
        model = parts["model"]
        for wrapper in [model, *_wrappers(model)]:
            unsync(wrapper)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """With delay=1, applies the round in flight before the Trainer saves or evaluates."""
        optimizer = _checked(parts["optimizer"])
        if (control.should_save or control.should_evaluate) and optimizer.replicator.in_flight:
            optimizer.flush()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """Writes all ranks' states of the optimizer into the checkpoint that was just saved."""
        if args.save_only_model:
            return
        optimizer = _checked(parts["optimizer"])
        optimizer.consolidate_state_dict()
        if args.should_save:
            folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            torch.save(optimizer.state_dict(), folder / OPTIMIZER_NAME)


def _checked(optimizer: Any) -> Any:
    return require_demo(
        optimizer,
        "with DeMoCallback",
        "give the Trainer optimizers=(demopt.DeMo(...), None), or leave the callback out",
    )


def _wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Returns the wrappers of a model: callbacks get the model inside, which has no reference to them."""
    return [each for each in gc.get_objects() if type(each) is DistributedDataParallel and each.module is model]

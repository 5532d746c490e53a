"""Accelerate: `accelerator.save_state` and `load_state` with every rank's momentum."""

from typing import Any

from accelerate import Accelerator

from demopt.integrations.require import require_demo


def register(accelerator: Accelerator, optimizer: Any) -> None:
    """Makes `accelerator.save_state` and `load_state` cover all ranks' states of a DeMo or LocalDeMo.

    `optimizer` may be wrapped by `accelerator.prepare`. Call it on all ranks, and `demopt.unsync` on
    the prepared model, which is wrapped in DistributedDataParallel:

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        demopt.unsync(model)
        register(accelerator, optimizer)

    The main process then holds all ranks' states while it saves, W times one rank's (see
    `DeMo.consolidate_state_dict`).

    TypeError if the optimizer is another one.
    """
    plain = require_demo(optimizer, "after demopt.unsync", "without DeMo, leave out demopt.unsync and register")
    accelerator.register_save_state_pre_hook(lambda *_: plain.consolidate_state_dict())

"""Accelerate: `accelerator.save_state` and `load_state` with every rank's momentum."""

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from demopt.integrations import require_demo
from demopt.optim.local_demo import LocalDeMo
from demopt.state import load_file, reshard

_registered: WeakKeyDictionary[Accelerator, int] = WeakKeyDictionary()


def register(accelerator: Accelerator, optimizer: Any) -> Any:
    """Makes `accelerator.save_state` and `load_state` cover all ranks' states of a DeMo or LocalDeMo, and returns that.

    Call it after `accelerator.prepare`, with its wrapper or the plain optimizer, on all ranks, and `demopt.unsync` on
    the prepared model, which is wrapped in DistributedDataParallel:

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        demopt.unsync(model)
        demo = register(accelerator, optimizer)  # prepare's wrapper has no `shared`
        ...
        with demo.shared():  # LocalDeMo: evaluate and save_pretrained here

    Each rank writes a file of its own into the folder, and nothing travels; nodes without a shared folder each keep
    their part of the checkpoint. The model is saved with the global weights.

    TypeError if the optimizer is another one, ValueError if it was not prepared.
    """
    plain = require_demo(optimizer, "after demopt.unsync", "without DeMo, leave out demopt.unsync and register")
    if not any(optimizer is each or plain is each.optimizer for each in accelerator._optimizers):
        raise ValueError(
            f"the {type(plain).__name__} was not prepared, and accelerator.load_state would leave it as it is; give it "
            "to accelerator.prepare, and then to register"
        )
    number = _registered[accelerator] = _registered.get(accelerator, -1) + 1
    found: list[dict[str, Any]] = []  # of this rank, inside load_state: the optimizer loads it in place of rank 0's
    load_state = accelerator.load_state

    def save(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        if accelerator.is_local_main_process:
            for path in Path(folder).glob(_name(number, "*", "*")):  # of an earlier checkpoint in this folder
                path.unlink(missing_ok=True)
        accelerator.wait_for_everyone()
        torch.save(plain.own_state_dict(), Path(folder, _name(number, *plain.replicator.rank_and_size)))
        if isinstance(plain, LocalDeMo):
            _show_global(plain, models, weights)

    def load(*given: Any) -> None:
        found[:] = _own(given[-1], number, *plain.replicator.rank_and_size)

    def load_state_and_forget(*args: Any, **kwargs: Any) -> None:
        try:
            load_state(*args, **kwargs)
        finally:
            found.clear()  # it may have failed before the optimizer's turn, and then another state may be loaded

    accelerator.load_state = load_state_and_forget
    if isinstance(plain, LocalDeMo):
        plain.warns_of_saving = False  # Accelerate saves rank 0's state, too, which nobody loads
    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    plain.register_load_state_dict_pre_hook(lambda *given: found.pop() if found else given[-1])
    return plain


def _show_global(optimizer: LocalDeMo, models: list[nn.Module], weights: list[dict[str, Tensor]]) -> None:
    """Replaces local weights by the global ones in the states of models that Accelerate is about to write."""
    mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    with optimizer.shared():
        shown = {parameter: parameter.detach().clone() for parameter in mine}
    for model, state in zip(models, weights, strict=False):  # FSDP and DeepSpeed have none here
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter in shown and name in state:
                state[name] = shown[parameter]


def _name(number: int, rank: int | str, world_size: int | str) -> str:
    """Returns the name of a rank's file; `number` counts the optimizers of an Accelerator."""
    return f"demopt{number}_rank{rank}_of_{world_size}.pt"


def _own(folder: str, number: int, rank: int, world_size: int) -> list[dict[str, Any]]:
    """Returns this rank's state from the files; its share, if other ranks saved them. ValueError if one is missing."""
    files = list(Path(folder).glob(_name(number, "*", "*")))
    if not files:
        return []
    old_size = int(files[0].stem.rpartition("_")[2])
    needed = [_name(number, old, old_size) for old in (range(old_size) if old_size != world_size else [rank])]
    missing = set(needed) - {path.name for path in files}
    if missing:
        lacks = f"{folder} lacks {', '.join(sorted(missing))}: each rank wrote its own state"
        raise ValueError(f"{lacks}; bring the files of all ranks into one folder")
    states = []
    for name in needed:
        try:
            with Path(folder, name).open("rb") as file:
                states.append(load_file(file))
        except ValueError as error:
            raise ValueError(f"{folder}/{name} cannot be read: {error}; load another checkpoint") from None
    return states if old_size == world_size else [reshard(states, world_size)[rank]]

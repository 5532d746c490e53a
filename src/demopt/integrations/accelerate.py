"""Accelerate: `accelerator.save_state` and `load_state` with every rank's momentum."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator

from demopt.integrations import require_demo, unwrapped
from demopt.optim.local_demo import LocalDeMo
from demopt.state import load_file, reshard

#: The optimizers of an Accelerator, in the order of `register`, each with the state that it is about to load.
_registered: WeakKeyDictionary[Accelerator, WeakKeyDictionary[Any, list[dict[str, Any]]]] = WeakKeyDictionary()


def register(accelerator: Accelerator, optimizer: Any) -> Any:
    """Makes the Accelerator save and load all ranks' states of the DeMo or LocalDeMo in `optimizer`; returns that one.

    Call it on all ranks after `accelerator.prepare`, with its wrapper or the plain optimizer. Call `demopt.unsync` on
    the prepared model, which DistributedDataParallel wraps:

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        demopt.unsync(model)
        demo = register(accelerator, optimizer)  # prepare's wrapper has no `shared`
        ...
        with demo.shared():  # LocalDeMo: evaluate and save_pretrained here

    Each rank writes a file of its own into the folder, and nothing travels; nodes without a shared folder each keep
    their part of the checkpoint. The model is saved with the global weights.

    TypeError if the optimizer is of another class, ValueError if it was not prepared.
    """
    plain = require_demo(optimizer, "after demopt.unsync", "without DeMo, leave out demopt.unsync and register")
    if not any(plain is unwrapped(each) for each in accelerator._optimizers):
        raise ValueError(
            f"the {type(plain).__name__} was not prepared, and accelerator.load_state would leave it as it is; give it "
            "to accelerator.prepare, and then to register"
        )
    if accelerator not in _registered:
        _registered[accelerator] = WeakKeyDictionary()
        _cover(accelerator)
    if plain not in _registered[accelerator]:
        found = _registered[accelerator][plain] = []
        plain.register_load_state_dict_pre_hook(lambda *given: found.pop() if found else given[-1])
    if isinstance(plain, LocalDeMo):
        plain.warns_of_saving = False  # Accelerate saves rank 0's state, too, which nobody loads
    return plain


def _cover(accelerator: Accelerator) -> None:
    """Makes `save_state` and `load_state` cover the registered optimizers that the Accelerator still has."""
    save_state, load_state = accelerator.save_state, accelerator.load_state

    def listed() -> list[Any]:  # without those of an earlier attempt, as after `free_memory`
        prepared = [*map(unwrapped, accelerator._optimizers)]
        return [plain for plain in _registered[accelerator] if any(plain is each for each in prepared)]

    def save_state_of_all(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as shared:
            for plain in listed():
                plain.replicator.session.exchange.await_all("accelerator.save_state()")
                if isinstance(plain, LocalDeMo):
                    shared.enter_context(plain.shared())
            return save_state(*args, **kwargs)

    def save(*given: Any) -> None:
        folder = Path(given[-1])
        if accelerator.is_local_main_process:
            for path in folder.glob(_name("*", "*", "*")):  # of an earlier checkpoint in this folder
                path.unlink(missing_ok=True)
        accelerator.wait_for_everyone()
        for number, plain in enumerate(listed()):
            torch.save(plain.own_state_dict(), folder / _name(number, *plain.replicator.rank_and_size))

    def load_state_of_all(*args: Any, **kwargs: Any) -> None:
        try:
            load_state(*args, **kwargs)
        finally:
            for found in _registered[accelerator].values():
                found.clear()  # loading may fail before the optimizer's turn: its next load must not get this state

    def load(*given: Any) -> None:
        for number, plain in enumerate(listed()):  # it loads this state in place of rank 0's
            _registered[accelerator][plain][:] = _own(given[-1], number, *plain.replicator.rank_and_size)

    accelerator.save_state, accelerator.load_state = save_state_of_all, load_state_of_all
    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _name(number: int | str, rank: int | str, world_size: int | str) -> str:
    """Returns the name of a rank's file; `number` counts the optimizers of an Accelerator."""
    return f"demopt{number}_rank{rank}_of_{world_size}.pt"


def _own(folder: str, number: int, rank: int, world_size: int) -> list[dict[str, Any]]:
    """Returns this rank's state, or its share if more or fewer ranks saved the files; ValueError if one is missing."""
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

"""transformers: `Trainer` without dense synchronisation, with every rank's momentum in its checkpoints."""

import inspect
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback

from demopt.exchange.interface import gather_values
from demopt.integrations import require_demo
from demopt.optim.local_demo import LocalDeMo
from demopt.parallel import unsync


class DeMoCallback(TrainerCallback):
    """Callback that a `Trainer` with DeMo or LocalDeMo needs, on all ranks.

        Trainer(..., optimizers=(optimizer, None), callbacks=[DeMoCallback()])
        Trainer(..., optimizer_cls_and_kwargs=(DeMo, {"lr": 1e-3}), callbacks=[DeMoCallback()])

    When training begins, it stops dense gradient synchronisation (`demopt.unsync`). The Trainer then evaluates and
    saves the global weights of a LocalDeMo; with delay=1 it first applies the round in flight. `optimizer.pt` gets all
    ranks' states in place of rank 0's, so that resuming restores each rank. When training ends, a last round makes the
    weights of all ranks equal, unless the best checkpoint was loaded: then ranks that lack its folder take the weights
    of the first rank that has it. TypeError if the Trainer has another optimizer, such as its default AdamW; ValueError
    with `enable_jit_checkpoint`.
    """

    def __init__(self) -> None:
        self._shared = ExitStack()  # holds `shared()` open from the end of a step until the next one begins
        self._unhook = ExitStack()
        self._first = TrainerCallback()  # comes before others, such as wandb's, which may export the final model
        self._first.on_train_end = self._end
        self._last = TrainerCallback()  # comes after the user's callbacks, which may decide to save or evaluate
        vars(self._last).update(dict.fromkeys(("on_step_end", "on_epoch_end", "on_log"), self.on_step_end))

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        optimizer = _checked(parts["optimizer"])
        if getattr(args, "enable_jit_checkpoint", False):
            raise ValueError("enable_jit_checkpoint saves weights and state of rank 0 alone; use save_steps instead")
        unsync(parts["model"])
        own = {*map(id, parts["model"].parameters())}
        if (trainer := _calling_trainer()) is not None:
            for part in vars(trainer).values():  # the wrapped model; a loss, or several, with parameters of their own
                for each in part.values() if isinstance(part, dict) else [part]:
                    if isinstance(each, nn.Module) and any(id(p) in own for p in each.parameters()):
                        unsync(each)
            trainer._save_optimizer_and_scheduler = partial(self._save, trainer)
            handler = trainer.callback_handler
            others = [each for each in handler.callbacks if each not in (self._first, self._last)]
            handler.callbacks = [self._first, *others, self._last]
        if isinstance(optimizer, LocalDeMo):
            self._unhook.close()  # of an earlier training, which may have failed
            self._unhook.callback(optimizer.register_load_state_dict_pre_hook(self._leave).remove)
            if args.eval_on_start:
                self._shared.enter_context(optimizer.shared())

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Gives the model this rank's local weights back."""
        self._shared.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Gives the model the global weights, if the Trainer is to save or evaluate."""
        optimizer = _checked(parts["optimizer"])
        if isinstance(optimizer, LocalDeMo) and (control.should_save or control.should_evaluate):
            if optimizer.replicator.in_flight:
                optimizer.flush()
            self._shared.enter_context(optimizer.shared())  # inside another one, it does nothing

    on_epoch_end = on_step_end

    def _end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Runs the last round; the best checkpoint, if it was loaded, replaces the weights instead."""
        optimizer, best = _checked(parts["optimizer"]), state.best_model_checkpoint
        is_local, loaded = isinstance(optimizer, LocalDeMo), [False]
        if args.load_best_model_at_end:  # a folder of another machine's checkpoint may be absent, or have no weights
            mine = best is not None and any(Path(best).glob("*model*"))
            loaded = _gathered(optimizer, mine)
        if is_local and any(loaded):
            weights = optimizer._weights
            self._leave(optimizer)
            kept = [each.detach().clone() for each in weights.parameters]
            optimizer.flush()
            weights.take(kept)
            weights.adopt()
        elif is_local:
            self._shared.close()
            if optimizer.local_steps or optimizer.replicator.in_flight:
                optimizer.finish_round(last=True)
        if any(loaded) and not all(loaded):
            optimizer.resync(loaded.index(True), **({"model": True} if is_local else {}))

    def _leave(self, optimizer: Any, *_: Any) -> None:
        """Ends `shared()`, as after a failed evaluation; keeps a checkpoint that was loaded inside it."""
        weights = optimizer._weights
        if weights.aside:
            weights.take(weights.parameters)  # the end of `shared` would undo them
            self._shared.close()
            weights.adopt()

    def _save(self, trainer: Any, folder: str) -> None:
        """Replaces the Trainer's method, which all ranks call: first, those that write get all ranks' states."""
        optimizer, kept = _checked(trainer.optimizer), None
        writes = _gathered(optimizer, trainer.args.should_save) if trainer.args.save_on_each_node else [True]
        for rank, needs_all in enumerate(writes):
            if needs_all:
                optimizer.consolidate_state_dict(rank)
                kept = optimizer._all_states or kept
        optimizer._all_states = kept
        type(trainer)._save_optimizer_and_scheduler(trainer, folder)


def _calling_trainer() -> Any:
    """Returns the Trainer that is training, to which its callbacks have no reference; None in other loops."""
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    return frame and frame.f_locals["self"]


def _gathered(optimizer: Any, value: bool) -> list[bool]:
    return gather_values(optimizer.replicator.session.exchange, value, optimizer.replicator.wiring().device)


def _checked(optimizer: Any) -> Any:
    remedy = "give the Trainer optimizers=(demopt.DeMo(...), None), or leave the callback out"
    return require_demo(optimizer, "with DeMoCallback", remedy)

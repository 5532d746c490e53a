"""The memory that a worker needs, from shapes: known before the first step, and without any of it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.filesize import decimal
from torch import Tensor, nn

from demopt.exchange import SingleRank
from demopt.train.config import InputError, TrainConfig
from demopt.train.data import BYTE_VOCABULARY
from demopt.train.method import make_optimizer
from demopt.train.model import autocasts, build


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker. `activations`: all that a forward pass keeps for backward; 0 if it cannot be counted.

    `optimizer`: Muon's momentum, AdamW's moments, buckets of DistributedDataParallel. `demopt`: global weights, errors,
    momenta.
    """

    weights: int
    gradients: int
    optimizer: int
    demopt: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(dataclasses.astuple(self))

    def __str__(self) -> str:
        parts = [f"{name} {decimal(each)}" for name, each in dataclasses.asdict(self).items() if each]
        return f"memory about {decimal(self.total)}: {', '.join(parts)}"


def memory_of(config: TrainConfig, model: nn.Module, optimizer: Any, activations: int) -> Memory:
    """Returns the memory for a model and its optimizer before the first step; both may be on the meta device."""
    trained = size_of(parameter for parameter in model.parameters() if parameter.requires_grad)
    moments = ours = 0
    if config.optimizer != "demo":  # Muon keeps a momentum, AdamW two moments
        groups = [(group, size_of(group["params"])) for group in optimizer.param_groups]
        moments = sum(size if "ns_steps" in group else 2 * size for group, size in groups)
    if config.optimizer == "adamw":
        moments += trained
    else:
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        ours = size_of(value for value in state if isinstance(value, Tensor))
    return Memory(size_of([*model.parameters(), *model.buffers()]), trained, moments, ours, activations)


def refuse_if_too_large(config: TrainConfig, device: torch.device, workers: int) -> None:
    """Raises InputError, before anything is read or made, if the run's workers on this machine cannot fit into it."""
    if device.type == "cuda":
        here, workers = torch.cuda.get_device_properties(device).total_memory, 1
    elif hasattr(os, "sysconf"):
        here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    what = f"--model {config.model}" if config.model else f"--preset {config.preset}"
    config = dataclasses.replace(config, vocab_size=config.vocab_size or BYTE_VOCABULARY)
    with torch.device("meta"):
        model = build(config)
    try:
        needed = memory_of(config, model, make_optimizer(config, model, SingleRank()), activations=0)
    except ValueError as error:  # such as a message that would be too long
        raise InputError(f"{what}: {error}") from None
    if 2 * needed.total * workers > here:  # otherwise not worth the time
        needed = dataclasses.replace(needed, activations=activations_of(config, autocasts(config, device)))
    if needed.total * workers > here:
        raise InputError(
            f"{what} does not fit: {needed}; for {workers} such worker{'s' * (workers > 1)} there are {decimal(here)}: "
            "take a smaller model, a smaller --batch, fewer workers, or --model with --lora"
        )


def activations_of(config: TrainConfig, autocast: bool) -> int:
    """Returns the bytes that a forward pass and its loss keep for backward: of tensors without content."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept: dict[int, Tensor] = {}  # by storage; the tensors, so that no storage comes twice

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.device("meta"):
        model = build(config)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model.to_empty(device="cpu")
            tokens = torch.zeros(config.batch, config.sequence or 1, dtype=torch.long)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                logits = model(input_ids=tokens, use_cache=False).logits
                F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
            for parameter in model.parameters():
                kept.pop(parameter.untyped_storage()._cdata, None)
            return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    except Exception:  # an architecture looks at contents, which are not there
        return 0


def size_of(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors, without those of a single number."""
    return sum(tensor.nbytes for tensor in tensors if tensor.dim())

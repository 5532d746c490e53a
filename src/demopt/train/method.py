"""A run's optimizer (LocalDeMo, DeMo, or AdamW with DDP), the cost of its steps, and a worker's memory."""

import importlib.util
import logging
import math
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.filesize import decimal
from torch import Tensor, nn

import demopt
from demopt import DeMo, LocalDeMo, Stats
from demopt.core.rules import rule_of
from demopt.exchange import SingleRank
from demopt.train.config import SETTINGS, Given, InputError, TrainConfig
from demopt.train.model import autocasts, build
from demopt.train.out import Row

FLOAT32_BYTES = 4
MANY_TOKENS = 1 << 16  # in a forward pass: its activations may then exceed everything else
TRAINERS = ("momentum", "global_batch")  # settings of an optimizer that are not arguments of its class


def cost_of(stats: Stats, seconds: float) -> Row:
    exchange = stats.seconds.get("exchange", 0.0)
    traffic = {name: getattr(stats, name) for name in ("payload_bytes", "sent_bytes", "received_bytes")}
    return {**traffic, "optimizer_seconds": seconds - exchange, "exchange_seconds": exchange}


def make_optimizer(config: TrainConfig, model: nn.Module, process_group: Any = None) -> torch.optim.Optimizer:
    """Builds the configured optimizer for a model on its device; its groups have the rate 1.0 times their factor."""
    rates: Given = {"lr": 1.0, "weight_decay": config.weight_decay}
    momentum: Any = config.momentum  # a number, as the config is resolved
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True, **rates)
    known = [name for name, about in SETTINGS.items() if config.optimizer in about["fits"] and name not in TRAINERS]
    settings: Given = {name: getattr(config, name) for name in known if getattr(config, name) is not None}
    settings["process_group"] = process_group
    if config.optimizer == "demo":
        groups: Any = demopt.muon_groups(model, lr=1.0) if rule_of(config.update).whole_matrix else model.parameters()
        return DeMo(groups, momentum_decay=momentum, **rates, **settings)
    inner = demopt.muon_adamw(model, momentum=momentum, **rates)
    on_host = next(model.parameters()).device.type not in ("cpu", "cuda", "meta")  # nobody has run rounds there
    return LocalDeMo(inner, state_device="cpu" if on_host else None, **settings)


def check_settings(config: TrainConfig) -> None:
    """Lets the optimizer itself refuse bad hyper-parameters, before any worker starts; names a missing tracker."""
    if config.tracker and importlib.util.find_spec(config.tracker) is None:
        raise InputError(f"--tracker {config.tracker} is not installed: pip install {config.tracker}")
    if config.device in ("mps", "xpu") and config.optimizer != "local":
        raise InputError(f"--device {config.device} takes --optimizer local, whose rounds are on the CPU there")
    try:
        make_optimizer(config, nn.Linear(2, 2), SingleRank())
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"--optimizer {config.optimizer}: {error}") from None


def memory_of(config: TrainConfig, model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Returns the bytes of one worker, before its first step; model and optimizer may be on the meta device.

    "optimizer": Muon's momentum, AdamW's moments, buckets of DDP. "demopt": global weights, errors, momenta.
    """
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
    weights = size_of([*model.parameters(), *model.buffers()])
    return {"weights": weights, "gradients": trained, "optimizer": moments, "demopt": ours}


def in_words(memory: dict[str, int]) -> str:
    """Returns the sum and the parts, for the user."""
    parts = [f"{name} {decimal(each)}" for name, each in memory.items() if each]
    return f"memory about {decimal(sum(memory.values()))}: {', '.join(parts)}"


def machine_memory() -> float:
    """Returns the bytes of this machine's memory; infinity where the system does not tell."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf


def refuse_if_too_large(config: TrainConfig, device: torch.device, workers: int) -> None:
    """Raises InputError, before anything is read or made, if the run's workers on this machine cannot fit into it."""
    here = machine_memory()
    if device.type == "cuda":
        here, workers = torch.cuda.get_device_properties(device).total_memory, 1
    if config.layers and config.layers > 16:  # thousands take minutes to build, and an eighth may be too large already
        refuse_if_too_large(replace(config, layers=config.layers // 8), device, workers)
    what = f"--model {config.model}" if config.model else f"--preset {config.preset}"
    with torch.device("meta"):
        model = build(config)
    try:
        needed = memory_of(config, model, make_optimizer(config, model, SingleRank()))
    except ValueError as error:  # such as a message that would be too long
        raise InputError(f"{what}: {error}") from None
    tokens = config.batch * (config.sequence or 0)
    if 2 * sum(needed.values()) * workers > here or tokens >= MANY_TOKENS:  # otherwise not worth the time
        needed["activations"] = activations_of(config, device)
    if sum(needed.values()) * workers > here:
        lacks = f"{in_words(needed)}; for {workers} such worker{'s' * (workers > 1)} there are {decimal(int(here))}"
        remedy = "take a smaller model, a smaller --batch, fewer workers, or --model with --lora"
        raise InputError(f"{what} does not fit: {lacks}: {remedy}")


def activations_of(config: TrainConfig, device: torch.device) -> int:
    """Returns the bytes that a forward pass on `device` and its loss keep for backward; 0 if they cannot be counted."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept: dict[int, Tensor] = {}  # by storage; held, so that no other storage gets its address

    def keep(tensor: Tensor) -> Tensor:
        if tensor.shape[1:] != (1, config.sequence, config.sequence):  # a mask, which only unknown contents need
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.device("meta"):
        model = build(config)
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it would print a traceback if the count fails
    log.disabled = True
    try:
        casts = torch.autocast("cpu", torch.bfloat16, enabled=autocasts(config, device))
        with FakeTensorMode(allow_non_fake_inputs=True), casts:
            model.to_empty(device="cpu")
            tokens = torch.zeros(config.batch, config.sequence or 1, dtype=torch.long)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                logits = model(input_ids=tokens, use_cache=False).logits
                F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
            for parameter in model.parameters():
                kept.pop(parameter.untyped_storage()._cdata, None)
            return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    except Exception:  # some architectures look at contents, which are not there
        return 0
    finally:
        log.disabled = False


def size_of(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors, without those that have no dimension."""
    return sum(tensor.nbytes for tensor in tensors if tensor.dim())

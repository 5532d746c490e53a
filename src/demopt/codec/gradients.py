"""Gradients for the codec: the local parts of DTensors, checks, the loss scale; checks of parameters."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from demopt.core.rules import Rule
from demopt.exchange.dtensor import is_made_of_others, shard_of, to_local
from demopt.kernels.gate import check_in_host_memory, extent

_LIMIT = 1e30  # sums over a chunk, and the momentum, then stay below float32's 3e38


def unscaling_of(optimizer: torch.optim.Optimizer) -> float | None:
    """Returns the inverse of GradScaler's factor, if any; NaN if it or a gradient is infinite. Waits for the device."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is None and found is None:
        return None
    if found is not None and bool(found):
        return math.nan
    factor = 1.0 if scale is None else 1.0 / (float(scale) or math.nan)  # None: after GradScaler.unscale_
    return factor if abs(factor) < _LIMIT else math.nan


def remove_scale(gradients: list[Tensor], factor: float) -> None:
    """Multiplies gradients by `factor`, in place. ValueError for float16, where the results would underflow."""
    if factor != 1.0 and any(gradient.dtype == torch.float16 for gradient in gradients):
        raise ValueError(
            "GradScaler's factor cannot be removed from float16 gradients without loss: keep the parameters in float32 "
            "and use torch.autocast"
        )
    torch._foreach_mul_(gradients, factor)


def forget_scale(optimizer: torch.optim.Optimizer) -> None:
    """Removes GradScaler's attributes after a failed step; GradScaler itself does so only after a successful one."""
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns each parameter's gradient (of a DTensor, this process's part); None where it has none or does not train.

    Where backward left a DTensor's gradient with other placements than its parameter's, as SequenceParallel leaves a
    norm's Partial, it gets the parameter's: a node's ranks call this together. TypeError if one is sparse or complex.
    """
    found: list[Tensor | None] = []
    for number, parameter in enumerate(parameters):
        gradient: Any = parameter.grad if parameter.requires_grad else None
        placements = getattr(gradient, "placements", None)
        if placements is not None:
            wanted = getattr(parameter, "placements", placements)
            if placements != wanted:
                gradient = parameter.grad = gradient.redistribute(placements=wanted)
            gradient = to_local(gradient)
        if gradient is not None:
            _check_kind(f"the gradient of parameter {number}, shape {list(parameter.shape)},", gradient)
        found.append(gradient)
    return found


def _check_kind(which: str, gradient: Tensor) -> None:
    if gradient.layout != torch.strided:
        raise TypeError(f"{which} is sparse; DeMo needs dense gradients, e.g. nn.Embedding(..., sparse=False)")
    if not gradient.is_floating_point():
        raise TypeError(f"{which} is {gradient.dtype}; DeMo needs real floating-point gradients")


def check_gradients(names: Sequence[str], parameters: Sequence[Tensor], given: Sequence[Tensor | None]) -> None:
    """Raises ValueError or TypeError unless each parameter has a gradient that fits it, or None."""
    if len(given) != len(parameters):
        raise ValueError(f"got {len(given)} gradients for {len(parameters)} parameters; give None where there is none")
    for name, parameter, gradient in zip(names, parameters, given, strict=True):
        if gradient is None:
            continue
        local, which = to_local(parameter), f"the gradient of {name}"
        if not isinstance(gradient, Tensor):
            raise TypeError(f"{which} is a {type(gradient).__name__}; give a tensor, or None")
        _check_kind(which, gradient)
        if gradient.shape != local.shape:
            came, wanted = list(gradient.shape), list(local.shape)
            raise ValueError(f"{which} has shape {came}, expected {wanted}; give gradients in the order of parameters")
        if gradient.device != local.device:
            raise ValueError(f"{which} is on {gradient.device}, the parameter on {local.device}")
        if gradient.is_cpu:
            check_in_host_memory(which, gradient)


def all_usable(tensors: Iterable[Tensor | None], factor: float = 1.0) -> bool:
    """Whether no tensor holds NaN, Inf, or a number so large (1e30, also times `factor`) that sums could overflow."""
    limit = _LIMIT / max(1.0, abs(factor))
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor is None or not tensor.numel():
            continue
        if tensor.device.type != "cpu":
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
            continue
        low, high = torch.aminmax(tensor.detach())  # a tenth of a norm's time on a CPU; NaN if an element is
        if not (float(low) > -limit and float(high) < limit):
            return False
    # the largest magnitude is NaN or too large exactly if some element is; one pass, and one wait per device and dtype
    largest = (torch.stack(torch._foreach_norm(alike, math.inf)).max() for alike in by_kind.values())
    return all(float(each) < limit for each in largest)


def check_group(group: Any) -> None:
    """Raises TypeError unless it has the form of a parameter group."""
    if not (isinstance(group, dict) and "params" in group):
        raise TypeError(f"param_group is {group!r}; give a dict with params")


def check_parameters(parameters: Collection[Tensor]) -> None:
    """Raises TypeError unless all are dense and all that train real floats; ValueError for a lazy or expanded one.

    ValueError, too, if one is listed twice, only some are on the meta device, or two that train overlap in memory.
    """
    seen: set[int] = set()
    for parameter in parameters:
        if is_lazy(parameter):
            raise ValueError("a parameter of a lazy module has no shape yet: run the model once before")
        shape, dtype = list(parameter.shape), parameter.dtype
        is_dense = parameter.layout == torch.strided and not parameter.is_quantized
        kind = dtype if parameter.layout == torch.strided else parameter.layout
        if parameter.requires_grad and not (is_dense and parameter.is_floating_point() and dtype.itemsize > 1):
            remedy = ": make it of torch.view_as_real, and call torch.view_as_complex in forward" * dtype.is_complex
            told = f"is {kind}; DeMo trains real floats, 16 bits or more, dense{remedy}"
            raise TypeError(f"a parameter of shape {shape} {told}")
        if parameter.requires_grad and parameter.is_cpu and is_made_of_others(to_local(parameter)):
            made = f"is a {type(to_local(parameter)).__name__}, which is made of other tensors"
            raise TypeError(f"a parameter of shape {shape} {made}: on a CPU DeMo trains plain ones, so freeze it")
        if not is_dense:
            raise TypeError(
                f"a frozen parameter of shape {shape} is {kind}, and ranks compare dense ones: leave it out"
            )
        repeats = any(n > 1 and not by for n, by in zip(shape, parameter.stride(), strict=True))
        if parameter.requires_grad and parameter.numel() and repeats:
            raise ValueError(f"elements of a parameter of shape {shape} share memory, as after expand(): clone it")
        if id(parameter) in seen:
            raise ValueError(f"a parameter of shape {shape} is twice in a parameter group; list it once")
        seen.add(id(parameter))
    if len({parameter.is_meta for parameter in parameters}) > 1:  # all may be there, as for `demopt plan`
        raise ValueError("some parameters are on the meta device: give them to the optimizer after model.to_empty()")
    check_apart(parameters)


def check_apart(parameters: Iterable[Tensor]) -> None:
    """Raises ValueError if two parameters that train share an element, as views of one buffer may.

    The same view twice is allowed, as of weights that are tied by their data: the two move together.
    """
    placed = []
    for parameter in parameters:
        local = to_local(parameter.detach())
        if parameter.requires_grad and local.numel() and not (local.is_meta or is_made_of_others(local)):
            first = local.data_ptr()
            placed.append((str(local.device), first, first + extent(local), local))
    placed.sort(key=lambda each: each[:2])
    begin = 0
    for number, (device, first, end, local) in enumerate(placed):
        near = [each for each in placed[begin:number] if each[0] == device and each[2] > first]
        begin = begin if near else number
        for _, start, other_end, other in near:  # their spans overlap, as do even those of a buffer's columns
            if other.dtype == local.dtype and other.is_set_to(local):
                continue
            marked = torch.zeros(max(end, other_end) - start, dtype=torch.bool, device="cpu")
            _bytes_of(other, marked, 0).fill_(True)
            if bool(_bytes_of(local, marked, first - start).any()):
                shapes = f"{list(other.shape)} and {list(local.shape)}"
                raise ValueError(
                    f"parameters of shapes {shapes} share memory, as views of one buffer do: give the buffer, or "
                    "clones of the views. To tie weights, put one and the same Parameter into both modules"
                )


def _bytes_of(tensor: Tensor, memory: Tensor, start: int) -> Tensor:
    """Returns the elements of `memory`, one per byte, that a tensor with its first byte at `start` occupies."""
    size = tensor.element_size()
    return memory.as_strided((*tensor.shape, size), (*(size * by for by in tensor.stride()), 1), start)


def check_matrices(rule: Rule, parameters: Iterable[Tensor]) -> None:
    """Raises ValueError if an update rule needs whole matrices, or batches of them, and a parameter is neither."""
    for parameter in parameters if rule.whole_matrix else ():
        shape = list(parameter.shape)
        if parameter.dim() not in (2, 3):
            others = "give these, embeddings and heads a group of their own: {'params': [...], 'update': 'adamw'}"
            raise ValueError(f"update {rule.name!r} is for matrices, and a parameter has shape {shape}; {others}")
        if shard_of(parameter)[1] > 1:
            sharded = f"a parameter of shape {shape} is sharded (FSDP2, tensor parallelism)"
            other = "take LocalDeMo around demopt.muon_adamw, whose Muon gathers them, or update 'adamw' or 'signum'"
            raise ValueError(f"update {rule.name!r} needs whole matrices; {sharded}; {other}")

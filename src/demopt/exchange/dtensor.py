"""How DTensors (FSDP2, tensor parallelism) are placed over ranks, and collectives between the ranks that share one."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def to_local(tensor: Tensor) -> Tensor:
    """Returns the part of a DTensor that this process holds; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def is_made_of_others(tensor: Any) -> bool:
    """Whether a tensor has no memory of its own, as a DTensor, or a quantized weight of torchao."""
    return hasattr(tensor, "__tensor_flatten__")


def unlike_memory(tensor: Tensor) -> str:
    """Returns why a tensor is no plain array of numbers, such as its layout; empty if it is one."""
    if tensor.layout != torch.strided:
        return str(tensor.layout)
    faults = {"quantized": tensor.is_quantized, "nested": tensor.is_nested, "on the meta device": tensor.is_meta}
    return next((fault for fault, holds in faults.items() if holds), "")


def parts_of(tensors: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the plain tensors that hold these in this process: for torchao's quantized weights, all components."""
    for tensor in tensors:
        local: Any = to_local(tensor)
        if is_made_of_others(local):
            yield from parts_of(getattr(local, name) for name in local.__tensor_flatten__()[0])
        else:
            yield local


def fsdp_groups(module: Any) -> list[Any]:
    """Returns the groups in which FSDP2 gathers the parameters of a module that went through `fully_shard`."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [*filter(None, groups)]


def forget_gathered(tensors: Iterable[Tensor]) -> None:
    """Lets FSDP2 gather these parameters anew: some stay whole after an evaluation, whatever their shards become."""
    changed = {id(tensor) for tensor in tensors if hasattr(tensor, "placements")}
    if not changed:
        return
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp import FSDPModule

    for module in [*_module_state_mapping]:
        if isinstance(module, FSDPModule):
            held = [each.sharded_param for group in fsdp_groups(module) for each in group.fsdp_params]
            if not changed.isdisjoint(map(id, held)):
                module.reshard()


def like_on(tensor: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns an empty tensor of this shape on a device; for a DTensor, which may be offloaded, one placed alike."""
    held = torch.empty_like(to_local(tensor.detach()), device=device, dtype=dtype)
    if not hasattr(tensor, "placements"):
        return held
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(tensor.shape, tensor.stride(), held.dtype)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
    return DTensor(held, spec, requires_grad=False)


def placed_as(local: Tensor, like: Any) -> Any:
    """Returns the DTensor of which `local` is this process's shard, placed as `like`; `local` if `like` is plain."""
    if not hasattr(like, "placements"):
        return local
    from torch.distributed.tensor import DTensor  # takes a second, and most models have none

    held, shape = local.to(like.to_local().device), like.shape
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(held, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


def whole_of(local: Tensor, like: Any) -> Tensor:
    """Returns the whole tensor of shard `local`, placed as `like`, by a collective; `local` if `like` is no DTensor."""
    return placed_as(local, like).full_tensor() if hasattr(like, "placements") else local


def shard_as(whole: Tensor, like: Any) -> Tensor:
    """Returns this process's shard of a tensor that all ranks have, placed as the DTensor `like`; otherwise `whole`."""
    if not hasattr(like, "placements"):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    found: Tensor = replicated.redistribute(placements=like.placements).to_local()
    return found.to(to_local(like).device)  # FSDP2 may offload it, and a mesh has one type of device


def _placements(tensor: Tensor) -> Iterator[tuple[Any, int, Any]]:
    """Yields the mesh of a DTensor, the number of each of its dimensions, and how the tensor is placed over it."""
    for number, placement in enumerate(getattr(tensor, "placements", ())):
        yield tensor.device_mesh, number, placement  # type: ignore[attr-defined]


def _cuts(tensor: Tensor) -> Iterator[tuple[Any, int, Any]]:
    """Yields those that cut the tensor into shards; `is_shard` is False for FSDP2 over tensor parallelism."""
    return (each for each in _placements(tensor) if hasattr(each[-1], "dim"))


def sharded_over(tensor: Tensor) -> frozenset[int]:
    """Returns the global ranks that a DTensor is sharded over, this rank included; empty if it is not sharded."""
    ranks: set[int] = set()
    for mesh, number, placement in _placements(tensor):
        if not placement.is_replicate():
            ranks |= set(torch.distributed.get_process_group_ranks(mesh.get_group(number)))
    return frozenset(ranks) if len(ranks) > 1 else frozenset()


def groups_of_copies(tensor: Tensor) -> list[Any]:
    """Returns the process groups of several ranks that hold the same part of a DTensor, this rank included."""
    places = _placements(tensor)
    return [mesh.get_group(n) for mesh, n, placement in places if placement.is_replicate() and mesh.size(n) > 1]


def shard_of(tensor: Tensor) -> tuple[int, int]:
    """Returns the number of this process's shard of a DTensor, and how many shards there are."""
    shard, count = 0, 1
    for mesh, number, _ in _cuts(tensor):
        shard = shard * mesh.size(number) + mesh.get_local_rank(number)
        count *= mesh.size(number)
    return shard, count


def cut_of(tensor: Tensor) -> str:
    """Returns how a DTensor is cut into shards, the same on meshes that differ only in its copies; empty if it is not.

    As many shards of the same shapes may have other content, such as those of FSDP2 alone and over tensor parallelism.
    """
    return ", ".join(
        f"{type(cut).__name__.strip('_')}({cut.dim}, {getattr(cut, 'split_factor', 1)}) over {mesh.size(number)}"
        for mesh, number, cut in _cuts(tensor)
        if mesh.size(number) > 1
    )


def shard_groups(tensors: Iterable[Tensor]) -> dict[Any, str]:
    """Returns the process groups of the ranks that hold shards of the same DTensors, each with its type of device."""
    groups = {}
    for tensor in tensors:
        for mesh, number, _ in _cuts(tensor):
            groups[mesh.get_group(number)] = mesh.device_type
    return groups


def true_in_all(groups: Mapping[Any, str], mine: bool) -> bool:
    """Whether `mine` is True on all ranks of these groups, which call this together."""
    for pg, device in groups.items():
        flag = torch.tensor(float(mine), device=device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=pg)
        mine = bool(flag)
    return mine

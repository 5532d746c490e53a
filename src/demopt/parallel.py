"""`unsync` and `broadcast_buffers`: models wrapped by DDP or FSDP2, and their buffers."""

from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from demopt.exchange.dtensor import fsdp_groups, parts_of, unlike_memory
from demopt.exchange.interface import device_between
from demopt.exchange.process_group import can_connect, resolve
from demopt.optim.mistakes import check_model, remember
from demopt.replicator.session import check_alike
from demopt.validation import check_rank
from demopt.wire.checksum import byte_view

M = TypeVar("M", bound=nn.Module)
_REPLICATE = "torch.distributed._composable.replicate"  # also of replicate_with_fsdp: the modules of their mixins


def unsync(model: M) -> M:
    """Stops the dense synchronisation between replicas, so that DeMo or LocalDeMo replaces it; returns the same model.

        model = demopt.unsync(DistributedDataParallel(model))

    - DistributedDataParallel, anywhere in the model, compiled or not: gradients stay local, and neither gradients nor
      buffers are sent (see `broadcast_buffers`). `.module`, `no_sync` and `require_backward_grad_sync` stay usable, and
      its constructor has made the weights of all ranks equal. With `find_unused_parameters=True` and a loop that turns
      `require_backward_grad_sync` on, DDP still reduces one number per parameter.
    - FSDP2 on a two-dimensional mesh (replicate, shard): no more all-reduce between replicas. The reduce-scatter inside
      continues, so that each rank has its shard of its replica's mean gradient. Give DeMo
      `process_group=mesh["replicate"]`.
    - FSDP2 on a mesh of one dimension, and a plain module: unchanged.

    The first step of a DeMo or LocalDeMo warns if the model trains parameters that neither has. BatchNorm, whose
    statistics nothing synchronises any more, causes a warning here.

    Call it before the first backward pass; calling it again changes nothing.

    Raises:
        ValueError: DistributedDataParallel already has a communication hook.
        TypeError: FullyShardedDataParallel (FSDP1), or a `replicate` of torch.distributed, which cannot be changed in
            place.

    Examples:
        >>> model = nn.Linear(4, 2)
        >>> unsync(model) is model
        True
    """
    check_model(model)
    if not can_connect():
        return model  # nothing could synchronise it
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # slow to import, rarely needed

    for module in model.modules():  # checks first, so that a refused model stays unchanged
        if isinstance(module, FullyShardedDataParallel):
            other = 'shard it with FSDP2: torch.distributed.fsdp.fully_shard(model, mesh=mesh["shard"])'
            raise TypeError(f"the model is a FullyShardedDataParallel (FSDP1), which unsync cannot change; {other}")
        if any(base.__module__.startswith(_REPLICATE) for base in type(module).__mro__):
            raise TypeError("the model went through replicate(), which only synchronises; leave that call out")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            _unsync_ddp(module)
        elif isinstance(module, FSDPModule):
            _unsync_fsdp(module)
    remember(model, "unsync")
    return model


@torch.no_grad()
def broadcast_buffers(model: nn.Module, src: int = 0, process_group: Any = None) -> None:
    """Gives all ranks the buffers of rank `src`, such as BatchNorm's running statistics, in one broadcast.

    Call it on all ranks, before evaluating or saving. `process_group`: as in `DeMo`; None: all ranks. SettingsError if
    the ranks' buffers differ in name, dtype or shape.

    Examples:
        >>> broadcast_buffers(nn.BatchNorm1d(4))
    """
    check_model(model)
    exchange, named = resolve(process_group), dict[str, Tensor]()
    for name, buffer in model.named_buffers():
        for number, part in enumerate(parts_of([buffer])):  # a quantized buffer of torchao has several
            named[f"{name} ({number})" if number else name] = part
    check_rank("src", src, exchange.world_size)
    exchange.await_all("broadcast_buffers()")
    faults = {name: fault for name, each in named.items() if (fault := unlike_memory(each))}
    forms = {name: faults.get(name) or f"{each.dtype} {list(each.shape)}" for name, each in named.items()}
    held = [*model.parameters(), *(each for name, each in named.items() if name not in faults)]  # even without buffers
    where = device_between(each.device for each in held)
    check_alike(exchange, {f"buffer {name}": form for name, form in forms.items()}, where)
    for name, fault in faults.items():  # now on all ranks
        raise TypeError(f"buffer {name} is {fault}; only dense ones can be sent")
    if not (buffers := [buffer for buffer in named.values() if buffer.numel()]):
        return
    parts = [byte_view(buffer).to(where) for buffer in buffers]  # other ranks may have them on other devices
    everything = torch.cat(parts)
    exchange.broadcast(everything, src)
    for buffer, part in zip(buffers, everything.split([len(part) for part in parts]), strict=True):
        value = part.clone().view(buffer.dtype).view(buffer.shape)  # a clone is aligned
        if 0 in buffer.stride():  # as after `expand`, where elements share memory
            buffer.data = value.to(buffer.device)
        else:
            buffer.copy_(value)


def _unsync_ddp(model: DistributedDataParallel) -> None:
    """Applies `no_sync` permanently, and adds a hook for loops that set `require_backward_grad_sync`."""
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    if not any(state is unsync for _, state in model._comm_hooks):
        try:
            model.register_comm_hook(unsync, noop_hook)  # the state, unsync, marks the hook as this one
        except RuntimeError as error:
            told = "this DistributedDataParallel has a communication hook already, which would be lost; make it without"
            raise ValueError(told) from error
    if not model.static_graph:  # whose first backward pass needs it on; there the hook suffices
        model.require_backward_grad_sync = False
    if _refuse_join not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_refuse_join)
    model.require_forward_param_sync = False
    model.broadcast_buffers = False


def _refuse_join(model: DistributedDataParallel, _: Any) -> None:
    """Before a forward pass, refuses torch's `Join` (`model.join()`), which waits for other ranks' all-reduces."""
    if model._join_config.enable and not torch.compiler.is_compiling():
        remedy = "let each take the same number of steps, by drop_last=True or the fewest batches of any rank"
        raise ValueError(f"join() of a model that went through demopt.unsync: rounds need all ranks; {remedy}")


def _unsync_fsdp(module: Any) -> None:
    """Turns HSDP's parameter groups into plain FSDP's, on the mesh's shard dimension; nothing else in them changes.

    FSDP2 has no public way: after `set_requires_all_reduce(False)` it accumulates gradients outside `.grad`, until an
    all-reduce comes, and its `set_all_reduce_hook` runs after the all-reduce.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    for fsdp_group in fsdp_groups(module):
        both = fsdp_group.mesh_info
        if isinstance(both, HSDPMeshInfo):
            shards_alone = FSDPMeshInfo(**{each.name: getattr(both, each.name) for each in fields(both) if each.init})
            if fsdp_group.post_forward_mesh_info == both:
                fsdp_group.post_forward_mesh_info = shards_alone
            fsdp_group.mesh_info = shards_alone

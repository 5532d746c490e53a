"""The checks of a handshake: settings and versions, initial weights, sharding, gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from demopt.errors import SettingsError
from demopt.exchange import Exchange
from demopt.exchange.dtensor import sharded_over
from demopt.exchange.interface import gather_values
from demopt.replicator.order import check_order, marks_of
from demopt.validation import warn
from demopt.wire.checksum import fingerprint
from demopt.wire.layout import digest


def check_settings(exchange: Exchange, facts: dict[str, str], device: torch.device) -> None:
    """Raises SettingsError on every rank, naming a rank and a setting, unless all ranks have the same facts."""
    if len(set(gather_values(exchange, digest(repr(facts)), device))) == 1:
        return
    theirs = gather_values(exchange, facts, device)
    for rank, other in enumerate(theirs):
        for name in {**theirs[0], **other}:
            first, here = theirs[0].get(name, "nothing"), other.get(name, "nothing")
            if first != here:
                raise SettingsError(f"rank {rank} has {name} = {here} where rank 0 has {first}")


def check_names(exchange: Exchange, names: list[str], device: torch.device) -> None:
    """Raises SettingsError on every rank if a rank has a parameter, by its name, at another place than rank 0."""
    theirs = gather_values(exchange, names, device)
    for rank, other in enumerate(theirs):
        check_order(f"rank {rank} has", "rank 0", theirs[0], other)


def equalize_weights(exchange: Exchange, tensors: list[Tensor], device: torch.device) -> None:
    """If tensors differ between ranks, copies rank 0's to all ranks; rank 0 warns.

    SettingsError if those of a rank are rank 0's in another order.
    """
    fingerprints = gather_values(exchange, fingerprint(tensors), device)
    differing = [rank for rank, theirs in enumerate(fingerprints) if theirs != fingerprints[0]]
    if not differing:
        return
    marks = gather_values(exchange, marks_of(tensors), device)
    for rank in differing:
        check_order(f"rank {rank} has", "rank 0", marks[0], marks[rank])
    if exchange.speaks:
        warn(
            f"initial parameters (or the update rules' state) of rank {', '.join(map(str, differing))} differ from "
            "rank 0's; all ranks now use those of rank 0. Seed all ranks alike, or load the same checkpoint, before "
            "the first step."
        )
    copy_tensors(exchange, tensors, src=0)


@torch.no_grad()
def copy_tensors(exchange: Exchange, tensors: list[Tensor], src: int) -> None:
    """Overwrites the tensors of all ranks with those of rank `src`."""
    for tensor in tensors:
        data = tensor.detach().clone(memory_format=torch.contiguous_format)
        if data.numel():
            exchange.broadcast(data.view(-1).view(torch.uint8), src)
            tensor.copy_(data)


def gradient_fingerprint(gradients: Sequence[Tensor | None]) -> list[int]:
    """Returns a hash of gradients, and whether one of them is not zero.

    Examples:
        >>> gradient_fingerprint([torch.zeros(2), None])[1], gradient_fingerprint([torch.ones(2)])[1]
        (0, 1)
    """
    present = [gradient for gradient in gradients if gradient is not None]
    return [fingerprint(present), int(any(bool(gradient.any()) for gradient in present))]


def warn_if_synchronized(exchange: Exchange, mine: list[int], device: torch.device) -> bool:
    """Rank 0 warns if all ranks have bit-identical gradients: something else already synchronizes them.

    `mine`: this rank's `gradient_fingerprint`.
    Returns whether some rank has a gradient that is not zero, the same answer on all; otherwise nothing can be seen.
    """
    fingerprints = gather_values(exchange, mine, device)
    if fingerprints[0][1] and all(theirs == fingerprints[0] for theirs in fingerprints) and exchange.speaks:
        warn(
            f"all {exchange.world_size} ranks have bit-identical gradients, so something already synchronizes them "
            "(DistributedDataParallel, FSDP2 over the same ranks) or every rank reads the same data. Call "
            "demopt.unsync(model), which stops that; or give the optimizer the plain model; or give it, as "
            "process_group, the ranks between which gradients are not yet averaged."
        )
    return any(found for _, found in fingerprints)


def check_sharding(global_ranks: frozenset[int], parameters: list[Tensor]) -> None:
    """Raises ValueError if a parameter is sharded (FSDP2) over ranks between which the optimizer exchanges messages."""
    for index, parameter in enumerate(parameters):
        both = sorted(sharded_over(parameter) & global_ranks)
        if len(both) > 1:
            raise ValueError(
                f"parameter {index} (shape {list(parameter.shape)}) is sharded over ranks {both} (FSDP2, tensor "
                "parallelism), and process_group spans them too, but DeMo synchronizes replicas. Give it the mesh's "
                'dimension that replicas span: process_group=mesh["replicate"].'
            )

"""Handshake checks: settings and versions, initial weights, sharding, and unsynchronised gradients; later, drift."""

import json
from typing import Any

import torch
from torch import Tensor

from demopt.core.update import rule_of
from demopt.errors import DriftError, SettingsError
from demopt.exchange import Exchange
from demopt.exchange.collective import sharded_over
from demopt.optim._warnings import warn_for_all
from demopt.optim.settings import NAMES
from demopt.wire.checksum import fingerprint
from demopt.wire.frame import FINGERPRINT, VERSION, Header
from demopt.wire.layout import digest


def settings_digest(groups: list[dict[str, Any]], also: tuple[tuple[str, str], ...] = ()) -> int:
    """Returns a 64-bit digest of all hyper-parameters, and other facts, which every message carries.

    Examples:
        >>> settings_digest([{"lr": 0.1}]) == settings_digest([{"lr": 0.2}])
        False
    """
    return digest(repr([[_texts(group) for group in groups], *also]))


def describe(groups: list[dict[str, Any]]) -> dict[str, str]:
    """Returns everything about groups that must be equal on all ranks, by name.

    Examples:
        >>> describe([{"params": [torch.zeros(3)], "lr": 0.5}])["param_groups[0]['lr']"]
        '0.5'
    """
    facts = {"wire version": str(VERSION)}
    for number, group in enumerate(groups):
        for name, text in _texts(group).items():
            facts[f"param_groups[{number}][{name!r}]"] = text
        for index, parameter in enumerate(group["params"]):
            trained = "" if parameter.requires_grad else ", frozen"
            facts[f"param_groups[{number}]['params'][{index}]"] = (
                f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}{trained}"
            )
    return facts


def _texts(group: dict[str, Any]) -> dict[str, str]:
    """Returns the hyper-parameters as texts, the same for equal ones: for 1 and 1.0, a rule and its name."""
    texts = {}
    for name in NAMES:
        if name in group:
            value = group[name].item() if isinstance(group[name], Tensor) else group[name]
            if name == "update":
                value = str(rule_of(value))
            texts[name] = repr(float(value) if isinstance(value, int) and not isinstance(value, bool) else value)
    return texts


def check_settings(exchange: Exchange, facts: dict[str, str], device: torch.device) -> None:
    """Raises SettingsError on every rank, naming a rank and a setting, unless all ranks have the same facts."""
    text = json.dumps(facts)
    heads = gather_words(exchange, [digest(text), len(text.encode())], device)
    if len({head[0] for head in heads}) == 1:
        return
    longest = max(head[1] for head in heads)
    raw = torch.frombuffer(bytearray(text.encode().ljust(longest)), dtype=torch.uint8).to(device)
    texts = exchange.all_gather(raw).cpu()
    theirs = [json.loads(bytes(row.tolist())) for row in texts]
    raise SettingsError(_difference(theirs))


def _difference(facts: list[dict[str, str]]) -> str:
    for rank, other in enumerate(facts):
        for name in {**facts[0], **other}:
            mine, yours = facts[0].get(name, "nothing"), other.get(name, "nothing")
            if mine != yours:
                return f"rank {rank} has {name} = {yours} where rank 0 has {mine}"
    return "ranks have different settings"


def check_weights(exchange: Exchange, parameters: list[Tensor], device: torch.device) -> None:
    """If initial weights, or the update rules' states, differ between ranks, copies rank 0's to all; rank 0 warns."""
    marks = [head[0] for head in gather_words(exchange, [fingerprint(parameters)], device)]
    differing = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
    if not differing:
        return
    warn_for_all(
        f"initial parameters (or what update rules keep of them) of rank {', '.join(map(str, differing))} differ from "
        "rank 0's; all ranks now use those of rank 0. Seed all ranks alike, or load the same checkpoint, before the "
        "first step.",
        exchange,
    )
    copy_parameters(exchange, parameters, src=0)


@torch.no_grad()
def copy_parameters(exchange: Exchange, parameters: list[Tensor], src: int) -> None:
    """Overwrites the parameters of all ranks with those of rank `src`."""
    for parameter in parameters:
        data = parameter.detach().clone(memory_format=torch.contiguous_format)
        if data.numel():
            exchange.broadcast(data.view(-1).view(torch.uint8), src)
            parameter.copy_(data)


def warn_if_synchronized(exchange: Exchange, gradients: list[Tensor], device: torch.device) -> bool:
    """Rank 0 warns if all ranks have bit-identical gradients: something else already synchronises them.

    Returns whether some rank has a gradient that is not zero, the same answer on all; otherwise nothing can be seen.
    """
    alive = any(bool(gradient.any()) for gradient in gradients)
    marks = gather_words(exchange, [fingerprint(gradients), int(alive)], device)
    if marks[0][1] and all(mark == marks[0] for mark in marks):
        warn_for_all(
            f"all {exchange.world_size} ranks have bit-identical gradients, so something already synchronises them "
            "(DistributedDataParallel, FSDP2 over the same ranks) or every rank reads the same data. Call "
            "demopt.unsync(model), which stops that, or give DeMo the plain model, or as process_group the ranks "
            "between which gradients are not yet averaged.",
            exchange,
        )
    return any(found for _, found in marks)


def check_drift(headers: list[Header], inside: str = "") -> None:
    """Raises DriftError if the headers carry different fingerprints of the ranks' parameters.

    `inside` says which copies differ inside this node. Its fingerprints are then not those of parameters (`drifted`),
    so that other nodes raise the error too.

    Examples:
        >>> check_drift([Header(7, 0, 2, 0, 0, FINGERPRINT, fingerprint=5), Header(7, 1, 2, 0, 0, FINGERPRINT, 6)])
        ... # doctest: +ELLIPSIS
        Traceback (most recent call last):
        demopt.errors.DriftError: step 7: the parameters of rank 1 differ from those of rank 0; ...
    """
    if all(header.flags & FINGERPRINT for header in headers):
        ranks = [rank for rank, header in enumerate(headers) if header.fingerprint != headers[0].fingerprint]
        if ranks or inside:
            raise DriftError(headers[0].step, ranks, inside)


def drifted(mark: int) -> int:
    """Returns what a rank sends as its fingerprint if copies inside its node differ: none that equal nodes could send.

    Examples:
        >>> drifted(0) == 2**64 - 1
        True
    """
    return mark ^ (2**64 - 1)


def gather_words(exchange: Exchange, words: list[int], device: torch.device) -> list[tuple[int, ...]]:
    """Returns each rank's numbers, all in [0, 2**64), by one all_gather."""
    raw = b"".join(word.to_bytes(8, "little") for word in words)
    rows = exchange.all_gather(torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)).cpu()
    return [
        tuple(int.from_bytes(bytes(row[at : at + 8].tolist()), "little") for at in range(0, len(raw), 8))
        for row in rows
    ]


def check_sharding(global_ranks: frozenset[int], parameters: list[Tensor]) -> None:
    """Raises ValueError if a parameter is sharded (FSDP2) over ranks between which DeMo exchanges messages."""
    for index, parameter in enumerate(parameters):
        both = sorted(sharded_over(parameter) & global_ranks)
        if len(both) > 1:
            raise ValueError(
                f"parameter {index} (shape {list(parameter.shape)}) is sharded over ranks {both} (FSDP2, tensor "
                "parallelism), and process_group spans them too, but DeMo synchronises replicas. Give it the mesh's "
                'dimension that replicas span: process_group=mesh["replicate"].'
            )

"""Buckets: sets of parameters with a message of their own, which can leave before the other buckets are ready.

Shapes: B bytes in a bucket's message, W ranks.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from demopt.errors import MessageError
from demopt.optim.chunk_group import ChunkGroup, build, local
from demopt.optim.compress import Extracted, Workspace, restore
from demopt.optim.routes.choice import make_route
from demopt.optim.routes.interface import Route, Team
from demopt.optim.terms import Terms
from demopt.wire.frame import Header

GradientVersion = tuple[int, int] | None


@dataclass(frozen=True)
class Bucket:
    """A route, and the trained parameters that take it."""

    route: Route
    parameters: tuple[Tensor, ...]


@dataclass
class Sending:
    """What one rank sends for a bucket in one step: what it took out of the momentum, and the message."""

    extracted: list[Extracted]
    message: Tensor
    arriving: "Future[Tensor] | None" = None  # the result, if the exchange runs in the background


@dataclass
class Round:
    """One step's exchange: the headers of this rank's messages, and what each bucket has extracted so far."""

    headers: list[Header]
    sendings: list[Sending | None]
    started: tuple[int, int]  # bytes sent and received before the round
    handed_out: bool = False  # `extract` has returned the message
    early_seconds: float = 0.0  # spent during backward on extracting and building messages
    versions: dict[Tensor, GradientVersion] = field(default_factory=dict)  # of gradients sent during backward

    @property
    def messages(self) -> list[Tensor]:
        """The messages of all buckets extracted so far."""
        return [sending.message for sending in self.sendings if sending is not None]

    def settle(self) -> None:
        """Waits until none of its exchanges is in flight."""
        for sending in self.sendings:
            if sending is not None and sending.arriving is not None:
                sending.arriving.exception()


def cut(groups: list[dict[str, Any]], count: int) -> list[list[Tensor]]:
    """Splits the parameters into at most `count` buckets, the last ones first, because backward reaches them first.

    Example:
        >>> import torch
        >>> parameters = [torch.zeros(4), torch.zeros(2), torch.zeros(2)]
        >>> [[len(p) for p in bucket] for bucket in cut([{"params": parameters}], 2)]
        [[2, 2], [4]]
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    total, gathered = sum(p.numel() for p in parameters), 0
    buckets: list[list[Tensor]] = [[]]
    for parameter in reversed(parameters):
        if buckets[-1] and gathered >= len(buckets) * total / count:
            buckets.append([])
        buckets[-1].append(parameter)
        gathered += parameter.numel()
    return buckets


def build_buckets(terms: Terms, team: Team, workspace: Workspace) -> tuple[list[Bucket], list[ChunkGroup], str]:
    """Builds the buckets; returns them, all their chunk groups, and the reason for the route. ValueError if none fits.

    Example:
        >>> from demopt.optim.options import Options
        >>> build_buckets(Terms(Options("auto", 100, 0, 0), [], {}), Team(0, 1), Workspace())[2]
        'gather: a rank alone receives nothing'
    """
    buckets: list[Bucket] = []
    chunk_groups: list[ChunkGroup] = []
    why = ""
    for parameters in cut(terms.groups, terms.options.overlap or 1):
        mine = build(terms.groups, parameters)
        active = [chunk_group for chunk_group in mine if chunk_group.chunks and not chunk_group.key.frozen]
        route, why = make_route(terms.options.route, active, team, workspace)
        buckets.append(Bucket(route, tuple(parameter for parameter in parameters if parameter.requires_grad)))
        chunk_groups += mine
    return buckets, chunk_groups, why


def split(messages: Tensor, widths: list[int]) -> list[Tensor]:
    """Splits messages into each bucket's columns; leaves a single bucket's unchanged, for its route to check."""
    if len(widths) == 1:
        return [messages]
    if messages.dim() != 2 or messages.shape[1] != sum(widths):
        raise MessageError(f"got {list(messages.shape)} bytes where rows of {sum(widths)} were expected")
    return list(messages.split(widths, dim=1))


def undo(buckets: Iterable[Bucket], sendings: Iterable[Sending | None]) -> None:
    """Puts back into the momenta, exactly, what `sendings` took out of them."""
    for bucket, sending in zip(buckets, sendings, strict=True):
        if sending is not None:
            for chunk_group, extracted in zip(bucket.route.chunk_groups, sending.extracted, strict=False):
                restore(chunk_group, extracted)


def gradient_version(parameter: Tensor) -> GradientVersion:
    """Returns a value that changes whenever the gradient is modified in place or replaced."""
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), local(gradient)._version)

"""Segments: sets of parameters with a message of their own, which can leave before the other segments are ready.

Shapes: B bytes in a segment's message, W ranks.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from demopt.errors import MessageError
from demopt.optim.bucket import Bucket, build, local
from demopt.optim.routes.choice import make_route
from demopt.optim.routes.interface import Route, Team
from demopt.optim.stages import Extracted, Workspace, restore
from demopt.optim.terms import Terms
from demopt.wire.frame import Header

GradientVersion = tuple[int, int] | None


@dataclass(frozen=True)
class Segment:
    """A route, and the trained parameters that take it."""

    route: Route
    parameters: tuple[Tensor, ...]


@dataclass
class Sending:
    """What one rank sends for a segment in one step: what it took out of the momentum, and the message."""

    extracted: list[Extracted]
    message: Tensor
    arriving: "Future[Tensor] | None" = None  # the result, if the exchange runs in the background


@dataclass
class Round:
    """One step's exchange: the headers of this rank's messages, and what each segment has extracted so far."""

    headers: list[Header]
    sendings: list[Sending | None]
    started: tuple[int, int]  # bytes sent and received before the round
    handed_out: bool = False  # `extract` has returned the message
    early_seconds: float = 0.0  # spent during backward on extracting and building messages
    versions: dict[Tensor, GradientVersion] = field(default_factory=dict)  # of gradients sent during backward

    @property
    def messages(self) -> list[Tensor]:
        """The messages of all segments extracted so far."""
        return [sending.message for sending in self.sendings if sending is not None]

    def settle(self) -> None:
        """Waits until none of its exchanges is in flight."""
        for sending in self.sendings:
            if sending is not None and sending.arriving is not None:
                sending.arriving.exception()


def cut(groups: list[dict[str, Any]], count: int) -> list[list[Tensor]]:
    """Splits the parameters into at most `count` segments, the last ones first, because backward reaches them first.

    Example:
        >>> import torch
        >>> parameters = [torch.zeros(4), torch.zeros(2), torch.zeros(2)]
        >>> [[len(p) for p in segment] for segment in cut([{"params": parameters}], 2)]
        [[2, 2], [4]]
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    total, gathered = sum(p.numel() for p in parameters), 0
    segments: list[list[Tensor]] = [[]]
    for parameter in reversed(parameters):
        if segments[-1] and gathered >= len(segments) * total / count:
            segments.append([])
        segments[-1].append(parameter)
        gathered += parameter.numel()
    return segments


def build_segments(terms: Terms, team: Team, workspace: Workspace) -> tuple[list[Segment], list[Bucket], str]:
    """Builds the segments; returns them, all their buckets, and the reason for the route. ValueError if none fits.

    Example:
        >>> from demopt.optim.options import Options
        >>> build_segments(Terms(Options("auto", 100, 0, 0), [], {}), Team(0, 1), Workspace())[2]
        'gather: a rank alone receives nothing'
    """
    segments: list[Segment] = []
    buckets: list[Bucket] = []
    why = ""
    for parameters in cut(terms.groups, terms.options.overlap or 1):
        mine = build(terms.groups, parameters)
        active = [bucket for bucket in mine if bucket.tiles and not bucket.kind.frozen]
        route, why = make_route(terms.options.route, active, team, workspace)
        segments.append(Segment(route, tuple(parameter for parameter in parameters if parameter.requires_grad)))
        buckets += mine
    return segments, buckets, why


def split(messages: Tensor, widths: list[int]) -> list[Tensor]:
    """Splits messages into each segment's columns; leaves a single segment's unchanged, for its route to check."""
    if len(widths) == 1:
        return [messages]
    if messages.dim() != 2 or messages.shape[1] != sum(widths):
        raise MessageError(f"got {list(messages.shape)} bytes where rows of {sum(widths)} were expected")
    return list(messages.split(widths, dim=1))


def undo(segments: Iterable[Segment], sendings: Iterable[Sending | None]) -> None:
    """Puts back into the momenta, exactly, what `sendings` took out of them."""
    for segment, sending in zip(segments, sendings, strict=True):
        if sending is not None:
            for bucket, extracted in zip(segment.route.buckets, sending.extracted, strict=False):
                restore(bucket, extracted)


def gradient_version(parameter: Tensor) -> GradientVersion:
    """Returns a value that changes whenever the gradient is modified in place or replaced."""
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), local(gradient)._version)

"""A message that is truncated, corrupted, of another layout, or with invalid coefficients is refused.

The error names the rank and the reason, and nothing is applied. Every field and bit of a header is refused in
tests/wire/test_message.py, random damage on both routes in test_fuzz.py, damage on the way in tests/routes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import problems
from demopt import DeMo, MessageError
from demopt.wire import message as wire
from demopt.wire.layout import Section

WORLD, BAD_RANK = 3, 1
SHAPES = [(13, 9), (20,)]
SECTIONS = (Section(1, 117, 11, "float32"), Section(2, 10, 1, "float32"))  # of a message, for those shapes


def _optimizers() -> list[DeMo]:
    settings = {"weight_decay": 0.1, "route": "gather", "values": "float32"}
    return [problems.demo(problems.OneOf(rank, WORLD), SHAPES, **settings) for rank in range(WORLD)]


def _gather(step: int, optimizers: list[DeMo]) -> Tensor:
    for rank, optimizer in enumerate(optimizers):
        problems.set_gradients(problems.all_parameters(optimizer), step, rank)
    return torch.stack([optimizer.extract() for optimizer in optimizers])


def _sealed(messages: Tensor, body: Tensor | None = None, **changes: int) -> Tensor:
    """The messages with one of BAD_RANK made anew, its checksum right, as a faulty or hostile sender's would be."""
    raw = wire.read_headers(messages)[BAD_RANK]
    header = wire.Header(raw.step, raw.rank, raw.world_size, raw.layout, raw.settings, raw.flags, raw.fingerprint)
    damaged = messages.clone()
    damaged[BAD_RANK] = wire.build(replace(header, **changes), messages[BAD_RANK, 64:] if body is None else body)
    return damaged


def _bit(messages: Tensor, place: int) -> Tensor:
    damaged = messages.clone()
    damaged[BAD_RANK, place // 8] ^= 1 << place % 8
    return damaged


def _made_up(messages: Tensor, **changes: Any) -> Tensor:
    """A made-up body, valid but for one change.

    `position`: of the first section's last coefficient; `twice`: an index comes twice; `value`: of the last one.
    """
    parts = []
    for number, section in enumerate(SECTIONS):
        positions = torch.arange(section.keep).repeat(section.chunks, 1)
        values = torch.ones(section.chunks, section.keep)
        if number == 0:
            positions[0, -1] = changes.get("position", section.length - 1)
            if changes.get("twice"):
                positions[0, -2] = positions[0, -1]
        else:
            values[-1, -1] = changes.get("value", 1.0)
        parts.append(torch.cat(section.encode(positions, values)))
    body = torch.cat(parts)
    return _sealed(messages, torch.nn.functional.pad(body, (0, messages.shape[1] - 64 - body.numel())))


#: What becomes of the messages, the rank that is named, and the reason.
DAMAGES: dict[str, tuple[Callable[[Tensor], Tensor], int | None, str]] = {
    "a byte short": (lambda m: m[:, :-1], None, "bytes"),
    "a rank missing": (lambda m: m[:2], None, "3"),
    "a bit of the header": (lambda m: _bit(m, 8 * 9), BAD_RANK, "checksum"),
    "the last bit": (lambda m: _bit(m, 8 * m.shape[1] - 1), BAD_RANK, "checksum"),
    "the step before": (lambda m: _sealed(m, step=0), BAD_RANK, "step 0"),
    "another layout": (lambda m: _sealed(m, layout=5), BAD_RANK, "layout"),
    "rank 0 twice": (lambda m: m[[0, 0, 2]], BAD_RANK, "rank 0"),
    "an index out of range": (lambda m: _made_up(m, position=117), BAD_RANK, "out of range"),
    "an index twice": (lambda m: _made_up(m, twice=True), BAD_RANK, "ascend"),
    "zeros, well sealed": (lambda m: _sealed(m, torch.zeros_like(m[0, 64:])), BAD_RANK, "."),
    "NaN": (lambda m: _made_up(m, value=float("nan")), BAD_RANK, "NaN"),
    "Inf": (lambda m: _made_up(m, value=float("inf")), BAD_RANK, "infinite"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_apply_refuses_damaged_messages_and_names_the_rank(damage: str) -> None:
    change, rank, says = DAMAGES[damage]
    optimizers = _optimizers()
    first = _gather(0, optimizers)
    for optimizer in optimizers:
        optimizer.apply(first)
    before, messages = optimizers[0].fingerprint(), _gather(1, optimizers)
    extracted = problems.momenta(optimizers[0])
    with pytest.raises(MessageError, match=says) as caught:
        optimizers[0].apply(change(messages))
    assert caught.value.rank == rank
    assert rank is None or f"rank {rank}" in str(caught.value)
    assert optimizers[0].fingerprint() == before
    assert problems.same(problems.momenta(optimizers[0]), extracted)
    for optimizer in optimizers:  # the true messages are accepted
        optimizer.apply(messages)
    assert optimizers[0].fingerprint() == optimizers[1].fingerprint() == optimizers[2].fingerprint() != before


def test_apply_accepts_a_handmade_valid_message() -> None:
    """So the bad ones above are refused for their flaw."""
    optimizers = _optimizers()
    optimizers[0].apply(_made_up(_gather(0, optimizers)))

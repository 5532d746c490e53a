"""A message that is truncated, corrupted, of another layout, or with invalid coefficients is refused.

The error names the rank and the reason, and nothing is applied.
"""

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import problems
import ranks
from demopt import DeMo, MessageError
from demopt.exchange import Collective, Exchange, Faulty, SingleRank
from demopt.wire import message as wire
from demopt.wire.layout import Layout, Section

WORLD = 3
BAD_RANK = 1
SHAPES = [(13, 9), (20,)]
SECTIONS = (Section(1, 117, 11, "float32"), Section(2, 10, 1, "float32"))  # of a message, for those shapes


def _optimizer(rank: int = 0, exchange: Exchange | None = None, **more: Any) -> DeMo:
    parameters = problems.parameters(SHAPES)
    settings = {**problems.SMALL, "weight_decay": 0.1, "route": "gather", "values": "float32", **more}
    return DeMo(parameters, **settings, process_group=exchange or _Pretend(rank))


class _Pretend(SingleRank):
    """One of three ranks, whose messages the test carries."""

    def __init__(self, rank: int) -> None:
        self.rank, self.world_size = rank, WORLD


def _gather(step: int, optimizers: list[DeMo]) -> Tensor:
    messages = []
    for rank, optimizer in enumerate(optimizers):
        problems.set_gradients(problems.all_parameters(optimizer), step, rank)
        messages.append(optimizer.extract())
    return torch.stack(messages)


# Damages of the message of BAD_RANK. Sealed ones carry a right checksum, as a faulty or hostile sender's would.


def _header(messages: Tensor) -> tuple[Any, ...]:
    return struct.unpack("<4sHHQIIQQQIIQ", bytes(messages[BAD_RANK, :64].tolist()))


def _sealed(messages: Tensor, header: wire.Header | None = None, body: Tensor | None = None) -> Tensor:
    magic, version, flags, step, rank, world_size, layout, settings, mark, size, samples, _ = _header(messages)
    assert (magic, version, size) == (b"DeMo", wire.VERSION, messages.shape[1] - 64)
    header = header or wire.Header(step, rank, world_size, layout, settings, flags, mark, samples)
    damaged = messages.clone()
    damaged[BAD_RANK] = wire.build(header, messages[BAD_RANK, 64:] if body is None else body)
    return damaged


def _with_header(**changes: int) -> Callable[[Tensor], Tensor]:
    def damage(messages: Tensor) -> Tensor:
        _, _, flags, step, rank, world_size, layout, settings, mark, _, samples, _ = _header(messages)
        header = wire.Header(step, rank, world_size, layout, settings, flags, mark, samples)
        return _sealed(messages, replace(header, **changes))

    return damage


def _bit(place: int) -> Callable[[Tensor], Tensor]:
    def damage(messages: Tensor) -> Tensor:
        damaged = messages.clone()
        damaged[BAD_RANK, place // 8] ^= 1 << place % 8
        return damaged

    return damage


def _zeros(messages: Tensor) -> Tensor:
    damaged = messages.clone()
    damaged[BAD_RANK] = 0
    return damaged


def _noise(messages: Tensor) -> Tensor:
    damaged = messages.clone()
    damaged[BAD_RANK] = torch.randint(0, 256, damaged[0].shape, generator=torch.Generator().manual_seed(0))
    return damaged


def _noise_as_body(messages: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, messages[0, 64:].shape, dtype=torch.uint8, generator=generator)
    return _sealed(messages, body=noise)


def _body(messages: Tensor, **changes: Any) -> Tensor:
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
        parts.append(section.encode(positions, values))
    body = torch.cat(parts)
    return torch.nn.functional.pad(body, (0, messages.shape[1] - 64 - body.numel()))


def _made_up(**changes: Any) -> Callable[[Tensor], Tensor]:
    return lambda messages: _sealed(messages, body=_body(messages, **changes))


def _copy_of_rank_0(messages: Tensor) -> Tensor:
    damaged = messages.clone()
    damaged[BAD_RANK] = messages[0]
    return damaged


def _swapped(messages: Tensor) -> Tensor:
    return messages[[0, 2, 1]]


DAMAGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a byte short": (lambda m: m[:, :-1], "bytes"),
    "header only": (lambda m: m[:, :64], "bytes"),
    "half a header": (lambda m: m[:, :30], "bytes"),
    "nothing": (lambda m: m[:, :0], "bytes"),
    "too long": (lambda m: torch.cat((m, m), 1), "bytes"),
    "a rank missing": (lambda m: m[:2], "3"),
    "a rank too many": (lambda m: torch.cat((m, m[:1])), "3"),
    "not bytes": (lambda m: m.to(torch.int32), "not rows of"),
    "not a table": (lambda m: m.flatten(), "not rows of"),
    "all zeros": (_zeros, "not a message"),
    "noise": (_noise, "not a message"),
    "another magic": (_bit(3), "not a message"),
    "another version": (_bit(8 * 4), "version"),
    "a bit of the header": (_bit(8 * 9), "checksum"),
    "a bit of the checksum": (_bit(8 * 56), "checksum"),
    "a bit of the body": (_bit(8 * 64 + 5), "checksum"),
    "the last bit": (lambda m: _bit(8 * m.shape[1] - 1)(m), "checksum"),
    "the step before": (_with_header(step=0), "step 0"),
    "a step ahead": (_with_header(step=2), "step 2"),
    "another rank": (_with_header(rank=2), "rank 2"),
    "an impossible rank": (_with_header(rank=77), "rank 77"),
    "another world": (_with_header(world_size=4), "world size 4"),
    "another layout": (_with_header(layout=5), "layout"),
    "other settings": (_with_header(settings=5), "settings"),
    "an unknown flag": (_with_header(flags=1 << 15), "flags"),
    "rank 0 twice": (_copy_of_rank_0, "rank 0"),
    "two ranks swapped": (_swapped, "rank 2"),
    "an index out of range": (_made_up(position=117), "out of range"),
    "noise, well sealed": (_noise_as_body, "."),
    "an index twice": (_made_up(twice=True), "ascend"),
    "zeros, well sealed": (lambda m: _sealed(m, body=torch.zeros_like(m[0, 64:])), "."),
    "ones, well sealed": (lambda m: _sealed(m, body=torch.full_like(m[0, 64:], 255)), "."),
    "NaN": (_made_up(value=float("nan")), "NaN"),
    "Inf": (_made_up(value=float("inf")), "infinite"),
    "minus Inf": (_made_up(value=float("-inf")), "infinite"),
}
ROW_IS_KNOWN = set(DAMAGES) - {
    "a byte short",
    "header only",
    "half a header",
    "nothing",
    "too long",
    "a rank missing",
    "a rank too many",
    "not bytes",
    "not a table",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_apply_refuses_damaged_messages_and_names_the_rank(damage: str) -> None:
    change, says = DAMAGES[damage]
    optimizers = [_optimizer(rank) for rank in range(WORLD)]
    for optimizer, messages in zip(optimizers, [_gather(0, optimizers)] * WORLD, strict=True):
        optimizer.apply(messages)
    before = optimizers[0].fingerprint()
    messages = _gather(1, optimizers)
    extracted = problems.momenta(optimizers[0])
    damaged = change(messages)
    with pytest.raises(MessageError, match=says) as caught:
        optimizers[0].apply(damaged)
    if damage in ROW_IS_KNOWN:
        assert caught.value.rank == BAD_RANK
        assert f"rank {BAD_RANK}" in str(caught.value)
    assert optimizers[0].fingerprint() == before
    assert problems.same(problems.momenta(optimizers[0]), extracted)
    for optimizer in optimizers:  # the true messages are accepted
        optimizer.apply(messages)
    assert optimizers[0].fingerprint() == optimizers[1].fingerprint() == optimizers[2].fingerprint() != before


@pytest.mark.parametrize("damage", ["a bit of the body", "an index out of range", "Inf", "a byte short"])
def test_rollback_after_refused_apply_loses_nothing(damage: str) -> None:
    optimizers = [_optimizer(rank) for rank in range(WORLD)]
    messages = _gather(0, optimizers)
    with pytest.raises(MessageError):
        optimizers[0].apply(DAMAGES[damage][0](messages))
    optimizers[0].rollback()
    lone = _optimizer(0, SingleRank(), top_k=problems.SMALL["chunk"] ** 2, alpha=1.0)
    parameters = problems.all_parameters(lone)
    problems.set_gradients(parameters, 0, 0)
    lone.extract()
    lone.rollback()
    for got, want in zip(problems.momenta(optimizers[0]), problems.momenta(lone), strict=True):
        assert torch.equal(got, want)


def test_apply_refuses_every_flipped_bit() -> None:
    optimizers = [_optimizer(rank) for rank in range(WORLD)]
    messages = _gather(0, optimizers)
    before = optimizers[0].fingerprint()
    for place in range(0, 8 * messages.shape[1], 7):
        with pytest.raises(MessageError) as caught:
            optimizers[0].apply(_bit(place)(messages))
        assert caught.value.rank == BAD_RANK
    assert optimizers[0].fingerprint() == before


def test_apply_accepts_a_handmade_valid_message() -> None:
    """So the bad ones above are refused for their flaw."""
    optimizers = [_optimizer(rank) for rank in range(WORLD)]
    messages = _gather(0, optimizers)
    assert Layout(SECTIONS).size == messages.shape[1] - 64
    optimizers[0].apply(_made_up()(messages))


def _step_with(rank: int, world_size: int, damage: str) -> dict[str, Any]:
    """A whole step over gloo, with damage on the way to rank 0 only at the second step."""
    rounds = [0]

    def break_second(messages: Tensor) -> Tensor:
        if messages.shape[1] >= 64 and bytes(messages[0, :4].tolist()) == b"DeMo":
            rounds[0] += 1
            if rounds[0] == 2 and rank == 0:
                return DAMAGES[damage][0](messages)
        return messages

    optimizer = _optimizer(exchange=Faulty(Collective(dist.group.WORLD), break_second))
    parameters = problems.all_parameters(optimizer)
    problems.train(optimizer, range(1), rank)
    before, momenta = optimizer.fingerprint(), problems.momenta(optimizer)
    problems.set_gradients(parameters, 1, rank)
    found: dict[str, Any] = {"error": None}
    try:
        optimizer.step()
    except MessageError as error:
        found["error"] = error
    found["unchanged"] = optimizer.fingerprint() == before
    accumulated = _optimizer(exchange=SingleRank())
    for parameter, twin, momentum in zip(parameters, problems.all_parameters(accumulated), momenta, strict=True):
        accumulated.state[twin]["momentum"].copy_(momentum)
        twin.grad = parameter.grad
    accumulated.extract()
    accumulated.rollback()
    found["rolled back"] = problems.same(problems.momenta(optimizer), problems.momenta(accumulated))
    found["saveable"] = bool(optimizer.state_dict())
    return found


@pytest.mark.parametrize("damage", ["a bit of the body", "NaN", "a byte short", "two ranks swapped"])
def test_step_rolls_back_a_damaged_message(damage: str) -> None:
    first, *others = ranks.run(_step_with, WORLD, damage)
    assert isinstance(first["error"], MessageError)
    assert first["unchanged"]
    assert first["rolled back"]
    assert first["saveable"]
    for found in others:
        assert found["error"] is None
        assert not found["unchanged"]

"""Mutated frames: a short run of benchmarks/fuzz_frames.py, and through whole optimizers, which must not change.

`make fuzz` runs a million.
"""

import random
from typing import Any

import fuzz_frames
import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import problems
from demopt import DeMo, MessageError
from demopt.exchange import SingleRank
from demopt.optim.chunk_group import build


def test_fuzz_of_3000_frames_finds_nothing_wrong() -> None:
    counts, wrong = fuzz_frames.fuzz(range(3000))
    assert not wrong, wrong[0]
    told = {says: sum(n for (_, said), n in counts.items() if said == says) for says in ("refused", "valid", "skipped")}
    assert told["refused"] > 1500
    assert told["valid"] > 300  # or nothing would reach the decoders
    assert sum(told.values()) == 3000


@pytest.mark.parametrize("target", fuzz_frames.targets(), ids=lambda target: target.name)
def test_fuzz_targets_are_valid_unmutated(target: fuzz_frames.Target) -> None:
    assert fuzz_frames.verdict(target, target.rows.clone()) == "valid"


@pytest.mark.parametrize("flags", [2, 4, 6, 8, 16])
def test_frame_flags_do_not_bypass_the_checks(flags: int) -> None:
    """Whatever flags a header has: a body that makes no sense is refused, unless the step is skipped."""
    for target in fuzz_frames.targets():
        for fill in (0, 255):
            rows = target.rows.clone()
            rows[1, 6] = flags
            rows[1, 64:] = fill
            assert fuzz_frames.verdict(target, fuzz_frames.sealed(rows)) in ("refused", "valid", "skipped")


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "int8", "2-bit", "sign"])
@pytest.mark.parametrize("byte", [0x7E, 0x7F, 0x80, 0xFE])
def test_huge_values_give_no_infinite_direction(name: str, byte: int) -> None:
    """3e38 is finite, the sum of two is not: what overflows must be refused, or nobody is safe from one rank."""
    for target in fuzz_frames.targets((name,)):
        for start in range(64, target.rows.shape[1], 12):
            rows = target.rows.clone()
            rows[1, start:] = byte
            assert fuzz_frames.verdict(target, fuzz_frames.sealed(rows)) in ("refused", "valid")


# Through whole optimizers


class Carried(SingleRank):
    """One of two ranks, whose messages the test carries."""

    def __init__(self, rank: int) -> None:
        self.rank, self.world_size = rank, 2


def _optimizer(rank: int, **more: Any) -> DeMo:
    settings = {**problems.SMALL, "chunk": 8, "route": "gather", "weight_decay": 0.1, **more}
    return DeMo(problems.parameters([(9, 8), (5,)]), **settings, process_group=Carried(rank))


def _extracted(**more: Any) -> tuple[DeMo, Tensor]:
    optimizers = [_optimizer(rank, **more) for rank in range(2)]
    for rank, optimizer in enumerate(optimizers):
        problems.set_gradients(problems.all_parameters(optimizer), 0, rank)
    return optimizers[0], torch.stack([optimizer.extract() for optimizer in optimizers])


READERS = {values: _extracted(values=values) for values in ("float32", "int8", "2-bit", "sign")}


@pytest.mark.parametrize("values", READERS)
@hypothesis.settings(max_examples=200)
@hypothesis.given(seed=st.integers(0, 2**32))
def test_apply_refusing_a_fuzzed_frame_changes_nothing(values: str, seed: int) -> None:
    optimizer, rows = READERS[values]
    before, momenta = optimizer.fingerprint(), problems.momenta(optimizer)
    damaged = fuzz_frames.mutated(rows, random.Random(seed))
    hypothesis.assume(not torch.equal(damaged, rows))
    refusal: MessageError | None = None
    try:
        optimizer.apply(damaged)
    except MessageError as error:
        refusal = error
    if refusal is not None:
        assert refusal.rank == (1 if damaged.shape == rows.shape else None)
        assert optimizer.fingerprint() == before
        assert problems.same(problems.momenta(optimizer), momenta)
    else:
        assert all(bool(torch.isfinite(p.detach()).all()) for p in problems.all_parameters(optimizer))
        READERS[values] = _extracted(values=values)


def _with_body(rows: Tensor, optimizer: DeMo, number: float) -> Tensor:
    """The rows, where the second rank sends `number` with alternating signs at all of its positions."""
    data = []
    for chunk_group in build(optimizer.param_groups):
        section = chunk_group.section
        positions = torch.arange(section.keep).repeat(section.chunks, 1)
        signs = 1.0 - 2.0 * (torch.arange(section.keep) % 2)
        data.append(section.encode(positions, (number * signs).repeat(section.chunks, 1)))
    body = torch.cat(data)
    damaged = rows.clone()
    damaged[1, 64 : 64 + body.numel()] = body
    return fuzz_frames.sealed(damaged)


@pytest.mark.parametrize("values", ["float32", "bfloat16", "int8", "2-bit", "sign"])
@pytest.mark.parametrize("update", ["signum", "sgd"])
@pytest.mark.parametrize("number", [3.3e38, 1e31])
def test_apply_survives_values_with_infinite_sums(values: str, update: str, number: float) -> None:
    """Gradients of 1e30 and more are not sent; a message that has them was not made by an honest rank."""
    optimizer, rows = _extracted(values=values, update=update)
    refusal: MessageError | None = None
    try:
        optimizer.apply(_with_body(rows, optimizer, number))
    except MessageError as error:
        refusal = error
    assert refusal is None or refusal.rank == 1
    for parameter in problems.all_parameters(optimizer):
        assert bool(torch.isfinite(parameter.detach()).all())

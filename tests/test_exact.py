"""Exact decoding (docs/algorithm.md): order, precision, threads and blocks do not matter; the error stays small."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import problems
from demopt import DeMo
from demopt.codec import chunk_group as chunk_groups
from demopt.core import exact, transform

LEVELS = {"sign": 1, "2-bit": 2}
LIMIT = 2**24
GUARD_BITS = 3


def _aggregate(coefficients, length, values, reduction):
    """The sums, and the unit of each chunk, from positions [W, C, K], levels [W, C, K] and codes [W, C]."""
    positions, levels, codes = coefficients
    pair = torch.empty(2, positions.shape[1], length)
    return pair[0], exact.aggregate_integers(positions, (levels, codes), LEVELS[values], reduction, pair, False, None)


def _literal_aggregate(coefficients, length, values, reduction):
    """In Python's integers; the quotient is one float32 division."""
    positions, levels, codes = (part.tolist() for part in coefficients)
    world_size, chunks = len(positions), len(positions[0])
    guard = min(GUARD_BITS, math.floor(math.log2(LIMIT / (world_size * LEVELS[values] * 32))))
    out = np.zeros((chunks, length), dtype=np.float32)
    for chunk in range(chunks):
        sums, senders = [0] * length, [0] * length
        top = max(codes[rank][chunk] >> 4 for rank in range(world_size))
        for rank in range(world_size):
            code = codes[rank][chunk]
            mantissa = (16 + code % 16 if code >> 4 else 0) << guard
            below = min(30, top - (code >> 4))
            unit = (mantissa + (2**below >> 1)) // 2**below
            for position, level in zip(positions[rank][chunk], levels[rank][chunk], strict=True):
                sums[position] += level * unit
                senders[position] += 1
        assert max(map(abs, sums)) < LIMIT
        for position in range(length):
            divisor = {"senders": max(senders[position], 1), "mean": world_size}[reduction]
            out[chunk, position] = np.float32(sums[position]) / np.float32(divisor)
    return out


@pytest.mark.parametrize("values", LEVELS)
@pytest.mark.parametrize("reduction", ["senders", "mean"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_exact_aggregate_equals_integer_arithmetic(values, reduction, world_size):
    torch.manual_seed(0)
    positions = torch.rand(world_size, 3, 40).argsort(-1)[..., :9].sort(-1).values
    levels = torch.randint(1, LEVELS[values] + 1, positions.shape) * (2 * torch.randint(0, 2, positions.shape) - 1)
    codes = torch.randint(121 * 16, 127 * 16, (world_size, 3))
    codes[:, 0] = 0  # of all ranks
    codes[:-1, 1] = 0  # of all but the last
    coefficients = positions, levels, codes
    out, _ = _aggregate(coefficients, 40, values, reduction)
    assert np.array_equal(out.numpy(), _literal_aggregate(coefficients, 40, values, reduction))


@pytest.mark.parametrize("values", LEVELS)
@pytest.mark.parametrize("world_size", [1, 2, 64, 500, 1000, 4000])
def test_exact_aggregate_worst_case_stays_below_2_24(values, world_size):
    positions, levels = torch.arange(2).expand(world_size, 1, 2), torch.full((world_size, 1, 2), LEVELS[values])
    for mantissa in (15, 0, 7):
        codes = torch.full((world_size, 1), 127 * 16 + mantissa)
        out, unit = _aggregate((positions, levels, codes), 3, values, "mean")
        assert float(out[0, 0]) * world_size < LIMIT
        assert float(out[0, 0] * unit[0]) == LEVELS[values] * (1 + mantissa / 16)


def _scaled(chunks, terms):
    """As exact.inverse scales before a pass: to integers below 2**bits."""
    bits = min(11, math.floor(math.log2(LIMIT / (127 * terms))))
    largest = chunks.abs().amax((1, 2), keepdim=True)
    return torch.round(chunks * 2.0 ** (bits - torch.frexp(largest).exponent.double()))


def _inverse(name, chunks):
    rows, columns = (exact.integer_basis(name, side) for side in chunks.shape[1:])
    out = chunks.clone()
    return out, math.prod(exact.inverse(out, (rows, columns), torch.empty_like(out)))


@pytest.mark.parametrize("name", transform.TRANSFORMS)
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (7, 5), (1, 64), (128, 16), (17, 128)])
def test_exact_inverse_equals_python_integers_and_no_partial_sum_leaves_2_24(name, rows, columns):
    """The sum of magnitudes bounds every partial sum, in any order; also for the chunk that is worst for a row."""
    a, b = (exact.integer_basis(name, side).double() for side in (rows, columns))
    worst = a[:, a.abs().sum(0).argmax()].sign().mul(2.0**20).view(1, rows, 1).expand(1, rows, columns).float()
    torch.manual_seed(0)
    sums = torch.randint(-20000, 20000, (1, rows, columns)) * (torch.rand(1, rows, columns) < 0.1).float()
    for chunks in (sums, sums / 3, worst):  # as an aggregation leaves them, undivided or divided
        first = _scaled(chunks.double(), rows)[0] if rows > 1 else chunks[0].double()
        assert rows == 1 or float((a.T.abs() @ first.abs()).max()) <= LIMIT  # one row has no sum
        second = _scaled((a.T @ first).float().double().unsqueeze(0), columns)[0]
        assert float((second.abs() @ b.abs()).max()) <= LIMIT
        assert _inverse(name, chunks)[0][0].tolist() == (second @ b).tolist()


def test_exact_inverse_keeps_zeros_and_never_overflows():
    for scale in (0.0, 2.0**-100, 2.0**23):
        chunks = torch.zeros(2, 8, 8)
        chunks[1, 3, 4] = scale
        out, unit = _inverse("dct", chunks)
        assert not out[0].any()
        assert torch.isfinite(unit).all()
        assert bool(out[1].any()) == (scale > 0)


@pytest.mark.parametrize("name", transform.TRANSFORMS)
def test_integer_basis_ignores_last_bits_of_cosines(name):
    """Where the float64 cosine of another machine differs in its last bits, the rounded entry must not."""
    near = []
    for size in range(1, 129):
        real = transform.basis(name, size)
        scaled = real * (127 / real.abs().max())
        up, down = exact.rounded(scaled + 1e-11), exact.rounded(scaled - 1e-11)
        near += [] if torch.equal(up, down) else [size]
        rounded = exact.integer_basis(name, size)
        assert torch.equal(rounded, rounded.round())
        assert float(rounded.abs().max()) == 127
        assert float((rounded.double() - scaled).abs().max()) < 0.51
    assert near == []


SHAPES = [(64, 64), (128, 130), (90, 40), (200,), (7,), ()]


@pytest.mark.parametrize("name", transform.TRANSFORMS)
@pytest.mark.parametrize("values", LEVELS)
@pytest.mark.parametrize("update", ["signum", "sgd"])
def test_exact_apply_ignores_threads_and_blocks(name, values, update, monkeypatch):
    def made(rank=0, **more):
        settings = {"transform": name, "values": values, "update": update, "exact": True, "chunk": 32, "top_k": 16}
        return problems.demo(problems.OneOf(rank, 3), SHAPES, **settings, **more)

    def replayed(**more):
        optimizer = made(**more)
        return [(optimizer.apply(messages), optimizer.fingerprint())[1] for messages in sent]

    optimizers, sent = [made(rank) for rank in range(3)], []
    for step in range(3):
        sent.append(torch.stack([problems.extracted(each, step, rank) for rank, each in enumerate(optimizers)]))
        for optimizer in optimizers:
            optimizer.apply(sent[-1])
    found = [replayed()]
    try:
        torch.set_num_threads(2)
        found.append(replayed())
        torch.set_num_threads(1)
        for elements in (1, 1 << 14):
            monkeypatch.setattr(chunk_groups, "_BLOCK_ELEMENTS", elements)
            found.append(replayed())
        found.append(replayed(kernels="torch"))
        torch.use_deterministic_algorithms(True)
        found.append(replayed())
    finally:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
    assert found == [found[0]] * len(found)
    assert len(set(found[0])) == 3


@pytest.mark.parametrize(
    ("settings", "dtype", "refused"),
    [
        ({"values": "sign"}, torch.float32, ""),
        ({"values": "2-bit", "transform": "identity"}, torch.bfloat16, ""),
        ({"values": "float32"}, torch.float32, "needs integers on the wire.*'float32'"),
        ({"values": "sign"}, torch.float64, "float64"),
    ],
    ids=str,
)
def test_exact_is_on_where_possible_and_refused_elsewhere(settings, dtype, refused):
    def decodes_exactly(exact):
        optimizer = DeMo([Parameter(torch.zeros(4, 4, dtype=dtype))], exact=exact, **settings)
        return optimizer.replicator.wiring().chunk_groups[0].key.exact

    assert decodes_exactly(None) == (not refused)
    assert not decodes_exactly(False)
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        assert decodes_exactly(True)

"""The oracle itself, against numbers worked out by hand and against the definition of each of its parts."""

import math
from typing import Any

import pytest
import torch

from demopt.optim.settings import keep_count
from demopt.wire.bits import index_code
from demopt.wire.layout import Section
from oracles.reference import (
    basis,
    chunk_shape,
    kept_per_chunk,
    matrix_shape,
    position_bits,
    reference_step,
    zero_momentum,
)

PLAIN: dict[str, Any] = {
    "lr": 0.5,
    "momentum": 0.5,
    "alpha": 1.0,
    "top_k": 1,
    "chunk": 2,
    "transform": "identity",
    "update": "sgd",
    "reduction": "senders",
    "values": "float64",
    "weight_decay": 0.0,
    "gradient_scale": "ema",
    "chunking": "divisor",
    "maximize": False,
}


def _two_ranks(**settings: Any) -> tuple[list[float], list[list[float]], list[float]]:
    """Gradients (4, 2) and (2, 8) of a parameter (1, 1): after the first momentum, (2, 1) and (1, 4)."""
    x = torch.ones(2, dtype=torch.float64)
    gradients = [[torch.tensor([4.0, 2.0]).double()], [torch.tensor([2.0, 8.0]).double()]]
    group = {**PLAIN, **settings}
    step = reference_step([x], gradients, [[zero_momentum(x, group)] for _ in range(2)], group)
    return step.parameters[0].tolist(), [m[0].flatten().tolist() for m in step.momenta], step.aggregates[0].tolist()


def test_reference_step_by_hand() -> None:
    """One coefficient each: rank 0 sends 2 of element 0, rank 1 sends 4 of element 1; each has one sender."""
    assert _two_ranks() == ([0.0, -1.0], [[0.0, 1.0], [1.0, 0.0]], [2.0, 4.0])


BY_HAND: list[tuple[dict[str, Any], Any]] = [
    ({"reduction": "mean"}, ([0.5, 0.0], [[0.0, 1.0], [1.0, 0.0]], [1.0, 2.0])),
    ({"alpha": 0.25}, ([0.0, -1.0], [[1.5, 1.0], [1.0, 3.0]], [2.0, 4.0])),
    ({"update": "signum"}, ([0.5, 0.5], [[0.0, 1.0], [1.0, 0.0]], [2.0, 4.0])),
    ({"maximize": True}, ([2.0, 3.0], [[0.0, -1.0], [-1.0, 0.0]], [-2.0, -4.0])),
    ({"weight_decay": 0.5}, ([-0.25, -1.25], [[0.0, 1.0], [1.0, 0.0]], [2.0, 4.0])),
    ({"gradient_scale": "lr", "lr": 0.25}, ([0.75, 0.5], [[0.0, 0.5], [0.5, 0.0]], [1.0, 2.0])),
    ({"top_k": 2}, ([0.25, -0.25], [[0.0, 0.0], [0.0, 0.0]], [1.5, 2.5])),
    ({"momentum": 0.0}, ([-1.0, -3.0], [[0.0, 2.0], [2.0, 0.0]], [4.0, 8.0])),
]


@pytest.mark.parametrize(("settings", "expected"), BY_HAND, ids=[str(settings) for settings, _ in BY_HAND])
def test_reference_step_of_each_setting_by_hand(settings: dict[str, Any], expected: Any) -> None:
    assert _two_ranks(**settings) == expected


def test_reference_two_steps_by_hand() -> None:
    """What rank 0 did not send in the first step, 1 of element 1, has decayed to a half, and is sent in the second."""
    x = torch.zeros(2, dtype=torch.float64)
    first = reference_step([x], [[torch.tensor([4.0, 2.0]).double()]], [[zero_momentum(x, PLAIN)]], PLAIN)
    second = reference_step(first.parameters, [[None]], first.momenta, PLAIN)
    assert second.aggregates[0].tolist() == [0.0, 0.5]
    assert second.parameters[0].tolist() == [-1.0, -0.25]
    assert second.momenta[0][0].tolist() == [[0.0, 0.0]]


def test_reference_step_keeps_wire_rounding_in_momentum() -> None:
    x = torch.zeros(1, dtype=torch.float64)
    settings = {**PLAIN, "values": "bfloat16", "momentum": 0.0}
    step = reference_step([x], [[torch.tensor([1 + 2.0**-10]).double()]], [[zero_momentum(x, settings)]], settings)
    assert step.aggregates[0].tolist() == [1.0]
    assert step.momenta[0][0].tolist() == [[2.0**-10]]


def test_basis_dct_of_four_by_hand() -> None:
    """Ahmed, Natarajan, Rao 1974: row k is cos(pi (2x + 1) k / 2n), scaled."""
    a, b, c = 0.5, math.cos(math.pi / 8) / math.sqrt(2), math.sin(math.pi / 8) / math.sqrt(2)
    want = torch.tensor([[a, a, a, a], [b, c, -c, -b], [a, -a, -a, a], [c, -b, b, -c]], dtype=torch.float64)
    torch.testing.assert_close(basis("dct", 4), want, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", ["dct", "hadamard", "random", "identity"])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 31, 40, 48, 64])
def test_basis_is_orthonormal(name: str, n: int) -> None:
    square = basis(name, n) @ basis(name, n).T
    torch.testing.assert_close(square, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-13)


def test_basis_dct_of_a_constant_has_one_coefficient() -> None:
    x = torch.zeros(8, 8, dtype=torch.float64)
    settings = {**PLAIN, "transform": "dct", "chunk": 8, "momentum": 0.0}
    step = reference_step([x], [[torch.full((8, 8), 3.0).double()]], [[zero_momentum(x, settings)]], settings)
    torch.testing.assert_close(step.aggregates[0], torch.full((8, 8), 3.0).double())
    assert float(step.momenta[0][0].abs().max()) < 1e-14


SHAPES: list[tuple[tuple[int, ...], int, tuple[int, int], tuple[int, int], tuple[int, int]]] = [
    # shape, `chunk`, chunk shape by "divisor", by "padded", padded size
    ((), 64, (1, 1), (1, 1), (1, 1)),
    ((7,), 64, (1, 7), (1, 7), (1, 7)),
    ((192,), 64, (1, 64), (1, 64), (1, 192)),
    ((67,), 64, (1, 1), (1, 34), (1, 68)),
    ((128, 64), 64, (64, 64), (64, 64), (128, 64)),
    ((48, 160), 64, (48, 40), (48, 40), (48, 160)),
    ((50257, 768), 64, (29, 64), (64, 64), (50304, 768)),
    ((32003, 2), 64, (1, 2), (64, 2), (32064, 2)),
    ((100, 100), 64, (50, 50), (50, 50), (100, 100)),
    ((33, 5), 16, (11, 5), (11, 5), (33, 5)),
    ((34, 5), 16, (2, 5), (12, 5), (36, 5)),
    ((8, 3, 5, 5), 16, (8, 15), (8, 15), (8, 75)),
    ((65, 1), 64, (13, 1), (33, 1), (66, 1)),
]


@pytest.mark.parametrize(("shape", "chunk", "divisor", "padded", "size"), SHAPES, ids=[str(t[0]) for t in SHAPES])
def test_chunk_shape_by_hand(
    shape: tuple[int, ...],
    chunk: int,
    divisor: tuple[int, int],
    padded: tuple[int, int],
    size: tuple[int, int],
) -> None:
    assert chunk_shape(shape, {"chunk": chunk, "chunking": "divisor"}) == divisor
    settings = {"chunk": chunk, "chunking": "padded"}
    assert chunk_shape(shape, settings) == padded
    assert tuple(zero_momentum(torch.zeros(shape), settings).shape) == size


def test_reference_step_keeps_padding_in_momentum() -> None:
    """A coefficient of a padded chunk reaches into the padding, and its feedback too."""
    x = torch.zeros(17, 1, dtype=torch.float64)
    settings = {**PLAIN, "chunk": 16, "chunking": "padded", "transform": "dct", "momentum": 0.0, "top_k": 16}
    step = reference_step([x], [[torch.ones(17, 1).double()]], [[zero_momentum(x, settings)]], settings)
    momentum = step.momenta[0][0]
    assert matrix_shape(x.shape) == (17, 1)
    assert tuple(momentum.shape) == (18, 1)
    assert kept_per_chunk(9, settings) == 1
    assert float(momentum[17].abs()) > 0.1
    torch.testing.assert_close(step.aggregates[0][:9], torch.ones(9, 1).double())


KEPT: list[tuple[int, dict[str, Any], int]] = [
    (4096, {"top_k": 32, "chunking": "padded"}, 32),
    (1024, {"top_k": 32, "chunking": "padded"}, 8),
    (64, {"top_k": 32, "chunking": "padded"}, 1),
    (1, {"top_k": 32, "chunking": "padded"}, 1),
    (192, {"top_k": 32, "chunking": "padded"}, 2),  # 1.5 rounds up
    (64, {"top_k": 32, "chunking": "divisor"}, 32),
    (16, {"top_k": 32, "chunking": "divisor"}, 16),
    (4096, {"top_k": 3847, "chunking": "padded"}, 3847),  # a map of 3847 + 4095 bits: 3847 (1 + 32) + 4095 < 4096 x 32
    (4096, {"top_k": 3848, "chunking": "padded"}, 4096),
    (4096, {"top_k": 3615, "chunking": "padded", "values": "bfloat16"}, 4096),  # 3615 (1 + 16) + 4095 >= 4096 x 16
    (4096, {"top_k": 3614, "chunking": "padded", "values": "bfloat16"}, 3614),
    (4096, {"top_k": 768, "chunking": "padded", "values": "sign"}, 768),  # 768 (2 + 1 + 1) + 1023 < 4096
    (4096, {"top_k": 769, "chunking": "padded", "values": "sign"}, 4096),
    (4096, {"top_k": 5000, "chunking": "divisor"}, 4096),
    (2, {"top_k": 4000, "chunking": "padded"}, 2),
]


@pytest.mark.parametrize("length", [1, 2, 15, 64, 192, 2816, 4096])
def test_position_bits_are_those_of_the_wire(length: int) -> None:
    for keep in {1, 2, 3, length // 7, length // 3, length - 1} - {0, length, length + 1, length + 2}:
        if keep < length:
            assert position_bits(keep, length) == index_code(keep, length).bits, keep


@pytest.mark.parametrize("values", ["sign", "2-bit", "int8", "float32"])
def test_no_chunk_takes_more_bits_than_all_its_values(values: str) -> None:
    settings = {"chunk": 64, "chunking": "padded", "values": values}
    for top_k in (1, 100, 316, 512, 700, 768, 769, 1024, 3000, 4095, 4096):
        kept = kept_per_chunk(4096, {**settings, "top_k": top_k})
        assert Section(8, 4096, kept, values).size <= Section(8, 4096, 4096, values).size, top_k
        assert keep_count(top_k, settings, 4096) == kept


@pytest.mark.parametrize(("elements", "settings", "kept"), KEPT, ids=[f"{n} {s}" for n, s, _ in KEPT])
def test_kept_per_chunk_by_hand(elements: int, settings: dict[str, Any], kept: int) -> None:
    assert kept_per_chunk(elements, {"chunk": 64, "values": "float32", **settings}) == kept


def test_reference_step_treats_ranks_and_parameters_apart() -> None:
    """A rank's momentum does not depend on the others; a parameter's step not on other parameters."""
    settings = {**PLAIN, "transform": "dct", "chunk": 4, "top_k": 3}
    xs = [torch.randn(8, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)]
    gradients = [[torch.randn_like(x) for x in xs] for _ in range(3)]
    momenta = [[zero_momentum(x, settings) for x in xs] for _ in range(3)]
    together = reference_step(xs, gradients, momenta, settings)
    for rank in range(3):
        alone = reference_step(xs, gradients[rank : rank + 1], momenta[rank : rank + 1], settings)
        assert all(torch.equal(a, b) for a, b in zip(alone.momenta[0], together.momenta[rank], strict=True))
    second = reference_step(xs[1:], [g[1:] for g in gradients], [m[1:] for m in momenta], settings)
    assert torch.equal(second.parameters[0], together.parameters[1])
    assert all(not m.any() for of_rank in momenta for m in of_rank), "what was given is as it was"

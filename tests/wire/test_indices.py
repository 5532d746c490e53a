"""Index codes: their choice, their lengths, bit for bit, and there and back."""

import math

import literal_wire as literal
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demopt.errors import MessageError
from demopt.wire.coefficients import refuse
from demopt.wire.indices import IndexCode, index_code

pytestmark = pytest.mark.usefixtures("bits_by")

#: K, N and the code that is shortest; also of lengths that are no powers of two.
CODES = [
    (1, 1, "every"),
    (5, 5, "every"),
    (1, 2, "fixed"),
    (1, 4096, "fixed"),
    (2, 4096, "fixed"),
    (8, 4096, "elias-fano"),
    (32, 4096, "elias-fano"),
    (64, 4096, "elias-fano"),
    (4095, 4096, "elias-fano"),
    (3, 7, "fixed"),
    (11, 117, "elias-fano"),
]


def _positions(length: int, keep: int, chunks: int, seed: int) -> torch.Tensor:
    order = torch.rand(chunks, length, generator=torch.Generator().manual_seed(seed)).argsort(dim=1)
    return order[:, :keep].sort(dim=1).values


def _decoded(planes: list[torch.Tensor], chunks: int, keep: int, length: int) -> torch.Tensor:
    return index_code(keep, length).decode([plane.unsqueeze(0) for plane in planes], chunks)[0][0]


@pytest.mark.parametrize(("keep", "length", "code"), CODES)
def test_index_code_is_the_shortest(keep: int, length: int, code: str) -> None:
    assert index_code(keep, length).name == code
    bits = index_code(keep, length).bits
    assert bits <= keep * math.ceil(math.log2(length)) if length > keep else bits == 0


def test_elias_fano_is_near_the_entropy() -> None:
    """At most half a bit per index above Elias-Fano's bound, log2(N / K) + 2, wherever it is chosen."""
    assert [index_code(keep, 4096).bits for keep in (8, 32, 64)] == [8 * 11 - 1, 32 * 9 - 1, 64 * 8 - 1]
    for length in (64, 100, 4096, 5000):
        for keep in (2, 3, 8, 17, 32, 50):
            if index_code(keep, length).name == "elias-fano":
                assert index_code(keep, length).bits <= keep * (math.log2(length / keep) + 2.5)


@st.composite
def _case(draw: st.DrawFn) -> tuple[int, int, int, int]:
    length = draw(st.integers(1, 300))
    return length, draw(st.integers(1, length)), draw(st.integers(1, 11)), draw(st.integers(0, 10**6))


@given(_case())
def test_index_code_bits_are_literal_and_round_trip(case: tuple[int, int, int, int]) -> None:
    length, keep, chunks, seed = case
    positions = _positions(length, keep, chunks, seed)
    planes = index_code(keep, length).encode(positions)
    assert [bytes(plane.tolist()) for plane in planes] == literal.index_planes(positions.tolist(), length)
    sizes = [plane.size(chunks) for plane in index_code(keep, length).planes]
    assert [plane.numel() for plane in planes] == sizes
    assert sum(plane.count * plane.bits for plane in index_code(keep, length).planes) == index_code(keep, length).bits
    if keep < length:
        assert torch.equal(_decoded(planes, chunks, keep, length), positions)


@pytest.mark.parametrize(("keep", "length", "code"), [case for case in CODES if case[2] != "every"])
@pytest.mark.parametrize("extreme", ["first", "last"])
def test_index_code_round_trips_extreme_positions(keep: int, length: int, code: str, extreme: str) -> None:
    first = 0 if extreme == "first" else length - keep
    positions = torch.arange(first, first + keep).repeat(3, 1)
    assert torch.equal(_decoded(index_code(keep, length).encode(positions), 3, keep, length), positions)


def test_index_map_refuses_a_wrong_number_of_ones() -> None:
    code = index_code(keep=4, length=16)
    planes = code.encode(torch.tensor([[1, 6, 7, 12]]))
    rows = [plane.repeat(3, 1) for plane in planes]
    for changed in (rows[1][2] | 16, rows[1][2] & 254):
        damaged = rows[1].clone()
        damaged[2] = changed
        with pytest.raises(MessageError, match="4 ones") as caught:
            refuse(code.decode([rows[0], damaged], chunks=1)[1])
        assert caught.value.rank == 2


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        *(([1, 5, 3], "do not ascend"), ([1, 5, 5], "do not ascend"), ([5, 1, 6], "do not ascend")),
        ([3, 5, 10], "out of range in a chunk of 10"),
    ],
)
def test_index_code_refuses_positions_that_do_not_ascend_or_are_out_of_range(positions: list[int], says: str) -> None:
    code = IndexCode("fixed", keep=3, length=10, low=4, width=0)
    rows = torch.stack([code.encode(torch.tensor([each]))[0] for each in ([1, 5, 9], positions)])
    with pytest.raises(MessageError, match=says) as caught:
        refuse(code.decode([rows], chunks=1)[1])
    assert caught.value.rank == 1

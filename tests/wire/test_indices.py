"""Packing of small integers, and index codes: their choice, their lengths, bit for bit, and there and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demopt.errors import MessageError
from demopt.wire.bits import IndexCode, bits_of, index_code, pack, packed_bytes, unpack
from demopt.wire.coefficients import refuse
from oracles import wire as literal

pytestmark = pytest.mark.usefixtures("bits_by")


@st.composite
def _numbers(draw: st.DrawFn) -> tuple[list[int], int]:
    width = draw(st.integers(1, 32))
    return draw(st.lists(st.integers(0, 2**width - 1), max_size=40)), width


@given(_numbers(), st.integers(1, 3))
def test_pack_equals_one_big_integer_and_unpack_returns_each_row(case: tuple[list[int], int], rows: int) -> None:
    numbers, width = case
    data = pack(torch.tensor(numbers, dtype=torch.int64), width)
    assert data.dtype == torch.uint8
    assert bytes(data.tolist()) == literal.packed(numbers, width)
    assert data.numel() == packed_bytes(len(numbers), width)
    assert unpack(data.expand(rows, -1), width, len(numbers)).tolist() == [numbers] * rows
    assert unpack(bits_of(data.expand(rows, -1)), width, len(numbers)).tolist() == [numbers] * rows


@st.composite
def _case(draw: st.DrawFn) -> tuple[int, torch.Tensor]:
    """The length of chunks, and their positions: random ones, the first and the last."""
    length = draw(st.integers(1, 300))
    keep = draw(st.integers(1, length) | st.sampled_from([1, max(1, length - 1)]))
    order = torch.rand(
        draw(st.integers(1, 9)), length, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    positions = order.argsort(dim=1)[:, :keep].sort(dim=1).values
    ends = torch.arange(keep), torch.arange(length - keep, length)
    return length, torch.cat((positions, torch.stack(ends)))


@given(_case())
def test_index_code_bits_are_literal_and_round_trip(case: tuple[int, torch.Tensor]) -> None:
    length, positions = case
    chunks, keep = positions.shape
    code = index_code(keep, length)
    planes = code.encode(positions)
    assert [bytes(plane.tolist()) for plane in planes] == literal.index_planes(positions.tolist(), length)
    assert [plane.numel() for plane in planes] == [plane.size(chunks) for plane in code.planes]
    assert sum(plane.count * plane.bits for plane in code.planes) == code.bits
    if keep < length:
        assert torch.equal(code.decode([plane.unsqueeze(0) for plane in planes], chunks)[0][0], positions)


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
    code = IndexCode(keep=3, length=10, low=4, width=0)
    rows = torch.stack([code.encode(torch.tensor([each]))[0] for each in ([1, 5, 9], positions)])
    with pytest.raises(MessageError, match=says) as caught:
        refuse(code.decode([rows], chunks=1)[1])
    assert caught.value.rank == 1

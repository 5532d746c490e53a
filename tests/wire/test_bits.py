"""Packing of small integers: every width, against one big integer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demopt.wire.bits import bits_of, pack, packed_bytes, unpack
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

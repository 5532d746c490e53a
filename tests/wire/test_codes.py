"""Codes of a message's numbers, bit for bit: positions, values and scales; their lengths, and what is refused."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demopt.errors import MessageError
from demopt.wire.bits import IndexCode, bits_of, index_code, pack, unpack
from demopt.wire.coefficients import refuse
from demopt.wire.quantizers import QUANTIZERS, SCALE_BITS, scale_code, scale_of
from oracles import wire as literal

pytestmark = pytest.mark.usefixtures("bits_by")


@given(st.data(), st.integers(1, 32), st.integers(1, 3))
def test_pack_equals_one_big_integer_and_unpack_returns_each_row(data, width, rows):
    numbers = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=40))
    packed = pack(torch.tensor(numbers, dtype=torch.int64), width)
    assert packed.dtype == torch.uint8
    assert bytes(packed.tolist()) == literal.packed(numbers, width)
    for each in (packed.expand(rows, -1), bits_of(packed.expand(rows, -1))):
        assert unpack(each, width, len(numbers)).tolist() == [numbers] * rows


@given(st.data(), st.integers(1, 300))
def test_index_code_bits_are_literal_and_round_trip(data, length):
    """Of positions that are random, the first and the last."""
    keep = data.draw(st.integers(1, length) | st.sampled_from([1, max(1, length - 1)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    order = torch.rand(data.draw(st.integers(1, 9)), length, generator=generator)
    ends = torch.arange(keep), torch.arange(length - keep, length)
    positions = torch.cat((order.argsort(dim=1)[:, :keep].sort(dim=1).values, torch.stack(ends)))
    code = index_code(keep, length)
    planes = code.encode(positions)
    assert [bytes(plane.tolist()) for plane in planes] == literal.index_planes(positions.tolist(), length)
    assert [plane.numel() for plane in planes] == [plane.size(len(positions)) for plane in code.planes]
    assert sum(plane.count * plane.bits for plane in code.planes) == code.bits
    if keep < length:
        assert torch.equal(code.decode([plane.unsqueeze(0) for plane in planes], len(positions))[0][0], positions)


def _assert_rank_1_refused(code, rows, says):
    with pytest.raises(MessageError, match=says) as caught:
        refuse(code.decode(rows, chunks=1)[1])
    assert caught.value.rank == 1


def test_index_map_refuses_a_wrong_number_of_ones():
    code = index_code(keep=4, length=16)
    lows, maps = (plane.repeat(2, 1) for plane in code.encode(torch.tensor([[1, 6, 7, 12]])))
    for changed in (maps[1] | 16, maps[1] & 254):
        _assert_rank_1_refused(code, [lows, torch.stack([maps[0], changed])], "4 ones")


@pytest.mark.parametrize("positions", [[1, 5, 3], [1, 5, 5], [5, 1, 6], [3, 5, 10]], ids=str)
def test_index_code_refuses_positions_that_do_not_ascend_or_are_out_of_range(positions):
    code = IndexCode(keep=3, length=10, low=4, width=0)
    rows = torch.stack([code.encode(torch.tensor([each]))[0] for each in ([1, 5, 9], positions)])
    says = "out of range in a chunk of 10" if 10 in positions else "do not ascend"
    _assert_rank_1_refused(code, [rows], says)


@pytest.mark.parametrize("values", QUANTIZERS)
@settings(max_examples=40)
@given(data=st.data(), keep=st.integers(1, 9), scale=st.integers(-90, 90))
def test_quantizer_bits_equal_literal(values, data, keep, scale):
    """Of numbers of few bits, so that the order of summation does not change their mean."""
    number = st.integers(-(2**12), 2**12).map(lambda n: math.ldexp(n, scale))
    chunks = data.draw(st.lists(st.lists(number, min_size=keep, max_size=keep), min_size=1, max_size=9))
    dtype = torch.float64 if values == "float64" else torch.float32
    planes = QUANTIZERS[values].encode(torch.tensor(chunks, dtype=dtype))
    assert [bytes(plane.tolist()) for plane in planes] == literal.value_planes(chunks, values)
    assert [p.numel() for p in planes] == [plane.size(len(chunks)) for plane in QUANTIZERS[values].planes(keep)]


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=40))
def test_scale_code_is_the_nearest(scales):
    codes = scale_code(torch.tensor(scales).abs()).tolist()
    assert codes == [literal.scale_code(abs(struct.unpack("<f", struct.pack("<f", s))[0])) for s in scales]


def test_scale_code_round_trips_every_valid_code():
    """Subnormal codes, and those of infinity and NaN, are invalid."""
    scales, valid = scale_of(torch.arange(4096)), [0, *literal.CODES]
    assert scales[valid].tolist() == [literal.scale_of(code) for code in valid]
    assert torch.isnan(scales[[code for code in range(4096) if code not in set(valid)]]).all()
    assert scale_code(scales[valid]).tolist() == valid
    assert scale_code(torch.tensor([1e-45, 1e-39, float(torch.finfo(torch.float32).max)])).tolist() == [0, 0, 4079]


@pytest.mark.parametrize(("values", "levels"), [("sign", [-1, 1]), ("2-bit", [-2, -1, 1, 2])])
def test_integer_quantizer_decodes_every_number_to_its_level_and_zeros_to_zeros(values, levels):
    quantizer = QUANTIZERS[values]
    packed = torch.tensor(list(literal.packed(range(1 << quantizer.bits), quantizer.bits)), dtype=torch.uint8)
    assert sorted(quantizer.numbers(packed, 1, 1 << quantizer.bits).flatten().tolist()) == levels
    scales, plane = quantizer.encode(torch.zeros(3, 4))
    assert not (quantizer.numbers(plane, 3, 4) * scale_of(unpack(scales, SCALE_BITS, 3)).unsqueeze(-1)).any()

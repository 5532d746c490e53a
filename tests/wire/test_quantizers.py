"""Quantizers: literal bits, bounded errors, and codes that no encoder writes refused."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demopt.wire.bits import unpack
from demopt.wire.quantizers import QUANTIZERS, SCALE_BITS, scale_code, scale_of
from oracles import wire as literal

_FLOATS = st.floats(-(2.0**99), 2.0**99, width=32)


@st.composite
def _chunks(draw: st.DrawFn) -> list[list[float]]:
    """Numbers of few bits, so that the order of summation does not change their mean."""
    scale = draw(st.integers(-90, 90))
    keep = draw(st.integers(1, 9))
    number = st.integers(-(2**12), 2**12).map(lambda n: math.ldexp(n, scale))
    return draw(st.lists(st.lists(number, min_size=keep, max_size=keep), min_size=1, max_size=9))


@pytest.mark.parametrize("values", QUANTIZERS)
@settings(max_examples=40)
@given(chunks=_chunks())
def test_quantizer_bits_equal_literal(values: str, chunks: list[list[float]]) -> None:
    numbers = torch.tensor(chunks, dtype=torch.float64 if values == "float64" else torch.float32)
    planes = QUANTIZERS[values].encode(numbers)
    assert [bytes(plane.tolist()) for plane in planes] == literal.value_planes(chunks, values)
    keep = numbers.shape[1]
    assert [p.numel() for p in planes] == [plane.size(len(chunks)) for plane in QUANTIZERS[values].planes(keep)]


@given(st.lists(_FLOATS, min_size=1, max_size=40))
def test_scale_code_is_the_nearest(scales: list[float]) -> None:
    codes = scale_code(torch.tensor(scales).abs()).tolist()
    assert codes == [literal.scale_code(abs(struct.unpack("<f", struct.pack("<f", s))[0])) for s in scales]


def test_scale_code_round_trips_every_valid_code() -> None:
    """Subnormal codes, and those of infinity and NaN, are invalid."""
    scales, valid = scale_of(torch.arange(4096)), [0, *literal.CODES]
    assert scales[valid].tolist() == [literal.scale_of(code) for code in valid]
    assert torch.isnan(scales[[code for code in range(4096) if code not in set(valid)]]).all()
    assert scale_code(scales[valid]).tolist() == valid
    assert scale_code(torch.tensor([1e-45, 1e-39, float(torch.finfo(torch.float32).max)])).tolist() == [0, 0, 4079]


@pytest.mark.parametrize(("values", "levels"), [("sign", [-1, 1]), ("2-bit", [-2, -1, 1, 2])])
def test_integer_quantizer_decodes_every_number_to_its_level_and_zeros_to_zeros(values: str, levels: list[int]) -> None:
    quantizer = QUANTIZERS[values]
    packed = torch.tensor(list(literal.packed(range(1 << quantizer.bits), quantizer.bits)), dtype=torch.uint8)
    found = quantizer.numbers(packed, 1, 1 << quantizer.bits)
    assert sorted(found.flatten().tolist()) == levels
    scales, plane = quantizer.encode(torch.zeros(3, 4))
    assert not (quantizer.numbers(plane, 3, 4) * scale_of(unpack(scales, SCALE_BITS, 3)).unsqueeze(-1)).any()

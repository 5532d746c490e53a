"""Quantizers: literal bits, bounded errors, and codes that no encoder writes refused."""

import math
import struct

import literal_wire as literal
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from demopt.wire.bits import unpack
from demopt.wire.coefficients import Coefficients
from demopt.wire.layout import Section
from demopt.wire.quantizers import (
    QUANTIZERS,
    SCALE_BITS,
    VALUES,
    FloatQuantizer,
    IntegerQuantizer,
    RoundedQuantizer,
    SignedQuantizer,
    scale_code,
    scale_of,
)

INTEGERS = ("sign", "2-bit", "int8")
_FLOATS = st.floats(-(2.0**99), 2.0**99, width=32)


def _decoded(quantizer: FloatQuantizer | IntegerQuantizer, planes: list[Tensor], chunks: int, keep: int) -> Tensor:
    if isinstance(quantizer, FloatQuantizer):
        return quantizer.decode(planes, chunks, keep)
    levels = quantizer.levels(planes[1], chunks, keep)
    values = levels.to(torch.float32) * scale_of(unpack(planes[0], SCALE_BITS, chunks)).unsqueeze(-1)
    if not quantizer.has_spare:
        return values
    return values.masked_fill(levels.abs() > quantizer.largest_level, math.nan)


@st.composite
def _chunks(draw: st.DrawFn) -> list[list[float]]:
    """Numbers of few bits, so that the order of summation does not change their mean."""
    scale = draw(st.integers(-90, 90))
    keep = draw(st.integers(1, 9))
    number = st.integers(-(2**12), 2**12).map(lambda n: math.ldexp(n, scale))
    return draw(st.lists(st.lists(number, min_size=keep, max_size=keep), min_size=1, max_size=9))


@pytest.mark.parametrize("values", VALUES)
@settings(max_examples=40)
@given(chunks=_chunks())
def test_quantizer_bits_equal_literal(values: str, chunks: list[list[float]]) -> None:
    numbers = torch.tensor(chunks, dtype=torch.float64 if values == "float64" else torch.float32)
    planes = QUANTIZERS[values].encode(numbers)
    assert [bytes(plane.tolist()) for plane in planes] == literal.value_planes(chunks, values)
    keep = numbers.shape[1]
    assert [p.numel() for p in planes] == [plane.size(len(chunks)) for plane in QUANTIZERS[values].planes(keep)]


@pytest.mark.parametrize("values", INTEGERS)
@settings(max_examples=40)
@given(chunks=_chunks())
def test_received_values_are_levels_times_scales(values: str, chunks: list[list[float]]) -> None:
    numbers = torch.tensor(chunks)
    count, keep = numbers.shape
    section = Section(count, keep + 1, keep, values)
    data = torch.cat(section.encode(torch.arange(keep).repeat(count, 1), numbers))
    received = section.received(data.unsqueeze(0)).chunks(0, count)
    assert isinstance(received, Coefficients)
    assert received.codes is not None
    levels, codes = received.numbers, received.codes
    exact = [[n * literal.scale_of(int(c)) for n in row] for row, c in zip(levels[0].tolist(), codes[0], strict=True)]
    assert received.values[0].tolist() == exact


@pytest.mark.parametrize(("values", "worst"), [("float32", 0.0), ("bfloat16", 2**-8), ("int8", 1 / 32)])
@given(st.lists(_FLOATS.filter(lambda x: abs(x) > 1e-20 or x == 0), min_size=1, max_size=20))
def test_error_of_fine_quantizers_is_bounded(values: str, worst: float, chunk: list[float]) -> None:
    numbers, quantizer = torch.tensor([chunk]), QUANTIZERS[values]
    back = _decoded(quantizer, quantizer.encode(numbers), 1, len(chunk))
    largest = float(numbers.abs().max())
    assert float((back.double() - numbers.double()).abs().max()) <= worst * largest * (1 + 1e-6)


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


OTHERS: dict[str, tuple[IntegerQuantizer, list[int]]] = {
    "sign": (QUANTIZERS["sign"], [-1, 1]),
    "2-bit": (QUANTIZERS["2-bit"], [-2, -1, 1, 2]),
    "int8": (QUANTIZERS["int8"], list(range(-127, 128))),
    "six levels": (SignedQuantizer(3, scale=lambda m: m.amax(1) / 3), [-3, -2, -1, 1, 2, 3]),
    "ternary": (RoundedQuantizer(1, scale=lambda m: m.amax(1)), [-1, 0, 1]),
    "int4": (RoundedQuantizer(7, scale=lambda m: m.amax(1) / 7), list(range(-7, 8))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_integer_quantizer_accepts_its_levels_alone(name: str) -> None:
    """A number without a level, such as -128 of int8, is refused."""
    quantizer, levels = OTHERS[name]
    accepted = set()
    for number in range(1 << quantizer.bits):
        packed = [torch.tensor(list(literal.packed([n], w))) for n, w in ((2032, 12), (number, quantizer.bits))]
        value = float(_decoded(quantizer, [plane.to(torch.uint8) for plane in packed], 1, 1))
        if not math.isnan(value):
            accepted.add(int(value))
    assert accepted == set(levels)
    assert quantizer.largest_level == max(levels)
    assert quantizer.bits == math.ceil(math.log2(len(levels)))


@pytest.mark.parametrize("name", OTHERS)
def test_integer_quantizer_keeps_zeros_and_its_levels(name: str) -> None:
    quantizer, levels = OTHERS[name]
    assert not _decoded(quantizer, quantizer.encode(torch.zeros(3, 4)), 3, 4).any()
    if name in ("six levels", "ternary", "int4"):  # the scales of the others are no powers of two here
        values = 0.25 * torch.tensor([levels, levels[::-1]], dtype=torch.float32)
        planes = quantizer.encode(values)
        assert [p.numel() for p in planes] == [plane.size(2) for plane in quantizer.planes(len(levels))]
        assert torch.equal(_decoded(quantizer, planes, 2, len(levels)), values)

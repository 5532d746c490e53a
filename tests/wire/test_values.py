"""Value codecs: literal bits, and what is decoded is what is fed back."""

import math
import struct

import literal_wire as literal
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demopt.errors import MessageError
from demopt.wire.layout import Section
from demopt.wire.values import CODECS, VALUES, Rounded, Signed, Stepped, step_code, step_of

STEPPED = ("sign", "2-bit", "int8")
_FLOATS = st.floats(-(2.0**99), 2.0**99, width=32)


def _planes(values: str, numbers: torch.Tensor) -> list[torch.Tensor]:
    return CODECS[values].encode(numbers)


def _back(values: str, planes: list[torch.Tensor], chunks: int, keep: int) -> torch.Tensor:
    return CODECS[values].decode(planes, chunks, keep)


@st.composite
def _chunks(draw: st.DrawFn) -> list[list[float]]:
    """Numbers of few bits, so that their mean has one value however it is summed."""
    scale = draw(st.integers(-90, 90))
    keep = draw(st.integers(1, 9))
    number = st.integers(-(2**12), 2**12).map(lambda n: math.ldexp(n, scale))
    return draw(st.lists(st.lists(number, min_size=keep, max_size=keep), min_size=1, max_size=9))


@pytest.mark.parametrize("values", VALUES)
@settings(max_examples=40)
@given(chunks=_chunks())
def test_codec_bits_equal_literal(values: str, chunks: list[list[float]]) -> None:
    numbers = torch.tensor(chunks, dtype=torch.float64 if values == "float64" else torch.float32)
    planes = _planes(values, numbers)
    assert [bytes(plane.tolist()) for plane in planes] == literal.value_planes(chunks, values)
    keep = numbers.shape[1]
    assert [p.numel() for p in planes] == [plane.size(len(chunks)) for plane in CODECS[values].planes(keep)]


@pytest.mark.parametrize("values", VALUES)
@settings(max_examples=40)
@given(chunks=_chunks())
def test_section_sent_equals_decoded(values: str, chunks: list[list[float]]) -> None:
    """Sender (`sent`) and receiver (`decode`) see the same numbers, bit for bit, and they are level x step."""
    numbers = torch.tensor(chunks, dtype=torch.float64 if values == "float64" else torch.float32)
    count, keep = numbers.shape
    section = Section(count, keep, keep, values)
    data = section.encode(torch.arange(keep).repeat(count, 1), numbers)
    received = section.decode(data.unsqueeze(0), 0, count)
    assert torch.equal(section.sent(data), received.values[0])
    received.check(keep)
    if values in STEPPED:
        levels, codes = received.stepped
        exact = [
            [n * literal.step_of(int(c)) for n in row] for row, c in zip(levels[0].tolist(), codes[0], strict=True)
        ]
        assert received.values[0].tolist() == exact
    elif values != "bfloat16":
        assert torch.equal(section.sent(data), numbers)


@pytest.mark.parametrize("values", STEPPED)
@settings(max_examples=40)
@given(chunks=_chunks())
def test_stepped_codec_requantises_to_the_same(values: str, chunks: list[list[float]]) -> None:
    """Quantising what was quantised changes nothing, where all levels' magnitudes are one (their mean is the step)."""
    codec = CODECS[values]
    count, keep = len(chunks), len(chunks[0])
    once = codec.decode(codec.encode(torch.tensor(chunks)), count, keep)
    if values == "sign":
        assert torch.equal(codec.decode(codec.encode(once), count, keep), once)
    assert torch.isfinite(once).all()


@pytest.mark.parametrize(("values", "worst"), [("float32", 0.0), ("bfloat16", 2**-8), ("int8", 1 / 32)])
@given(st.lists(_FLOATS.filter(lambda x: abs(x) > 1e-20 or x == 0), min_size=1, max_size=20))
def test_fine_codec_error_is_bounded(values: str, worst: float, chunk: list[float]) -> None:
    numbers = torch.tensor([chunk])
    back = _back(values, _planes(values, numbers), 1, len(chunk))
    largest = float(numbers.abs().max())
    assert float((back.double() - numbers.double()).abs().max()) <= worst * largest * (1 + 1e-6)


@given(st.lists(_FLOATS, min_size=1, max_size=40))
def test_step_code_is_the_nearest(steps: list[float]) -> None:
    codes = step_code(torch.tensor(steps).abs()).tolist()
    assert codes == [literal.step_code(abs(struct.unpack("<f", struct.pack("<f", s))[0])) for s in steps]


def test_step_code_round_trips_every_known_code() -> None:
    """Each known one comes back as itself; subnormal ones and those of infinity and NaN are none."""
    codes = torch.arange(4096)
    steps = step_of(codes)
    known = [0, *literal.CODES]
    assert steps[known].tolist() == [literal.step_of(code) for code in known]
    assert torch.isnan(steps[[code for code in range(4096) if code not in set(known)]]).all()
    assert step_code(steps[known]).tolist() == known
    assert step_code(torch.tensor([1e-45, 1e-39, float(torch.finfo(torch.float32).max)])).tolist() == [0, 0, 4079]


@pytest.mark.parametrize("values", STEPPED)
@pytest.mark.parametrize("code", [1, 15, 4080, 4095])
def test_section_check_refuses_codes_of_no_step(values: str, code: int) -> None:
    section = Section(2, 3, 3, values)
    width = section.planes[1].bits
    body = literal.packed([2032, code], 12) + literal.packed([1] * 6, width)
    data = torch.tensor(list(body), dtype=torch.uint8)
    rows = torch.stack([section.encode(torch.arange(3).repeat(2, 1), torch.ones(2, 3)), data])
    with pytest.raises(MessageError, match="NaN") as caught:
        section.decode(rows, 0, 2).check(3)
    assert caught.value.rank == 1


def test_int8_codec_refuses_its_unused_level() -> None:
    section = Section(1, 3, 3, "int8")
    for number, accepted in ((128, False), (127, True), (129, True)):
        body = literal.packed([2032], 12) + literal.packed([1, number, 2], 8)
        coefficients = section.decode(torch.tensor([list(body)], dtype=torch.uint8), 0, 1)
        if accepted:
            coefficients.check(3)
            assert coefficients.stepped[0].flatten().tolist() == [1, literal.levels([number], "int8")[0], 2]
        else:
            with pytest.raises(MessageError, match="NaN"):
                coefficients.check(3)


@pytest.mark.parametrize("values", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_float_codecs_refuse_nonfinite_values(values: str, bad: float) -> None:
    section = Section(1, 3, 3, values)
    data = section.encode(torch.arange(3).unsqueeze(0), torch.tensor([[1.0, bad, 2.0]], dtype=torch.float64))
    with pytest.raises(MessageError, match="NaN, infinite"):
        section.decode(data.unsqueeze(0), 0, 1).check(3)


@pytest.mark.parametrize(("values", "bits", "largest"), [("sign", 1, 1), ("2-bit", 2, 2), ("int8", 8, 127)])
def test_stepped_codec_bits_follow_from_its_levels(values: str, bits: int, largest: int) -> None:
    codec = CODECS[values]
    assert isinstance(codec, Stepped)
    assert (codec.bits, codec.largest_level) == (bits, largest)


NEW: dict[str, tuple[Stepped, list[int]]] = {
    "3-bit": (Signed(4, step=lambda m: m.amax(1) / 4), [-4, -3, -2, -1, 1, 2, 3, 4]),
    "six levels": (Signed(3, step=lambda m: m.amax(1) / 3), [-3, -2, -1, 1, 2, 3]),
    "ternary": (Rounded(1, step=lambda m: m.amax(1)), [-1, 0, 1]),
    "int4": (Rounded(7, step=lambda m: m.amax(1) / 7), [-7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7]),
}


@pytest.mark.parametrize("name", NEW)
def test_new_stepped_codec_round_trips(name: str) -> None:
    codec, levels = NEW[name]
    step = 0.25
    values = step * torch.tensor([levels, levels[::-1]], dtype=torch.float32)
    planes = codec.encode(values)
    assert [p.numel() for p in planes] == [plane.size(2) for plane in codec.planes(len(levels))]
    assert torch.equal(codec.decode(planes, 2, len(levels)), values)
    near = codec.decode(codec.encode(values * 0.9), 2, len(levels))
    assert float((near - values * 0.9).abs().max()) <= (0.5 if 0 in levels else 1) * step


@pytest.mark.parametrize("name", NEW)
def test_new_stepped_codec_refuses_numbers_of_no_level(name: str) -> None:
    codec, levels = NEW[name]
    accepted = set()
    for number in range(1 << codec.bits):
        packed = [
            torch.tensor(list(literal.packed([n], w)), dtype=torch.uint8) for n, w in ((2032, 12), (number, codec.bits))
        ]
        value = float(codec.decode(packed, 1, 1))
        if not math.isnan(value):
            accepted.add(int(value))
    assert accepted == set(levels)


@pytest.mark.parametrize("values", STEPPED)
def test_stepped_codec_keeps_zeros(values: str) -> None:
    codec = CODECS[values]
    assert isinstance(codec, Stepped)
    back = codec.decode(codec.encode(torch.zeros(3, 4)), 3, 4)
    assert not back.any()

"""Decoded coefficients: narrow while they are kept, the same once widened, and checked."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demopt.errors import MessageError
from demopt.wire.coefficients import UNUSABLE, Coefficients, SignBits, refuse, unusable_codes, unusable_numbers
from demopt.wire.layout import GRANULE, Section
from demopt.wire.quantizers import QUANTIZERS, SCALE_BITS, VALUES, IntegerQuantizer, scale_of

INTEGERS = [values for values in VALUES if isinstance(QUANTIZERS[values], IntegerQuantizer)]
LENGTHS = st.integers(1, 128 * 128) | st.sampled_from([1, 2, 4096, 32767, 32768, 32769, 65536])


def _messages(section: Section, world_size: int, seed: int) -> torch.Tensor:
    """Messages [W, size] of random coefficients, the last position of each chunk among them."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for _ in range(world_size):
        order = torch.rand(section.chunks, section.length, generator=generator)
        order[:, -1] = 2.0
        positions = order.topk(section.keep).indices.sort(dim=1).values
        scale = 2.0 ** torch.randint(-40, 40, (section.chunks, 1), generator=generator)
        rows.append(
            torch.cat(section.encode(positions, scale * torch.randn(section.chunks, section.keep, generator=generator)))
        )
    return torch.stack(rows)


def _assert_same(one: Coefficients | SignBits, other: Coefficients | SignBits) -> None:
    if isinstance(one, SignBits):
        assert torch.equal(one.values, other.values)
        return
    for name in ("positions", "numbers", "codes"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert (a == b).all()


@given(st.data())
def test_compact_coefficients_widen_to_the_same(data: st.DataObject) -> None:
    length = data.draw(LENGTHS)
    keep, values = data.draw(st.integers(1, min(length, 40))), data.draw(st.sampled_from(VALUES))
    section, world_size = Section(data.draw(st.integers(1, 20)), length, keep, values), data.draw(st.integers(1, 3))
    messages = _messages(section, world_size, data.draw(st.integers(0, 10**6)))
    decoded, kept = section.decode(messages, slice(0, section.chunks))[0], section.received(messages)
    start = data.draw(st.integers(0, section.chunks))
    stop = data.draw(st.integers(start, section.chunks))
    _assert_same(kept.chunks(start, stop), decoded.chunks(start, stop))
    assert torch.equal(kept.values, decoded.values)
    assert torch.equal(kept.clipped_to_median().values, decoded.clipped_to_median().values)
    rank = data.draw(st.integers(0, world_size - 1))
    _assert_same(kept.rank(rank), section.received(messages[rank : rank + 1]))


@pytest.mark.parametrize("values", INTEGERS)
@pytest.mark.parametrize(("length", "width"), [(4096, 2), (32768, 2), (32769, 4)])
def test_compact_coefficient_takes_three_bytes(values: str, length: int, width: int) -> None:
    section = Section(16, length, 8, values)
    kept = section.received(_messages(section, 2, 0))
    assert isinstance(kept, Coefficients)
    assert kept.codes is not None
    sizes = (kept.positions.nbytes, kept.numbers.nbytes, kept.codes.nbytes)
    assert sizes == (2 * 16 * 8 * width, 2 * 16 * 8, 2 * 16 * 2)


@pytest.mark.parametrize("values", VALUES)
def test_received_names_the_rank_whose_value_is_nan(values: str) -> None:
    section = Section(GRANULE, 64, 1, values)
    messages = _messages(section, 2, 0)
    first = section.sizes[0]  # of the plane of values, or of scales
    messages[1, first : first + section.sizes[1]] = 255
    with pytest.raises(MessageError, match="NaN") as caught:
        section.received(messages)
    assert caught.value.rank == 1
    with pytest.raises(MessageError, match="NaN") as caught:
        section.received(messages[1:], rank=7)
    assert caught.value.rank == 7


def test_received_names_the_rank_with_a_level_that_no_encoder_writes() -> None:
    section = Section(GRANULE, 64, 1, "int8")
    messages = _messages(section, 2, 0)
    messages[1, section.size - 1] = 0x80  # -128
    with pytest.raises(MessageError, match="NaN") as caught:
        section.received(messages)
    assert caught.value.rank == 1


def test_unusable_codes_are_those_above_the_limit_of_the_wire_format() -> None:
    codes = torch.arange(1 << SCALE_BITS).unsqueeze(1)
    allowed = (scale_of(codes) <= 1e35 / 127).flatten().tolist()
    assert 0 < sum(allowed) < 255 * 16  # some finite ones are too large
    assert unusable_codes(codes.device).logical_not().tolist() == allowed


@pytest.mark.parametrize(("value", "refused"), [(-1e35, False), (1.0001e35, True), (float("nan"), True)])
def test_refuse_names_the_rank_of_a_number_above_the_limit_of_the_wire_format(value: float, refused: bool) -> None:
    numbers = torch.tensor([1.0, value], dtype=torch.float64).view(2, 1, 1)
    with (
        pytest.raises(MessageError, match="NaN, infinite, or so large")
        if refused
        else contextlib.nullcontext() as found
    ):
        refuse([(UNUSABLE, unusable_numbers(numbers))])
    assert found is None or found.value.rank == 1

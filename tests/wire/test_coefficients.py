"""Decoded coefficients: narrow while they are kept, the same once widened, and checked."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demopt.errors import MessageError
from demopt.wire.coefficients import Coefficients, SignBits, unusable_codes, unusable_numbers
from demopt.wire.layout import GRANULE, Section
from demopt.wire.quantizers import SCALE_BITS, VALUES, scale_of

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


@pytest.mark.parametrize(("values", "plane", "number"), [*((values, 1, 255) for values in VALUES), ("int8", 2, 0x80)])
def test_received_names_the_rank_whose_value_is_nan_or_no_level(values: str, plane: int, number: int) -> None:
    """The plane of scales, or of values; -128 is no level of int8."""
    section = Section(GRANULE, 64, 1, values)
    messages, first = _messages(section, 2, 0), sum(section.sizes[:plane])
    messages[1, first : first + section.sizes[plane]] = number
    for rows, rank, named in ((messages, None, 1), (messages[1:], 7, 7)):
        with pytest.raises(MessageError, match="NaN") as caught:
            section.received(rows, rank)
        assert caught.value.rank == named


def test_numbers_and_scales_above_the_limit_of_the_wire_format_are_unusable() -> None:
    numbers = torch.tensor([1.0, -1e35, 1.0001e35, float("nan")], dtype=torch.float64)
    assert unusable_numbers(numbers).tolist() == [False, False, True, True]
    codes = torch.arange(1 << SCALE_BITS)
    allowed = (scale_of(codes) <= 1e35 / 127).tolist()
    assert 0 < sum(allowed) < 255 * 16  # some finite ones are too large
    assert unusable_codes(codes.device).logical_not().tolist() == allowed

"""The compact form of decoded coefficients: narrow while it is kept, and the same once widened."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demopt.errors import MessageError
from demopt.wire.coefficients import Coefficients
from demopt.wire.layout import GRANULE, Section
from demopt.wire.values import CODECS, VALUES, Stepped

STEPPED = [values for values in VALUES if isinstance(CODECS[values], Stepped)]
LENGTHS = st.integers(1, 128 * 128) | st.sampled_from([1, 2, 4096, 32767, 32768, 32769, 65536])


def _received(section: Section, world_size: int, seed: int) -> torch.Tensor:
    """Messages [W, size] of random coefficients, the last position of each chunk among them."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for _ in range(world_size):
        order = torch.rand(section.chunks, section.length, generator=generator)
        order[:, -1] = 2.0
        positions = order.topk(section.keep).indices.sort(dim=1).values
        scale = 2.0 ** torch.randint(-40, 40, (section.chunks, 1), generator=generator)
        rows.append(section.encode(positions, scale * torch.randn(section.chunks, section.keep, generator=generator)))
    return torch.stack(rows)


def _assert_same(one: Coefficients, other: Coefficients) -> None:
    for name in ("positions", "numbers", "levels", "codes"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@given(st.data())
def test_compact_coefficients_widen_to_the_same(data: st.DataObject) -> None:
    length = data.draw(LENGTHS)
    keep, values = data.draw(st.integers(1, min(length, 40))), data.draw(st.sampled_from(VALUES))
    section, world_size = Section(data.draw(st.integers(1, 20)), length, keep, values), data.draw(st.integers(1, 3))
    messages = _received(section, world_size, data.draw(st.integers(0, 10**6)))
    decoded = section.decode(messages, 0, section.chunks)
    kept = section.checked(messages, 0, section.chunks)
    _assert_same(kept.chunks(0, section.chunks), decoded)
    start = data.draw(st.integers(0, section.chunks))
    stop = data.draw(st.integers(start, section.chunks))
    _assert_same(kept.chunks(start, stop), decoded.chunks(start, stop))
    assert torch.equal(kept.values, decoded.values)
    if values in STEPPED:
        assert all(torch.equal(a, b) for a, b in zip(kept.stepped, decoded.stepped, strict=True))


@pytest.mark.parametrize("values", STEPPED)
@pytest.mark.parametrize(("length", "width"), [(4096, 2), (32768, 2), (32769, 4)])
def test_compact_coefficient_takes_three_bytes(values: str, length: int, width: int) -> None:
    section = Section(16, length, 8, values)
    kept = section.checked(_received(section, 2, 0), 0, 16)
    assert kept.levels is not None
    assert kept.codes is not None
    assert (kept.positions.nbytes, kept.levels.nbytes, kept.codes.nbytes) == (
        2 * 16 * 8 * width,
        2 * 16 * 8,
        2 * 16 * 2,
    )


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("clip", [False, True])
def test_compact_coefficients_clip_without_overflow(values: str, clip: bool) -> None:
    section = Section(8, 64, 5, values)
    messages = _received(section, 3, 1)
    kept, decoded = section.checked(messages, 0, 8), section.decode(messages, 0, 8)
    if clip:
        kept, decoded = kept.clipped_to_median(), decoded.clipped_to_median()
    assert torch.equal(kept.values, decoded.values)


@pytest.mark.parametrize("values", VALUES)
def test_section_checked_refuses_nan(values: str) -> None:
    section = Section(GRANULE, 64, 1, values)
    messages = _received(section, 2, 0)
    first = section.sizes[0]  # of the plane of values, or of steps
    messages[1, first : first + section.sizes[1]] = 255
    with pytest.raises(MessageError, match="NaN") as caught:
        section.checked(messages, 0, section.chunks)
    assert caught.value.rank == 1


@pytest.mark.parametrize("positions", [[1, 5, 3], [1, 5, 5], [5, 1, 6]])
def test_check_refuses_positions_that_do_not_ascend_anywhere_in_a_chunk(positions: list[int]) -> None:
    rows = torch.tensor([[[1, 5, 7]], [positions]])
    with pytest.raises(MessageError, match="do not ascend") as caught:
        Coefficients(rows, torch.ones(rows.shape)).check(length=10)
    assert caught.value.rank == 1

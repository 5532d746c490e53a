"""Layouts: sizes known beforehand, and runs of chunks that can be read alone."""

import literal_wire as literal
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from demopt.wire import layout
from demopt.wire.coefficients import Coefficients
from demopt.wire.layout import GRANULE, SIGN_GRANULE, Layout, Section
from demopt.wire.quantizers import VALUES


@st.composite
def _section(draw: st.DrawFn) -> Section:
    length = draw(st.integers(1, 60))
    return Section(draw(st.integers(0, 40)), length, draw(st.integers(1, length)), draw(st.sampled_from(VALUES)))


def _filled(section: Section, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(section.chunks, section.length, generator=generator).argsort(dim=1)
    positions = order[:, : section.keep].sort(dim=1).values
    return positions, torch.randn(section.chunks, section.keep, generator=generator)


@given(_section(), st.data())
def test_section_cut_equals_encoding_of_its_chunks(section: Section, data: st.DataObject) -> None:
    """An owner's part equals the message of a rank with these chunks alone."""
    granule = SIGN_GRANULE if section.all_signs else GRANULE
    start = granule * data.draw(st.integers(0, section.chunks // granule))
    stop = data.draw(st.integers(start, section.chunks))
    if stop % granule and stop < section.chunks:
        stop = stop // granule * granule
    positions, values = _filled(section)
    whole = torch.cat(section.encode(positions, values))
    part = Section(stop - start, section.length, section.keep, section.values)
    cut = torch.cat(section.cut(whole, slice(start, stop)))
    assert torch.equal(cut, torch.cat(part.encode(positions[start:stop], values[start:stop])))
    sliced, all_of_it = section.decode(whole.unsqueeze(0), slice(start, stop))[0], section.received(whole.unsqueeze(0))
    assert torch.equal(sliced.values, all_of_it.chunks(start, stop).values)
    if isinstance(sliced, Coefficients):
        assert torch.equal(sliced.positions[0], positions[start:stop])
        if section.values in ("float32", "float64"):
            assert torch.equal(sliced.values[0], values[start:stop].to(sliced.values.dtype))
    else:
        assert torch.equal(sliced.negative[0], values[start:stop] < 0)


@pytest.mark.parametrize("values", VALUES)
def test_section_in_runs_equals_whole(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Section(43, 60, 7, values)
    positions, numbers = _filled(whole)
    data = torch.cat(whole.encode(positions, numbers))
    assert len(whole.runs) == 1
    monkeypatch.setattr(layout, "_COEFFICIENTS_AT_ONCE", 7 * 2 * GRANULE)
    cut = Section(43, 60, 7, values)
    assert [run.start for run in cut.runs] == [0, 16, 32]
    assert torch.equal(torch.cat(cut.encode(positions, numbers)), data)
    runs, one_run = (section.received(data.unsqueeze(0)) for section in (cut, whole))
    assert torch.equal(runs.positions, one_run.positions)
    assert torch.equal(runs.values, one_run.values)


@pytest.mark.parametrize("values", VALUES)
def test_layout_bytes_equal_literal(values: str) -> None:
    sections = tuple(Section(*each, values) for each in [(9, 64, 5), (3, 7, 7), (0, 5, 2), (2, 40, 1)])
    layout, data, expected = Layout(sections), [], []
    for seed, section in enumerate(sections):
        positions, values_CK = _filled(section, seed)
        exact = (values_CK * 256).round() / 256
        data.append(torch.cat(section.encode(positions, exact)))
        literally = positions.tolist(), exact.tolist(), section.length, values
        expected.append(literal.section(*literally) if section.chunks else b"")
    body = torch.nn.functional.pad(torch.cat(data), (0, layout.sizes[-1]))
    assert body.numel() == layout.size
    assert layout.size % 8 == 0
    assert [bytes(part.tolist()) for part in layout.bodies(body)] == expected


def test_layout_digest_and_count_are_those_of_its_sections() -> None:
    unlike = [(9, 64, 5, "sign"), (8, 65, 5, "sign"), (8, 64, 6, "sign"), (8, 64, 5, "int8"), (8, 64, 5, "sign")]
    layouts = [Layout((Section(*each),)) for each in unlike]
    layouts += [Layout(2 * layouts[-1].sections), Layout(())]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert Layout((Section(*unlike[-1]),)).digest == layouts[4].digest
    assert Layout((Section(8, 64, 5, "sign"), Section(3, 7, 7, "int8"))).kept == 8 * 5 + 3 * 7
    assert (Layout(()).size, Layout((), least=64).size) == (0, 64)

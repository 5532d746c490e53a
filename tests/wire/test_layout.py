"""Codes of numbers, bit for bit; layouts: sizes known beforehand and small, runs of chunks that can be read alone."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

import problems
from demopt import DeMo, LocalDeMo
from demopt.codec.hyperparameters import Codec
from demopt.errors import MessageError
from demopt.wire import layout
from demopt.wire.bits import IndexCode, bits_of, index_code, pack, unpack
from demopt.wire.coefficients import SignBits, Strongest, code_faults, number_faults, refuse
from demopt.wire.layout import GRANULE, SIGN_GRANULE, Layout, Section
from demopt.wire.message import HEADER_BYTES
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
    """For random positions, the first ones and the last ones."""
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
    """For numbers of few bits, so that the order of summation does not change their mean."""
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


LENGTHS = st.integers(1, 128 * 128) | st.sampled_from([1, 2, 4096, 32767, 32768, 32769, 65536])


def _drawn(section, seed):
    """Random positions [C, K], the last one of each chunk among them, and values of unlike scales."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(section.chunks, section.length, generator=generator)
    order[:, -1] = 2.0
    positions = order.topk(section.keep).indices.sort(dim=1).values
    scale = 2.0 ** torch.randint(-40, 40, (section.chunks, 1), generator=generator)
    return positions, scale * torch.randn(section.chunks, section.keep, generator=generator)


def _messages(section, world_size):
    return torch.stack([torch.cat(section.encode(*_drawn(section, rank))) for rank in range(world_size)])


def _assert_same(one, other):
    assert torch.equal(one.values, other.values)
    if isinstance(one, Strongest) and isinstance(other, Strongest):
        assert bool((one.positions == other.positions).all())


@given(st.data(), LENGTHS, st.integers(0, 40), st.sampled_from([*QUANTIZERS]), st.integers(1, 3))
def test_section_decodes_any_run_of_chunks_of_any_rank_alone_and_from_its_cut(data, length, chunks, values, world_size):
    """An owner's part equals the message of a rank with only these chunks; narrow copies widen to the same."""
    keep = data.draw(st.integers(1, min(length, 40)))
    section = Section(chunks, length, keep, values)
    granule = SIGN_GRANULE if section.all_signs else GRANULE
    start = granule * data.draw(st.integers(0, section.chunks // granule))
    stop = min(section.chunks, start + granule * data.draw(st.integers(0, section.chunks)))
    rank, messages = data.draw(st.integers(0, world_size - 1)), _messages(section, world_size)
    positions, numbers = _drawn(section, rank)
    part = Section(stop - start, length, keep, values)
    cut = torch.cat(section.cut(messages[rank], slice(start, stop)))
    assert torch.equal(cut, torch.cat(part.encode(positions[start:stop], numbers[start:stop])))
    decoded, kept = section.decode(messages, slice(start, stop))[0], section.checked(messages)
    _assert_same(kept.chunks(start, stop), decoded)
    _assert_same(kept.clipped_to_median().chunks(start, stop), decoded.clipped_to_median())
    _assert_same(kept.rank(rank), section.checked(messages[rank : rank + 1]))
    if isinstance(decoded, Strongest):
        assert torch.equal(decoded.positions[rank], positions[start:stop])
        if values in ("float32", "float64"):
            assert torch.equal(decoded.values[rank], numbers[start:stop].to(decoded.values.dtype))
    elif isinstance(decoded, SignBits):
        assert torch.equal(decoded.negative[rank], numbers[start:stop] < 0)


@pytest.mark.parametrize("values", QUANTIZERS)
def test_section_in_runs_equals_whole(values, monkeypatch):
    whole = Section(43, 60, 7, values)
    messages = _messages(whole, 1)
    assert len(whole.spans) == 1
    monkeypatch.setattr(layout, "_COEFFICIENTS_AT_ONCE", 7 * 2 * GRANULE)
    cut = Section(43, 60, 7, values)
    assert [span.start for span in cut.spans] == [0, 16, 32]
    assert torch.equal(_messages(cut, 1), messages)
    _assert_same(cut.checked(messages), whole.checked(messages))


def test_layout_digest_and_count_are_those_of_its_sections():
    unlike = [(9, 64, 5, "sign"), (8, 65, 5, "sign"), (8, 64, 6, "sign"), (8, 64, 5, "2-bit"), (8, 64, 5, "sign")]
    layouts = [Layout((Section(*each),)) for each in unlike]
    layouts += [Layout(2 * layouts[-1].sections), Layout(())]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert Layout((Section(*unlike[-1]),)).digest == layouts[4].digest
    assert Layout((Section(8, 64, 5, "sign"), Section(3, 7, 7, "2-bit"))).kept == 8 * 5 + 3 * 7
    assert (Layout(()).size, Layout((), least=64).size) == (0, 64)


def test_numbers_and_scales_above_the_limit_of_the_wire_format_are_unusable():
    numbers = torch.tensor([1.0, -1e35, 1.0001e35, float("nan")], dtype=torch.float64)
    assert number_faults(numbers)[0][1].tolist() == [False, False, True, True]
    codes = torch.arange(1 << SCALE_BITS)
    allowed = (scale_of(codes) <= 1e35 / 127).tolist()
    assert 0 < sum(allowed) < 255 * 16  # some finite ones are too large
    assert code_faults(codes)[0][1].logical_not().tolist() == allowed


_BLOCK = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)]
_BLOCK += [(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
GPT2 = [(50257, 768), (1024, 768), *_BLOCK * 12, (768,), (768,)]


def _layout(optimizer):
    return optimizer.replicator.wiring().route.layout


def _bare(shapes):
    return [Parameter(torch.empty(shape, device="meta")) for shape in shapes]


def test_gpt2_message_has_at_most_1_32_bytes_per_kept_sign_and_1_02_bits_per_sign_of_all():
    """The published code sends 12 bytes for each."""
    largest = _layout(DeMo(_bare(GPT2), top_k=32, codec=Codec(values="sign")))
    assert (HEADER_BYTES + largest.size) / largest.kept <= 1.32
    signs = _layout(LocalDeMo(torch.optim.SGD(_bare(GPT2))))
    assert signs.kept >= sum(math.prod(shape) for shape in GPT2)
    assert 8 * (HEADER_BYTES + signs.size) / signs.kept <= 1.02


@pytest.mark.parametrize("shape", [(50257, 3), (3, 8191), (8191,), (127, 1, 63)], ids=str)
def test_message_of_large_prime_shapes_stays_small(shape):
    """With the largest divisor as chunk, an embedding of 50257 or 8191 rows would cost more than its dense gradient."""
    (parameter,) = _bare([shape])
    assert _layout(DeMo([parameter], top_k=32)).size < 0.2 * parameter.nbytes


@given(st.lists(st.integers(0, 300), max_size=3).map(tuple) | st.sampled_from(problems.SHAPES))
def test_message_of_any_shape_is_no_longer_than_its_gradient_and_a_header(shape):
    (parameter,) = _bare([shape])
    for optimizer in (DeMo([parameter]), LocalDeMo(torch.optim.SGD([parameter]))):
        assert _layout(optimizer).size <= -(-parameter.nbytes // 8) * 8

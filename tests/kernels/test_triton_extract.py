"""extract against core.transform.accumulate and core.select.strongest."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")  # the imports below do not need it, what they run does

from triton_cases import ALIKE, DEVICE, DTYPES, chunkings_of, chunks_of

from demopt.core import transform
from demopt.core.chunk import Chunking
from demopt.core.select import strongest
from demopt.kernels import triton_table
from demopt.kernels.triton_extract import extract


def _momentum(chunkings: list[Chunking]) -> Tensor:
    return torch.randn(sum(whole.chunks for whole in chunkings), *chunkings[0].chunk_shape, device=DEVICE)


def _bases(chunkings: list[Chunking], name: str = "dct") -> tuple[Tensor, Tensor]:
    rows, columns = (transform.basis(name, side, torch.float32, str(DEVICE)) for side in chunkings[0].chunk_shape)
    return rows, columns


def _check(gradients: list[Tensor | None], chunkings: list[Chunking], keep: int, name: str = "dct") -> None:
    """The momentum is the literal one but for rounding; what is chosen is exactly its K strongest."""
    momentum = _momentum(chunkings)
    wanted = momentum.double()
    bases = _bases(chunkings, name)
    positions, values = extract(gradients, chunkings, momentum, bases, 0.9, -0.25, keep)

    chunks = chunks_of(gradients, chunkings).double()
    wide = bases[0].double(), bases[1].double()
    transform.accumulate(wanted, chunks, wide, torch.empty_like(chunks), 0.9, -0.25)
    assert torch.allclose(momentum.double(), wanted, rtol=1e-5, atol=1e-5)
    flat = momentum.view(len(momentum), -1)
    assert (positions.dtype, values.dtype) == (torch.int64, torch.float32)
    assert positions.shape == values.shape == (len(flat), keep)
    assert keep == 0 or torch.equal(positions, strongest(flat, keep)[0])
    assert torch.equal(values, flat.gather(1, positions))


@pytest.mark.parametrize("case", ALIKE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_extract_matches_core_for_shapes_and_dtypes(case: str, dtype: torch.dtype) -> None:
    shapes, chunk = ALIKE[case]
    torch.manual_seed(0)
    chunkings = chunkings_of(shapes, chunk)
    length = chunkings[0].chunk_shape[0] * chunkings[0].chunk_shape[1]
    _check([torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes], chunkings, min(8, length))


@pytest.mark.parametrize("shape", [(32, 32), (7, 40), (50,)], ids=str)
@pytest.mark.parametrize("keep", [0, 1, 8, 32, "all"])
def test_triton_extract_matches_core_for_every_top_k(shape: tuple[int, ...], keep: int | str) -> None:
    torch.manual_seed(1)
    chunkings = chunkings_of([shape], 64)
    length = chunkings[0].chunk_shape[0] * chunkings[0].chunk_shape[1]
    _check([torch.randn(shape, device=DEVICE)], chunkings, length if isinstance(keep, str) else keep)


@pytest.mark.parametrize("name", transform.TRANSFORMS)
@pytest.mark.parametrize("shape", [(20, 24), (40,)], ids=str)
def test_triton_extract_matches_core_for_every_transform(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    _check([torch.randn(shape, device=DEVICE)], chunkings_of([shape], 12), 5, name)


@pytest.mark.parametrize("shape", [(12, 10), (30,)], ids=str)
def test_triton_extract_takes_missing_and_mixed_gradients(shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    gradients = [None, *(torch.randn(shape, device=DEVICE).to(dtype) for dtype in DTYPES), None]
    chunkings = chunkings_of([shape] * 5, 6)
    _check(gradients, chunkings, 3)
    _check([None] * 5, chunkings, 3)


def test_triton_extract_follows_strides() -> None:
    torch.manual_seed(4)
    whole = torch.randn(24, 40, device=DEVICE)
    gradients = [whole[:, :16], whole[::2, 3:19], whole.T[:16, :12], whole[:12, ::2][:, :16], whole[0].expand(12, 40)]
    for gradient in gradients:
        _check([gradient], chunkings_of([tuple(gradient.shape)], 8), 4)
    images = torch.randn(8, 4, 3, 2, device=DEVICE).to(memory_format=torch.channels_last)
    _check([images], chunkings_of([(8, 4, 3, 2)], 8), 4)
    _check([whole[0, ::3]], chunkings_of([(14,)], 7), 2)


def test_triton_extract_takes_empty_members() -> None:
    torch.manual_seed(5)
    shapes = [(0, 6), (6, 6), (0, 6)]
    chunkings = chunkings_of(shapes[1:2], 6)
    empty = Chunking((0, 6), (6, 6), (0, 0))
    _check([torch.randn(shape, device=DEVICE) for shape in shapes], [empty, *chunkings, empty], 4)
    positions, values = extract([], [], torch.zeros(0, 6, 6, device=DEVICE), _bases(chunkings), 0.9, 1.0, 4)
    assert positions.shape == values.shape == (0, 4)


@pytest.mark.parametrize("shape", [(8, 8), (1, 64)], ids=str)
def test_triton_extract_takes_the_first_of_equals(shape: tuple[int, int]) -> None:
    """Four chunks: all zero, all equal, larger ones among equals, and one number among zeros."""
    chunkings = chunkings_of([shape] * 4, 64)
    momentum = torch.zeros(4, *shape, device=DEVICE)
    flat = momentum.view(4, -1)
    flat[1, ::2], flat[1, 1::2] = 3.0, -3.0
    flat[2] = 0.5
    flat[2, [9, 40]] = torch.tensor([-7.0, 2.0], device=DEVICE)
    flat[3, 63] = 1e-38
    positions, values = extract([None] * 4, chunkings, momentum, _bases(chunkings), 1.0, 1.0, 4)
    assert positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 9, 40], [0, 1, 2, 63]]
    assert values[1:3].tolist() == [[3.0, -3.0, 3.0, -3.0], [0.5, 0.5, -7.0, 2.0]]


def test_triton_extract_orders_numbers_of_all_sizes() -> None:
    """Over the whole range of float32: the search by bits ends, and is right."""
    torch.manual_seed(6)
    chunkings = chunkings_of([(16, 16)] * 2, 16)
    momentum = torch.randn(2, 16, 16, device=DEVICE) * torch.exp2(torch.randint(-120, 120, (2, 16, 16), device=DEVICE))
    for keep in (1, 5, 100, 255):
        positions, _ = extract([None, None], chunkings, momentum, _bases(chunkings), 1.0, 1.0, keep)
        assert torch.equal(positions, strongest(momentum.view(2, -1), keep)[0])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_triton_extract_counts_nonfinite_as_largest(number: float) -> None:
    chunkings = chunkings_of([(8, 8)], 8)
    momentum = torch.ones(1, 8, 8, device=DEVICE)
    momentum[0, 3, 5] = number
    positions, _ = extract([None], chunkings, momentum, _bases(chunkings), 1.0, 1.0, 1)
    assert positions.tolist() == [[29]]


def test_triton_table_is_kept_while_addresses_stay() -> None:
    chunkings = chunkings_of([(8, 8), (8, 8)], 8)
    gradient, other = torch.zeros(8, 8, device=DEVICE), torch.zeros(8, 8, device=DEVICE)
    first = triton_table.table([gradient, None], chunkings, DEVICE)
    again = triton_table.table([gradient, None], chunkings, DEVICE)
    moved = triton_table.table([gradient, other], chunkings, DEVICE)
    assert again.members is first.members
    assert moved.members is not first.members
    assert moved.member_of_chunk is first.member_of_chunk
    assert moved.members[:, 0].tolist() == [gradient.data_ptr(), other.data_ptr()]


def test_triton_table_is_aligned_only_if_all_members_are() -> None:
    chunkings = chunkings_of([(16, 16), (16, 16)], 8)
    whole = torch.zeros(17, 32, device=DEVICE)
    for gradients, aligned in (
        ([whole[:16, :16], None], True),
        ([whole[:16, :16], whole[1:, 8:24]], True),
        ([whole[:16, :16], whole[:16, 1:17]], False),
        ([None, None], False),
    ):
        assert triton_table.table(gradients, chunkings, DEVICE).aligned == aligned

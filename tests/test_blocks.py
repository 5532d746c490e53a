"""Blocks: every parameter's chunks once, and copies equal to the literal ones of one parameter at a time."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import problems
from demopt.codec.blocks import Block, Member, blocks_of
from demopt.core.chunking import chunking

SHAPES = [  # each of one chunk shape
    [(47, 32), (31, 48), (16, 16)],  # padded rows
    [(47, 31), (31, 1, 47), (16, 16)],  # padded columns too
    [(47,), (31,)],
    [(48,), (32,)],
]


def _members(shapes: list[tuple[int, ...]]) -> list[Member]:
    return [Member(number, torch.zeros(shape), chunking(shape, 16)) for number, shape in enumerate(shapes)]


def _pair(block: Block) -> Tensor:
    r, c = block.pieces[0].member.chunking.chunk_shape
    return torch.full((2, block.stop - block.start, r, c), 7.0)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4),
    st.integers(1, 30),
    st.booleans(),
)
def test_blocks_hold_each_grid_row_once_and_no_more_chunks_than_asked_but_one_row_or_parameter(
    grids: list[tuple[int, int]], most: int, undivided: bool
) -> None:
    members = _members([(16 * down, 16 * across) for down, across in grids])
    blocks = list(blocks_of(members, most, undivided))
    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])]
    rows = [
        (piece.member.number, row)
        for block in blocks
        for piece in block.pieces
        for row in range(piece.first, piece.last)
    ]
    assert rows == [(number, row) for number, (down, _) in enumerate(grids) for row in range(down)]
    for block in blocks:
        parts = [piece.chunks if undivided else piece.member.chunking.grid[1] for piece in block.pieces]
        assert block.stop - block.start <= max(most, parts[0])
        starts = [sum(piece.chunks for piece in block.pieces[:number]) for number in range(len(block.pieces))]
        assert [piece.start for piece in block.pieces] == starts


@pytest.mark.parametrize("most", [3, 4, 100])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_copy_the_bits_of_the_literal_chunks(
    shapes: list[tuple[int, ...]], most: int, dtype: torch.dtype
) -> None:
    """Differences are taken in float32, also of bfloat16 tensors, as kernels take them."""
    torch.manual_seed(0)
    members = _members(shapes)
    gradients: list[Tensor | None] = [torch.randn(shape).to(dtype) for shape in shapes]
    minus = [torch.randn(shape).to(dtype) for shape in shapes]
    gradients[1] = None
    expected = []
    for member, gradient, less in zip(members, gradients, minus, strict=True):
        difference = torch.zeros(less.shape) if gradient is None else gradient.float() - less.float()
        expected.append(problems.chunks_of(difference, member.chunking))
    rows: dict[int, list[Tensor]] = {}
    for block in blocks_of(members, most, undivided=False):
        pair = _pair(block)
        numbers = [piece.member.number for piece in block.pieces]
        block.read([gradients[number] for number in numbers], *pair, [minus[number] for number in numbers])
        assert torch.equal(pair[0], torch.cat(expected)[block.start : block.stop])
        for number, part in zip(numbers, block.write(*pair), strict=True):
            rows.setdefault(number, []).append(part.clone())
    for member, chunks in zip(members, expected, strict=True):
        whole = torch.cat(rows[member.number])
        assert torch.equal(whole, problems.matrix_of(chunks, member.chunking))

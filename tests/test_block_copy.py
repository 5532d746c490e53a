"""Copies for all parameters at once, as an accelerator makes them, against those of one parameter at a time."""

import pytest
import torch
from torch import Tensor

import demopt
from demopt.codec.block_copy import BlockCopy, Placed
from demopt.codec.compress import read_gradients
from demopt.exchange import SingleRank

SHAPES = [(47, 32), (31, 48), (16, 16)]  # the first two with padded rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_less_other_tensors_have_the_same_bits(dtype: torch.dtype) -> None:
    """Differences are taken in float32, also of bfloat16 tensors, as kernels take them."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    (chunk_group,) = demopt.DeMo(parameters, chunk=16, process_group=SingleRank()).replicator.plan().chunk_groups
    (block,) = chunk_group.blocks
    gradients: list[Tensor | None] = [torch.randn(shape).to(dtype) for shape in SHAPES]
    minus = [torch.randn(shape).to(dtype) for shape in SHAPES]
    gradients[1] = None
    pair = torch.empty(2, chunk_group.chunks, *chunk_group.key.chunk_shape)
    read_gradients(block, gradients, pair, minus)
    placed = [Placed(piece.member.number, piece.member.whole, piece.start) for piece in block.pieces]
    together = torch.empty_like(pair)
    BlockCopy(placed, chunk_group.chunks, torch.device("cpu")).read(gradients, *together, minus)
    assert torch.equal(together[0], pair[0])

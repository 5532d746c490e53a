"""The codec of signs compiles to whole graphs: no graph break, no shape that depends on data, and the same bits."""

import math
import shutil
from unittest import mock

import pytest
import torch
from torch import Tensor

from demopt.core import exact, transform
from demopt.wire import bits
from demopt.wire.coefficients import SignBits, encode_signs, unusable_codes
from demopt.wire.quantizers import SCALE_BITS, scale_plane

CHUNKS, SIDE, LENGTH = 24, 16, 256


def extract(momentum_Crc: Tensor, chunks_Crc: Tensor, basis_rr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Steps 1 to 4: the new momentum, and signs and codes of its coefficients as bytes."""
    new = momentum_Crc.clone()
    transform.accumulate(new, chunks_Crc, (basis_rr, basis_rr), torch.empty_like(new), 0.9, 0.1)
    signs_CS, scale_C = encode_signs(new.flatten(1))
    return new, signs_CS, scale_plane(scale_C)


def apply(parameter_Crc: Tensor, signs_WCS: Tensor, codes_WB: Tensor, basis_rr: Tensor) -> tuple[Tensor, Tensor]:
    """Steps 6 to 8: the new parameter, and which ranks sent an invalid scale."""
    received = SignBits(signs_WCS, bits.unpack(codes_WB, SCALE_BITS, CHUNKS), LENGTH)
    out = torch.empty_like(parameter_Crc)
    unit_C = exact.aggregate_signs(received.negative, received.codes, (1, 1), out.view(CHUNKS, LENGTH))
    unit_C = unit_C * math.prod(exact.inverse(out, basis_rr, basis_rr, torch.empty_like(out)))
    return parameter_Crc - out * unit_C.view(-1, 1, 1), unusable_codes(received.codes.device)[received.codes]


def _no_library() -> None:
    return None


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_extract_and_apply_compile_to_whole_graphs_with_the_same_bits() -> None:
    torch.manual_seed(0)
    momentum, chunks = torch.randn(2, CHUNKS, SIDE, SIDE)
    basis, integers = transform.basis("dct", SIDE, torch.float32), exact.integer_basis("dct", SIDE)
    with mock.patch.object(bits, "library", _no_library):  # the C kernels, which no graph holds
        expected = extract(momentum, chunks, basis)
        torch._dynamo.reset()
        found = torch.compile(extract, fullgraph=True, dynamic=False)(momentum, chunks, basis)
        assert torch.allclose(found[0], expected[0])  # products may be summed in another order
        assert torch.equal(found[1], encode_signs(found[0].flatten(1))[0])
        sent = torch.stack((found[1], expected[1].flip(0))), torch.stack((found[2], expected[2].flip(0)))
        before = torch.randn(CHUNKS, SIDE, SIDE)
        compiled = torch.compile(apply, fullgraph=True, dynamic=False)
        for mine, literal in zip(compiled(before, *sent, integers), apply(before, *sent, integers), strict=True):
            assert torch.equal(mine, literal)

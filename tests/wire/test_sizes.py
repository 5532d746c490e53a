"""Bytes per kept coefficient of whole messages for GPT-2 with 124.4M parameters; none of them is allocated."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from demopt import DeMo
from demopt.exchange import SingleRank
from demopt.wire.layout import Layout
from demopt.wire.message import HEADER_BYTES

_BLOCK = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)]
_BLOCK += [(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
GPT2 = [(50257, 768), (1024, 768), *_BLOCK * 12, (768,), (768,)]

#: K, values, and the limit of bytes per kept coefficient; the published code always sends 12.
TARGETS = [(32, "sign", 1.32), (32, "2-bit", 1.45), (8, "sign", 1.75), (8, "2-bit", 1.90)]


def layout_of_gpt2(**settings: Any) -> Layout:
    """The layout of a message of DeMo."""
    parameters = [Parameter(torch.empty(shape, device="meta")) for shape in GPT2]
    return DeMo(parameters, process_group=SingleRank(), **settings).replicator.plan().route.layout


@pytest.mark.parametrize(("top_k", "values", "most"), TARGETS)
def test_bytes_per_coefficient_meet_targets(top_k: int, values: str, most: float) -> None:
    layout = layout_of_gpt2(top_k=top_k, values=values)
    assert (HEADER_BYTES + layout.size) / layout.kept <= most


def test_sign_message_is_nine_times_below_published() -> None:
    assert 12 * layout_of_gpt2(chunking="divisor").kept > 9 * layout_of_gpt2(values="sign").size

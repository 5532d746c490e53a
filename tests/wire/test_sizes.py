"""Bytes per kept coefficient of whole messages for GPT-2 with 124.4M parameters; none of them is allocated."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from demopt import DeMo
from demopt.codec.chunk_group import GroupKey, group_key
from demopt.codec.hyperparameters import Hyperparameters
from demopt.wire.layout import Layout, Section
from demopt.wire.message import HEADER_BYTES

_BLOCK = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)]
_BLOCK += [(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
GPT2 = [(50257, 768), (1024, 768), *_BLOCK * 12, (768,), (768,)]

#: K, values, and the limit of bytes per kept coefficient; the published code always sends 12.
TARGETS = [(32, "sign", 1.32), (32, "2-bit", 1.45), (8, "sign", 1.75), (8, "2-bit", 1.90)]


def layout_of(shapes: list[tuple[int, ...]], **settings: Any) -> Layout:
    """The layout of a message, as `DeMo` would make it."""
    group = Hyperparameters.of(DeMo([Parameter(torch.zeros(1))], **settings).param_groups[0])
    chunks: dict[GroupKey, int] = {}
    for shape in shapes:
        key, whole = group_key(Parameter(torch.empty(shape, device="meta")), 0, group)
        chunks[key] = chunks.get(key, 0) + whole.chunks
    return Layout(tuple(Section(count, key.length, key.keep, key.values) for key, count in chunks.items()))


@pytest.mark.parametrize("values", ["float32", "sign", "int8"])
def test_layout_of_shapes_equals_that_of_optimizer(values: str) -> None:
    shapes = [(70, 130), (64, 64), (70,), (), (3, 5, 7), (0,), (200,)]
    optimizer = DeMo([Parameter(torch.zeros(shape)) for shape in shapes], values=values, top_k=8)
    message = optimizer.extract()
    layout = layout_of(shapes, values=values, top_k=8)
    assert message.numel() == HEADER_BYTES + layout.size
    assert optimizer.stats.kept == layout.kept


@pytest.mark.parametrize(("top_k", "values", "most"), TARGETS)
def test_bytes_per_coefficient_meet_targets(top_k: int, values: str, most: float) -> None:
    layout = layout_of(GPT2, top_k=top_k, values=values)
    assert (HEADER_BYTES + layout.size) / layout.kept <= most


def test_sign_message_is_nine_times_below_published() -> None:
    assert 12 * layout_of(GPT2, chunking="divisor").kept > 9 * layout_of(GPT2, values="sign").size

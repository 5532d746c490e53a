"""apply against core.exact and core.update, and against optim.decompress: the same bits."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

pytest.importorskip("triton")

from triton_cases import ALIKE, DEVICE, DTYPES, add_chunks, chunkings_of

from demopt.core import exact
from demopt.core.chunk import Chunking
from demopt.core.update import sign
from demopt.kernels import triton_kernels
from demopt.kernels.choice import Kernels
from demopt.kernels.steps import Steps
from demopt.kernels.triton_apply import apply, directions
from demopt.optim import chunk_group as chunk_groups
from demopt.optim.decompress import direction
from demopt.optim.demo import DeMo
from demopt.wire.coefficients import Coefficients

LEVELS = {"sign": 1, "2-bit": 2, "int8": 127}
LR, WEIGHT_DECAY = 3e-3, 0.1


def _sent(world_size: int, chunks: int, length: int, keep: int, level: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, levels, codes: steps apart by up to 2**7, some zero; to the first chunk nobody sends anything."""
    positions = torch.rand(world_size, chunks, length).argsort(-1)[..., :keep].sort(-1).values
    levels = torch.randint(1, level + 1, (world_size, chunks, keep)) * (
        torch.randint(0, 2, (world_size, chunks, keep)) * 2 - 1
    )
    codes = torch.randint(16 * 120, 16 * 127, (world_size, chunks))
    codes[torch.rand(world_size, chunks) < 0.1] = 0
    codes[:, 0] = 0
    return positions.to(DEVICE), levels.to(DEVICE), codes.to(DEVICE)


def _bases(chunkings: list[Chunking], name: str = "dct") -> tuple[Tensor, Tensor]:
    rows, columns = (exact.integer_basis(name, side, str(DEVICE)) for side in chunkings[0].chunk_shape)
    return rows, columns


def _literal(
    parameters: list[Tensor], chunkings: list[Chunking], sent: tuple[Tensor, ...], name: str, level: int, reduction: str
) -> list[Tensor]:
    """The parameters after the step, by core functions on the CPU."""
    positions, levels, codes = (part.cpu() for part in sent)
    chunks = torch.empty(positions.shape[1], *chunkings[0].chunk_shape)
    flat, spare = chunks.view(len(chunks), -1), torch.empty_like(chunks)
    exact.aggregate_steps(positions, (levels, codes), level, reduction, (flat, spare.view_as(flat)))
    exact.inverse(chunks, *(exact.integer_basis(name, side) for side in chunkings[0].chunk_shape), spare)
    sign(chunks, (codes != 0).any(0))
    floats = [parameter.cpu().float().contiguous() * (1 - LR * WEIGHT_DECAY) for parameter in parameters]
    add_chunks(floats, chunkings, chunks.to(floats[0].device), -LR)
    return [after.to(parameter.dtype) for after, parameter in zip(floats, parameters, strict=True)]


def _check(
    parameters: list[Tensor], chunkings: list[Chunking], world_size: int, keep: int,
    name: str = "dct", level: int = 1, reduction: str = "senders",
) -> None:  # fmt: skip
    length = chunkings[0].chunk_shape[0] * chunkings[0].chunk_shape[1]
    sent = _sent(world_size, sum(whole.chunks for whole in chunkings), length, min(keep, length), level)
    wanted = _literal(parameters, chunkings, sent, name, level, reduction)
    apply(parameters, chunkings, Steps(*sent, _bases(chunkings, name), level, reduction), LR, WEIGHT_DECAY)
    for parameter, expected in zip(parameters, wanted, strict=True):
        assert torch.equal(parameter.cpu(), expected)


def _parameters(shapes: list[tuple[int, ...]], *dtypes: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, device=DEVICE).to(dtypes[at % len(dtypes)]) for at, shape in enumerate(shapes)]


@pytest.mark.parametrize("case", ALIKE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_apply_matches_core_for_shapes_and_dtypes(case: str, dtype: torch.dtype) -> None:
    shapes, chunk = ALIKE[case]
    torch.manual_seed(0)
    _check(_parameters(shapes, dtype), chunkings_of(shapes, chunk), world_size=2, keep=8)


@pytest.mark.parametrize("shape", [(24, 20), (40,)], ids=str)
@pytest.mark.parametrize("reduction", ["senders", "mean"])
@pytest.mark.parametrize("values", LEVELS)
@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_triton_apply_matches_core_for_worlds_and_levels(
    shape: tuple[int, ...], reduction: str, values: str, world_size: int
) -> None:
    torch.manual_seed(world_size)
    parameters = _parameters([shape] * 2, *DTYPES)
    _check(parameters, chunkings_of([shape] * 2, 12), world_size, 8, level=LEVELS[values], reduction=reduction)


@pytest.mark.parametrize("shape", [(16, 16), (50,)], ids=str)
@pytest.mark.parametrize("keep", [1, 8, 32, 256])
@pytest.mark.parametrize("name", ["dct", "hadamard"])
def test_triton_apply_matches_core_for_every_top_k(shape: tuple[int, ...], keep: int, name: str) -> None:
    torch.manual_seed(keep)
    _check(_parameters([shape], torch.float32), chunkings_of([shape], 64), world_size=3, keep=keep, name=name)


def test_triton_apply_takes_more_ranks_than_one_block() -> None:
    torch.manual_seed(1)
    for shape in ((16, 16), (16,)):
        _check(_parameters([shape], torch.float32), chunkings_of([shape], 16), world_size=41, keep=3, level=127)


def test_triton_apply_takes_the_largest_allowed_sums() -> None:
    """All ranks send the largest level of the largest mantissa at the same places."""
    world_size, level = 500, 127
    chunkings = chunkings_of([(8, 8)], 8)
    positions = torch.arange(2, device=DEVICE).expand(world_size, 1, 2)
    levels = torch.full((world_size, 1, 2), level, device=DEVICE)
    sent = positions, levels, torch.full((world_size, 1), 127 * 16 + 15, device=DEVICE)
    parameters = [torch.randn(8, 8, device=DEVICE)]
    for reduction in ("senders", "mean"):
        wanted = _literal(parameters, chunkings, sent, "dct", level, reduction)
        apply(parameters, chunkings, Steps(*sent, _bases(chunkings), level, reduction), LR, WEIGHT_DECAY)
        assert torch.equal(parameters[0].cpu(), wanted[0])
    many = (part[:1].expand(9000, *part.shape[1:]) for part in sent)
    with pytest.raises(ValueError, match="use exact=False"):
        apply(parameters, chunkings, Steps(*many, _bases(chunkings), level, "mean"), LR, 0.0)


def test_triton_apply_counts_sent_zeros_as_plus_one() -> None:
    """Two ranks cancel: U is zero all over, which counts as +1; to the second chunk nobody sent anything."""
    for shape in ((8, 8), (1, 64)):
        chunkings = chunkings_of([shape] * 2, 64)
        parameters = [torch.zeros(shape, device=DEVICE) for _ in range(2)]
        positions = torch.tensor([3, 8], device=DEVICE).expand(2, 2, 2)
        levels = torch.tensor([1, -1], device=DEVICE).view(2, 1, 1).expand(2, 2, 2)
        codes = torch.tensor([[2032, 0], [2032, 0]], device=DEVICE)
        apply(parameters, chunkings, Steps(positions, levels, codes, _bases(chunkings), 1, "senders"), 0.5, 0.0)
        assert bool((parameters[0] == -0.5).all())
        assert not parameters[1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_apply_rounds_all_sizes_to_nearest(dtype: torch.dtype) -> None:
    """Subnormal and huge elements, negative zero, halves to even."""
    torch.manual_seed(2)
    limit = {torch.float32: 126, torch.bfloat16: 126, torch.float16: 14}[dtype]
    numbers = torch.randn(16, 64) * torch.exp2(torch.randint(-limit - 8, limit, (16, 64)))
    numbers[0, :2] = torch.tensor([0.0, -0.0])
    parameter = numbers.to(DEVICE).to(dtype)
    chunkings = chunkings_of([(16, 64)], 64)
    sent = _sent(2, 1, 1024, 8, 1)
    unsent = _literal([parameter], chunkings, sent, "dct", 1, "mean")
    apply([parameter], chunkings, Steps(*sent, _bases(chunkings), 1, "mean"), LR, WEIGHT_DECAY)
    assert torch.equal(parameter.cpu(), unsent[0])
    assert torch.equal(parameter.cpu().signbit(), unsent[0].signbit())
    sent[2].fill_(127 * 16)
    stepped = _literal([parameter], chunkings, sent, "dct", 1, "mean")
    apply([parameter], chunkings, Steps(*sent, _bases(chunkings), 1, "mean"), LR, WEIGHT_DECAY)
    assert torch.equal(parameter.cpu(), stepped[0])


def test_triton_apply_follows_strides_and_stays_inside() -> None:
    torch.manual_seed(3)
    whole = torch.randn(20, 40, device=DEVICE)
    before = whole.clone()
    part = whole[2:18, 5:21]
    _check([part], chunkings_of([(16, 16)], 8), world_size=2, keep=4)
    part.copy_(before[2:18, 5:21])
    assert torch.equal(whole, before)
    _check([whole.T[:16, :12]], chunkings_of([(16, 12)], 8), world_size=2, keep=4)
    _check([whole[0, ::3]], chunkings_of([(14,)], 7), world_size=2, keep=2)
    images = torch.randn(8, 4, 3, 2, device=DEVICE).to(memory_format=torch.channels_last)
    _check([images], chunkings_of([(8, 4, 3, 2)], 8), world_size=2, keep=4)
    assert images.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16], ids=str)
def test_triton_apply_takes_any_integers_and_empty_members(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    chunkings = [Chunking((0, 6), (6, 6), (0, 0)), *chunkings_of([(6, 12)], 6)]
    parameters = [torch.zeros(0, 6, device=DEVICE), torch.randn(6, 12, device=DEVICE)]
    sent = _sent(2, 2, 36, 4, 127)
    wanted = _literal(parameters, chunkings, sent, "dct", 127, "mean")
    narrow = (part.to(dtype) for part in sent)
    apply(parameters, chunkings, Steps(*narrow, _bases(chunkings), 127, "mean"), LR, WEIGHT_DECAY)
    assert torch.equal(parameters[1].cpu(), wanted[1])


@pytest.mark.parametrize("shape", [(24, 20), (67,)], ids=str)
def test_triton_apply_in_parts_equals_whole(shape: tuple[int, ...]) -> None:
    """Run after run of chunks comes to the same as all at once; the direction alone is the sign."""
    torch.manual_seed(6)
    chunkings = chunkings_of([shape] * 2, 7)
    count, (r, c) = sum(whole.chunks for whole in chunkings), chunkings[0].chunk_shape
    sent = _sent(3, count, r * c, 4, 1)
    whole, parts = ([torch.zeros(shape, device=DEVICE) for _ in range(2)] for _ in range(2))
    apply(whole, chunkings, Steps(*sent, _bases(chunkings), 1, "mean"), 0.5, 0.0)
    for start in range(0, count, 5):
        some = (part[:, start : start + 5] for part in sent)
        apply(parts, chunkings, Steps(*some, _bases(chunkings), 1, "mean"), 0.5, 0.0, first=start)
    assert all(map(torch.equal, whole, parts))

    out = torch.full((count, r, c), torch.nan, device=DEVICE)
    directions(Steps(*sent, _bases(chunkings), 1, "mean"), out)
    again = [torch.zeros(shape, device=DEVICE) for _ in range(2)]
    add_chunks(again, chunkings, out, -0.5)
    assert all(map(torch.equal, whole, again))


def test_triton_module_satisfies_kernels_protocol() -> None:
    kernels: Kernels = triton_kernels
    assert kernels.writable(torch.zeros(2, dtype=torch.float16))
    assert triton_kernels.covers((64, 64), torch.float32, DEVICE) == (DEVICE.type == "cuda")
    for chunk, dtype in (((64, 65), torch.float32), ((128, 64), torch.float32), ((64, 64), torch.float64)):
        assert not triton_kernels.covers(chunk, dtype, DEVICE)


@pytest.mark.parametrize("values", LEVELS)
@pytest.mark.parametrize("reduction", ["senders", "mean"])
def test_triton_apply_equals_decompress(values: str, reduction: str) -> None:
    """Momenta through the wire and back; then both ways to the parameters."""
    torch.manual_seed(5)
    parameters = [Parameter(torch.randn(shape, device=DEVICE)) for shape in ((40, 24), (20, 12), (31,), (1,))]
    optimizer = DeMo(parameters, lr=LR, chunk=12, top_k=6, values=values, reduction=reduction)
    for chunk_group in chunk_groups.build(optimizer.param_groups):
        members, chunkings = zip(*chunk_group.members, strict=True)
        ours = [member.detach().clone() for member in members]
        theirs = [member.detach().clone() for member in members]
        messages = []
        for _ in range(3):
            momentum = torch.randn(chunk_group.chunks, chunk_group.key.length, device=DEVICE)
            positions = momentum.abs().topk(chunk_group.key.keep).indices.sort(1).values
            messages.append(chunk_group.section.encode(positions, momentum.gather(1, positions)))
        coefficients: Coefficients = chunk_group.section.decode(torch.stack(messages), 0, chunk_group.chunks)
        pair = torch.empty_like(chunk_group.momentum), torch.empty_like(chunk_group.momentum)
        add_chunks(theirs, chunkings, direction(chunk_group, coefficients, pair), -LR)
        steps = Steps(
            coefficients.positions, *coefficients.stepped, chunk_group.inverse_bases, LEVELS[values], reduction
        )
        apply(ours, chunkings, steps, LR, 0.0)
        assert all(map(torch.equal, ours, theirs))

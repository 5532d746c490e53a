"""The CPU kernels against core, which says what they compute: bit for bit where core is exact."""

import ctypes
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import problems
import ranks
from demopt import DeMo
from demopt.core import exact, transform
from demopt.core.chunk import Chunking, Patch, add_patch, chunking, matrix_view, read_patch
from demopt.core.select import strongest
from demopt.core.update import sign
from demopt.exchange import Exchange
from demopt.kernels import cpu
from demopt.kernels.compiled import LIBRARY
from demopt.kernels.steps import Steps

pytestmark = pytest.mark.skipif(cpu.compiled() is None, reason="demopt was installed without a C compiler")

SHAPES = [(64, 64), (200, 130), (128,), (1,), (7,), (257, 65), (30, 5), (50, 3), (3, 100), (8, 128)]


def built_levels() -> list[int]:
    loaded = ctypes.CDLL(str(LIBRARY)) if LIBRARY.exists() else None
    return [level for level in (1, 3, 4) if loaded and hasattr(loaded, f"demopt_extract_v{level}")]


@pytest.fixture(params=built_levels(), ids=lambda level: f"v{level}")
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Each instruction set that was built for and that this machine has."""
    if request.param > cpu.compiled().demopt_level():
        pytest.skip("not on this processor")
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.demopt_level = lambda: request.param  # type: ignore[assignment]
    monkeypatch.setattr(cpu, "compiled", lambda: loaded)
    return int(request.param)


def whole_patch(whole: Chunking) -> Patch:
    return Patch((0, whole.grid[0]), (0, whole.grid[1]))


def chunks_of(tensors: list[Tensor | None], whole: Chunking) -> Tensor:
    chunks = torch.zeros(len(tensors), whole.chunks, *whole.chunk_shape)
    for tensor, part in zip(tensors, chunks, strict=True):
        if tensor is not None:
            read_patch(matrix_view(tensor, whole), part, whole, whole_patch(whole))
    return chunks.flatten(0, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["dct", "random", "hadamard", "identity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_extract_matches_core(level: int, shape: tuple[int, ...], name: str, dtype: torch.dtype) -> None:
    whole = chunking(shape, 64)
    r, c = whole.chunk_shape
    keep = max(1, r * c // 100)
    torch.manual_seed(r * c)
    gradients = [torch.randn(shape).to(dtype), None, torch.randn(shape).to(dtype)]
    momentum = torch.randn(3 * whole.chunks, r, c)
    chunks, expected = chunks_of(gradients, whole), momentum.clone()
    bases = transform.basis(name, r, torch.float32), transform.basis(name, c, torch.float32)
    positions, values = cpu.extract(gradients, [whole] * 3, momentum, bases, 0.9, 0.5, keep)
    transform.accumulate(expected, chunks, bases, torch.empty_like(chunks), 0.9, 0.5)
    torch.testing.assert_close(momentum, expected, rtol=0, atol=2e-6)
    flat = momentum.view(len(momentum), -1)
    assert torch.equal(positions, strongest(flat, keep)[0])
    assert torch.equal(values, flat.gather(1, positions))


@pytest.mark.parametrize("keep", [1, 2, 8, 31, 32, 100, 128, 1024, 4095, 4096])
def test_cpu_extract_chooses_the_strongest(level: int, keep: int) -> None:
    torch.manual_seed(keep)
    momentum = torch.randn(20, 64, 64) * torch.rand(20, 64, 1) ** 8  # strong rows
    momentum[3] = 0
    momentum[4] = momentum[4].sign()  # nothing but ties
    momentum[5, 1:] = 0
    momentum[6] = momentum[6].round()
    eye = torch.eye(64)
    positions, values = cpu.extract([None], [chunking((20 * 64, 64), 64)], momentum, (eye, eye), 1.0, 1.0, keep)
    flat = momentum.view(20, -1)
    assert bool((positions[:, 1:] > positions[:, :-1]).all())
    assert torch.equal(values, flat.gather(1, positions))
    assert torch.equal(values.abs().sort().values, flat.abs().topk(keep).values.flip(1))


def test_cpu_extract_with_keep_0_sends_nothing(level: int) -> None:
    momentum, gradient = torch.zeros(1, 64, 64), torch.randn(64, 64)
    eye = torch.eye(64)
    positions, values = cpu.extract([gradient], [chunking((64, 64), 64)], momentum, (eye, eye), 0.5, 1.0, 0)
    assert positions.shape == values.shape == (1, 0)
    assert torch.equal(momentum[0], gradient)


def drawn(whole: Chunking, world_size: int, keep: int, largest_level: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    chunks, length = count * whole.chunks, whole.chunk_shape[0] * whole.chunk_shape[1]
    positions = torch.rand(world_size, chunks, length).argsort(-1)[..., :keep].sort(-1).values
    levels = torch.randint(1, largest_level + 1, positions.shape) * (2 * torch.randint(0, 2, positions.shape) - 1)
    codes = torch.randint(1700, 2100, (world_size, chunks))
    codes[torch.rand(world_size, chunks) < 0.3] = 0
    return positions, levels, codes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["dct", "hadamard"])
@pytest.mark.parametrize("world_size", [1, 2, 7])
@pytest.mark.parametrize("reduction", ["senders", "mean"])
def test_cpu_apply_gives_the_bits_of_core(
    level: int, shape: tuple[int, ...], name: str, world_size: int, reduction: str
) -> None:
    whole = chunking(shape, 64)
    r, c = whole.chunk_shape
    torch.manual_seed(world_size * r * c)
    for keep, largest, weight_decay in itertools.product({1, min(8, r * c)}, [1, 127], [0.0, 0.1]):
        steps = drawn(whole, world_size, keep, largest, count=2)
        bases = exact.integer_basis(name, r), exact.integer_basis(name, c)
        parameters = [torch.randn(shape) for _ in range(2)]
        expected = [parameter.clone() for parameter in parameters]
        directions = literal_directions(steps, bases, largest, reduction, (2 * whole.chunks, r, c))
        for parameter, part in zip(expected, directions.view(2, whole.chunks, r, c), strict=True):
            factor = 1 - 1e-3 * weight_decay
            add_patch(matrix_view(parameter, whole), -1e-3 * part, whole, whole_patch(whole), factor)
        sent = Steps(*steps, bases, largest, reduction)
        cpu.apply(parameters, [whole] * 2, sent, 1e-3, weight_decay)
        assert all(torch.equal(*pair) for pair in zip(parameters, expected, strict=True))
        signs = torch.empty(2 * whole.chunks, r, c)
        cpu.directions(sent, signs)
        assert torch.equal(signs, directions)


def literal_directions(
    steps: tuple[Tensor, Tensor, Tensor],
    bases: tuple[Tensor, Tensor],
    largest: int,
    reduction: str,
    shape: tuple[int, int, int],
) -> Tensor:
    positions, levels, codes = steps
    out, spare = torch.empty(shape), torch.empty(shape)
    exact.aggregate_steps(positions, (levels, codes), largest, reduction, (out.flatten(1), spare.flatten(1)))
    exact.inverse(out, *bases, spare)
    return sign(out, (codes != 0).any(0))


def test_cpu_apply_in_parts_equals_whole(level: int) -> None:
    whole = chunking((640, 64), 64)
    steps = drawn(whole, 1, 8, 1, count=1)
    bases = exact.integer_basis("dct", 64), exact.integer_basis("dct", 64)
    parameter, expected = torch.zeros(640, 64), torch.zeros(640, 64)
    cpu.apply([expected], [whole], Steps(*steps, bases, 1, "mean"), 1.0, 0.0)
    for first, stop in ((0, 3), (3, 10)):
        part = tuple(tensor[:, first:stop] for tensor in steps)
        cpu.apply([parameter], [whole], Steps(*part, bases, 1, "mean"), 1.0, 0.0, first=first)
    assert torch.equal(parameter, expected)


@pytest.mark.parametrize("route", ["gather", "owner", "relay"])
def test_rank_without_kernels_stays_equal(route: str) -> None:
    fingerprints = ranks.threads(_train, 2, route)
    assert fingerprints[0] == fingerprints[1]


def _train(exchange: Exchange, route: str) -> list[int]:
    settings = {**problems.SMALL, "values": "sign", "weight_decay": 0.1}
    kernels = "torch" if exchange.rank == 1 else "auto"
    parameters = problems.parameters(problems.SHAPES)
    optimizer = DeMo(parameters, **settings, route=route, kernels=kernels, process_group=exchange)
    compiled = [chunk_group.decoders is not None for chunk_group in optimizer._current_plan().chunk_groups]
    assert compiled == [exchange.rank != 1] * len(compiled)
    return problems.train(optimizer, range(5), exchange.rank).fingerprints


def test_compiled_refuses_a_stale_library(tmp_path: Path) -> None:
    for name in ("cpu.so.1", "cpu.c"):
        (tmp_path / name).write_bytes(LIBRARY.with_name(name).read_bytes())
    with (tmp_path / "cpu.c").open("a") as source:
        source.write("/* changed */\n")
    script = (
        "import warnings, pathlib; import demopt.kernels.compiled as kernels; "
        f"kernels.LIBRARY = pathlib.Path({str(tmp_path / 'cpu.so.1')!r}); "
        "caught = warnings.catch_warnings(record=True); log = caught.__enter__(); "
        "print(kernels.compiled(), log[0].message)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None the CPU kernels are older than their source; install demopt again"

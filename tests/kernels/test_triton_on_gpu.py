"""What only a GPU can show: the host never waits, nothing is compiled anew, and a CUDA graph can hold the launches."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton_cases import chunkings_of

from demopt.core import exact, transform
from demopt.kernels.steps import Steps
from demopt.kernels.triton_apply import apply
from demopt.kernels.triton_extract import extract

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPES, KEEP = [(256, 128), (192, 64), (64, 64)], 8


class Step:
    """One extract and one apply on parameters that stay where they are."""

    def __init__(self, world_size: int) -> None:
        torch.manual_seed(0)
        self.world_size = world_size
        self.chunkings = chunkings_of(SHAPES, 64)
        self.parameters = [torch.randn(shape, device="cuda") for shape in SHAPES]
        self.gradients = [torch.randn(shape, device="cuda") for shape in SHAPES]
        self.momentum = torch.zeros(sum(whole.chunks for whole in self.chunkings), 64, 64, device="cuda")
        basis = transform.basis("dct", 64, torch.float32, "cuda")
        integers = exact.integer_basis("dct", 64, "cuda")
        self.bases, self.integers = (basis, basis), (integers, integers)
        self.codes = torch.full((world_size, len(self.momentum)), 2032, device="cuda")

    def __call__(self, decay: float = 0.9, lr: float = 1e-3) -> tuple[Tensor, Tensor]:
        found = extract(self.gradients, self.chunkings, self.momentum, self.bases, decay, 0.1, KEEP)
        positions, levels = (part.expand(self.world_size, *part.shape) for part in (found[0], found[1].sign().long()))
        apply(self.parameters, self.chunkings, Steps(positions, levels, self.codes, self.integers, 1, "mean"), lr, 0.1)
        return found


@pytest.fixture
def _waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_triton_step_never_waits_on_the_host(request: pytest.FixtureRequest) -> None:
    step = Step(world_size=2)
    request.getfixturevalue("_waiting_is_an_error")
    step()
    step.gradients = [gradient.clone() for gradient in step.gradients]  # a new table
    step()


def test_triton_step_compiles_nothing_anew() -> None:
    from triton import knobs

    Step(world_size=2)()
    compiled: list[object] = []
    knobs.runtime.jit_post_compile_hook = lambda **found: compiled.append(found)
    try:
        for world_size, lr, decay in ((1, 1.0, 1.0), (3, 0.0, 0.5), (16, 16.0, 0.0), (64, 1e-3, 0.9)):
            Step(world_size)(decay, lr)
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert compiled == []


def test_triton_step_replays_in_a_cuda_graph() -> None:
    step, literal = Step(world_size=2), Step(world_size=2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        positions, values = step()
    graph.replay()
    literal()
    expected = literal()
    torch.cuda.synchronize()
    assert torch.equal(positions, expected[0])
    assert torch.equal(values, expected[1])
    assert all(map(torch.equal, step.parameters, literal.parameters))

"""The CPU kernels against core: bit for bit where core is exact."""

import ctypes
import itertools
import math
import signal
import subprocess
import sys
import threading

import pytest
import torch

import hatch_build
import problems
from demopt.core import exact, top_k, transform
from demopt.core.aggregate import REDUCTIONS
from demopt.core.chunking import chunking
from demopt.core.rounding import decay_and_add
from demopt.core.rules import sign
from demopt.exchange import SingleRank
from demopt.kernels import step
from demopt.kernels.gate import LIBRARY, library
from demopt.kernels.step import Kernel, received_signs, received_strongest
from demopt.wire.coefficients import SignBits, encode_signs
from demopt.wire.quantizers import scale_code

pytestmark = pytest.mark.skipif(library() is None, reason="demopt was installed without a C compiler")

SHAPES = [(64, 64), (200, 130), (128,), (1,), (7,), (257, 65), (30, 5), (50, 3), (3, 100), (8, 128)]


@pytest.fixture(params=[1, 3, 4], ids=lambda level: f"v{level}")
def level(request, monkeypatch):
    """Each instruction set that was built and that this machine has."""
    loaded = ctypes.CDLL(str(LIBRARY))
    if not hasattr(loaded, f"demopt_extract_v{request.param}") or request.param > loaded.demopt_level():
        pytest.skip("not built, or not on this processor")
    loaded.demopt_level = lambda: request.param
    monkeypatch.setattr(step, "library", lambda: loaded)


class _Scene:
    """Parameters of one shape, their chunks one after another, with the kernel for them and the bases of core."""

    def __init__(self, shape, count, name="dct", keep=None):
        whole = chunking(shape, 64)
        r, c = whole.chunk_shape
        torch.manual_seed(r * c)
        self.shape, self.whole, self.length, self.chunks = shape, whole, r * c, (count, whole.chunks, r, c)
        self.bases = transform.basis(name, r, torch.float32), transform.basis(name, c, torch.float32)
        self.integer_bases = exact.integer_basis(name, r), exact.integer_basis(name, c)
        self.unit = exact.basis_unit(name, r) * exact.basis_unit(name, c)
        self.kernel = Kernel([whole] * count, name, keep)

    def accumulated(self, momentum, tensors):
        chunks, expected = torch.zeros(self.chunks), momentum.clone()
        for tensor, part in zip(tensors, chunks, strict=True):
            if tensor is not None:
                part.copy_(problems.chunks_of(tensor, self.whole))
        flat = chunks.flatten(0, 1)
        transform.accumulate(expected, flat, self.bases, torch.empty_like(flat), (0.9, 0.5))
        return expected

    def assert_applies(self, received, Q, units, sent):
        """The kernel moves parameters, and decodes, to the bits of core, whose reduction gave Q [C, N] in units [C]."""
        U = Q.view(-1, *self.chunks[2:])
        units = units * math.prod(exact.inverse(U, self.integer_bases, torch.empty_like(U))) * self.unit
        direction = sign(U + 0.0, sent)
        U.mul_(units.view(-1, 1, 1))
        for by_sign, decay in itertools.product([False, True], [1.0, 1 - 1e-4]):
            update = direction if by_sign else U
            parameters = [torch.randn(self.shape) for _ in range(self.chunks[0])]
            expected = [parameter.clone() for parameter in parameters]
            for parameter, part in zip(expected, update.view(self.chunks), strict=True):
                moved = problems.matrix_of(-1e-3 * part, self.whole).reshape(self.shape)
                decay_and_add(parameter, moved, decay)
            self.kernel.apply(parameters, received, by_sign, (decay, -1e-3))
            assert all(torch.equal(*pair) for pair in zip(parameters, expected, strict=True))
            out = torch.empty_like(U)
            self.kernel.invert(received, by_sign, out)
            assert torch.equal(out, update)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["dct", "identity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extract_matches_core(level, shape, name, dtype):
    keep = max(1, math.prod(chunking(shape, 64).chunk_shape) // 100)
    scene = _Scene(shape, 3, name, keep)
    gradients = [torch.randn(shape).to(dtype), None, torch.randn(shape).to(dtype)]
    momentum = torch.randn(scene.chunks).flatten(0, 1)
    expected = scene.accumulated(momentum, gradients)
    found = scene.kernel.extract(gradients, None, momentum, (0.9, 0.5))
    torch.testing.assert_close(momentum, expected, rtol=0, atol=2e-6)
    assert all(map(torch.equal, found, top_k.strongest(momentum.flatten(1), keep)))


@pytest.mark.parametrize("keep", [0, 1, 2, 31, 32, 100, 1024, 4095, 4096])
def test_extract_selects_the_strongest(level, keep):
    scene = _Scene((20 * 64, 64), 1, "identity", keep)
    momentum = torch.randn(20, 64, 64) * torch.rand(20, 64, 1) ** 8  # strong rows
    momentum[3] = 0
    momentum[4] = momentum[4].sign()  # nothing but ties
    momentum[5, 1:] = 0
    momentum[6] = momentum[6].round()
    positions, values = scene.kernel.extract([None], None, momentum, (1.0, 1.0))
    flat = momentum.view(20, -1)
    assert bool((positions[:, 1:] > positions[:, :-1]).all())
    assert torch.equal(values, flat.gather(1, positions))
    assert torch.equal(values.abs().sort().values, flat.abs().topk(keep).values.flip(1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", transform.TRANSFORMS)
@pytest.mark.parametrize("world_size", [1, 2, 7])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_apply_of_the_strongest_gives_the_bits_of_core(level, shape, name, world_size, reduction):
    scene = _Scene(shape, 2, name)
    chunks = 2 * scene.whole.chunks
    for keep, largest in itertools.product({1, min(8, scene.length)}, [1, 127]):
        positions = torch.rand(world_size, chunks, scene.length).argsort(-1)[..., :keep].sort(-1).values
        levels = torch.randint(1, largest + 1, positions.shape) * (2 * torch.randint(0, 2, positions.shape) - 1)
        codes = torch.randint(1700, 2100, (world_size, chunks))
        codes[torch.rand(world_size, chunks) < 0.3] = 0
        pair = torch.empty(2, chunks, scene.length)
        units = exact.aggregate_integers(positions, (levels, codes), largest, reduction, pair, False, None)
        received = received_strongest(positions.to(torch.int16), levels, codes, largest, reduction)
        scene.assert_applies(received, pair[0], units, (codes != 0).any(0))


def _sign_bits(values_WCN):
    encoded = [encode_signs(values_CN) for values_CN in values_WCN]
    signs_WCS, scale_WC = (torch.stack(parts) for parts in zip(*encoded, strict=True))
    return SignBits(signs_WCS, length=values_WCN.shape[2], codes=scale_code(scale_WC))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extract_and_subtraction_of_signs_match_core(level, shape, dtype):
    scene = _Scene(shape, 3)
    starts = [torch.randn(shape), None, torch.randn(shape)]
    ends = [torch.randn(shape).to(dtype), None, torch.randn(shape).to(dtype)]
    momentum = torch.randn(scene.chunks).flatten(0, 1)
    differences = [None if a is None or b is None else a - b.float() for a, b in zip(starts, ends, strict=True)]
    expected = scene.accumulated(momentum, differences)
    signs, codes = scene.kernel.extract(starts, ends, momentum, (0.9, 0.5))
    torch.testing.assert_close(momentum, expected, rtol=0, atol=3e-6)
    own_signs, own_scales = encode_signs(momentum.flatten(1))
    assert torch.equal(signs, own_signs)
    assert int((codes - scale_code(own_scales)).abs().max()) <= 1  # magnitudes are added in another order, then rounded
    kept = momentum.flatten(1).clone()
    step.subtract_sent(kept, signs.unsqueeze(0), codes.unsqueeze(0), alpha=0.5, decay=0.75)
    q = SignBits(signs.unsqueeze(0), length=scene.length, codes=codes.unsqueeze(0)).values[0]
    assert torch.equal(kept, (momentum.flatten(1) - 0.5 * q) * 0.75)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", transform.TRANSFORMS)
@pytest.mark.parametrize("samples", [(1,), (1, 1), (2, 3, 1), (8,) * 7])
def test_apply_of_signs_gives_the_bits_of_core(level, shape, name, samples):
    scene = _Scene(shape, 2, name)
    weights, chunks = exact.weights_of(samples), 2 * scene.whole.chunks
    values = torch.randn(len(samples), chunks, scene.length) * torch.rand(len(samples), chunks, 1) ** 8
    values[:, :1] = 0
    bits, Q = _sign_bits(values), torch.empty(chunks, scene.length)
    units = exact.aggregate_signs(bits.negative, bits.codes, weights, Q, False, None)
    scene.assert_applies(received_signs(bits.signs, bits.codes, weights), Q, units, (bits.codes != 0).any(0))


def test_signs_of_tiny_updates_survive_a_processor_that_flushes_them_to_zero(level):
    scene = _Scene(SHAPES[0], 2, "dct")
    chunks = 2 * scene.whole.chunks
    bits = _sign_bits(torch.randn(1, chunks, scene.length))
    codes = torch.full_like(bits.codes, 16)
    plain, flushed = (torch.empty(chunks, *scene.chunks[2:]) for _ in range(2))
    scene.kernel.invert(received_signs(bits.signs, codes, (1,)), True, plain)
    torch.set_flush_denormal(True)
    try:
        scene.kernel.invert(received_signs(bits.signs, codes, (1,)), True, flushed)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(plain, flushed)
    assert set(plain.unique().tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("length", [1, 3, 4096])
def test_answer_is_the_error_plus_the_mean(level, length):
    torch.manual_seed(length)
    bits, error = _sign_bits(torch.randn(3, 40, length)), torch.randn(40, length)
    sums, mean = torch.empty(40, length), torch.empty(40, length)
    signs, _ = step.answer(received_signs(bits.signs, bits.codes, (1, 2, 1)), error, sums)
    unit = exact.aggregate_signs(bits.negative, bits.codes, (1, 2, 1), mean, False, None)
    assert torch.equal(sums, error + mean * unit.unsqueeze(1))
    assert torch.equal(signs, encode_signs(sums)[0])


def _signs_of_many_chunks():
    momentum = torch.zeros(256, 64, 64)
    _Scene((1024, 1024), 1).kernel.extract([problems.draw((1024, 1024), 0)], None, momentum, (0.5, 0.5))
    return momentum


def test_a_kernel_does_its_work_where_the_machine_has_no_more_threads(monkeypatch):
    expected, start, started = _signs_of_many_chunks(), threading.Thread.start, []

    def start_one(thread):
        started.append(thread)
        if len(started) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(threading.Thread, "start", start_one)
    assert torch.equal(_signs_of_many_chunks(), expected)
    assert len(started) == 2


_SMALL_STACKS = """
import threading
import torch
import demopt
from demopt.exchange import Threads
from demopt.exchange.background import Background

def train(exchange=None):
    parameter = torch.nn.Parameter(torch.zeros(1024, 1024))
    parameter.grad = torch.ones_like(parameter)
    demopt.DeMo([parameter], top_k=32, process_group=exchange).step()

torch.set_num_threads(2)
threading.stack_size(1 << 16)
train()
Background().submit(train).result()
Threads(1).run(train)
assert threading.stack_size() == 1 << 16
"""


def test_kernels_have_room_in_threads_of_a_program_with_small_stacks():
    subprocess.run([sys.executable, "-c", _SMALL_STACKS], check=True, timeout=120)


def test_an_interrupt_leaves_no_thread_of_a_kernel_behind(monkeypatch):
    """Such a thread would go on in memory that is freed."""
    join, awaited, end = threading.Thread.join, [], threading.Event()

    def interrupted(thread):
        awaited.append(thread)
        signal.raise_signal(signal.SIGINT)
        end.set()
        join(thread)

    monkeypatch.setattr(threading.Thread, "run", lambda _: end.wait())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _signs_of_many_chunks()
    assert {thread.is_alive() for thread in awaited} == {False}


def test_a_new_library_replaces_one_in_use_without_writing_into_it(tmp_path):
    library, built = tmp_path / "cpu.so.1", tmp_path / "built"
    library.write_bytes(b"old")
    built.write_bytes(b"new")
    with library.open("rb") as in_use:
        hatch_build._replace(library, built)
        assert in_use.read() == b"old"
    assert library.read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["built", "cpu.so.1"]


def test_stale_library_is_not_used(tmp_path, monkeypatch):
    for name in ("cpu.so.1", *(path.name for path in LIBRARY.parent.glob("*.[ch]"))):
        (tmp_path / name).write_bytes(LIBRARY.with_name(name).read_bytes())
    with (tmp_path / "chunk.h").open("a") as source:
        source.write("/* changed */\n")
    library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("demopt.kernels.gate.LIBRARY", tmp_path / "cpu.so.1")
        with pytest.warns(UserWarning, match="the CPU kernels are older than their sources; install demopt again"):
            assert library() is None
    library.cache_clear()


@pytest.mark.parametrize("top_k", [None, 24])
def test_the_number_of_threads_changes_no_bit(top_k):
    """Each chunk is one thread's, and nothing is summed over chunks."""
    ends = []
    try:
        for threads in (5, 2, 1):
            torch.set_num_threads(threads)
            optimizer = problems.local(SingleRank(), [(520, 700), (300, 130), (1000,)], top_k=top_k, chunk=64)
            ends.append(problems.train(optimizer, range(3)))
    finally:
        torch.set_num_threads(1)
    assert all(problems.same_history(end, ends[0]) for end in ends)

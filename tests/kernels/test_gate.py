"""No tensor reaches C that is not what C takes it for: a wrong one is refused in words, or gives the right bits."""

import ast
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import demopt
import problems
from demopt.core.chunking import chunking
from demopt.exchange import SingleRank
from demopt.kernels import bits, step
from demopt.kernels.gate import library
from demopt.kernels.step import Kernel, received_signs, received_strongest

pytestmark = pytest.mark.skipif(library() is None, reason="demopt was installed without a C compiler")


def _without_memory(tensor, part=1):
    """Returns a copy with the second half of its memory freed, or all of it (`part` 0)."""
    left = tensor.clone()
    left.untyped_storage().resize_(left.untyped_storage().nbytes() * part // 2)
    return left


MUTATIONS = {
    "shorter": lambda each: each[:-1].clone(),
    "longer": lambda each: torch.cat((each, each)),
    "narrower": lambda each: each[..., :-1].contiguous(),
    "flat": lambda each: each.flatten(),
    "deeper": lambda each: each.unsqueeze(0),
    "turned": lambda each: each.transpose(0, -1),
    "gaps": lambda each: torch.stack((each, torch.zeros_like(each)), -1)[..., 0],
    "expanded": lambda each: each[:1].expand(each.shape),
    "empty": lambda each: each.new_empty(0),
    "number": lambda each: each.flatten()[0],
    "float64": lambda each: each.to(torch.float64),
    "float16": lambda each: each.to(torch.float16),
    "int64": lambda each: each.to(torch.int64),
    "uint8": lambda each: each.to(torch.uint8),
    "bool": lambda each: each.to(torch.bool),
    "complex": lambda each: each.to(torch.complex64),
    "negative view": lambda each: torch._neg_view(each.neg()) if each.is_floating_point() else each.to(torch.complex64),
    "elsewhere": lambda each: each.to("meta"),
    "sparse": lambda each: each.to_sparse(),
    "freed": lambda each: _without_memory(each, 0),
    "shrunk": _without_memory,
    "far": lambda each: each + 1_000_000,
    "list": lambda each: each.tolist(),
    "none": lambda each: None,  # noqa: ARG005
}

WHOLE = chunking((33, 20), 16)
R, C = WHOLE.chunk_shape
COUNT = 2 * WHOLE.chunks


def _strongest():
    positions = torch.arange(3).expand(2, COUNT, 3).contiguous()
    return {"positions": positions, "levels": torch.ones_like(positions), "codes": torch.full((2, COUNT), 2000)}


def _signs(ranks=2):
    signs = torch.randint(0, 256, (ranks, COUNT, (R * C + 7) // 8), generator=torch.Generator().manual_seed(0))
    return {"signs": signs.to(torch.uint8), "codes": torch.full((ranks, COUNT), 2000)}


def _kernel(keep=None):
    return Kernel([WHOLE] * 2, "dct", keep)


def _extract(keep, given):
    gradients = [given["gradient"], given["gradient 2"]]
    return _kernel(keep).extract(gradients, [given["minus"], None], given["momentum"], (0.9, 0.5))


def _apply(received, given):
    _kernel().apply([given["parameter"], given["parameter 2"]], received, False, (1.0, -0.1))


def _of_strongest(given):
    return received_strongest(given["positions"], given["levels"], given["codes"], 1, "senders")


def _of_signs(given):
    return received_signs(given["signs"], given["codes"], (1, 2))


MATRIX, CHUNKS = (problems.draw(shape, 3) for shape in ((33, 20), (COUNT, R, C)))
INPUTS = {**dict.fromkeys(("gradient", "gradient 2", "minus"), MATRIX), "momentum": CHUNKS}
PARAMETERS, OUT = dict.fromkeys(("parameter", "parameter 2"), MATRIX), {"out": CHUNKS}
ASCENDING = torch.tensor([[1, 6, 7, 12], [0, 1, 2, 15]])

#: Each entry to C: the arguments of a right call, which writes to those in WRITTEN; and the call.
ENTRIES = {
    "extract strongest": (INPUTS, lambda given: _extract(5, given)),
    "extract signs": (INPUTS, lambda given: _extract(None, given)),
    "apply strongest": (PARAMETERS | _strongest(), lambda given: _apply(_of_strongest(given), given)),
    "apply signs": (PARAMETERS | _signs(), lambda given: _apply(_of_signs(given), given)),
    "invert strongest": (OUT | _strongest(), lambda given: _kernel().invert(_of_strongest(given), True, given["out"])),
    "invert signs": (OUT | _signs(), lambda given: _kernel().invert(_of_signs(given), True, given["out"])),
    "subtract sent": (
        {"momentum": CHUNKS.flatten(1), **_signs(1)},
        lambda given: step.subtract_sent(given["momentum"], given["signs"], given["codes"], 0.5, 0.75),
    ),
    "answer": (
        {"error": CHUNKS.flatten(1), "sum": CHUNKS.flatten(1), **_signs()},
        lambda given: step.answer(_of_signs(given), given["error"], given["sum"]),
    ),
    "pack": ({"values": torch.arange(16)}, lambda given: bits.pack(given["values"], 5)),
    "unpack": (
        {"packed": torch.arange(20, dtype=torch.uint8).view(2, 10)},
        lambda given: bits.unpack(given["packed"], 5, 16),
    ),
    "pack unary": ({"positions": ASCENDING}, lambda given: bits.pack_unary(given["positions"], 2, 8)),
    "unpack unary": (
        {"maps": bits.pack_unary(ASCENDING, 2, 8).view(1, 2)},
        lambda given: bits.unpack_unary(given["maps"], 2, 4, 8),
    ),
}
WRITTEN = {"momentum", "parameter", "parameter 2", "out", "sum"}


def _copies(entry):
    return {name: tensor.clone() for name, tensor in ENTRIES[entry][0].items()}


def _outcome(entry, given):
    """The tensors that the call returns and writes."""
    found = ENTRIES[entry][1](given)
    returned = [found] if torch.is_tensor(found) else found or []
    return [*returned, *(tensor for name, tensor in given.items() if name in WRITTEN)]


@given(entry=st.sampled_from(sorted(ENTRIES)), which=st.integers(0, 5), name=st.sampled_from(sorted(MUTATIONS)))
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_a_wrong_tensor_is_refused_or_read_rightly(entry, which, name):
    wrong = _copies(entry)
    argument = sorted(wrong)[which % len(wrong)]
    try:
        wrong[argument] = MUTATIONS[name](wrong[argument])
    except (RuntimeError, IndexError):
        return  # there is no such tensor
    try:
        found = _outcome(entry, wrong)
    except (TypeError, ValueError, AttributeError):
        return
    plain = _copies(entry)
    # "far": other numbers do not concern the gate, as long as they stay inside the memory
    if name != "far" and torch.is_tensor(wrong[argument]) and wrong[argument].shape == plain[argument].shape:
        # the numbers that the mutation leaves, as a plain tensor of the original dtype
        left = MUTATIONS[name](plain[argument]).resolve_neg().to(plain[argument].dtype, copy=True).contiguous()
        assert problems.same(found, _outcome(entry, {**plain, argument: left}))


@pytest.mark.parametrize(
    ("entry", "written", "other"),
    [
        ("extract signs", "momentum", "gradient"),
        *((f"apply {kind}", "parameter", "parameter 2") for kind in ("signs", "strongest")),
        ("answer", "sum", "error"),
        ("subtract sent", "momentum", "signs"),
        ("invert signs", "out", "signs"),
    ],
)
def test_tensors_that_share_memory_with_a_written_one_are_refused(entry, written, other):
    given_, memory = _copies(entry), torch.zeros(1 << 20, dtype=torch.uint8)
    for name in (written, other):
        each = given_[name]
        given_[name] = memory[: each.nbytes].view(each.dtype).view(each.shape).copy_(each)
    with pytest.raises(ValueError, match="share memory that the kernel writes"):
        _outcome(entry, given_)


SHAPES = [(33, 20), (40,), (2, 3, 5)]


def _make(kind="DeMo", kernels="auto", shapes=SHAPES):
    more = {"exchange": SingleRank(), "shapes": shapes, "kernels": kernels}
    return problems.demo(**more, update="sgd") if kind == "DeMo" else problems.local(**more)


@given(which=st.integers(0, 2), name=st.sampled_from(sorted(MUTATIONS)), kernels=st.sampled_from(["auto", "torch"]))
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_replicator_refuses_a_wrong_gradient_and_names_its_parameter(which, name, kernels):
    optimizer = _make("DeMo", kernels)
    replicator, before = optimizer.replicator, problems.momenta(optimizer)
    gradients = [problems.draw(shape, 5) for shape in SHAPES]
    try:
        gradients[which] = given_ = MUTATIONS[name](gradients[which])
    except (RuntimeError, IndexError):
        return
    try:
        replicator.apply(replicator.exchange(replicator.extract(gradients)))
    except (TypeError, ValueError) as error:
        told = str(error)
    else:
        assert given_ is None or given_.shape == SHAPES[which]
        return
    assert f"['params'][{which}]" in told
    assert problems.same(problems.momenta(optimizer), before)


@pytest.mark.parametrize("gradients", [[], [torch.zeros(33, 20)], [None] * 4], ids=len)
def test_replicator_refuses_another_number_of_gradients(gradients):
    with pytest.raises(ValueError, match=f"got {len(gradients)} gradients for 3 parameters"):
        _make().replicator.extract(gradients)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@pytest.mark.parametrize("shape", [(16, 16), (20, 33), (660,), (66, 40)], ids=str)
def test_step_refuses_a_parameter_whose_data_got_another_shape(kind, kernels, shape):
    optimizer = _make(kind, kernels)
    parameter = problems.all_parameters(optimizer)[0]
    problems.fingerprints(optimizer, [0])
    kept, parameter.data = parameter.data, torch.zeros(shape)
    parameter.grad = torch.ones(shape)
    says = r"parameter 0.* had shape \[33, 20\] and has .* its data was replaced"
    with problems.unchanged(optimizer), pytest.raises(ValueError, match=says):
        optimizer.step()
    parameter.data = kept
    problems.fingerprints(optimizer, [1])


@pytest.mark.parametrize("shape", [(16, 16), (66, 40)], ids=str)
def test_apply_refuses_data_that_was_replaced_since_extract_and_applies_nothing(shape):
    optimizer = _make()
    messages = optimizer.exchange(problems.extracted(optimizer))
    parameter = problems.all_parameters(optimizer)[1]
    kept, parameter.data = parameter.data, torch.zeros(shape)
    says = r"\['params'\]\[1\] was .* when gradients were extracted"
    with problems.unchanged(optimizer), pytest.raises(ValueError, match=says):
        optimizer.apply(messages)
    parameter.data = kept
    optimizer.apply(messages)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_parameters_of_another_dtype_since_train_on(kind, dtype):
    """As by `model.to(dtype)` after the optimizer was built."""

    def end(kernels):
        optimizer = _make(kind, kernels)
        problems.fingerprints(optimizer, range(2))
        for parameter in problems.all_parameters(optimizer):
            parameter.grad, parameter.data = None, parameter.data.to(dtype)
        return problems.train(optimizer, range(2, 4)).parameters

    torch.testing.assert_close(end("auto"), end("torch"), rtol=1e-2, atol=1e-2)


def test_parameters_that_share_memory_have_the_bits_of_torch():
    """Weights that are tied by their data: threads of a kernel would write them at the same time."""

    def end(kernels):
        optimizer = _make("DeMo", kernels, [(33, 20), (33, 20)])
        one, other = problems.all_parameters(optimizer)
        other.data = one.data
        return problems.train(optimizer, range(3)).parameters

    torch.testing.assert_close(end("auto"), end("torch"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("message", [torch.zeros(8, dtype=torch.uint8), torch.zeros(3), torch.zeros(2, 64), 5], ids=str)
def test_exchange_refuses_what_is_no_message_of_extract(message):
    optimizer = _make()
    right = problems.extracted(optimizer)
    with pytest.raises(ValueError, match="extract returned torch"):
        optimizer.exchange(message)
    optimizer.apply(optimizer.exchange(right))


def test_only_the_gate_tells_addresses_to_c_and_only_its_folder_calls_that():
    files = Path(demopt.__file__).parent.rglob("*.py")
    nodes = [(file, node) for file in files for node in ast.walk(ast.parse(file.read_text()))]
    used = {(node.attr, file) for file, node in nodes if isinstance(node, ast.Attribute)}
    kernels = {file.name for name, file in used if name == "data_ptr" and file.parent.name == "kernels"}
    assert kernels == {"gate.py"}
    assert {file.parent.name for name, file in used if name.startswith("demopt_")} == {"kernels"}

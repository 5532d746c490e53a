"""The inputs of a step: closures, hooks, any shape, dtype and stride; gradients that ranks lack, or are not finite."""

import warnings
from collections import Counter
from math import inf, nan
from unittest.mock import Mock

import pytest
import torch
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo, LocalDeMo
from demopt.wire.message import HEADER_BYTES


@pytest.mark.parametrize(("kind", "rounds"), [("DeMo", [0, 1, 2, 3]), ("LocalDeMo", [0, 0, 1, 1])])
def test_closure_runs_once_before_a_round_and_its_gradients_and_loss_are_those_of_the_step(kind, rounds):
    optimizer, plain = (problems.optimizer_of(kind, problems.parameters(problems.FEW)) for _ in range(2))
    parameters, seen = problems.all_parameters(optimizer), []

    def closure():
        problems.set_gradients(parameters, len(seen))
        seen.append(int(optimizer.replicator.round_number))
        return 0.5 if torch.is_grad_enabled() else None

    for step in range(4):
        problems.set_gradients(parameters, -1)
        assert optimizer.step(closure) == 0.5
        assert problems.fingerprints(plain, [step]) == [optimizer.fingerprint()]
    assert seen == rounds
    assert optimizer.step() is None


def test_closure_failure_sends_and_changes_nothing():
    recorder = problems.Recorder()
    optimizer = problems.demo(recorder)
    problems.set_gradients(problems.all_parameters(optimizer), 0)
    with problems.unchanged(optimizer, recorder), pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.step()


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_frozen_parameter_with_a_gradient_is_told_of_once_because_others_would_train_it(kind):
    """Also if that gradient is not finite."""
    optimizer = problems.optimizer_of(kind, problems.parameters(problems.FEW))
    parameter, heard = problems.all_parameters(optimizer)[0], []
    for _ in range(2):
        parameter.grad = torch.full_like(parameter, torch.nan)
        parameter.requires_grad_(False)
        told = problems.warned(optimizer.step)
        assert not optimizer.stats.skipped, "it is dropped"
        optimizer.zero_grad()
        parameter.requires_grad_(True)
        heard += [text for text in told if "freeze it after step()" in text]
    assert len(heard) == 1
    quiet = problems.optimizer_of(kind, problems.parameters(problems.FEW))
    first, *others = problems.all_parameters(quiet)
    problems.set_gradients([first, *others], 0)
    quiet.step()
    first.requires_grad_(False)  # its old gradient is there until the closure drops it
    quiet.step(lambda: (quiet.zero_grad(), problems.set_gradients(others, 1), 0.0)[-1])


@pytest.mark.parametrize("by_closure", [False, True])
def test_hooks_fire_once_a_step_and_a_pre_hook_may_change_gradients(by_closure):
    counts = Counter()
    model = torch.nn.Linear(6, 3, bias=False)
    optimizer = DeMo(model.parameters(), maximize=True, **problems.SMALL)
    model.weight.register_hook(lambda _: counts.update(["gradient"]))
    model.weight.register_post_accumulate_grad_hook(lambda _: counts.update(["accumulated"]))
    optimizer.register_step_post_hook(lambda *_: counts.update(["after"]))

    def backward():
        optimizer.zero_grad()
        model(torch.ones(2, 6, requires_grad=True)).sum().backward()

    def clip(*_):
        counts.update(["before"])
        if model.weight.grad is not None:  # without a closure, the hook is in time
            model.weight.grad.zero_()

    optimizer.register_step_pre_hook(clip)
    for step in (1, 2):
        if not by_closure:
            backward()
        start = optimizer.fingerprint()
        optimizer.step(backward if by_closure else None)
        assert counts == dict.fromkeys(["gradient", "accumulated", "before", "after"], step)
        assert (optimizer.fingerprint() == start) == (not by_closure)
        assert torch.equal(model.weight.grad, torch.full((3, 6), 2.0 * by_closure)), "a step leaves gradients unchanged"


#: (rank, step) -> the parameters without a gradient there
PATTERNS = {
    "one parameter on one rank": {(1, 1): {1}},
    "at the first step": {(0, 0): {0}, (1, 0): {2}},
    "different ones on each rank": {(0, 1): {0, 3}, (1, 1): {1}, (1, 2): {2}},
    "all parameters on one rank": {(1, 1): {0, 1, 2, 3}},
    "all parameters everywhere": {(0, 1): {0, 1, 2, 3}, (1, 1): {0, 1, 2, 3}},
    "nothing at all, from the first step": {(r, s): {0, 1, 2, 3} for r in (0, 1) for s in range(4)},
}


@pytest.mark.filterwarnings("ignore:no parameter of this optimizer has had a gradient")
@pytest.mark.parametrize("pattern", PATTERNS)
@ranks.alike(2)
def test_missing_gradient_counts_as_zero_and_changes_no_collective(exchange, pattern):
    """Until some rank has a gradient, each step also compares gradients' fingerprints, to notice synchronised ones."""

    def run(missing, as_zeros=False):
        recorder = problems.Recorder(exchange)
        optimizer = problems.demo(recorder, update="sgd")
        parameters = problems.all_parameters(optimizer)

        def drop(step):
            for number in missing.get((exchange.rank, step), ()):
                parameters[number].grad = torch.zeros_like(parameters[number]) if as_zeros else None

        return problems.train(optimizer, range(4), exchange.rank, drop), recorder.lengths

    (_, usual), (got, lengths) = run({}), run(PATTERNS[pattern])
    want, of_zeros = run(PATTERNS[pattern], as_zeros=True)
    assert problems.same_history(got, want)
    comparisons = 2 * 3 * (pattern == "nothing at all, from the first step")
    assert len(lengths) == len(of_zeros) == len(usual) + comparisons
    assert [length for length in lengths if length >= HEADER_BYTES] == 4 * [usual[-1]], "one message per step"
    return got, lengths


@pytest.mark.parametrize("done", [0, 2])
def test_sparse_gradients_are_refused_before_sending(done):
    recorder = problems.Recorder()
    layer = torch.nn.Embedding(11, 4, sparse=True)
    optimizer = DeMo([Parameter(torch.zeros(3)), layer.weight], process_group=recorder, **problems.SMALL)
    problems.train(optimizer, range(done))
    optimizer.zero_grad()
    layer(torch.tensor([1, 2])).sum().backward()
    says = r"the gradient of parameter 1, shape \[11, 4\].* is sparse"
    with problems.unchanged(optimizer, recorder), pytest.raises(TypeError, match=says):
        optimizer.step()
    optimizer.zero_grad()
    problems.train(optimizer, range(5, 6))


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("update", ["signum", "adamw", "sgd"])
@ranks.alike(3)
def test_step_trains_each_shape_and_dtype_at_once_and_keeps_replicas_equal_also_without_kernels(exchange, update):
    parameters = [p for dtype in DTYPES for p in problems.parameters(problems.SHAPES, dtype)]
    before = [parameter.detach().clone() for parameter in parameters]
    more = {"lr": 0.5, "update": update, "kernels": "torch" if exchange.rank == 1 else "auto"}
    optimizer = DeMo(parameters, process_group=exchange, **{**problems.SMALL, **more})
    history = problems.train(optimizer, range(3), exchange.rank)
    for parameter, was, momentum in zip(parameters, before, history.momenta, strict=True):
        assert (parameter.shape, parameter.dtype) == (was.shape, was.dtype)
        assert momentum.dtype == torch.promote_types(parameter.dtype, torch.float32)
        assert bool(parameter.isfinite().all())
        assert parameter.numel() == 0 or not torch.equal(parameter, was), parameter.shape
    return history


#: The same values, some in a part of a larger tensor of 77s.
STRIDES = {
    "transposed": lambda v: v.transpose(0, -1).contiguous().transpose(0, -1),
    "channels last": lambda v: v.to(memory_format=torch.channels_last),
    "every other": lambda v: torch.full((*v.shape[:-1], 2 * v.shape[-1]), 77.0, dtype=v.dtype)[..., ::2].copy_(v),
    "inside": lambda v: torch.full([n + 2 for n in v.shape], 77.0)[tuple(slice(1, 1 + n) for n in v.shape)].copy_(v),
}


def test_negative_view_is_named_by_the_step():
    parameter = Parameter(torch._neg_view(torch.ones(3)))
    parameter.grad = torch.ones(3)
    with pytest.raises(ValueError, match="parameter 0 is a view of the negative of its memory"):
        DeMo([parameter]).step()


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("strided_gradient", [True, False])
def test_step_ignores_strides(strides, strided_gradient, bits_by):
    strided = STRIDES[strides]
    for shape in [(6, 5, 3, 3)] if strides == "channels last" else [(17, 19), (6, 5, 3, 3), (20,), (4, 3, 5)]:
        values = problems.draw(shape, 1)
        plain, other = Parameter(values.clone()), Parameter(strided(values))
        assert torch.equal(plain, other)
        address, stride = other.data_ptr(), other.stride()

        def spread(_, other=other):
            other.grad = strided(other.grad) if strided_gradient and other.grad is not None else other.grad

        optimizers = [DeMo([parameter], weight_decay=0.1, **problems.SMALL) for parameter in (plain, other)]
        histories = [problems.train(optimizer, range(3), before_step=spread) for optimizer in optimizers]
        assert problems.same_history(*histories), shape
        assert (other.data_ptr(), other.stride()) == (address, stride), "updated in place"
        memory = torch.empty(0).set_(other.detach().untyped_storage())
        assert int((memory == 77.0).sum()) == memory.numel() - other.numel(), "its neighbours are untouched"


@pytest.mark.parametrize(
    "settings",
    [{"values": "float32"}, {"values": "2-bit"}, *({"update": u, "values": "sign"} for u in ("sgd", "adamw", "lion"))],
    ids=str,
)
@pytest.mark.parametrize(
    ("world_size", "bad_ranks", "bad_step", "bad"),
    [(1, {0}, 1, -inf), (3, {2}, 0, nan), (3, {0, 1}, 2, inf), (3, {0, 1, 2}, 0, -inf)],
    ids=str,
)
def test_nonfinite_gradient_skips_on_all_ranks(settings, world_size, bad_ranks, bad_step, bad):
    """optim/test_state_machine.py compares what is left in the momenta with the oracle."""

    def work(exchange):
        optimizer, histories, payloads = problems.demo(exchange, weight_decay=0.1, **settings), [], set()
        weights_and_rules = optimizer.replicator.wiring().replicated_tensors

        def spoil(step):
            if step == bad_step and exchange.rank in bad_ranks:
                problems.all_parameters(optimizer)[1].grad[3, 4] = bad

        for step in range(4):
            momenta, before = problems.momenta(optimizer), [each.clone() for each in weights_and_rules()]
            after, is_bad = problems.train(optimizer, [step], exchange.rank, spoil), step == bad_step
            assert optimizer.stats.skipped == is_bad
            assert problems.same(weights_and_rules(), before) == is_bad
            assert problems.same(momenta, after.momenta) == (is_bad and exchange.rank in bad_ranks)
            assert all(bool(tensor.isfinite().all()) for tensor in after.parameters + after.momenta)
            payloads.add(optimizer.stats.payload_bytes)
            histories.append(after)
        assert len(payloads) == 1
        return histories

    first, *others = ranks.threads(work, world_size)
    assert others == [first] * len(others)


@pytest.mark.parametrize("make", [problems.demo, problems.local])
def test_rounds_that_are_skipped_again_and_again_are_told_once_and_name_the_rank(make):
    def work(exchange):
        optimizer = make(exchange)

        def spoil(step):
            if exchange.rank == 1 and step not in (15, 40):
                problems.all_parameters(optimizer)[0].grad.fill_(torch.nan)

        problems.fingerprints(optimizer, range(60), exchange.rank, spoil)

    assert problems.warned(lambda: ranks.threads(work, 2)) == [
        "the last 20 rounds were skipped, because gradients of rank 1 were not finite: nothing is trained. Look at its "
        "data and loss, or lower its learning rate or loss scale"
    ]


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        *(({"values": values}, size) for values in ("float32", "float64") for size in (3.4e38, 3e37)),
        ({"update": "adamw"}, 1e25),  # its square overflows
    ],
    ids=str,
)
def test_overflowing_finite_gradients_poison_nothing(settings, size):
    """The transform adds up a chunk, and bfloat16 rounds up: both can turn finite gradients into Inf."""
    optimizer = problems.demo(shapes=[(16, 16)], momentum_decay=0.0, **settings)
    (parameter,) = problems.all_parameters(optimizer)
    before = parameter.detach().clone()
    parameter.grad = torch.full_like(parameter, size)
    optimizer.step()
    assert torch.equal(parameter, before) if optimizer.stats.skipped else bool(parameter.isfinite().all())
    assert all(bool(torch.as_tensor(each).isfinite().all()) for each in optimizer.state[parameter].values())
    optimizer.load_state_dict(problems.by_file(optimizer.state_dict()))
    problems.train(optimizer, range(2))
    assert not optimizer.stats.skipped
    assert bool(parameter.isfinite().all())


@pytest.mark.parametrize(
    ("scale", "size", "skipped"), [(0.0, 1, True), (1e-45, 0, True), (1e-25, 1e10, True), (1e-25, 1, False)]
)
def test_gradients_that_only_unscaling_makes_too_large_leave_the_momentum(scale, size, skipped):
    optimizer = problems.demo(shapes=[(16, 16)])
    (parameter,) = problems.all_parameters(optimizer)
    parameter.grad = torch.full_like(parameter, size)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
    before = problems.momenta(optimizer)
    optimizer.step()
    assert optimizer.stats.skipped == problems.same(problems.momenta(optimizer), before) == skipped
    assert all(bool(each.isfinite().all()) for each in problems.momenta(optimizer))


def _scaled(exchange, mode, bad_step):
    optimizer = problems.demo(exchange, dtype=torch.float64)
    parameters = problems.all_parameters(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=mode != "off")
    skipped, scales = [], []
    for step in range(5):
        optimizer.zero_grad()
        gradients = problems.gradients_of_ranks(parameters, step, 2)[exchange.rank]
        scaler.scale(sum((p * g).sum() for p, g in zip(parameters, gradients, strict=True))).backward()
        if step == bad_step and exchange.rank == 1 and parameters[1].grad is not None:
            parameters[1].grad[0, 0] = inf
        if mode == "unscale first":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1e9)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(optimizer.stats.skipped)
        scales.append(scaler.get_scale())
    return optimizer.fingerprint(state=True), problems.values(optimizer), problems.momenta(optimizer), skipped, scales


def test_grad_scaler_with_float16_parameters_is_refused_by_local_demo_where_gradients_would_vanish():
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer = LocalDeMo(torch.optim.SGD([parameter], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale((parameter.float() * 3e-8).sum()).backward()
    with pytest.raises(ValueError, match="cannot be removed from float16 gradients without loss"):
        scaler.step(optimizer)
    assert optimizer.local_steps == 0


@pytest.mark.parametrize("mode", ["on", "unscale first"])
@pytest.mark.parametrize("bad_step", [None, 2])
def test_grad_scaler_unscales_exactly_and_skips_on_all_ranks(mode, bad_step):
    """While scales grow. The scaler also calls step on the rank that overflowed; otherwise the others would wait."""
    scaled, unscaled = (ranks.threads(_scaled, 2, each, bad_step) for each in (mode, "off"))
    for (mark, parameters, momenta, skipped, scales), plain in zip(scaled, unscaled, strict=True):
        assert mark == scaled[0][0], "the ranks have drifted"
        assert skipped == [step == bad_step for step in range(5)]
        assert len(set(scales)) > 1
        torch.testing.assert_close(parameters, plain[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(momenta, plain[2], rtol=1e-4, atol=1e-6)
    assert bad_step is None or scaled[1][-1][2] < scaled[0][-1][2], "ranks may have different scales"


@ranks.each(2)
def test_optimizers_of_torch_that_synchronize_ranks_are_refused_around_and_inside_ours(rank):
    del rank
    with warnings.catch_warnings():  # torch's module uses torch.jit
        warnings.simplefilter("ignore")
        from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
    parameters = problems.parameters([(4, 4), (4, 4)])
    with pytest.raises(TypeError, match="give DeMo all of the model's parameters, without ZeroRedundancyOptimizer"):
        ZeroRedundancyOptimizer(parameters, optimizer_class=DeMo)
    local = torch.optim.SGD(parameters, lr=0.1)
    for inner in (ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1), PostLocalSGDOptimizer(local, Mock())):
        with pytest.raises(TypeError, match="which synchronizes the ranks itself; give a local optimizer"):
            LocalDeMo(inner)

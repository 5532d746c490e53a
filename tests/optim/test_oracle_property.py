"""DeMo equals its oracle: random shapes, dtypes, worlds and settings, for several steps."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings

import oracle
import problems
import ranks
from demopt import V2, AdamW, DeMo, Lion, Nesterov
from demopt.core.rules import RULES
from oracles import reference

SIDES = [1, 2, 3, 5, 7, 8, 13, 16, 17, 24, 31, 40]  # and sometimes 0
MOST_ELEMENTS = 640
MOST_CHUNKS = 90

flat_shapes = st.lists(st.sampled_from(SIDES), min_size=1, max_size=2)
deep_shapes = st.lists(st.sampled_from([0, *SIDES[:6]]), max_size=5)
shapes = st.one_of(flat_shapes, flat_shapes, deep_shapes).map(tuple).filter(lambda s: math.prod(s) <= MOST_ELEMENTS)


def _rules(updates):
    """Names, for the default settings, and rules with other settings."""
    beta1, beta2 = st.sampled_from([0.0, 0.9]), st.sampled_from([0.5, 0.99])
    eps = st.sampled_from([1e-3, 0.5])  # with a smaller one, updates made only of rounding errors count
    others = {
        "nesterov": st.builds(Nesterov, beta=beta1),
        "lion": st.builds(Lion, beta1=beta1, beta2=beta2),
        "adamw": st.builds(AdamW, beta2=beta2, eps=eps),
    }
    return st.sampled_from(updates).flatmap(lambda update: others.get(update, st.just(update)))


@st.composite
def groups(draw, values, updates):
    """A parameter group without its parameters."""
    chunk = draw(st.sampled_from([16, 8, 20, 5, 2, 1]))
    # Mostly far fewer than all: if ranks send everything, nearly all reductions and transforms agree.
    most = chunk * chunk if draw(st.sampled_from([False, False, False, True])) else max(1, chunk * chunk // 4)
    return {
        "lr": draw(st.sampled_from([1.0, 0.03, 1.0, 0.03, 0.0])),
        "momentum_decay": draw(st.sampled_from([0.0, 0.5, 0.9, 0.999])),
        "alpha": draw(st.sampled_from([0.2, 1.0])),
        "top_k": draw(st.integers(1, most)),
        "chunk": chunk,
        "transform": draw(st.sampled_from(["dct", "identity"])),
        "update": draw(_rules(updates)),
        "reduction": draw(st.sampled_from(["senders", "mean"])),
        "values": draw(st.sampled_from(values)),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "gradient_scale": draw(st.sampled_from(["ema", "lr"])),
        "chunking": draw(st.sampled_from(["padded", "divisor"])),
        "maximize": draw(st.booleans()),
        "shapes": draw(st.lists(shapes, min_size=1, max_size=3)),
    }


def _allowed(group):
    """Few chunks; Muon is for matrices."""
    sides = [reference.chunk_shape(shape, group) for shape in group["shapes"]]
    chunks = [math.ceil(math.prod(shape) / (r * c)) for shape, (r, c) in zip(group["shapes"], sides, strict=True)]
    return sum(chunks) <= MOST_CHUNKS and (group["update"] != "muon" or all(len(each) == 2 for each in group["shapes"]))


def _build(drawn, dtype):
    """Parameter groups with fresh parameters, the same for the same `drawn`."""
    built = []
    for number, group in enumerate(drawn):
        settings_ = {name: value for name, value in group.items() if name != "shapes"}
        built.append({**settings_, "params": problems.parameters(group["shapes"], dtype, number)})
    return built


def _trained(drawn, dtype, world_size, steps, **options):
    """By step, the histories of all ranks, which are replicas."""

    def work(exchange):
        optimizer = DeMo(_build(drawn, dtype), process_group=exchange, **options)
        return [problems.train(optimizer, [step], exchange.rank) for step in range(steps)]

    by_step = list(zip(*ranks.threads(work, world_size), strict=True))
    for of_ranks in by_step:
        problems.assert_replicas(of_ranks)
    return by_step


STEPS = st.integers(1, 3)
ALL_VALUES = ["float64", "float32", "2-bit", "sign"]
#: arXiv 2411.19870, version 2.
PUBLISHED = {name: value for name, value in V2.items() if name != "codec"} | V2["codec"].hyperparameters()
PUBLISHED |= {"lr": 0.01, "weight_decay": 0.1, "maximize": False, "shapes": [(64, 64), (70, 130), (90,)]}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@given(drawn=st.lists(groups(ALL_VALUES, list(RULES)).filter(_allowed), min_size=1, max_size=2), steps=STEPS)
@example(drawn=[PUBLISHED], steps=5)
@settings(max_examples=45, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_demo_in_float64_matches_oracle(drawn, world_size, steps):
    """Ties are left out."""
    results = _trained(drawn, torch.float64, world_size, steps)
    truth = oracle.Oracle(_build(drawn, torch.float64), world_size)
    group_of = [group for group in truth.groups for _ in group["params"]]
    for step in range(steps):
        truth.step(problems.gradients_of_ranks(truth.parameters, step, world_size))
        assume(truth.gap > 1e-12)
        for number, expected in enumerate(truth.parameters):
            settled = ~truth.undecided[number]
            got = results[step][0].parameters[number]
            torch.testing.assert_close(got[settled], expected[settled], rtol=1e-10, atol=1e-11)
            for rank in range(world_size):
                momentum = oracle.dense(results[step][rank].momenta[number], expected, group_of[number])
                torch.testing.assert_close(momentum, truth.momenta[rank][number], rtol=1e-10, atol=1e-11)


def _largest(*tensors):
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)


@given(
    groups(["float32"], ["sgd"]).filter(_allowed),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([2, 3, 1, 4]),
    st.integers(1, 3),
    st.sampled_from(["auto", "torch"]),
)
@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_demo_in_lower_precision_matches_oracle_within_rounding(drawn, dtype, world_size, steps, kernels):
    """A step rounds a parameter three times; coefficients are exact to 2e-5 of the largest update; without ties."""
    results = _trained([drawn], dtype, world_size, steps, kernels=kernels)
    truth = oracle.Oracle(_build([drawn], dtype), world_size)
    bounds, eps = [0.0] * len(truth.parameters), torch.finfo(dtype).eps
    for step in range(steps):
        gradients = problems.gradients_of_ranks(truth.parameters, step, world_size)
        truth.step([[gradient.double() for gradient in of_rank] for of_rank in gradients])
        assume(truth.gap > 1e-5)
        for number, expected in enumerate(truth.parameters):
            U = truth.aggregates[number]
            bounds[number] += 3 * eps * (_largest(expected) + drawn["lr"] * _largest(U))
            bounds[number] += 2e-5 * drawn["lr"] * _largest(U) + 1e-7
            got = results[step][0].parameters[number].double()
            assert _largest(got - expected.double()) <= bounds[number]
            for rank, of_rank in enumerate(gradients):
                momentum = oracle.dense(results[step][rank].momenta[number], expected, drawn)
                assert _largest(momentum - truth.momenta[rank][number]) <= 2e-5 * _largest(*of_rank) + 1e-7

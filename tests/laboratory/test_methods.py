"""Each method's step against its paper, spelled out for one matrix and three workers; and its bytes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ranks
from laboratory.compare.methods import METHODS
from laboratory.compare.methods.averaged import MAKERS, muon_maker
from laboratory.compare.methods.muloco import MuLoCo, quantise
from laboratory.compare.studies import STUDIES, Entry
from laboratory.network import steps
from laboratory.simulation.workers import Cost, Method, Rates, SimulatedWorkers, all_gather_bytes, all_reduce_bytes

P, W, LR = 96, 3, 0.1
close = torch.testing.assert_close
Gradients = list[list[Tensor]]  # by step and worker


def layer() -> Any:
    """A 12 x 8 matrix of ones as the only parameter of a model."""
    found = torch.nn.Linear(8, 12, bias=False)
    torch.nn.init.ones_(found.weight)
    return found


random = torch.Generator().manual_seed(0)
GRADIENTS: Gradients = [[torch.randn(12, 8, generator=random) for _ in range(W)] for _ in range(2)]


def start(make: Callable[..., Any], clip: float = 0.0, **settings: Any) -> tuple[Any, Any]:
    """The matrix, and the method that trains it."""
    model = layer()
    return model, make(SimulatedWorkers(model, W, clip), **settings)


def walk(method: Method, given: list[Tensor], lr: float = LR) -> Cost:
    """Takes one step with given gradients."""
    method.begin(lr)
    for rank, gradient in enumerate(given):
        method.model_of(rank).weight.grad = gradient.clone()
        method.take(rank)
    cost = method.finish()
    method.prepare_evaluation()
    return cost


def quantised(tensor: Tensor) -> Tensor:
    places, means = quantise(tensor)
    return means[places].view_as(tensor)


@pytest.mark.parametrize("name", MAKERS)
def test_averaged_methods_equal_torch_on_the_mean_gradient(name):
    matrix, method = start(METHODS[name])
    twin, other = start(METHODS[name])
    rates = Rates(other.optimizers)
    for given in GRADIENTS:
        cost = walk(method, given)
        rates.set(LR)
        twin.weight.grad = torch.stack(given).mean(0)
        for optimizer in other.optimizers:
            optimizer.step()
    close(matrix.weight, twin.weight)
    assert (cost.payload_bytes, cost.sent_bytes) == (4 * P, all_reduce_bytes(4 * P, W))


STEP = {"outer_lr": 0.7, "outer_momentum": 0.6}


def test_muloco_steps_on_the_mean_pseudo_gradient_in_2_bits():
    matrix, method = start(MuLoCo, every=2, **STEP)
    whole = []  # each worker's pseudo-gradient of two local steps
    for two in zip(*GRADIENTS, strict=True):
        model = layer()
        optimizers = muon_maker(0.95)(model)
        Rates(optimizers).set(LR)
        for gradient in two:
            model.weight.grad = gradient.clone()
            for optimizer in optimizers:
                optimizer.step()
        whole.append(1 - model.weight.detach())
    sent = [quantised(each) for each in whole]
    mean = torch.stack(sent).mean(0)
    assert walk(method, GRADIENTS[0]).sent_bytes == 0
    close(matrix.weight.data, torch.ones(12, 8))  # between rounds the global weights are those of the last one
    cost = walk(method, GRADIENTS[1])
    close(matrix.weight.data, 1 - 0.7 * (mean + 0.6 * mean))
    assert all(torch.equal(weights[0], method.global_weights[0]) for weights in method.weights)
    for rank in range(W):
        close(method.errors[rank][0], whole[rank] - sent[rank])
        assert len(sent[rank].unique()) <= 4
    assert (cost.payload_bytes, cost.received_bytes) == (P // 4 + 20, all_gather_bytes(P // 4 + 20, W))


def raced(rank: int, world_size: int, settings: dict[str, Any]) -> Tensor:
    """MuLoCo in 2 bits, as it takes part in the race on links."""
    model = layer()
    method = steps.make(Entry("", "muloco", {"momentum": 0.95, **settings}, 0.0), model, None)
    Rates(method.optimizers[0].inner).set(LR)
    for given in 2 * GRADIENTS:
        model.weight.grad = given[rank].clone()
        method.optimizers[0].step()
    return model.weight.detach()


def test_muloco_of_the_race_gives_the_weights_of_the_simulated_one():
    settings = {"every": 2, **STEP}
    matrix, method = start(MuLoCo, **settings)
    for given in 2 * GRADIENTS:
        walk(method, given)
    for weight in ranks.run(raced, W, settings):
        close(weight, matrix.weight.data)


def test_the_quantiser_takes_means_of_four_intervals_one_and_a_half_deviations_wide():
    values = torch.tensor([-3.0, -1.0, -0.2, 0.0, 0.1, 1.1, 3.0])
    place = ((values - values.mean()) / (1.5 * values.std()) + 2).round().clamp(0, 3)
    expected = torch.stack([values[place == one].mean() for one in place])
    close(quantised(values), expected)
    close(quantised(torch.full((5,), 2.0)), torch.full((5,), 2.0))


def test_sparseloco_sends_the_largest_elements_of_the_pseudo_gradients_of_adamw():
    matrix, method = start(METHODS["sparseloco"], every=1, top_k=5, error_decay=0.5, weight_decay=0.0, values="float32")
    errors, weight = [torch.zeros(P) for _ in range(W)], torch.ones(P)
    own = [torch.nn.Parameter(torch.ones(12, 8)) for _ in range(W)]
    inner = [torch.optim.AdamW([w], lr=1.0, betas=(0.9, 0.95), weight_decay=0.0) for w in own]
    kept = max(1, 5 * P // 4096)  # top_k is for a full chunk
    for lr, given in zip((0.05, 0.1), GRADIENTS, strict=True):
        walk(method, given, lr)
        total = torch.zeros(P)
        for rank, gradient in enumerate(given):
            inner[rank].param_groups[0]["lr"] = lr
            own[rank].grad = gradient.clone()
            inner[rank].step()
            errors[rank] = 0.5 * errors[rank] + (weight - own[rank].detach().flatten())
            chosen = errors[rank].abs().topk(kept).indices
            total[chosen] += errors[rank][chosen]
            errors[rank][chosen] = 0
        weight = weight - total / W
        for each in own:
            each.data = weight.view(12, 8).clone()
    close(matrix.weight.data.flatten(), weight, atol=1e-5, rtol=1e-5)
    method.close()


@pytest.mark.parametrize("name", METHODS)
def test_clip_limits_every_method(name):
    """Where workers do not clip, the method does: a gradient a million times as large changes nothing more."""
    matrix, method = start(METHODS[name], clip=1.0, **({"every": 1} if name == "muloco" else {}))
    huge = [1e6 * gradient for gradient in GRADIENTS[0]]
    if method.clips_workers:
        huge = [gradient / gradient.norm() for gradient in huge]
    walk(method, huge)
    method.close()
    assert matrix.weight.data.isfinite().all()
    assert (matrix.weight.data - 1).abs().max() < 3 * LR


@pytest.mark.parametrize("study", STUDIES)
def test_study_entries_have_names_of_their_own_and_can_all_be_made(study):
    entries = STUDIES[study].entries
    assert len({entry.name for entry in entries}) == len(entries)
    for entry in entries:
        METHODS[entry.method](SimulatedWorkers(torch.nn.Linear(16, 16), 1), **entry.settings).close()

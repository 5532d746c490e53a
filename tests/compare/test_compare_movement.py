"""Methods with local steps: the same optimizers as all gradients have, and each paper's round, spelled out."""

import pytest
import torch

from demopt.compare.catalogue import METHODS
from demopt.compare.methods.ddp import muon_maker
from demopt.compare.methods.local import quantised
from demopt.compare.scale import Scale
from demopt.compare.studies import STUDIES
from demopt.exchange.wrappers import all_gather_bytes, all_reduce_bytes
from demopt.simulate.method import Fleet
from demopt.train.model import build

close = torch.testing.assert_close
SMALL = Scale(width=32, layers=1, sequence=16)
#: LocalDeMo without anything that distinguishes it: a round at every step, everything is sent, exactly.
NO_LOSS = {"sync_every": 1, "top_k": 4096, "values": "float32", "error_decay": 0.0}


def weights_after(name, settings, world_size, steps=5, equal=True):
    """The weights of a small decoder after some steps of given gradients, clipped as in a run."""
    torch.manual_seed(0)
    fleet = Fleet(build(SMALL.config(0, 1)), world_size)
    method = METHODS[name].make(fleet, **settings)
    random = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        method.begin(0.01 * step)
        draw = [torch.randn(p.shape, generator=random) for p in fleet.parameters]
        for rank in range(world_size):
            method.enter(rank)
            for parameter, gradient in zip(fleet.parameters, draw, strict=True):
                parameter.grad = gradient.clone() if equal else torch.randn(gradient.shape, generator=random)
            method.take(rank)
        method.finish()
    method.settle()
    method.close()
    return [parameter.detach().clone() for parameter in fleet.parameters]


@pytest.mark.parametrize("world_size", [1, 4])  # their mean is exact: Newton-Schulz in bfloat16 enlarges differences
@pytest.mark.parametrize("momentum", [0.8, 0.95])
def test_without_loss_local_steps_on_equal_gradients_are_muon_on_their_mean(world_size, momentum):
    mine = weights_after("local", {**NO_LOSS, "momentum": momentum}, world_size)
    theirs = weights_after("muon", {"momentum": momentum}, world_size)
    for one, other in zip(mine, theirs, strict=True):
        close(one, other, atol=1e-6, rtol=1e-6)


def test_without_loss_local_steps_on_equal_gradients_are_adamw_on_their_mean():
    mine = weights_after("local", {**NO_LOSS, "inner": "adamw"}, 4)
    theirs = weights_after("adamw", {}, 4)
    for one, other in zip(mine, theirs, strict=True):
        close(one, other, atol=1e-6, rtol=1e-6)


def test_one_worker_that_sends_everything_is_muon_whatever_the_round():
    mine = weights_after("local", {**NO_LOSS, "sync_every": 5}, 1, equal=False)
    theirs = weights_after("muon", {}, 1, equal=False)
    for one, other in zip(mine, theirs, strict=True):
        close(one, other, atol=1e-6, rtol=1e-6)


def test_a_dense_round_of_muloco_without_outer_momentum_is_the_mean_of_localdemos_that_send_everything():
    dense = {"every": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
    mine = weights_after("local", {**NO_LOSS, "sync_every": 2, "reduction": "mean"}, 3, steps=4, equal=False)
    theirs = weights_after("muloco", dense, 3, steps=4, equal=False)
    for one, other in zip(mine, theirs, strict=True):
        close(one, other, atol=1e-5, rtol=1e-5)


def test_all_gradients_local_steps_and_muloco_split_and_set_up_parameters_alike():
    def facts(optimizers):
        return [
            (type(each).__name__, [p.shape for p in group["params"]],
             {name: value for name, value in group.items() if name not in ("params", "lr")})
            for each in optimizers for group in each.param_groups
        ]  # fmt: skip

    fleet = Fleet(build(SMALL.config(0, 1)), 1)
    ddp, own = METHODS["muon"].make(fleet, momentum=0.9), METHODS["local"].make(fleet, momentum=0.9)
    rival = METHODS["muloco"].make(fleet, momentum=0.9)
    assert facts(ddp._optimizers) == facts(own.optimizers[0].inner) == facts(rival._inner[0])
    first, second = facts(ddp._optimizers)
    assert (first[0], second[0]) == ("Float32Muon", "AdamW")
    assert torch.Size([256, 32]) in second[1]  # the embedding
    own.close()
    for method in (ddp, own, rival):
        method.begin(0.25)
    ours = [group for each in own.optimizers[0].inner for group in each.param_groups]
    for groups in (ddp._optimizers, rival._inner[0]):
        assert [g["lr"] for each in groups for g in each.param_groups] == [g["lr"] for g in ours] == [0.25, 0.25]


def test_the_share_of_adamw_is_a_factor_on_its_rate_alone():
    fleet = Fleet(build(SMALL.config(0, 1)), 1)
    method = METHODS["muon"].make(fleet, others_share=0.5)
    method.begin(0.5)
    assert [group["lr"] for each in method._optimizers for group in each.param_groups] == [0.5, 0.25]


def moved(fleet, gradients, lr):
    """What two local steps of Muon move each worker's 12 x 8 matrix of ones, [W][12, 8]."""
    found = []
    for two in zip(*gradients, strict=True):
        weight = torch.nn.Parameter(torch.ones(12, 8))
        optimizers = muon_maker(fleet, 0.95, 0.1)([weight])
        for gradient in two:
            weight.grad = gradient.clone()
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
                optimizer.step()
        found.append(torch.ones(12, 8) - weight.detach())
    return found


def test_muloco_takes_the_mean_drift_of_muon_as_the_gradient_of_nesterov(matrix, fleet, gradients, walk):
    method = METHODS["muloco"].make(fleet, every=2, outer_lr=0.7, outer_momentum=0.6)
    drift = torch.stack(moved(fleet, gradients, 0.1)).mean(0)
    assert walk(method, gradients[0], 0.1).sent_bytes == 0
    cost = walk(method, gradients[1], 0.1)
    close(matrix.weight.data, 1 - 0.7 * (drift + 0.6 * drift))
    assert (cost.payload_bytes, cost.sent_bytes) == (4 * 96, all_reduce_bytes(4 * 96, 3))


def test_muloco_sends_two_bits_and_keeps_what_they_leave_out(matrix, fleet, gradients, walk):
    method = METHODS["muloco"].make(fleet, every=2, bits=2, outer_lr=1.0, outer_momentum=0.0, error_decay=0.5)
    drifts = moved(fleet, gradients, 0.1)
    walk(method, gradients[0], 0.1)
    cost = walk(method, gradients[1], 0.1)
    sent = [quantised(drift, 4, 6.0) for drift in drifts]
    close(matrix.weight.data, 1 - torch.stack(sent).mean(0))
    for rank in range(3):
        close(method._errors[rank][0], drifts[rank] - sent[rank])
        assert len(sent[rank].unique()) <= 4
    assert cost.payload_bytes == 96 // 4 + 20
    assert cost.received_bytes == all_gather_bytes(cost.payload_bytes, 3)


def test_the_quantiser_takes_means_of_four_intervals_one_and_a_half_deviations_wide():
    values = torch.tensor([-3.0, -1.0, -0.2, 0.0, 0.1, 1.1, 3.0])
    width = 1.5 * values.std()
    place = ((values - values.mean()) / width + 2).round().clamp(0, 3)
    expected = torch.stack([values[place == one].mean() for one in place])
    close(quantised(values, 4, 6.0), expected)
    close(quantised(torch.full((5,), 2.0), 4, 6.0), torch.full((5,), 2.0))


def test_sparseloco_sends_the_largest_elements_of_what_adamw_has_moved(matrix, fleet, gradients, walk):
    method = METHODS["sparseloco"].make(fleet, every=1, top_k=5, error_decay=0.5, weight_decay=0.0, values="float32")
    errors, weight = [torch.zeros(96) for _ in range(3)], torch.ones(96)
    scale = torch.tensor([0.5, 1.0, 2.0])
    for step, given in enumerate(gradients):
        walk(method, given, 0.1 * scale[step].item())
    # the same with AdamW on each worker's own copy
    own = [torch.nn.Parameter(torch.ones(12, 8)) for _ in range(3)]
    inner = [torch.optim.AdamW([w], lr=1.0, betas=(0.9, 0.95), weight_decay=0.0) for w in own]
    kept = 5 * 96 // 4096 or 1  # top_k is for a full chunk
    for step, given in enumerate(gradients):
        total = torch.zeros(96)
        for rank, gradient in enumerate(given):
            inner[rank].param_groups[0]["lr"] = 0.1 * scale[step].item()
            own[rank].grad = gradient.clone()
            inner[rank].step()
            errors[rank] = 0.5 * errors[rank] + (weight - own[rank].detach().flatten())
            chosen = errors[rank].abs().topk(kept).indices
            total[chosen] += errors[rank][chosen]
            errors[rank][chosen] = 0
        weight = weight - total / 3
        for each in own:
            each.data = weight.view(12, 8).clone()
    close(matrix.weight.data.flatten(), weight, atol=1e-5, rtol=1e-5)
    method.close()


@pytest.mark.parametrize(("every", "top_k"), [(5, 231), (3, 122)])
def test_a_round_of_local_steps_costs_what_its_message_costs_and_nothing_in_between(every, top_k):
    torch.manual_seed(0)
    fleet = Fleet(build(SMALL.config(0, 1)), 4)
    local = METHODS["local"].make(fleet, sync_every=every, top_k=top_k)
    demo = METHODS["demo"].make(fleet, top_k=top_k, route="gather")
    costs = []
    for _ in range(every):
        for method in (local, demo):
            method.begin(1e-3)
            for rank in range(4):
                method.enter(rank)
                for parameter in fleet.parameters:
                    parameter.grad = torch.randn_like(parameter)
                method.take(rank)
            costs.append(method.finish())
    rounds, whole = costs[::2], costs[-1]
    assert [cost.sent_bytes for cost in rounds[:-1]] == [0] * (every - 1)
    assert (rounds[-1].payload_bytes, rounds[-1].sent_bytes) == (whole.payload_bytes, whole.sent_bytes)
    local.close()
    demo.close()


def test_entries_of_the_final_table_are_within_their_budget():
    """Entries called "local" upload no more a step than DeMo with K = 32 at the default scale."""
    fleet = Fleet(build(Scale().config(0, 1)), 4)
    spent = {}
    for entry in STUDIES["movement"].entries:
        if entry.method not in ("demo", "local"):
            continue
        method = METHODS[entry.method].make(fleet, **entry.settings)
        every = entry.settings.get("sync_every", 1)
        total = 0
        for _ in range(every):
            method.begin(0.0)
            for rank in range(4):
                method.enter(rank)
                for parameter in fleet.parameters:
                    parameter.grad = torch.randn_like(parameter)
                method.take(rank)
            total += method.finish().sent_bytes
        spent[entry.name] = total / every
        method.close()
    limit = spent["demo muon k32"]
    assert all(count <= limit for count in spent.values())


def test_settings_that_make_no_sense_are_refused(fleet):
    with pytest.raises(ValueError, match="bits is 3, wanted 32 or 2"):
        METHODS["muloco"].make(fleet, bits=3)
    with pytest.raises(ValueError, match="inner is 'sgd', wanted one of muon, adamw"):
        METHODS["local"].make(fleet, inner="sgd")

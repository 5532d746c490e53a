"""Faults that testers found, each as the sequence that showed it."""

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo, ExchangeError, LocalDeMo, SettingsError
from demopt.exchange import Exchange


def make(exchange: Any = None, **settings: Any) -> LocalDeMo:
    inner = torch.optim.AdamW(problems.parameters(problems.FEW), lr=0.01)
    chosen = {"sync_every": 2, "top_k": 24, "chunk": 16, **settings}
    return LocalDeMo(inner, **chosen, process_group=exchange)


def train(optimizer: Any, steps: range, rank: int = 0) -> list[int]:
    return problems.train(_WithMomenta(optimizer), steps, rank).fingerprints  # type: ignore[arg-type]


class _WithMomenta:
    """What `problems.train` asks of an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups, self.step, self.fingerprint = (
            optimizer.param_groups, optimizer.step, optimizer.fingerprint
        )  # fmt: skip
        zero = torch.zeros(1)
        self.state = {p: {"momentum": zero} for p in problems.all_parameters(optimizer)}


def values(optimizer: Any) -> list[Tensor]:
    return [p.detach().clone() for p in problems.all_parameters(optimizer)]


def test_grad_scaler_steps_local_demo() -> None:
    model = nn.Linear(4, 2)
    optimizer = LocalDeMo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(3, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.local_steps == 0
    assert not torch.equal(model.weight, before)


def _scaled_round_that_fails(exchange: Exchange) -> list[str]:
    """Returns what GradScaler left on the optimizer that is still there after a step that failed."""
    link = problems.FailsWhenDue(exchange)
    optimizer: Any = make(link)
    train(optimizer, range(1), exchange.rank)
    link.due = True
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    with pytest.raises(ExchangeError):
        train(optimizer, range(1, 2), exchange.rank)
    return [name for name in ("grad_scale", "found_inf") if hasattr(optimizer, name)]


def test_a_failed_step_leaves_no_scale_for_the_next() -> None:
    assert ranks.threads(_scaled_round_that_fails, 2) == [[], []]


def test_weights_loaded_before_the_first_step_stay() -> None:
    parameter = Parameter(torch.zeros(4, 4))
    optimizer = LocalDeMo(torch.optim.SGD([parameter], lr=0.0), sync_every=1)
    parameter.data.fill_(7.0)
    parameter.grad = torch.zeros(4, 4)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.full((4, 4), 7.0))


@torch.no_grad()
def _loaded() -> tuple[LocalDeMo, Parameter]:
    """An optimizer that has taken no step, and whose model had weights loaded since it was made."""
    parameter = Parameter(torch.zeros(4, 4))
    optimizer = LocalDeMo(torch.optim.SGD([parameter], lr=0.0), sync_every=1)
    parameter.fill_(7.0)
    return optimizer, parameter


def test_weights_loaded_before_the_first_step_are_shown() -> None:
    optimizer, parameter = _loaded()
    with optimizer.shared():
        assert torch.equal(parameter.detach(), torch.full((4, 4), 7.0))
    assert torch.equal(parameter.detach(), torch.full((4, 4), 7.0))


def test_weights_loaded_before_the_first_step_are_saved_and_counted() -> None:
    optimizer, parameter = _loaded()
    assert torch.equal(optimizer.state_dict()["state"][0]["shared"], parameter.detach())
    assert optimizer.fingerprint() == LocalDeMo(torch.optim.SGD([parameter], lr=0.0)).fingerprint()


@pytest.mark.parametrize("call", ["resync", "extract"])
def test_weights_loaded_before_the_first_step_outlast(call: str) -> None:
    optimizer, parameter = _loaded()
    found = getattr(optimizer, call)()
    if found is not None:
        optimizer.apply(optimizer.exchange(found))
    assert torch.equal(parameter.detach(), torch.full((4, 4), 7.0))
    assert torch.equal(optimizer.state_dict()["state"][0]["shared"], parameter.detach())


def test_a_copy_with_a_scheduler_steps_itself() -> None:
    optimizer = make()
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    twin = copy.deepcopy(optimizer)
    before = values(optimizer)
    train(twin, range(2))
    assert problems.same(values(optimizer), before)
    assert not problems.same(values(twin), before)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_copy_made_inside_shared_is_refused(duplicate: Any) -> None:
    optimizer = make()
    train(optimizer, range(1))
    own = values(optimizer)
    with optimizer.shared(), pytest.raises(RuntimeError, match=r"copying or pickling came inside `with optimizer\.sh"):
        duplicate(optimizer)
    assert problems.same(values(optimizer), own)


def test_a_state_loaded_into_the_inner_optimizer_keeps_schedules_alive() -> None:
    optimizer = make()
    train(optimizer, range(2))
    optimizer.inner[0].load_state_dict(optimizer.inner[0].state_dict())
    train(optimizer, range(2, 3))
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.inner[0].param_groups[0]["lr"] == 0.5


def test_saving_with_dcp_runs_no_step() -> None:
    model = nn.Linear(4, 2)
    optimizer = LocalDeMo(torch.optim.AdamW(model.parameters()), sync_every=1)
    before = optimizer.fingerprint()
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.fingerprint() == before
    assert optimizer.local_steps == 0


def _infinite_once(exchange: Exchange, ranks_at: dict[int, int]) -> tuple[list[int], bool]:
    optimizer = make(exchange, delay=1)
    marks = []
    for step in range(12):
        parameters = problems.all_parameters(optimizer)
        problems.set_gradients(parameters, step, exchange.rank)
        if ranks_at.get(step) == exchange.rank:
            parameters[0].data[0] = float("inf")
        optimizer.step()
        marks.append(optimizer.fingerprint())
    optimizer.flush()
    states = optimizer.state_dict()["state"].values()
    finite = all(bool(torch.isfinite(entry["error"]).all()) for entry in states)
    return marks, finite and all(bool(torch.isfinite(value).all()) for value in values(optimizer))


@pytest.mark.parametrize("ranks_at", [{4: 1}, {4: 0, 6: 1}], ids=str)
def test_a_late_round_that_is_skipped_stops_nothing(ranks_at: dict[int, int]) -> None:
    (first, finite), (second, also) = ranks.threads(_infinite_once, 2, ranks_at)
    assert first == second
    assert finite
    assert also
    assert first[-1] != first[-4], "later rounds are applied"


def _after_a_skip(exchange: Exchange) -> bool:
    optimizer = make(exchange)
    for step in range(4):
        parameters = problems.all_parameters(optimizer)
        problems.set_gradients(parameters, step, exchange.rank)
        if step == 3 and exchange.rank == 1:
            parameters[0].data[0] = float("nan")
        optimizer.step()
    assert optimizer.stats.skipped
    own = values(optimizer)
    with pytest.raises(RuntimeError, match="between two rounds"):  # on all ranks alike
        optimizer.add_param_group({"params": [Parameter(torch.zeros(2))]})
    with optimizer.shared():
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    twin = make(exchange)
    twin.load_state_dict(torch.load(saved, weights_only=True))
    return problems.same(values(twin), own)


def test_what_a_skipped_round_leaves_is_saved() -> None:
    assert ranks.threads(_after_a_skip, 2) == [True, True]


def test_rollback_is_exact_however_often() -> None:
    optimizer = make(sync_every=100)
    train(optimizer, range(3))
    optimizer.apply(optimizer.exchange(optimizer.extract()))
    train(optimizer, range(3, 5))
    with optimizer.shared():
        before = {n: e["error"].clone() for n, e in optimizer.state_dict()["state"].items()}
    for _ in range(3):
        optimizer.extract()
        optimizer.rollback()
    with optimizer.shared():
        for number, entry in optimizer.state_dict()["state"].items():
            torch.testing.assert_close(entry["error"], before[number], rtol=0, atol=1e-6)


@pytest.mark.parametrize("call", ["step", "extract", "rollback", "flush", "resync"])
def test_nothing_but_saving_is_allowed_inside_shared(call: str) -> None:
    optimizer = make()
    train(optimizer, range(1))
    own = values(optimizer)
    with optimizer.shared(), pytest.raises(RuntimeError, match=r"inside `with optimizer\.shared"):
        getattr(optimizer, call)()
    assert problems.same(values(optimizer), own)


def test_a_state_of_other_shapes_changes_nothing() -> None:
    optimizer = LocalDeMo(torch.optim.AdamW([Parameter(torch.zeros(32, 16))], lr=0.5), chunk=16, top_k=8)
    other = LocalDeMo(torch.optim.AdamW([Parameter(torch.zeros(16, 32))], lr=0.1), chunk=16, top_k=8)
    before = copy.deepcopy(optimizer.state_dict())
    for state in (other.state_dict(), {}, {"param_groups": before["param_groups"]}):
        with pytest.raises(ValueError, match="state"):
            optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_parameters_that_are_no_floats_are_refused() -> None:
    """Frozen whole numbers could be trained by nobody, and float32 shared weights would round them."""
    whole = Parameter(torch.tensor([2**24 + 1]), requires_grad=False)
    with pytest.raises(TypeError, match="int64"):
        LocalDeMo(torch.optim.SGD([Parameter(torch.zeros(2)), whole], lr=0.1))
    optimizer = make()
    with pytest.raises(TypeError, match="int64"):
        optimizer.add_param_group({"params": [whole]})
    assert len(optimizer.param_groups) == len(optimizer.inner[0].param_groups) == 1


def test_a_parameter_of_two_inner_optimizers_is_refused() -> None:
    parameter = Parameter(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"inner\[0\] and inner\[1\] both have a parameter of shape \[2, 3\]"):
        LocalDeMo([torch.optim.SGD([parameter], lr=0.1), torch.optim.AdamW([parameter])])


def _with_zero(rank: int, world_size: int) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import brings torch.jit.script, which is deprecated
        from torch.distributed.optim import ZeroRedundancyOptimizer
    parameters = problems.parameters([(4, 4), (4, 4)])  # a rank each, and nothing tells them apart
    said = []
    for make in (
        lambda: LocalDeMo(ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)),
        lambda: ZeroRedundancyOptimizer(parameters, DeMo, lr=0.1),
    ):
        with pytest.raises(TypeError) as caught:
            make()
        said.append(str(caught.value))
    return said


def test_zero_redundancy_optimizer_is_refused_inside_and_around() -> None:
    for inside, around in ranks.run(_with_zero, 2):
        assert inside.startswith("inner is a ZeroRedundancyOptimizer, which synchronises the ranks itself")
        assert around.startswith("ZeroRedundancyOptimizer gives each rank a part of the parameters")


def test_sparse_gradients_and_lbfgs_are_refused() -> None:
    with pytest.raises(TypeError, match="LBFGS"):
        LocalDeMo(torch.optim.LBFGS([Parameter(torch.zeros(2))]))
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = LocalDeMo(torch.optim.SGD(table.parameters(), lr=0.1))
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="is sparse"):
        optimizer.step()


# DeMo


def _changed_lr(exchange: Exchange, route: str) -> str:
    optimizer = DeMo(problems.parameters(problems.FEW), **problems.SMALL, route=route, process_group=exchange)
    problems.train(optimizer, range(2), exchange.rank)
    if exchange.rank == 1:
        optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(SettingsError) as caught:
        problems.train(optimizer, range(2, 3), exchange.rank)
    return str(caught.value)


@pytest.mark.parametrize("route", ["gather", "owner"])
def test_a_learning_rate_that_one_rank_changed_is_named(route: str) -> None:
    for said in ranks.threads(_changed_lr, 2, route):
        assert "rank 1 has param_groups[0]['lr'] = 0.5 where rank 0 has 0.01" in said


def test_reduction_can_change_between_steps() -> None:
    found = []
    for kernels in ("auto", "torch"):
        optimizer = DeMo(problems.parameters([(32, 32)]), **{**problems.SMALL, "values": "sign"}, kernels=kernels)
        problems.train(optimizer, range(2))
        optimizer.param_groups[0]["reduction"] = "root"
        found.append(problems.train(optimizer, range(2, 4)).fingerprints)
    assert found[0] == found[1]


def test_stages_by_hand_are_refused_while_a_round_is_in_flight() -> None:
    optimizer = DeMo(problems.parameters(problems.FEW), **problems.SMALL, delay=1)
    problems.train(optimizer, range(1))
    with pytest.raises(RuntimeError, match=r"call flush\(\)"):
        optimizer.extract()
    optimizer.flush()
    optimizer.extract()
    with pytest.raises(RuntimeError, match="call apply or rollback"):
        optimizer.step()
    optimizer.rollback()


def _added_unlike(exchange: Exchange) -> list[Tensor]:
    optimizer = DeMo(problems.parameters(problems.FEW), **problems.SMALL, process_group=exchange)
    problems.train(optimizer, range(1), exchange.rank)
    optimizer.add_param_group({"params": [Parameter(torch.full((3,), float(exchange.rank)))]})
    problems.train(optimizer, range(1, 2), exchange.rank)
    return values(optimizer)


@pytest.mark.filterwarnings("ignore:initial parameters")
def test_added_parameters_with_other_values_become_rank_0s() -> None:
    first, second = ranks.threads(_added_unlike, 2)
    assert problems.same(first, second)

"""Settings of inner optimizers: what a user gave; neither the state that they keep in groups, nor what has no text."""

import copy
import enum
import threading
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch

import problems
import ranks
from demopt import FolderExchange, LocalDeMo, SettingsError
from demopt.exchange import Exchange
from demopt.runs.store import ObjectStore
from problems import fingerprints as train


class Adapting(torch.optim.SGD):
    """Keeps state in its groups: a counter, the d of Prodigy, which adapts to gradients, a list, and a tensor."""

    def __init__(self, parameters: Any, lr: Any = 0.1) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        for group in self.param_groups:
            group.update(d=1e-6, seen=[0, 0.5], norms=torch.zeros(2))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = float(sum(p.grad.norm() for p in group["params"] if p.grad is not None))
            group["step"] = group.get("step", 0) + 1
            group["d"] = max(group["d"], norm * 1e-3)
            group["seen"][0] = group["step"]
            group["norms"].add_(norm)
            for parameter in group["params"]:
                self.state[parameter]["in_group"] = group["step"]
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] * group["d"]
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


def make(exchange: Any, lr: Any = 0.1, **settings: Any) -> LocalDeMo:
    return problems.local(exchange, inner=lambda p: Adapting(p, lr), **{"sync_every": 2, **settings})


def adapted(optimizer: LocalDeMo) -> list[Any]:
    group = optimizer.inner[0].param_groups[0]
    in_group = optimizer.inner[0].state[group["params"][0]]["in_group"]
    return [*(group[name] for name in ("step", "d", "seen")), in_group]


@pytest.mark.filterwarnings("ignore:rank 0 received .* bytes of states")
@pytest.mark.parametrize("how", ["a file per rank", "consolidated", "deepcopy"])
def test_state_in_groups_is_each_ranks_own_and_resumed_and_is_no_setting_then(how):
    box: dict[str, Any] = {}

    def work(exchange: Exchange) -> list[Any]:
        optimizer = make(exchange)
        train(optimizer, range(4), exchange.rank)
        saved = optimizer.state_dict()
        if how == "consolidated":
            optimizer.consolidate_state_dict()
            box[str(exchange.rank)] = optimizer.state_dict()
            exchange.all_gather(torch.zeros(8, dtype=torch.uint8))
            saved = box["0"]
        again = copy.deepcopy(optimizer) if how == "deepcopy" else make(exchange)
        if how == "deepcopy":
            again.regroup(exchange)
        else:
            again.load_state_dict(copy.deepcopy(saved))
        assert adapted(again)[:2] == adapted(optimizer)[:2]
        assert train(again, range(4, 7), exchange.rank) == train(optimizer, range(4, 7), exchange.rank)
        return adapted(again)

    first, second = ranks.threads(work, 2)
    assert first[1] != second[1]


def test_empty_dict_in_the_inner_optimizers_state_is_resumed():
    optimizer, again = make(None), make(None)
    train(optimizer, range(4))
    optimizer.inner[0].state[problems.all_parameters(optimizer)[0]]["cache"] = {}
    again.load_state_dict(problems.by_file(optimizer.state_dict()))
    assert again.inner[0].state[problems.all_parameters(again)[0]]["cache"] == {}


def test_pickled_optimizer_knows_its_state_in_groups():
    optimizer = make(None)
    train(optimizer, range(3))
    assert adapted(again := problems.by_pickle(optimizer)) == adapted(optimizer)
    assert again._inner.facts() == optimizer._inner.facts()


def test_state_in_groups_restarts_with_the_rest_after_a_gradient_that_is_not_finite():
    def work(exchange: Exchange) -> list[int]:
        optimizer = make(exchange)
        train(optimizer, range(4), exchange.rank)
        if exchange.rank == 1:
            problems.all_parameters(optimizer)[0].grad.fill_(torch.inf)
            optimizer.step()
            problems.set_gradients(problems.all_parameters(optimizer), 5, 1)
            optimizer.step()
            group = optimizer.param_groups[0]
            assert ("step" in group, group["d"], group["seen"]) == (False, 1e-6, [0, 0.5])
            return train(optimizer, range(6, 8), 1)
        return train(optimizer, range(4, 8), 0)[2:]

    first, second = ranks.threads(work, 2)
    assert first == second


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("change", "lr", "said"),
    [
        (None, 0.1, "sync_every = 3 where rank 0 has 2"),
        (lambda group: group.update(lr=0.2), 0.1, "['lr'] = 0.2 where rank 0 has 0.1"),
        (lambda group: group.update(lr=torch.tensor(0.25)), torch.tensor(0.5), "['lr'] = 0.25 where rank 0 has 0.5"),
        (lambda group: group["lr"].fill_(0.25), torch.tensor(0.5), "['lr'] = 0.25 where rank 0 has 0.5"),
        (lambda group: group.update(d=1.0), 0.1, "['d'] = 1.0 where rank 0 has 1e-06"),
        (lambda group: group.update(nesterov=True), 0.1, "['nesterov'] = True where rank 0 has False"),
        (lambda group: group.update(tags=("a", 1)), 0.1, "['tags'] = ('a', 1.0) where rank 0 has nothing"),
    ],
)
def test_a_setting_of_one_rank_is_named_at_the_first_step_and_where_it_changes(change, lr, said, delay, at):
    def told(exchange: Exchange) -> str:
        optimizer = make(exchange, copy.deepcopy(lr), delay=delay)
        train(optimizer, range(at), exchange.rank)
        if exchange.rank == 1:
            optimizer.sync_every = 3 if change is None else 2
            (change or dict)(optimizer.inner[0].param_groups[0])
        with pytest.raises(SettingsError) as refused:
            train(optimizer, range(at, 10), exchange.rank)
        return str(refused.value)

    assert ranks.threads(told, 2) == [f"rank 1 has {'inner param_groups[0]' if change else ''}{said}"] * 2


class Plain:
    """An object, whose text has its address."""


def _looped() -> list[Any]:
    """A list that holds itself."""
    found: list[Any] = [1]
    found.append(found)
    return found


@pytest.mark.parametrize(
    "pair",
    [
        (lambda step: step, lambda step: step + 1),
        (Plain(), Plain()),
        ({"a", "b"}, {"a", "c"}),
        (torch.zeros(2), torch.ones(2)),
        (numpy.zeros(2), numpy.ones(2)),
        ({"inside": Plain()}, {"inside": Plain()}),
        ([Plain(), 1], [Plain(), 1]),
        (torch.float32, torch.bfloat16),
        ([1, 2.0], (1.0, 2)),
        (numpy.float64(0.5), torch.tensor(0.5, dtype=torch.float64)),
        (10**400, 10**400),
        (Fraction(10**400), Fraction(10**400)),
        (True, numpy.bool_(True)),
        (0.5, numpy.array(0.5)),
        (0.0, -0.0),
        (enum.Enum("Mode", {"FAST": "fast"}, type=str).FAST, "fast"),
        (2**60, 2.0**60),
        (_looped(), _looped()),
        (torch.zeros((), device="meta"), torch.ones((), device="meta")),
    ],
)
def test_values_without_a_text_and_equal_ones_of_other_types_stop_no_run(pair):
    def work(exchange: Exchange) -> None:
        inner = torch.optim.SGD([{"params": problems.parameters(problems.FEW), "given": pair[exchange.rank]}], lr=0.1)
        train(LocalDeMo(inner, sync_every=1, process_group=exchange), range(2), exchange.rank)

    ranks.threads(work, 2)


def in_folder(store: ObjectStore, **group: Any) -> LocalDeMo:
    run = FolderExchange(store, late=0.0, patience=0.0)
    inner = Adapting(problems.parameters(problems.FEW))
    inner.param_groups[0].update(group)
    return LocalDeMo(inner, sync_every=1, process_group=run)


def test_worker_of_a_folder_joins_with_other_state_in_groups_and_other_objects():
    store = ObjectStore()
    first = in_folder(store, warmup=lambda step: step, tags={"a", "b"}, lock=threading.Lock())
    train(first, range(3), 0)
    second = in_folder(store, warmup=lambda step: step, tags={"a", "c"}, lock=(lock := threading.Lock()))
    second.join()
    train(second, range(1), 1)
    assert second.replicator.session.exchange.decided.refused == {}
    assert second.param_groups[0].pop("lock") is lock
    again = in_folder(store)
    again.load_state_dict(second.state_dict())
    again.join()  # d is 1e-6 in the run's record, and another one here
    assert again.replicator.round_number == 4


def test_worker_of_a_folder_names_the_setting_in_which_it_differs_from_the_run():
    store = ObjectStore()
    train(in_folder(store), range(1), 0)
    told = r"-[0-9a-f]{8} has inner param_groups\[0\]\['nesterov'\] = True where the"
    with pytest.raises(SettingsError, match=told):
        in_folder(store, nesterov=True).join()
    later = in_folder(store)
    later.join()
    train(later, range(1), 1)
    later.inner[0].param_groups[0]["nesterov"] = True
    with pytest.raises(SettingsError, match=told):
        train(later, range(1, 2), 1)
    later.inner[0].param_groups[0]["nesterov"] = False
    train(later, range(2, 3), 1)


def test_what_a_scheduler_adds_to_groups_stops_no_run_in_a_folder():
    store = ObjectStore()
    first, second = in_folder(store), in_folder(store)
    first.join()
    schedule = torch.optim.lr_scheduler.OneCycleLR(first, max_lr=0.2, total_steps=9)
    train(first, range(2), 0)
    schedule.step()
    train(second, range(1), 1)
    train(first, range(2, 3), 0)
    assert first.replicator.session.exchange.decided.refused == {}
    assert second.replicator.session.exchange.decided.refused == {}

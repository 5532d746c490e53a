"""Bytes of a study's rows: what DeMo itself says, what demopt plan foresees, what the published format takes."""

import pytest
import torch

from demopt.compare.catalogue import METHODS
from demopt.compare.studies import BASE, STUDIES
from demopt.plan.costs import make_plan
from demopt.plan.model import of_count
from demopt.simulate.method import Fleet


def one_step(method, model, world_size):
    method.begin(1e-3)
    for rank in range(world_size):
        method.enter(rank)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        method.take(rank)
    cost = method.finish()
    method.close()
    return cost


@pytest.mark.parametrize("route", ["gather", "owner", "relay"])
def test_compare_demo_bytes_equal_plan(route):
    model = torch.nn.Linear(64, 128, bias=False)
    settings = {**BASE, "route": route, "values": "sign"}
    workers = METHODS["demo"].make(Fleet(model, 4), **settings)
    cost = one_step(workers, model, 4)
    planned = make_plan(of_count(64 * 128, 64), {k: v for k, v in settings.items() if k != "route"}, [4])
    way = planned.rows[0].ways[route]
    assert (cost.sent_bytes, cost.received_bytes) == (way.sent_bytes, way.received_bytes)
    stats = workers.optimizers[0].stats
    assert (cost.payload_bytes, cost.sent_bytes) == (stats.payload_bytes, stats.sent_bytes)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_compare_published_costs_12_bytes_a_coefficient(version):
    model = torch.nn.Linear(64, 128, bias=False)
    cost = one_step(METHODS["published"].make(Fleet(model, 4), version=version), model, 4)
    assert cost.payload_bytes == 12 * 2 * 32
    planned = make_plan(of_count(64 * 128, 64), {"top_k": 32}, [4]).rows[0].ways["published"]
    assert (cost.sent_bytes, cost.received_bytes) == (planned.sent_bytes, planned.received_bytes)


@pytest.mark.parametrize("study", STUDIES)
def test_compare_study_entries_can_all_be_made(study):
    names = [entry.name for entry in STUDIES[study].entries]
    assert len(set(names)) == len(names)
    for entry in STUDIES[study].entries:
        model = torch.nn.Linear(16, 16)
        METHODS[entry.method].make(Fleet(model, 1), **entry.settings).close()

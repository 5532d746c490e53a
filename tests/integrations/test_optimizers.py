"""Optimizers from PyPI inside LocalDeMo: each row of the table in docs/integrations.md, checked again."""

import importlib.util
import io
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import problems
import ranks
from demopt import FolderExchange, LocalDeMo
from demopt.runs.store import ObjectStore

DRAWING = threading.Lock()
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
LR = {"Prodigy": 1.0}
#: By module and class, how to build those for which `(parameters, lr=)` does not suffice.
SPECIAL = {
    "torch.optim.Muon": lambda kind, model: kind([model[0].weight, model[2].weight], lr=1e-2),
    "pytorch_optimizer.Muon": lambda kind, model: kind([{"params": [*model.parameters()], "use_muon": False}], lr=1e-2),
    "pytorch_optimizer.Lookahead": lambda kind, model: kind(torch.optim.SGD(model.parameters(), lr=1e-2)),
    "pytorch_optimizer.SAM": lambda kind, model: kind(model.parameters(), torch.optim.SGD, lr=1e-2, momentum=0.9),
    "pytorch_optimizer.Ranger21": lambda kind, model: kind(model.parameters(), num_iterations=100, lr=1e-2),
    "schedulefree.ScheduleFreeWrapper": lambda kind, model: kind(torch.optim.SGD(model.parameters(), lr=1e-2)),
}
#: The table's words for a refusal, by a part of the error.
REASONS = {
    "whose train() and eval() switch": "two copies of the weights",
    "and no state by parameter": "wraps another optimizer",
    "give a torch optimizer": "no torch optimizer",
    "keeps a second copy": "two copies of the weights",
    "which synchronizes the ranks itself": "synchronizes the ranks",
    "evaluates the loss several times": "several passes per step",
}


def rows():
    """What the page's table says of each class."""
    found = {}
    for line in PAGE.read_text().partition("## Optimizers")[2].partition("\n## ")[0].splitlines():
        classes, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        for module, kinds in re.findall(r"`([\w.]+)`: ([\w, ]+)", classes if len(cells) == 4 else ""):
            found |= {f"{module}.{kind}": [cell.replace("-", "") for cell in cells] for kind in kinds.split(", ")}
    return found


def build(name, model):
    module, _, attribute = name.rpartition(".")
    found = importlib.import_module(module)
    if module == "heavyball":
        found.utils.compile_mode = None  # otherwise its steps are compiled, which takes minutes
    kind = getattr(found, attribute)
    if name in SPECIAL:
        return SPECIAL[name](kind, model)
    return kind(model.parameters(), lr=LR.get(attribute, 1e-2))


def wrapped(name, group, seed=0):
    with DRAWING:  # the seed is the whole process's, and ranks are threads
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    return model, LocalDeMo(build(name, model), sync_every=2, process_group=group)


def train(model, optimizer, steps, rank):
    losses = []
    for step in steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(100 * step + rank))

        def closure(x=x):
            optimizer.zero_grad()
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            return loss.detach()

        losses.append(float(closure()))
        optimizer.step(closure)
    return losses


def _trained(exchange, name):
    """The last fingerprint, whether a resumed run has the bits of the one that goes on, and how it consolidates."""
    model, optimizer = wrapped(name, exchange)
    losses = train(model, optimizer, range(30), exchange.rank)
    assert losses[-1] < losses[0], f"the loss goes from {losses[0]} to {losses[-1]}"
    file = io.BytesIO(problems.saved((model.state_dict(), optimizer.state_dict())))
    weights, saved = torch.load(file, weights_only=False)
    again, resumed = wrapped(name, exchange)
    again.load_state_dict(weights)
    resumed.load_state_dict(saved)
    for pair in ((again, resumed), (model, optimizer)):
        torch.manual_seed(1 + exchange.rank)
        train(*pair, range(30, 34), exchange.rank)
    mark, consolidates = optimizer.fingerprint(), "yes"
    try:
        optimizer.consolidate_state_dict()
    except TypeError:
        consolidates = "refused"
    return mark, resumed.fingerprint() == mark, consolidates


def _joined(name):
    store = ObjectStore()
    runs = [FolderExchange(store, late=0.0, patience=0.0, checkpoint_every=2) for _ in range(2)]
    (model, first), (other, second) = wrapped(name, runs[0]), wrapped(name, runs[1], seed=1)
    train(model, first, range(12), 0)
    runs[0].wait_for_uploads()
    second.join()
    assert second.fingerprint() == first.fingerprint()
    train(other, second, range(12, 14), 1)
    train(model, first, range(12, 14), 0)
    return "yes" if store.list("moments") else "yes, without its moments"


def found_out(name):
    """What the page says of a class: trains, resumes, joins, consolidates."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            wrapped(name, None)
        except TypeError as error:
            return [f"refused: {REASONS[next(text for text in REASONS if text in str(error))]}", "", "", ""]
        (first, resumes, consolidates), (second, *_) = ranks.threads(_trained, 2, name)
        joins = _joined(name)
    assert first == second
    copies = any("second copy of the weights" in str(each.message) for each in seen)
    return ["warns of two copies of the weights" if copies else "yes", "yes" if resumes else "no", joins, consolidates]


@pytest.mark.parametrize("name", rows())
def test_optimizer_does_what_the_page_says(name):
    if importlib.util.find_spec(name.split(".")[0]) is None:
        pytest.skip("make test-integrations installs it")
    assert found_out(name) == rows()[name]


def test_page_has_some_25_classes_of_seven_packages():
    assert len(rows()) >= 25
    assert len({name.split(".")[0] for name in rows()}) >= 7

"""LocalDeMo loses no local step and counts none twice, whatever happens to its rounds.

With a linear rule and no decay, at any time and for each parameter: W times the distance that the global weights have
moved, plus all errors, plus all pseudo-gradients since the last round, is the sum of all local steps. With unequal
samples, each rank's part and the number of ranks are weighted by them.
"""

import copy
import random
from unittest.mock import patch

import pytest
import torch
from torch.nn import Parameter

import oracle
import problems
import ranks
from demopt import ExchangeError, LocalDeMo
from demopt.exchange import Threads
from oracles import reference

LR = 0.1
SHAPES = [(9, 8), (5,), (3,)]
SETTINGS = {"sync_every": 2, "chunk": 8, "reduction": "mean", "error_decay": 1.0}
CODECS = {
    "top-k": {"top_k": 12, "values": "2-bit"},
    "signs of all": {"route": "gather"},
    "two-way": {"route": "owner"},
    "unequal samples": {"route": "gather"},
}
SAMPLES = (1, 1), (3, 1)  # of each rank
ACTIONS = ["step"] * 5
ACTIONS += ["step with NaN", "fails", "by hand", "roll back", "copy", "load", "regroup", "flush", "frozen"]


class Ledger:
    """One rank's optimizer, and the local steps that it has taken."""

    def __init__(self, exchange, others, codec, delay):
        self.codec, self.place = codec, exchange.rank  # the place among the ranks: regroup may turn it
        self.rank, self.others, self.delay = exchange.rank, others, delay
        self.parameters = problems.parameters(SHAPES, torch.float64)
        self.parameters[-1].requires_grad_(False)  # until an action unfreezes it
        self.start = [parameter.detach().clone() for parameter in self.parameters]
        self.total = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.link = problems.FailsWhenDue(exchange)
        self.optimizer = self.made(self.parameters)
        self.draws = 0

    def made(self, parameters):
        inner, samples = torch.optim.SGD(parameters, lr=LR), SAMPLES[self.codec == "unequal samples"][self.rank]
        more = {**SETTINGS, **CODECS[self.codec], "samples": samples}
        return LocalDeMo(inner, delay=self.delay, process_group=self.link, **more)

    def new_link(self, turn=0):
        self.place = (self.place + turn) % 2
        self.link = problems.FailsWhenDue(self.others.pop()[self.place])

    def step(self, bad=False):
        """A step; a rank whose gradient is bad loses its local steps since the last round."""
        self.draws += 1
        lost = bad or not self.finite
        since = [p.clone() for p in self.pseudo_gradients()]
        for number, parameter in enumerate(self.parameters):
            if parameter.requires_grad:
                parameter.grad = problems.draw(parameter.shape, self.draws, self.rank, number, dtype=torch.float64)
                parameter.grad.view(-1)[0] *= torch.nan if bad else 1.0
        before, failed, local = self.optimizer.local_steps, True, problems.values(self.optimizer)
        try:
            self.optimizer.step()
            failed = False
        finally:
            if not (failed and self.optimizer.local_steps == before):  # unless it failed before the local step
                for parameter, old, total, gone in zip(self.parameters, local, self.total, since, strict=True):
                    if lost:
                        total -= gone
                    elif parameter.requires_grad and parameter.grad is not None:
                        total += LR * parameter.grad
                        if failed or (self.optimizer.stats.skipped and not self.delay):  # local weights stay
                            torch.testing.assert_close(parameter, old - LR * parameter.grad, rtol=0, atol=1e-12)

    def steps(self, count):
        for _ in range(count):
            self.step()

    @property
    def finite(self):
        return all(bool(parameter.isfinite().all()) for parameter in self.parameters)

    def pseudo_gradients(self):
        """This rank's, since the last round; zeros where they are lost."""
        found, finite = [], self.finite
        for parameter in self.parameters:
            entry = self.optimizer.state[parameter]
            start = entry.get("start", entry["global"]) if entry and finite else parameter
            found.append((start - parameter).detach() if finite else torch.zeros_like(parameter))
        return found

    def act(self, action, actions):
        optimizer, replicator = self.optimizer, self.optimizer.replicator
        if action == "step":
            self.step()
        elif action == "step with NaN":
            self.step(bad=self.rank == actions.randrange(2))
        elif action == "fails":
            self.fail(actions)
        elif action == "by hand":
            optimizer.flush()
            optimizer.apply(optimizer.exchange(optimizer.extract()))
        elif action in ("roll back", "regroup"):
            finite, local = self.finite, problems.values(optimizer)
            if action == "regroup":
                self.new_link(turn=1)  # owners hand over their errors
                optimizer.regroup(self.link)
            else:
                if not replicator.in_flight:
                    optimizer.extract()
                optimizer.rollback()
            assert problems.same(problems.values(optimizer), local) or not finite, "local weights stay"
        elif action == "copy":
            optimizer.flush()
            self.optimizer = copy.deepcopy(optimizer)
            self.parameters = problems.all_parameters(self.optimizer)
        elif action == "load":
            with optimizer.shared():  # as a user saves
                saved = copy.deepcopy(optimizer.state_dict())
            replicator.rollback()
            self.new_link()
            self.parameters = [
                Parameter(weights.clone(), requires_grad=old.requires_grad)
                for weights, old in zip(self.start, self.parameters, strict=True)
            ]
            self.optimizer = self.made(self.parameters)
            self.optimizer.load_state_dict(saved)
        elif action == "flush":
            optimizer.flush()
        else:
            self.freeze(actions.randrange(3))

    def fail(self, actions):
        """A round fails; with delay, when it should be applied."""
        in_flight = self.optimizer.replicator.round
        if in_flight is not None and in_flight.work is not None:
            in_flight.work.exception()  # it has passed the link
        self.link.due = True
        self.link.second = self.codec == "two-way" and actions.random() < 0.5  # when owners have made their answers
        with pytest.raises(ExchangeError):
            self.steps(6)
        if actions.random() < 0.5:
            self.new_link()
            self.optimizer.regroup(self.link)

    def freeze(self, number):
        """Unfreezes the last parameter; from then on, freezes one for a while, right after a round."""
        if not self.parameters[-1].requires_grad:
            self.parameters[-1].requires_grad_(True)
            return
        self.optimizer.flush()
        while self.optimizer.weights_differ:
            self.step()
            self.optimizer.flush()
        self.parameters[number].requires_grad_(False)
        self.parameters[number].grad = None
        self.steps(3)
        self.optimizer.flush()
        self.parameters[number].requires_grad_(True)

    def account(self):
        """Copies of the global weights' movement, of error plus pseudo-gradient, and of the sum of all local steps."""
        group = {**SETTINGS, "transform": "dct", "chunking": "padded"}
        moved, owed = [], []
        for begun, parameter, since in zip(self.start, self.parameters, self.pseudo_gradients(), strict=True):
            entry = self.optimizer.state[parameter]
            if not entry:
                moved.append(torch.zeros_like(parameter))
                owed.append(torch.zeros_like(parameter))
                continue
            error = reference.unpad(oracle.dense(problems.unsent(entry, world_size=2), parameter, group), parameter)
            owed.append(error + since)
            moved.append(begun - entry["global"])
        return moved, owed, [total.clone() for total in self.total]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("seed", range(6))
def test_no_local_step_is_lost_or_counted_twice(seed, codec, delay):
    others = [Threads(2, timeout=100.0).exchanges for _ in range(60)]

    def accounts(exchange):
        ledger, actions, found = Ledger(exchange, list(others), codec, delay), random.Random(seed), []
        for _ in range(25):
            action = actions.choice(ACTIONS)
            ledger.act(action, actions)
            found.append((action, *ledger.account()))
        return found

    one, other = ranks.threads(accounts, 2)
    done = []
    for (action, *first), (_, *second) in zip(one, other, strict=True):
        done.append(action)
        for moved, owed, total, same, theirs, of_theirs in zip(*first, *second, strict=True):
            assert torch.equal(moved, same)
            w, v = SAMPLES[codec == "unequal samples"]
            kept, taken = (w + v) * moved + w * owed + v * theirs, w * total + v * of_theirs
            torch.testing.assert_close(kept, taken, rtol=0, atol=1e-10, msg=str(done))
    assert any(part.any() for part in one[-1][1])


@ranks.alike(3)
def test_an_owner_that_goes_on_among_fewer_ranks_sends_its_error_once(exchange):
    optimizer = problems.two_way(exchange, [(64, 48), (80, 16), (96,), ()], sync_every=2)
    problems.fingerprints(optimizer, range(4), exchange.rank)
    if exchange.rank == 2:
        return
    before = [{name: value.clone() for name, value in entry.items()} for entry in optimizer.state.values()]
    assert any(entry["owner_error"].any() for entry in before if "owner_error" in entry)
    optimizer.regroup(problems.OneOf(exchange.rank, 2))
    optimizer.replicator.wiring()
    errors = [problems.unsent(old, world_size=2) for old in before]  # as parts of a mean over 2 ranks
    torch.testing.assert_close(problems.momenta(optimizer), errors)


def test_an_extraction_that_fails_leaves_local_steps_in_place():
    """No round is then between extract and apply: a state can be saved, and `rollback` forgets nothing."""
    optimizer = problems.local(sync_every=2)
    problems.fingerprints(optimizer, [0])
    with problems.unchanged(optimizer):
        broken = patch("demopt.replicator.replicator.compress", side_effect=ZeroDivisionError)
        with broken, pytest.raises(ZeroDivisionError):
            optimizer.extract()
        optimizer.rollback()
        with optimizer.shared():
            optimizer.state_dict()

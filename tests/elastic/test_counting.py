"""No gradient is lost and none is applied twice, whichever worker is killed when: counted exactly, on real processes.

Gradient number n of a worker is 1 at one element that no other gradient has, and 0 elsewhere. Everything is sent, and
each round divides by its W senders: an element that ends as -1/W was applied once, in a round of W members.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replicas import Cluster, Ears, Replica

import demopt
from demopt.errors import ExchangeError
from demopt.integrations.torchft import Optimizer

ROOM = 2048  # elements of each worker: more than it can take steps before another has joined
SURVIVORS = 2
INSTANTS = ("backward", "extract", "exchange", "check", "apply")  # at which victims 2, 3, ... die: before it
EVERYONE = SURVIVORS + len(INSTANTS)
ONCE = {-1 / 2, -1 / 3}  # an element whose gradient was applied in one round, of two members or three


def _train(make_manager: Callable[[], Any], ears: Ears, number: int, local: bool) -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.zeros(EVERYONE * ROOM, dtype=torch.float64))
    exactly: Any = {"transform": "identity", "top_k": 4096, "values": "float64", "fingerprint_every": 1}
    inner: Any
    if local:
        inner = demopt.LocalDeMo(torch.optim.SGD([parameter], lr=1.0), sync_every=2, error_decay=0.0, **exactly)
    else:
        inner = demopt.DeMo([parameter], lr=1.0, momentum_decay=0.0, update="sgd", **exactly)
    ears.hear()
    optimizer = Optimizer(make_manager(), inner)
    taken = 0
    while (order := ears.hear()) != "end":
        optimizer.zero_grad()
        if order == "join":
            ears.say("joined", optimizer.workers)
            continue
        if order in INSTANTS[1:]:
            holder = inner.replicator if order == "check" else inner
            setattr(holder, order, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        if order == "lose the result":  # all others have it, and apply it
            optimizer._quorum.vote = _failing_once(optimizer._quorum.vote)  # type: ignore[method-assign]
        if order == "backward":
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2 if local else 1):  # to the next round
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[number * ROOM + taken] = 1.0
            optimizer.step()
            taken += 1
        ears.say("stepped", optimizer.workers)
    weights = parameter.detach().view(EVERYONE, ROOM)
    return {"weights": weights.tolist(), "taken": taken, "mark": inner.fingerprint(state=True)}


def _failing_once(vote: Callable[[], bool]) -> Callable[[], bool]:
    failed: list[bool] = []

    def wrapped() -> bool:
        if not failed:
            failed.append(True)
            raise ExchangeError("lost")
        return vote()

    return wrapped


def _step(members: list[Replica], orders: dict[int, str] | None = None) -> list[int]:
    for number, member in enumerate(members):
        member.tell((orders or {}).get(number, "step"))
    return [member.wait_for("stepped") for number, member in enumerate(members) if (orders or {}).get(number) is None]


@pytest.mark.parametrize("local", [False, True], ids=["DeMo", "LocalDeMo"])
def test_every_gradient_is_applied_once(local: bool) -> None:
    with Cluster(min_replicas=2) as cluster:
        everyone = [cluster.start(_train, number, local) for number in range(EVERYONE)]
        survivors, victims = everyone[:SURVIVORS], everyone[SURVIVORS:]
        for survivor in survivors:
            survivor.tell("go")
        assert _step(survivors) == [2, 2]
        for instant, victim in zip(INSTANTS, victims, strict=True):
            victim.tell("go")
            victim.tell("join")
            while 3 not in _step(survivors):  # until the victim has joined
                pass
            assert victim.wait_for("joined") == 3
            trio = [*survivors, victim]
            assert _step(trio) == [3, 3, 3]
            _step(trio, {2: instant})
        _step(survivors, {0: "lose the result"})
        assert _step(survivors[1:]) == [2]  # in which the other takes part without a gradient, as a new member does
        assert survivors[0].wait_for("stepped") == 2
        for survivor in survivors:
            survivor.tell("end")
        results = [survivor.wait_for("result") for survivor in survivors]
    assert results[0]["mark"] == results[1]["mark"]
    for result in results:
        for number, row in enumerate(result["weights"]):
            applied = [value for value in row if value != 0]
            assert set(applied) <= ONCE  # never twice
            if number < SURVIVORS:  # and none of theirs is missing
                assert len(applied) == results[number]["taken"]
            else:  # two with the second round; what a victim took along is its last alone
                steps = 2 if local else 1
                died_after_its_vote = INSTANTS[number - SURVIVORS] == "apply"
                assert len(applied) == steps * (1 + died_after_its_vote)

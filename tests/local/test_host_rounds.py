"""With delay and its state on the host, a round is extracted, exchanged and decoded while the model trains on."""

import threading

import pytest
import torch
from torch.nn import Parameter

import problems
from demopt import LocalDeMo
from demopt.codec.hyperparameters import Codec
from demopt.exchange import SingleRank
from demopt.optim import local_weights


def _make(parameters: list[Parameter]) -> LocalDeMo:
    inner = torch.optim.SGD(parameters, lr=0.1)
    return LocalDeMo(
        inner, sync_every=1, delay=1, state_device="cpu", process_group=SingleRank(), codec=Codec(chunk=16)
    )


def test_a_step_does_not_wait_for_the_extraction_and_saving_does(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for apart in (False, True):
        monkeypatch.setattr(local_weights, "_are_apart", lambda *_, apart=apart: apart)
        parameters = problems.parameters(problems.FEW)
        optimizer = _make(parameters)
        for number in range(4):
            held = threading.Event()
            background = optimizer.replicator.session._background
            assert background is not None
            background.submit(held.wait)
            problems.set_gradients(parameters, number)
            threading.Timer(0.05, held.set).start()
            optimizer.step()
            current = optimizer.replicator.round
            assert current is not None
            assert optimizer.replicator.in_flight
            if number == 3:
                with optimizer.shared():  # whose weights do not wait
                    saved = optimizer.state_dict()
                assert current.message is not None
                errors = [entry["error"].clone() for entry in saved["state"].values()]
        optimizer.flush()
        ends.append([*errors, *(parameter.detach().clone() for parameter in parameters)])
    assert problems.same(*ends)


def test_the_extraction_is_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_weights, "_are_apart", lambda *_: True)
    parameters = problems.parameters(problems.FEW)
    optimizer, held = _make(parameters), threading.Event()
    background = optimizer.replicator.session._background
    assert background is not None
    problems.set_gradients(parameters, 0)
    optimizer.join()
    background.submit(held.wait)
    optimizer.step()
    current = optimizer.replicator.round
    assert current is not None
    assert current.message is None
    held.set()
    optimizer.replicator.let_extract()
    optimizer.flush()
    assert current.message is not None
    assert current.stats.seconds["extract"] > 0
    assert current.result is not None
    assert current.result.decoded is not None


def test_a_lost_exchange_keeps_the_pseudo_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as beside the parameters: it is in the error, and the message may travel again."""
    ends = []
    for apart in (False, True):
        monkeypatch.setattr(local_weights, "_are_apart", lambda *_, apart=apart: apart)
        parameters = problems.parameters(problems.FEW)
        exchange = problems.FailsWhenDue(SingleRank())
        inner = torch.optim.SGD(parameters, lr=0.1)
        optimizer = LocalDeMo(
            inner,
            sync_every=1,
            delay=1,
            state_device="cpu",
            route="gather",
            process_group=exchange,
            codec=Codec(chunk=16),
        )
        for number in range(5):
            problems.set_gradients(parameters, number)
            if optimizer.replicator.round is not None and optimizer.replicator.round.work is not None:
                optimizer.replicator.round.work.exception()  # it has come back: the next one is lost
            exchange.due = number == 2
            try:
                optimizer.step()
            except problems.ExchangeError:
                assert number == 3
        optimizer.flush()
        ends.append([parameter.detach().clone() for parameter in parameters])
    assert problems.same(*ends)

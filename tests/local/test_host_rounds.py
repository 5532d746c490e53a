"""With delay and its state on the host, a round is extracted, exchanged and decoded while the model trains on."""

import threading
from typing import Any

import pytest

import problems
from demopt import ExchangeError, LocalDeMo
from demopt.exchange import SingleRank
from demopt.optim.local_weights import LocalWeights


def _make(apart: bool, monkeypatch: pytest.MonkeyPatch, exchange: Any = None) -> tuple[LocalDeMo, Any]:
    """An optimizer whose parameters count as those of an accelerator, if they are `apart`; its background thread."""
    monkeypatch.setattr(LocalWeights, "_is_here", lambda *_: not apart)
    optimizer = problems.local(exchange or SingleRank(), delay=1, state_device="cpu", route="gather")
    return optimizer, optimizer.replicator.session._background


def test_a_step_does_not_wait_for_the_extraction_and_saving_does(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for apart in (False, True):
        optimizer, background = _make(apart, monkeypatch)
        for number in range(4):
            held = threading.Event()
            background.submit(held.wait)
            threading.Timer(0.05, held.set).start()
            problems.fingerprints(optimizer, [number])
            current: Any = optimizer.replicator.round
            assert current.message is None or held.is_set() or not apart
            assert optimizer.replicator.in_flight
        with optimizer.shared():  # whose weights do not wait
            saved = optimizer.state_dict()
        assert current.message is not None
        errors = [entry["error"].clone() for entry in saved["state"].values()]
        optimizer.flush()
        ends.append([*errors, *problems.values(optimizer)])
    assert problems.same(*ends)


def test_a_lost_exchange_keeps_the_pseudo_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as beside the parameters: it is in the error, and the message may travel again."""
    ends = []
    for apart in (False, True):
        exchange = problems.FailsWhenDue(SingleRank())
        optimizer, _ = _make(apart, monkeypatch, exchange)
        for number in range(5):
            current: Any = optimizer.replicator.round
            if current is not None and current.work is not None:
                current.work.exception()  # it has come back: the next one is lost
            exchange.due = number == 2
            try:
                problems.fingerprints(optimizer, [number])
            except ExchangeError:
                assert number == 3
        optimizer.flush()
        ends.append(problems.values(optimizer))
    assert problems.same(*ends)

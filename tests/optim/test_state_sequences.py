"""Random sequences of all actions beside the oracle (state_machine.py), in short; and what they found."""

from typing import Any

import torch
from state_machine import Sequence, of
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo
from demopt.exchange import Exchange

SETTINGS: dict[str, Any] = {"chunk": 4, "top_k": 5, "update": "sgd", "values": "float64", "momentum": 0.5}


class TestSequences(Sequence.TestCase):  # type: ignore[misc]
    """`python tests/optim/state_machine.py --sequences 10000` runs more."""

    settings = of(100, 10, derandomize=True)


def _frozen_in_flight(exchange: Exchange, frozen: int) -> None:
    """A parameter is frozen between sending a round and saving it: the layout that sent it is gone after loading."""
    parameters = problems.parameters([(8, 4), (6,)], torch.float64)
    optimizer = DeMo(parameters, delay=1, process_group=exchange, **SETTINGS)
    problems.set_gradients(parameters, 0, exchange.rank)
    whole = [0.5 * problems.draw(p.shape, 9, 0, exchange.rank, n, dtype=p.dtype) for n, p in enumerate(parameters)]
    optimizer.step()
    parameters[frozen].requires_grad_(False)
    saved = optimizer.state_dict(in_flight=True)
    twins = [Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in parameters]
    twin = DeMo(twins, delay=1, process_group=exchange, **SETTINGS)
    twin.load_state_dict(saved)
    for parameter, momentum in zip(twins, whole, strict=True):  # T is orthonormal: norms tell that all is back
        torch.testing.assert_close(twin.state[parameter]["momentum"].norm(), momentum.norm())


def test_round_in_flight_returns_to_the_momenta_if_its_layout_is_gone() -> None:
    for frozen in (0, 1):
        ranks.threads(_frozen_in_flight, 2, frozen)

"""With delay=1 a round's bytes are counted by the step that applies it."""

import torch

import problems
import ranks
from demopt import LocalDeMo
from demopt.exchange import Exchange


def _bytes(exchange: Exchange, delay: int) -> list[tuple[int, int]]:
    parameters = problems.parameters(problems.FEW)
    inner = torch.optim.SGD(parameters, lr=0.1)
    optimizer = LocalDeMo(inner, sync_every=2, top_k=8, chunk=16, delay=delay, process_group=exchange)
    counted = []
    for step in range(8):
        problems.set_gradients(parameters, step, exchange.rank)
        optimizer.step()
        counted.append((optimizer.stats.sent_bytes, optimizer.stats.received_bytes))
    optimizer.flush()
    return counted


def test_bytes_of_a_round_in_flight_are_counted_a_round_later() -> None:
    at_once, delayed = (ranks.threads(_bytes, 2, delay)[0] for delay in (0, 1))
    message = at_once[-1]
    assert message[0] > 0
    assert at_once[1::2] == [message] * 4
    assert delayed[1::2] == [(0, 0), *[message] * 3]
    assert at_once[::2] == delayed[::2] == [(0, 0)] * 4

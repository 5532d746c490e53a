"""What `flush` costs is told as what `step` costs: every round's bytes are counted once."""

import torch

import problems
import ranks
from demopt import LocalDeMo
from demopt.exchange import Exchange

SETTINGS = {"sync_every": 2, "top_k": 24, "chunk": 16}


def _traffic(exchange: Exchange, delay: int, flush_after: int) -> tuple[int, int]:
    """The bytes of four steps, and of a flush after one of them and at the end."""
    inner = torch.optim.AdamW(problems.parameters(problems.FEW), lr=0.01)
    optimizer = LocalDeMo(inner, delay=delay, process_group=exchange, **SETTINGS)
    sent = received = 0
    for step in range(4):
        problems.set_gradients(problems.all_parameters(optimizer), step, exchange.rank)
        optimizer.step()
        sent, received = sent + optimizer.stats.sent_bytes, received + optimizer.stats.received_bytes
        if step in (flush_after, 3):
            before = optimizer.stats
            optimizer.flush()
            if optimizer.stats is not before:
                sent, received = sent + optimizer.stats.sent_bytes, received + optimizer.stats.received_bytes
    return sent, received


def test_flush_tells_the_bytes_of_the_round_that_it_applies() -> None:
    at_once = ranks.threads(_traffic, 2, 0, 3)
    assert at_once[0][0] > 0
    for flush_after in (1, 2, 3):
        assert ranks.threads(_traffic, 2, 1, flush_after) == at_once

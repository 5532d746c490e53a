"""Lost ranks are named: killed, frozen, late, or gone with the store, as real processes."""

import os
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ranks
from demopt import ExchangeError
from demopt.exchange import Collective, liveness
from demopt.exchange.liveness import Answer, Liveness, verdict_of

HOST = socket.gethostname()
HERE = "127.0.0.1"
LONG = timedelta(seconds=ranks.JOB_SECONDS)


def _failure(exchange):
    with pytest.raises(ExchangeError) as caught:
        exchange.all_gather(torch.zeros(4))
    return str(caught.value)


def _met():
    """An exchange whose ranks know each other's machines."""
    liveness.ANSWER_SECONDS = 8.0  # an idle machine needs one
    exchange = Collective()
    exchange.all_gather(torch.zeros(4))
    while len(exchange._liveness._hosts) < exchange.world_size:
        time.sleep(0.05)
    exchange.all_gather(torch.zeros(4))
    return exchange


def _store_of_rank_0(rank, world_size):
    """Begins the process group again with a store as torchrun has it, which rank 0 holds.

    The pool's store is a file with a lock: a rank that is frozen while it holds that lock stops all others, and after
    the loss of rank 0 the file is still there.
    """
    files = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store = dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
        files.set("port of rank 0", str(store.port))
    else:
        store = dist.TCPStore(HERE, int(files.get("port of rank 0")))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))


def _rank_1_dies(rank, world_size):
    """Rank 2 comes to the exchange only when rank 0 has left it, and could take rank 0 for the culprit."""
    exchange = _met()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        os._exit(9)
    exchange._timeout = timedelta(seconds=2)  # rank 0 may be waiting for rank 2 at first
    if rank == 2:
        store.wait(["rank 0 gave up"], LONG)
    said = _failure(exchange)
    store.set(f"rank {rank} gave up", "")
    if rank == 0:
        store.wait(["rank 2 gave up"], LONG)
    return said


def test_killed_rank_is_named_with_its_host_by_all_and_nobody_else_is():
    zero, one, two = ranks.outcomes(_rank_1_dies, 3)
    assert isinstance(one.error, ranks.RankDiedError)
    assert zero.value.startswith(f"no answer from rank 1 (host {HOST}) of 3 after"), zero
    assert two.value.startswith(f"no answer from rank 1 (host {HOST}) of 3 (as rank 0 found) after"), two


def _rank_0_takes_the_store_with_it(rank, world_size):
    _store_of_rank_0(rank, world_size)
    exchange = _met()
    exchange._timeout = timedelta(seconds=2)
    if rank == 0:
        os._exit(9)
    return _failure(exchange)


def test_loss_of_rank_0_with_the_store_names_rank_0():
    zero, one, two = ranks.outcomes(_rank_0_takes_the_store_with_it, 3)
    assert isinstance(zero.error, ranks.RankDiedError)
    for other in (one, two):
        assert other.error is None, other.trace
        assert other.value.startswith(f"no answer from rank 0 (host {HOST}) of 3, whose machine holds the store"), other


def _rank_1_dies_in_ddp(rank, world_size):
    exchange = _met()
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    if rank == 1:
        os._exit(9)
    with pytest.raises(ExchangeError) as caught, exchange.waiting():
        model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="shapes") as own, exchange.waiting():
        torch.ones(2, 3) @ torch.ones(2, 3)  # a mistake of the model's, not of the network
    return str(caught.value), type(own.value).__name__


def test_rank_lost_during_ddp_backward_is_named():
    zero, _ = ranks.outcomes(_rank_1_dies_in_ddp, 2)
    assert zero.error is None, zero.trace
    assert zero.value[0].startswith(f"no answer from rank 1 (host {HOST}) of 2"), zero
    assert zero.value[1] == "RuntimeError"


WAITS, LATE = Answer(5, True), Answer(4, False)
NAMES = {rank: f"rank {rank} (host m{rank})" for rank in range(4)}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({0: WAITS, 1: WAITS, 3: WAITS}, "no answer from rank 2 (host m2) of 4"),
        ({0: WAITS, 1: WAITS}, "no answer from rank 2 (host m2), rank 3 (host m3) of 4"),
        ({0: WAITS}, "no rank answers rank 0 (host m0): the network of this machine is down, or all 3"),
        ({0: WAITS, 1: WAITS, 2: LATE, 3: Answer(6, True)}, "rank 2 (host m2) of 4 is alive, but has not come"),
        # Rank 3 has left the exchange in which the others still wait: that is nobody's fault.
        ({0: WAITS, 1: WAITS, 2: WAITS, 3: Answer(6, False)}, "exchange among 4 ranks failed, and all of them answer"),
    ],
)
def test_verdict_follows_from_who_waits_for_whom(answers, said):
    assert verdict_of(NAMES, answers, 0).startswith(said)


def test_rank_on_another_machine_cannot_tell_the_loss_of_the_store_from_that_of_its_own_network():
    far = Liveness(lambda: None, rank=1)
    far._hosts = {0: "m0", 1: "m1"}
    lost = "no answer from rank 0 (host m0) of 3, whose machine holds the store"
    assert far.suspects([0, 1, 2]) == f"{lost} (or the network of rank 1 (host m1) is down)"

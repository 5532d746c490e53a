"""One conformance routine for every exchange; the exchange of an optimizer that got none; lost ranks are named."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import problems
import ranks
from demopt import ExchangeError, LocalDeMo, SettingsError
from demopt.exchange import Collective, Exchange, Hierarchical, Meter, SingleRank, Threads, liveness
from demopt.exchange.hierarchical import average
from demopt.exchange.interface import gather_values
from demopt.exchange.liveness import Answer, Liveness, verdict_of
from demopt.exchange.process_group import resolve


def test_values_travel_by_the_host_under_any_default_device():
    with torch.device("meta"):
        assert gather_values(SingleRank(), {"a": [1]}) == [{"a": [1]}]


_SLOW_STORE = """
import sys, time
from contextlib import suppress
from datetime import timedelta
import torch.distributed as dist
from demopt.exchange.liveness import Liveness

asked = dist.HashStore()

def store():
    with suppress(Exception):
        asked.wait(["never"], timedelta(seconds=4))  # inside torch
    return asked

class Late:
    def __del__(self, sleep=time.sleep):
        sleep(4)

sys.late = Late()  # goes when the interpreter has ended all but its own thread
rank = Liveness(store, rank=0)
with rank.waiting([0, 1]):
    time.sleep(1.5)
"""


def test_process_ends_well_while_a_slow_store_has_yet_to_answer():
    subprocess.run([sys.executable, "-c", _SLOW_STORE], check=True, timeout=120)


def conform(exchange):
    rank, world_size = exchange.rank, exchange.world_size
    assert 0 <= rank < world_size
    for round_, size in enumerate([1, 8, 64, 100_003, 8, 1]):
        message = torch.full((size,), 10 * round_ + rank, dtype=torch.uint8)
        gathered = exchange.all_gather(message)
        assert gathered.dtype == torch.uint8
        assert gathered.shape == (world_size, size)
        for row in range(world_size):
            assert gathered[row].unique().tolist() == [10 * round_ + row]
        assert message.unique().tolist() == [10 * round_ + rank], "the message itself stays as it was"
    for size in (1, 8, 1000):
        parts = (torch.arange(world_size, dtype=torch.uint8)[:, None] + 10 * rank).repeat(1, size)
        received = exchange.all_to_all(parts)
        assert (received.dtype, received.shape) == (torch.uint8, (world_size, size))
        assert received[:, -1].tolist() == [10 * sender + rank for sender in range(world_size)]
    for dst in range(world_size):
        rows = exchange.gather(torch.full((9,), 10 * dst + rank, dtype=torch.uint8), dst)
        assert (rows is not None) == (rank == dst and exchange.is_leader)
        if rows is not None:
            assert (rows.dtype, rows.shape) == (torch.uint8, (world_size, 9))
            assert rows[:, -1].tolist() == [10 * dst + sender for sender in range(world_size)]
    for src in range(world_size):
        data = torch.arange(5, dtype=torch.uint8) + 20 * rank
        exchange.broadcast(data, src)
        assert data.tolist() == (torch.arange(5) + 20 * src).tolist()
    for round_ in range(30):  # a fast rank does not overtake a slow one
        if round_ % world_size == rank:
            time.sleep(0.002)
        gathered = exchange.all_gather(torch.tensor([round_, rank], dtype=torch.uint8))
        assert gathered.tolist() == [[round_, row] for row in range(world_size)]


def test_single_rank_and_threads_with_a_meter_conform():
    conform(SingleRank())
    for world_size in (2, 4):
        ranks.threads(lambda exchange: conform(Meter(exchange)), world_size)


@ranks.each(4)
def test_collective_conforms_in_groups_and_meshes(rank):
    """All ranks, ranks 3 and 1, and both dimensions of a mesh: ranks and sources are counted within the group."""
    conform(resolve(None))
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        conform(Collective(group))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("out", "in"))
    conform(resolve(mesh["out"]))
    conform(resolve(mesh["in"]))
    conform(resolve(mesh))
    assert gather_values(resolve(mesh), "x" * rank) == ["", "xx"], "those of the nodes' first ranks, on all ranks"
    with pytest.raises(ValueError, match="3 dimensions"):
        resolve(init_device_mesh("cpu", (2, 2, 1)))
    if rank in (0, 2):
        with pytest.raises(ValueError, match="not a member"):
            Collective(group)
    assert (resolve(mesh["out"]).rank, resolve(mesh["in"]).rank) == divmod(rank, 2)


@pytest.mark.parametrize(("rows", "column"), [([[0, 1], [3, 2]], [0, 3]), ([[1, 2], [0, 3]], [2, 3])])
@ranks.each(4)
def test_mesh_whose_nodes_torch_sorts_apart_is_refused_and_other_orders_conform(rank, rows, column):
    """torch sorts every group's ranks: the nodes' first ranks would be in different columns, or differ in number."""
    with pytest.raises(ValueError, match=re.escape(f"ranks {column} are a column")):
        resolve(DeviceMesh("cpu", torch.tensor(rows)))
    conform(resolve(DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]))))


@ranks.each(4)
def test_hierarchical_node_acts_as_one_rank(rank):
    """With two nodes of two ranks: as one rank that has the mean gradients of the node."""
    exact = {"dtype": torch.float64, "values": "float64", "update": "sgd"}

    def node(exchange):
        optimizer = problems.demo(exchange, **exact)
        parameters = problems.all_parameters(optimizer)

        def average(step):
            pair = problems.gradients_of_ranks(parameters, step, 4)[2 * exchange.rank :][:2]
            for parameter, *gradients in zip(parameters, *pair, strict=True):
                parameter.grad = torch.stack(gradients).mean(0)

        return problems.train(optimizer, range(3), exchange.rank, average)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "inside"))
    history, of_node = problems.train(problems.demo(mesh, **exact), range(3), rank), ranks.threads(node, 2)[rank // 2]
    got, want = (each.parameters + each.momenta for each in (history, of_node))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    return history


OF_A_NODE = [
    *(((1000, 7), torch.bfloat16), ((5,), torch.float64), ((), torch.float32), ((3, 3), torch.bfloat16)),
    *(((0, 5), torch.bfloat16), ((0,), torch.float32)),
]


@ranks.alike(3)
def test_hierarchical_averages_in_float32_or_wider_rounds_once_and_sends_dtypes_as_they_are(exchange):
    """With gradients of three dtypes, in an order that mixes them."""
    metered = Meter(exchange)
    gradients = [problems.draw(shape, exchange.rank, dtype=dtype) for shape, dtype in OF_A_NODE]
    average(gradients, metered)
    thirds = 2 * -(-7009 // 3) + 8 * -(-5 // 3) + 4  # bytes
    assert metered.sent_bytes == 2 * 2 * thirds
    for found, (shape, dtype) in zip(gradients, OF_A_NODE, strict=True):
        wide = torch.promote_types(dtype, torch.float32)
        total = torch.stack([problems.draw(shape, rank, dtype=dtype).to(wide) for rank in range(3)]).sum(0)
        assert torch.equal(found, (total / 3).to(dtype))


@pytest.mark.parametrize(
    ("other", "said"), [({"shapes": [(3, 3)]}, "['params'][0] = float32 [3, 3]"), ({"lr": 0.5}, "['lr'] = 0.5")]
)
@ranks.each(2)
def test_hierarchical_names_unlike_ranks_of_a_node(rank, other, said):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("nodes", "inside"))
    optimizer = problems.demo(mesh, **(other if rank == 1 else {}))
    with pytest.raises(SettingsError, match=re.escape(f"rank 1 has param_groups[0]{said}")):
        problems.train(optimizer, range(1), rank)


def test_threads_and_nodes_refuse_what_is_no_number_of_ranks_and_no_exchange():
    for many in ("2", None, 1.5, 0, 2**70):
        with pytest.raises((TypeError, ValueError), match=f"world_size is {many!r}; "):
            Threads(many)
    for name in ("inter_node", "intra_node"):
        with pytest.raises(TypeError, match=f"{name} is None; give an Exchange"):
            Hierarchical(**{"inter_node": SingleRank(), "intra_node": SingleRank(), name: None})


class AllGather(Exchange):
    """An exchange with only the two abstract methods."""

    def __init__(self, inner):
        self.rank, self.world_size, self._inner = inner.rank, inner.world_size, inner

    def all_gather(self, message_B):
        return self._inner.all_gather(message_B)

    def broadcast(self, data_B, src):
        self._inner.broadcast(data_B, src)


@pytest.mark.parametrize("route", ["gather", "owner"])
def test_exchange_of_ones_own_needs_all_to_all_for_owners_alone_and_says_so(route):
    def step(exchange):
        optimizer = problems.local(AllGather(exchange), [(64, 64)], problems.ADAMW, sync_every=1, route=route)
        refused = pytest.raises(
            NotImplementedError, match=r"AllGather has no all_to_all, .*route='gather' does without"
        )
        with refused if route == "owner" else nullcontext():
            problems.fingerprints(optimizer, [0], exchange.rank)

    ranks.threads(step, 2)


def test_nodes_in_the_background_are_refused_at_construction():
    nodes, inner = Hierarchical(SingleRank(), SingleRank()), torch.optim.SGD(problems.parameters([(3,)]), lr=0.1)
    with pytest.raises(ValueError, match="nodes cannot exchange in the background yet"):
        LocalDeMo(inner, delay=1, process_group=nodes)


@ranks.each(3)
def test_rounds_in_the_background_use_the_group_that_an_earlier_optimizer_has_left(rank):
    """Also where ranks are in different groups. A group that a rank still uses, or has used more, is not reused."""
    dist.new_group([0, 2])
    made, kept = len(dist.distributed_c10d._world.pg_names), []
    for turn in range(6):
        optimizer = problems.local(shapes=[(3,)], delay=1)
        problems.train(optimizer, range(2), rank)
        optimizer.flush()
        if turn == 2:
            kept += [optimizer] * (rank == 0)
        if turn == 4 and rank == 0:
            optimizer.replicator.session.exchange.inner._calls.update(begun=1, ended=1)
        del optimizer
    assert len(dist.distributed_c10d._world.pg_names) - made == 3


@ranks.each(2)
def test_threads_may_each_train_with_delay_between_groups_of_the_same_ranks(rank):
    groups, found = [dist.new_group([0, 1]) for _ in range(2)], {}

    def work(number):
        if number == rank:  # each thread is late on one rank
            time.sleep(0.2)
        optimizer = problems.local(groups[number], shapes=[(3, 3)], delay=1)
        found[number] = problems.fingerprints(optimizer, range(3), rank)
        optimizer.flush()

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ranks.GLOO_SECONDS)
    assert len(found) == 2, "both have ended"
    return sorted(found.items())


@pytest.mark.parametrize("kind", ["Background()", "Daemons(2)"])
def test_process_ends_after_the_call_in_the_background(kind):
    code = f"import time, demopt.exchange.background as b; b.{kind}.submit(lambda: print(time.sleep(1)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "None\n"


def test_calls_are_made_also_in_a_function_of_atexit_that_was_registered_before():
    code = """
import atexit, demopt.exchange.background as b
atexit.register(lambda: print(pool.submit(lambda: "left").result(60)))
pool = b.Daemons(2)
pool.submit(int).result()
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "left\n"


def test_collective_needs_init_process_group():
    assert isinstance(resolve(None), SingleRank)
    with pytest.raises(ValueError, match="init_process_group"):
        Collective()


@ranks.alike(2)
def test_all_gather_refuses_unlike_lengths(exchange):
    with pytest.raises(ExchangeError, match=r"\[3, 4\]"):
        exchange.all_gather(torch.zeros(3 + exchange.rank, dtype=torch.uint8))


def test_threads_share_one_copy_raise_the_first_error_and_can_run_again():
    def work(exchange, broken):
        if exchange.rank == broken:
            raise ValueError(f"rank {broken} is broken")
        return exchange.all_gather(torch.zeros(5, dtype=torch.uint8)).data_ptr()

    threads = Threads(3)
    for _ in range(2):
        with pytest.raises(ValueError, match="rank 1 is broken"):
            threads.run(lambda exchange: work(exchange, broken=1))
        assert len(set(threads.run(lambda exchange: work(exchange, broken=-1)))) == 1
    threads.close()


@pytest.mark.parametrize("timeout", [None, 100.0])
def test_whoever_waits_for_threads_that_are_closed_gives_up(timeout, monkeypatch):
    threads, waits = Threads(2, timeout), threading.Event()
    submit = threads._pool.submit

    def submit_slowly(*call):
        future = submit(*call)
        time.sleep(0.1)  # rank 0 waits, and the threads are closed, before rank 1 has begun
        return future

    monkeypatch.setattr(threads._pool, "submit", submit_slowly)

    def work(exchange):
        if exchange.rank == 1:
            waits.wait()
            return
        with pytest.raises(ExchangeError, match="another rank gave up"):
            exchange.all_gather(torch.zeros(3, dtype=torch.uint8))

    running = threading.Thread(target=threads.run, args=(work,))
    running.start()
    while not threads._barrier.n_waiting:
        time.sleep(0.01)
    closing = threading.Thread(target=threads.close)
    closing.start()
    while not threads._barrier.broken:
        time.sleep(0.01)
    waits.set()
    for each in (running, closing):
        each.join()
    with pytest.raises(ExchangeError, match="closed"):
        threads.run(work)


@ranks.each(3)
def test_collective_timeout_names_step_and_rank(rank):
    exchange = Collective(dist.group.WORLD, timeout=3.0)
    exchange._timeout, short = timedelta(seconds=ranks.GLOO_SECONDS), exchange._timeout
    store = dist.distributed_c10d._get_default_store()
    optimizer = problems.demo(exchange)
    problems.train(optimizer, range(2), rank)
    store.set(f"ready {rank}", "")
    store.wait([f"ready {each}" for each in range(3)], timedelta(seconds=ranks.JOB_SECONDS))
    exchange._timeout = short  # short only from here, where a rank is missed: before, a busy machine may be slow
    if rank == 2:
        store.wait(["gave up 0", "gave up 1"], timedelta(seconds=ranks.JOB_SECONDS))
        return
    begun, error = time.monotonic(), problems.refusal(optimizer, 2, rank)
    assert time.monotonic() - begun < ranks.GLOO_SECONDS, "by its own timeout, not by the group's"
    store.set(f"gave up {rank}", "")
    assert isinstance(error, ExchangeError)
    assert [each in str(error) for each in ("step 2", "rank 2", "rank 0")] == [True, True, False]


def test_two_levels_may_have_two_backends():
    """gloo between nodes, nccl inside each: gloo's results go back to the device before they are broadcast."""
    between, inside, devices = SingleRank(), SingleRank(), []
    between.all_gather = lambda message_B: torch.zeros(1, message_B.numel(), dtype=message_B.dtype)
    between.all_to_all = lambda parts_WB: torch.zeros(parts_WB.shape, dtype=parts_WB.dtype)
    inside.broadcast = lambda data_B, *_: devices.append(data_B.device.type)
    nodes, message = Hierarchical(between, inside), torch.zeros(1, 8, dtype=torch.uint8, device="meta")
    devices += [nodes.all_gather(message[0]).device.type, nodes.all_to_all(message).device.type]
    assert devices == ["meta"] * 4


def test_demo_warns_a_launched_rank_without_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    problems.train(problems.demo(), range(1))  # only rank 0 warns
    monkeypatch.setenv("RANK", "0")
    optimizer = problems.demo()
    problems.set_gradients(problems.all_parameters(optimizer), 0)
    with pytest.warns(UserWarning, match="init_process_group") as seen:
        optimizer.step()
    assert seen[0].filename == __file__  # the caller's line, not one of demopt's or torch's
    optimizer.step()  # once
    monkeypatch.setenv("WORLD_SIZE", "1")
    problems.train(problems.demo(), range(1))


@pytest.mark.parametrize("steps_before", [0, 1])
@ranks.each(2)
def test_group_made_after_the_optimizer_is_used_and_after_steps_takes_weights_of_rank_0(rank, steps_before):
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    optimizer = problems.demo()
    problems.train(optimizer, range(steps_before), rank)  # alone: the ranks diverge
    dist.init_process_group("gloo", store=dist.PrefixStore("late", store), rank=rank, world_size=2)
    differ = steps_before > 0 and rank == 0
    with pytest.warns(UserWarning, match="parameters .* of rank 1 differ") if differ else nullcontext():
        history = problems.train(optimizer, range(1, 4), rank)
    assert len(set(gather_values(resolve(None), problems.bits(history.momenta)))) == 2
    return history


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
    """Restarts the process group with a store as torchrun has it, which rank 0 holds.

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


def test_group_that_begins_again_in_its_store_finds_nothing_of_the_one_before(monkeypatch):
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", 0.1)
    store, said, counts = dist.HashStore(), [], []
    for _ in range(2):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        alive = Collective()._liveness
        said.append(alive.suspects([0, 1]))
        counts.append(alive._store().add("demopt/await", 1))
        dist.destroy_process_group()
    assert said == ["no answer from rank 1 of 2"] * 2
    assert counts == [1, 1]


def test_rank_on_another_machine_cannot_tell_the_loss_of_the_store_from_that_of_its_own_network():
    far = Liveness(lambda: None, rank=1)
    far._hosts = {0: "m0", 1: "m1"}
    lost = "no answer from rank 0 (host m0) of 3, whose machine holds the store"
    assert far.suspects([0, 1, 2]) == f"{lost} (or the network of rank 1 (host m1) is down)"


def test_rank_that_comes_to_a_call_while_another_asks_where_it_is_has_come(monkeypatch):
    """Its answer says that it is already in the next exchange."""
    store = dist.HashStore()
    early, key = Liveness(lambda: store, rank=0), liveness._key_of([0, 1])

    def comes(ranks):
        store.add(f"demopt/await/{key}/join", 1)
        return {0: Answer(0, True), 1: Answer(1, True)}

    monkeypatch.setattr(liveness, "_ASK_SECONDS", 0.0)
    early._answers = comes
    early.await_all([0, 1], "join", 60.0)


@pytest.mark.parametrize("goes_on", [True, False])
@ranks.each(2)
def test_rank_interrupted_in_a_call_has_not_come_to_it(rank, goes_on, monkeypatch):
    """Otherwise the other rank would begin the call's collectives alone, and gloo would end a process."""
    monkeypatch.setattr(liveness, "_ASK_SECONDS", 0.1)
    exchange, store = Collective(), dist.distributed_c10d._get_default_store()
    if rank == 1:
        with monkeypatch.context() as interrupted:
            interrupted.setattr(liveness.time, "sleep", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                exchange.await_all("save")
        store.set("interrupted", "")
    else:
        store.wait(["interrupted"], LONG)
    if not goes_on:  # it calls again
        exchange.await_all("save")
        exchange.await_all("save")
    elif rank == 0:
        with pytest.raises(ExchangeError, match=r"rank 1 .* went on without"):
            exchange.await_all("save")
    exchange.all_gather(torch.zeros(3, dtype=torch.uint8))

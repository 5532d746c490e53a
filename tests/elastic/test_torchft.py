"""torchft: exchanges among the workers of a quorum, hooks in the wrapper, and each gradient applied once.

Replicas of torchft, with a real lighthouse, take orders and answer over a pipe. Gradient number n of a worker is 1 at
one element that no other gradient has, and 0 elsewhere. Everything is sent, and each round divides by its W senders: an
element that ends as -1/W was applied once, in a round of W members.
"""

import copy
import functools
import itertools
import logging
import os
import signal
import traceback
import types
from contextlib import contextmanager, suppress
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import demopt
import problems
import ranks
from demopt.codec.steps import decompress
from demopt.errors import ExchangeError, SettingsError
from demopt.exchange import Exchange, SingleRank
from demopt.integrations.torchft import Optimizer, QuorumExchange
from forked import CONTEXT

SECONDS = 200.0  # for anything that a test waits for: only a hang takes so long
TIMEOUT = timedelta(seconds=100)  # of a manager
ROOM = 2048  # elements per worker: more than the steps it can take before another has joined
SURVIVORS = 2
INSTANTS = ("backward", "extract", "exchange", "check", "apply")  # victims 2, 3, ... die just before these
EVERYONE = SURVIVORS + len(INSTANTS)
ONCE = {-1 / 2, -1 / 3}  # an element whose gradient was applied in one round, of two members or three


class Replica:
    """A process that trains under a lighthouse; `number` gives it elements of its own."""

    def __init__(self, lighthouse, number, local):
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_run, args=(lighthouse, theirs, number, local), daemon=True)
        self.process.start()
        theirs.close()

    def wait_for(self, word):
        """Returns the value that the replica sends next, which must be under this word."""
        said, value = _heard(self.pipe)
        assert said == word, f"a replica said {said!r} while {word!r} was awaited:\n{value}"
        return value


@contextmanager
def _replicas(local):
    pytest.importorskip("torchft", reason="torchft is not installed (extra elastic)")
    from torchft.coordination import LighthouseServer

    # A busy machine is slow: a quorum waits for all whose heartbeat came in the last seconds.
    limits = {"join_timeout_ms": 60_000, "heartbeat_timeout_ms": 3000}
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=SURVIVORS, **limits)
    address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"
    everyone = [Replica(address, number, local) for number in range(EVERYONE)]
    try:
        yield everyone
    finally:
        for replica in everyone:
            replica.process.kill()
            replica.process.join()
        lighthouse.shutdown()


def _heard(pipe):
    assert pipe.poll(SECONDS), f"nothing within {SECONDS:g} s"
    return pipe.recv()


def _run(lighthouse, pipe, number, local):
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    store = None  # its manager needs it as long as it lives

    def make_manager():  # from here on the lighthouse counts this replica
        import torchft

        nonlocal store
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=TIMEOUT), min_replica_size=SURVIVORS, load_state_dict=None,
            state_dict=None, timeout=TIMEOUT, quorum_timeout=TIMEOUT, rank=0, world_size=1, store_addr="localhost",
            store_port=store.port, lighthouse_addr=lighthouse, hostname="localhost",
        )  # fmt: skip

    try:
        pipe.send(("result", _train(make_manager, pipe, number, local)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    os._exit(0)


def _train(make_manager, pipe, number, local):
    parameter = torch.nn.Parameter(torch.zeros(EVERYONE * ROOM, dtype=torch.float64))
    exactly = {"transform": "identity", "top_k": 4096, "values": "float64", "fingerprint_every": 1}
    if local:
        inner = demopt.LocalDeMo(torch.optim.SGD([parameter], lr=1.0), sync_every=2, error_decay=0.0, **exactly)
    else:
        inner = demopt.DeMo([parameter], lr=1.0, momentum_decay=0.0, update="sgd", **exactly)
    _heard(pipe)
    optimizer, taken = Optimizer(make_manager(), inner), 0
    while (order := _heard(pipe)) != "end":
        optimizer.zero_grad()
        if order == "join":
            pipe.send(("joined", optimizer.workers))
            continue
        if order in INSTANTS[1:]:
            holder = inner.replicator if order == "check" else inner
            setattr(holder, order, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        if order == "lose the result":  # all others have it, and apply it
            _lose_a_vote(optimizer._quorum)
        if order == "backward":
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2 if local else 1):  # to the next round
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[number * ROOM + taken] = 1.0
            optimizer.step()
            taken += 1
        pipe.send(("stepped", optimizer.workers))
    weights = parameter.detach().view(EVERYONE, ROOM)
    return {"weights": weights.tolist(), "taken": taken, "mark": inner.fingerprint(state=True)}


def _lose_a_vote(quorum):
    def vote():
        del quorum.vote  # its class's method is back
        raise ExchangeError("lost")

    quorum.vote = vote


def _step(members, orders=None):
    for number, member in enumerate(members):
        member.pipe.send((orders or {}).get(number, "step"))
    return [member.wait_for("stepped") for number, member in enumerate(members) if (orders or {}).get(number) is None]


@pytest.mark.parametrize("local", [False, True], ids=["DeMo", "LocalDeMo"])
def test_every_gradient_is_applied_once(local):
    with _replicas(local) as everyone:
        survivors, victims = everyone[:SURVIVORS], everyone[SURVIVORS:]
        for survivor in survivors:
            survivor.pipe.send("go")
        assert _step(survivors) == [2, 2]
        for instant, victim in zip(INSTANTS, victims, strict=True):
            victim.pipe.send("go")
            victim.pipe.send("join")
            while 3 not in _step(survivors):  # until the victim has joined
                pass
            assert victim.wait_for("joined") == 3
            trio = [*survivors, victim]
            assert _step(trio) == [3, 3, 3]
            _step(trio, {2: instant})
        _step(survivors, {0: "lose the result"})
        assert _step(survivors[1:]) == [2]  # the other takes part without a gradient, as a new member does
        assert survivors[0].wait_for("stepped") == 2
        for survivor in survivors:
            survivor.pipe.send("end")
        results = [survivor.wait_for("result") for survivor in survivors]
    assert results[0]["mark"] == results[1]["mark"]
    for result in results:
        for number, row in enumerate(result["weights"]):
            applied = [value for value in row if value != 0]
            assert set(applied) <= ONCE  # never twice
            if number < SURVIVORS:  # and none of the survivors' is missing
                assert len(applied) == results[number]["taken"]
            else:  # its first round; its second, too, if it died after its vote: only that one can be lost
                steps = 2 if local else 1
                died_after_its_vote = INSTANTS[number - SURVIVORS] == "apply"
                assert len(applied) == steps * (1 + died_after_its_vote)


@pytest.fixture
def port():
    """The port of a store that lives as long as the test."""
    pytest.importorskip("torchft")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


@ranks.each(2)
def test_close_releases_waiting_workers_though_others_hold_the_exchange(rank, port):
    import torchft

    whole = torchft.ProcessGroupGloo(timeout=TIMEOUT)
    whole.configure(f"localhost:{port}/members", str(rank), rank, 2, 1)
    held = [QuorumExchange(whole), QuorumExchange(whole)]  # an optimizer still has the other one
    assert held[0].all_gather(torch.tensor([rank], dtype=torch.uint8)).flatten().tolist() == [0, 1]
    if rank == 0:
        whole.abort()
    else:
        with pytest.raises(ExchangeError, match=r"(?i)^(?!.*Timed out).*(closed|reset)"):
            held[1].all_gather(torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(ExchangeError):
        held[1].all_gather(torch.zeros(1, dtype=torch.uint8))


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_hooks_of_torch_run_and_rates_count_after_loading(kind):
    pytest.importorskip("torchft")
    (parameter,) = problems.parameters([(4, 4)])
    inner = demopt.DeMo([parameter]) if kind == "DeMo" else problems.local(shapes=[(4, 4)])
    manager = types.SimpleNamespace(current_step=lambda: 0)  # what the wrapper asks when it is built
    optimizer = Optimizer(manager, inner)
    optimizer.finish_round, optimizer._new, called = lambda: None, False, []
    names = [f"{of}_{when}" for of in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")]
    for name in names:
        getattr(optimizer, f"register_{name}_hook")(lambda *_, name=name: called.append(name))
    problems.set_gradients(problems.all_parameters(inner), 0)
    optimizer.step()
    if kind == "LocalDeMo":
        inner.finish_round()
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == names
    optimizer.param_groups[0]["lr"] = 0.125  # as schedulers write it: loading has replaced the groups of a LocalDeMo
    assert inner.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@pytest.mark.parametrize("then", ["zero_grad", "finish_round", "load"])
def test_round_that_an_interrupt_has_left_is_applied_once_and_never_after_loading(then, kind):
    pytest.importorskip("torchft")
    found = []
    for interrupts in ([], [KeyboardInterrupt]):
        more = {"sync_every": 1} if kind == "LocalDeMo" else {}
        inner = problems.optimizer_of(kind, problems.parameters([(4, 4)]), **more)
        optimizer = Optimizer(types.SimpleNamespace(current_step=lambda: 0), inner)
        optimizer._new, optimizer._quorum, before = False, Mock(met=True), copy.deepcopy(optimizer.state_dict())
        optimizer._quorum.form.side_effect = [*interrupts, None, None]
        optimizer._quorum.exchange.return_value = SingleRank()
        problems.set_gradients(problems.all_parameters(inner), 0)
        if interrupts:
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            if then == "load":
                optimizer.load_state_dict(before)
                optimizer.zero_grad()
                problems.set_gradients(problems.all_parameters(inner), 0)
                optimizer.step()
            else:
                getattr(optimizer, then)()
        else:
            optimizer.step()
        assert int(inner.replicator.round_number) == 1
        found.append((inner.fingerprint(), problems.bits(inner.param_groups[0]["params"])))
    assert found[0] == found[1]


def test_state_saved_after_an_interrupted_round_has_its_local_steps_once():
    pytest.importorskip("torchft")
    weights = []
    for is_saved in (False, True):
        optimizer = _alone()
        optimizer._quorum.form.side_effect = [KeyboardInterrupt, *[None] * 9]
        for n in range(3):
            problems.set_gradients(problems.all_parameters(optimizer.inner), n)
            with suppress(KeyboardInterrupt):
                optimizer.step()
            if optimizer._detached is not None and is_saved:
                with optimizer.inner.shared():
                    found = copy.deepcopy(optimizer.state_dict())
                optimizer = _alone()
                optimizer.load_state_dict(found)
        optimizer.finish_round()
        weights.append(problems.values(optimizer.inner))
    for pair in zip(*weights, strict=True):
        torch.testing.assert_close(*pair)


@pytest.mark.parametrize("gives_up", [False, True])
def test_interrupt_as_a_round_is_attached_leaves_it_for_the_next_try(gives_up):
    pytest.importorskip("torchft")
    weights = []
    for interrupts in (False, True):
        optimizer = _alone()
        attach, calls = optimizer.inner.replicator.attach_round, itertools.count()

        def attached(detached, attach=attach, calls=calls):
            message = attach(detached)
            if not next(calls):
                signal.raise_signal(signal.SIGINT)
            return message

        if interrupts:
            optimizer.inner.replicator.attach_round = attached
        if gives_up:
            optimizer._quorum.form.side_effect = [SettingsError("another lr"), *[None] * 9]
        for n in range(4):
            problems.set_gradients(problems.all_parameters(optimizer.inner), n)
            with suppress(KeyboardInterrupt, SettingsError):
                optimizer.step()
        optimizer.finish_round()
        weights.append(problems.values(optimizer.inner))
    for pair in zip(*weights, strict=True):
        torch.testing.assert_close(*pair)


def _alone():
    """A worker whose quorum has met, with no others; the exact settings send everything."""
    exactly = {"transform": "identity", "top_k": 4096, "values": "float64"}
    sgd = torch.optim.SGD(problems.parameters([(4, 4)], torch.float64), lr=0.1)
    inner = demopt.LocalDeMo(sgd, sync_every=2, **exactly)
    optimizer = Optimizer(types.SimpleNamespace(current_step=lambda: 0), inner)
    optimizer._new, optimizer._quorum = False, Mock(met=True)
    optimizer._quorum.exchange.return_value = SingleRank()
    return optimizer


def test_messages_applied_after_a_checkpoint_do_not_count_once_it_is_loaded():
    """Otherwise a worker that is behind would drop its own message, as if the weights included it."""
    pytest.importorskip("torchft")
    inner = demopt.DeMo(problems.parameters([(4, 4)]))
    optimizer = Optimizer(types.SimpleNamespace(current_step=lambda: 7, state_dict=dict), inner)
    optimizer._new, optimizer._quorum, before = False, Mock(met=True), copy.deepcopy(optimizer.state_dict())
    optimizer._quorum.exchange.return_value = SingleRank()
    problems.set_gradients(problems.all_parameters(inner), 0)
    optimizer.step()
    assert optimizer._given()["counted"] == [(optimizer._name, 7)]
    optimizer.load_state_dict(before)
    assert optimizer._given()["counted"] == []


class _Manager:
    """A manager for threads, without torchft; a vote advances `step`."""

    def __init__(self):
        self.step = 0

    def current_step(self):
        return self.step

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, found):
        self.step = found["step"]


class _Reversed(Exchange):
    """Two ranks in reverse order."""

    def __init__(self, whole):
        self.whole, self.rank, self.world_size = whole, 1 - whole.rank, 2

    def all_gather(self, message_B):
        return self.whole.all_gather(message_B).flip(0)

    def broadcast(self, data_B, src):
        self.whole.broadcast(data_B, 1 - src)


class _Meets:
    """A quorum of all threads that compares weights before every round."""

    met = False

    def __init__(self, manager, exchange):
        self.manager, self.all, self.refused = manager, exchange, []

    def form(self):
        self.met = False

    def exchange(self, seconds=None, ranks=()):
        return _Reversed(self.all) if tuple(ranks) == (1, 0) else self.all

    def vote(self):
        self.manager.step += 1
        return True

    def refuse(self, error):
        self.refused.append(error)


def _apply_in_part(inner, messages):
    del inner.apply
    route = inner.replicator.wiring().route

    def apply(decoded, number):
        del route.apply
        decompress(route.chunk_groups[0], decoded[0], number, route.workspace)
        raise torch.OutOfMemoryError("device is full")

    route.apply = apply
    inner.apply(messages)


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@ranks.alike(2)
def test_worker_that_has_applied_a_round_in_part_takes_the_weights_of_another(exchange, kind):
    pytest.importorskip("torchft")
    make, more = (problems.demo, {}) if kind == "DeMo" else (problems.local, {"sync_every": 1})
    inner = make(exchange, [(16, 16), (8, 8)], top_k=24, **more)
    optimizer = Optimizer(_Manager(), inner)
    optimizer._new, optimizer._quorum = False, _Meets(optimizer._manager, exchange)
    tears = exchange.rank == 0  # rank 0: the first rank with the newest step would give its weights to all
    for step in range(3 if tears else 4):
        if step == 2 and tears:
            inner.apply = functools.partial(_apply_in_part, inner)
        problems.set_gradients(problems.all_parameters(inner), step, exchange.rank)
        optimizer.step()
        assert len(optimizer._quorum.refused) == (step == 2 and tears)
    assert optimizer._manager.step == int(inner.replicator.round_number) == 4
    return inner.fingerprint(state=True), problems.bits(problems.all_parameters(inner))

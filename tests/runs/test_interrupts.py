"""Ctrl-C at any line of the library leaves no round half applied: every step counts once, and no worker forks."""

import copy
import itertools
import math
import random
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from workers import EXACTLY, AtOnce, Counter, at_first, counters, replayed, times_applied

import demopt
import problems
from demopt import FolderExchange
from demopt.errors import ExchangeError
from demopt.exchange import SingleRank
from demopt.interrupts import uninterrupted
from demopt.replicator import attach, replicator
from demopt.replicator.replicator import Replicator
from demopt.replicator.session import Session
from demopt.runs.store import ObjectStore

SOURCE = str(Path(demopt.__file__).parent)
pytestmark = pytest.mark.usefixtures("still")


class CtrlC:
    """Raises SIGINT at a line of the library that the main thread executes, counted from 1; never in other threads."""

    def __init__(self, at):
        self.at, self.lines, self.has_interrupted = at, 0, False

    def __call__(self, frame, event, arg):
        return self._line if frame.f_code.co_filename.startswith(SOURCE) else None

    def _line(self, frame, event, arg):
        self.lines += event == "line"
        if self.lines >= self.at and not _in_background(frame):
            self.at = float("inf")
            signal.raise_signal(signal.SIGINT)
        return self._line

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, kind, *rest):
        sys.settrace(None)
        self.has_interrupted = kind is KeyboardInterrupt
        return self.has_interrupted


def _in_background(frame):
    while frame is not None and frame.f_code is not AtOnce.submit.__code__:
        frame = frame.f_back
    return frame is not None


def anywhere(interrupted, count, seed=0, begin=0.0):
    """Calls `interrupted`, which returns its lines: once to its end, then with Ctrl-C at `count` lines past `begin`."""
    lines = interrupted(math.inf)
    for at in random.Random(seed).sample(range(max(1, int(begin * lines)), lines), count):
        interrupted(at)


@pytest.mark.parametrize("delay", [0, 1])
def test_worker_that_is_interrupted_anywhere_counts_every_step_once_and_stays_in_the_run(delay):
    def interrupted(at):
        """Interrupts one of two workers in two steps, the second of which has a round."""
        (store, workers), ctrl_c = counters(delay=delay), CtrlC(at)
        for taken in range(8):
            with ctrl_c if taken in (3, 4) else nullcontext():
                workers[0].step()
            workers[1].step()
        times = times_applied(store, workers)
        assert times[1] == [1.0] * 8, at
        assert [times[0][step] for step in (0, 1, 2, 5, 6, 7)] == [1.0] * 6, at
        assert {*times[0][3:5]} <= {0.0, 1.0}, at  # an interrupt before the inner optimizer's step leaves that step out
        assert workers[0].digest == replayed(store)[-1], at
        return ctrl_c.lines

    anywhere(interrupted, 25, seed=delay)


def four_steps(delay, at, broken):
    """How often the steps of two workers count. `broken` takes the second one's step `at`; it returns who goes on."""
    store, workers = counters(delay=delay)
    for taken in range(4):
        workers[0].step()
        if taken == at:
            workers[1] = broken(store, workers[1])
        else:
            workers[1].step()
    return times_applied(store, workers)


@pytest.mark.parametrize(
    ("delay", "inside"),
    [(0, (Replicator, "_count_skips")), (0, (FolderExchange, "exchange_round")), (1, (Session, "submit"))],
)
def test_state_that_a_handler_saves_within_a_round_has_every_step_once(delay, inside, monkeypatch):
    def saved_at(store, worker):
        def save(number, _):
            states.append(worker.state())
            signal.signal(number, signal.SIG_DFL)
            raise SystemExit

        states, call = [], getattr(*inside)
        signal.signal(signal.SIGUSR1, save)
        signalled = lambda *given: (call(*given), signal.raise_signal(signal.SIGUSR1))[0]  # noqa: E731
        monkeypatch.setattr(*inside, at_first(signalled, call))
        with pytest.raises(SystemExit):
            worker.step()
        return Counter(store, 1, delay, *states, taken=4).join()

    assert four_steps(delay, 3, saved_at) == [[1.0] * 4] * 2


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_second_interrupt_at_once_leaves_every_step_counted_once(delay, restarts, finite):
    def interrupted_twice(store, worker):
        replicator, rounds = worker.optimizer.replicator, worker.optimizer._rounds

        def interrupted():
            rounds.settle = at_first(Mock(side_effect=KeyboardInterrupt), rounds.settle)
            raise KeyboardInterrupt

        holder, name = (replicator, "send") if delay else (rounds, "exchange_and_apply")
        setattr(holder, name, at_first(interrupted, getattr(holder, name)))
        worker.parameter.data[-1] = 0.0 if finite else math.inf
        with pytest.raises(KeyboardInterrupt):
            worker.step()
        return Counter(store, 1, delay, worker.state(), taken=2).join() if restarts else worker

    assert four_steps(delay, 1, interrupted_twice) == [[1.0] * 4, [float(finite)] * 2 + [1.0] * 2]


@pytest.mark.parametrize("delay", [0, 1])
def test_state_that_a_handler_saves_within_a_round_changes_nothing(delay):
    worker, other = (Counter(ObjectStore(), 0, delay) for _ in range(2))
    sends = (worker.optimizer.replicator, "send") if delay else (worker.run, "exchange_round")
    for holder, name in (sends, (worker.optimizer._rounds, "_end")):
        call = getattr(holder, name)
        setattr(holder, name, at_first(lambda *given, call=call: (worker.state(), call(*given))[1], call))
        for member in (worker, other) * 2:
            member.step()
        assert worker.optimizer.weights_differ == other.optimizer.weights_differ
        assert torch.equal(worker.parameter, other.parameter)


def test_interrupt_at_the_end_of_a_catch_up_takes_nothing_of_others_back():
    store, (late, other) = counters()
    for worker in (*[other] * 4, late):
        worker.step()
    weights, interrupted = late.optimizer._weights, Mock(side_effect=KeyboardInterrupt)
    calls = iter([weights.adopt, interrupted])  # after round 1, which left it out, and after round 2
    weights.adopt = lambda adopt=weights.adopt: next(calls, adopt)()
    with pytest.raises(KeyboardInterrupt):
        late.step()
    late.step()
    late.step()
    assert times_applied(store, [late, other]) == [[1.0] * 4] * 2


def test_interrupt_while_a_message_is_prepared_leaves_its_sequences_unsent(monkeypatch):
    worker, call = Counter(ObjectStore(), 0), replicator.all_usable
    monkeypatch.setattr(replicator, "all_usable", at_first(Mock(side_effect=KeyboardInterrupt), call))
    worker.step()
    with pytest.raises(KeyboardInterrupt):
        worker.step()
    assert (worker.run.sequences.unsent, worker.state()["folder"]["unsent"]) == (2, 2)
    worker.step()
    assert worker.run.sequences.unsent == 0


def test_round_whose_words_raise_an_error_counts_every_step_once():
    def fail(text):
        raise BrokenPipeError(text)

    said, (store, workers) = [], counters(3)
    workers[0].run.say = at_first(fail, said.append)
    for taken in range(6):
        with pytest.raises(BrokenPipeError, match="moves nothing") if taken == 1 else nullcontext():
            workers[0].step()
    assert times_applied(store, workers)[0] == [1.0] * 6


def demo():
    """A parameter and a DeMo whose messages lose nothing."""
    parameter = torch.nn.Parameter(torch.zeros(64, dtype=torch.float64))
    codec = {name: value for name, value in EXACTLY.items() if name != "error_decay"}
    settings = {"momentum_decay": 0.5, "process_group": SingleRank(), "update": "sgd", **codec}
    return parameter, demopt.DeMo([parameter], 1.0, **settings)


def test_step_of_demo_that_is_interrupted_anywhere_is_applied_once_or_sent_later():
    def interrupted(at):
        parameter, optimizer = demo()
        ctrl_c = CtrlC(at)
        for step in range(4):
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[step] = 1.0
            with ctrl_c if step == 1 else nullcontext():
                optimizer.step()
        assert -parameter[1].item() in (0.0, 0.25, 0.5), at  # half if the momentum kept it for the step after
        assert (-parameter[[0, 2, 3]]).tolist() == [0.5] * 3, at
        return ctrl_c.lines

    anywhere(interrupted, 60)


@pytest.mark.parametrize("then", [id, copy.deepcopy, lambda optimizer: optimizer.own_state_dict()])
@pytest.mark.parametrize("local", [False, True])
def test_second_interrupt_at_once_of_connected_ranks_leaves_the_next_step_a_copy_and_a_state_free(local, then):
    parameter, optimizer = demo()
    if local:
        codec = {**EXACTLY, "error_decay": 1.0, "process_group": SingleRank()}
        optimizer = demopt.LocalDeMo(torch.optim.SGD([parameter], lr=1.0), sync_every=1, **codec)
    for name in ("exchange", "rollback"):
        interrupted = Mock(side_effect=KeyboardInterrupt)
        setattr(optimizer.replicator, name, at_first(interrupted, getattr(optimizer.replicator, name)))
    for step in range(2):
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad[step] = 1.0
        with nullcontext() if step else pytest.raises(KeyboardInterrupt):
            optimizer.step()
        then(optimizer)
    assert (-parameter[:2]).tolist() == [1.0 if local else 0.25, 1.0 if local else 0.5]


@pytest.mark.parametrize("make", [problems.local, problems.demo])
def test_state_within_a_step_of_connected_ranks_is_refused_and_the_step_goes_on(make):
    """As if a handler tried to save. promises/test_state.py tests a round that a user has begun."""
    optimizer = make(SingleRank())
    exchange = optimizer.replicator.exchange

    def saved(*message):
        with pytest.raises(RuntimeError, match=r"state_dict came inside step\(\), .* handler"):
            optimizer.own_state_dict()
        return exchange(*message)

    optimizer.replicator.exchange = saved
    problems.set_gradients(problems.all_parameters(optimizer), 0)
    optimizer.step()
    assert int(optimizer.replicator.round_number) == 1
    optimizer.own_state_dict()


def test_round_in_flight_that_travels_again_stays_while_a_handler_saves(monkeypatch):
    optimizer = problems.local(SingleRank(), delay=1)
    optimizer.warns_of_saving = False
    problems.fingerprints(optimizer, [0])
    current = optimizer.replicator.round
    monkeypatch.setattr(replicator, "handshake_due", lambda _: True)
    monkeypatch.setattr(optimizer.replicator.session, "compare", lambda *_: optimizer.own_state_dict())
    optimizer.flush()
    assert current.stage == "applied"


def test_interrupt_while_a_new_wiring_takes_the_state_leaves_the_momentum(monkeypatch):
    parameter, optimizer = demo()
    parameter.grad = torch.ones_like(parameter)
    optimizer.extract()
    optimizer.rollback()
    optimizer.regroup(SingleRank())
    optimizer.zero_grad()
    call = attach._copy_into
    interrupted = lambda *given: (signal.raise_signal(signal.SIGINT), call(*given))  # noqa: E731
    monkeypatch.setattr(attach, "_copy_into", at_first(interrupted, call))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.step()
    assert {*parameter.tolist()} == {-0.25}


@pytest.mark.parametrize("make", [problems.demo, problems.local])
def test_group_whose_addition_is_interrupted_anywhere_is_there_or_not(make):
    def interrupted(at):
        optimizer = make(SingleRank())
        problems.fingerprints(optimizer, range(2))
        with CtrlC(at) as ctrl_c:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(20, 20))]})
        problems.fingerprints(optimizer, range(2, 4))
        assert len(optimizer.state_dict()["state"]) == len(problems.all_parameters(optimizer)), at
        return ctrl_c.lines

    anywhere(interrupted, 30, begin=0.5)


@pytest.mark.parametrize("kind", ["demo", "local", "folder"])
def test_loading_that_is_interrupted_anywhere_has_loaded_all_or_nothing(kind):
    adam = lambda parameters: torch.optim.AdamW(parameters, 0.1)  # noqa: E731

    def trained(steps, store):
        exchange = FolderExchange(store) if kind == "folder" else SingleRank()
        exchange.worker = "w0"
        optimizer = problems.demo(exchange) if kind == "demo" else problems.local(exchange, inner=adam, sync_every=2)
        problems.fingerprints(optimizer, range(steps))
        return optimizer

    def content(optimizer):
        return problems.saved([optimizer.own_state_dict(), problems.values(optimizer), optimizer.param_groups])

    state = trained(5, ObjectStore()).own_state_dict()
    state["param_groups"][0]["lr"] = 0.05
    whole, before = trained(0, ObjectStore()), content(trained(0, ObjectStore()))
    whole.load_state_dict(state)

    def interrupted(at):
        optimizer = trained(0, ObjectStore())
        with CtrlC(at) as ctrl_c:
            optimizer.load_state_dict(state)
        assert content(optimizer) in (before, content(whole)), at
        return ctrl_c.lines

    anywhere(interrupted, 50)


def test_interrupt_while_a_round_is_applied_ends_that_round(monkeypatch):
    optimizer = problems.local(SingleRank())
    monkeypatch.setattr(optimizer.replicator, "_count_skips", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        problems.fingerprints(optimizer, [0])
    assert (int(optimizer.replicator.round_number), optimizer.local_steps) == (1, 0)
    assert not optimizer.weights_differ


def test_signals_that_wait_for_the_outer_context_are_all_handled_and_both_handlers_are_as_before(monkeypatch):
    handled, seen, set_handler = [], [], signal.signal

    def leave(number, _):
        handled.append(number)
        raise SystemExit

    def fails_after(number, handler):
        set_handler(number, handler)
        raise KeyboardInterrupt  # as if Ctrl-C came now

    def interrupted(restore):
        with uninterrupted():
            with uninterrupted():
                for number in both:
                    signal.raise_signal(number)
            seen.append([*handled])  # before the end of the outer one
            monkeypatch.setattr(signal, "signal", restore)

    both = (signal.SIGINT, signal.SIGTERM)
    before = [set_handler(number, leave) for number in both]
    try:
        for restore in (set_handler, fails_after):
            handled.clear()
            with pytest.raises((SystemExit, KeyboardInterrupt)):
                interrupted(restore)
            monkeypatch.undo()
            assert (sorted(handled), seen.pop()) == (sorted(both), [])
            assert [signal.getsignal(number) for number in both] == [leave, leave]
    finally:
        for number, handler in zip(both, before, strict=True):
            set_handler(number, handler)


def test_signal_at_any_line_of_the_context_is_handled_once_and_one_that_waits_then_too():
    raised, handled = [], []
    signal.signal(signal.SIGUSR1, lambda *_: handled.append(at))
    for at in itertools.count(1):
        with CtrlC(at) as ctrl_c, uninterrupted():
            raised.append(at)
            signal.raise_signal(signal.SIGUSR1)
        assert handled == raised
        if ctrl_c.lines < at:
            break
        assert ctrl_c.has_interrupted, at
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert at > 10


def test_local_steps_that_have_followed_a_late_round_stay_where_no_other_moves_weights():
    worker = Counter(ObjectStore(), 0, delay=1)
    worker.step()
    worker.failing = 1
    worker.step()  # its round fails in flight
    worker.step()
    with pytest.raises(ExchangeError, match="away"):
        worker.step()
    worker.step()
    weights = worker.parameter.detach().clone()
    with worker.optimizer._weights.moved_by_others():
        pass
    assert torch.equal(worker.parameter, weights)


@pytest.mark.parametrize("first", ["join", "flush", "resync"])
def test_join_that_is_interrupted_before_the_round_of_its_state_keeps_the_steps_since(first):
    store, workers = counters()
    mine, interrupted = workers[1], Mock(side_effect=KeyboardInterrupt)
    mine.step()
    mine.optimizer._rounds.exchange_and_apply = interrupted
    for _ in range(2):  # the second step is after the round that is left open
        with pytest.raises(KeyboardInterrupt):
            mine.step()
    again = workers[1] = Counter(store, 1, state=mine.state(), taken=mine.taken)
    again.optimizer.replicator.exchange = at_first(interrupted, again.optimizer.replicator.exchange)
    if first == "flush":
        again.optimizer.flush()
    with pytest.raises(KeyboardInterrupt):
        again.optimizer.resync() if first == "resync" else again.join()
    if first == "resync":  # resync has dropped the step since
        again.parameter.grad = torch.zeros_like(again.parameter)
        again.optimizer.local_step()
    again.optimizer.flush()
    again.join()
    assert times_applied(store, workers)[1] == [1.0, 1.0, 0.0 if first == "resync" else 1.0]

"""Where LocalDeMo meets a folder: nothing is sent that the others refuse, and no thread reads what another changes."""

import contextlib
import json
import math
import signal
import threading
import time
from dataclasses import replace
from unittest.mock import Mock, patch

import obstore
import pytest
import torch
from stores import Cache
from workers import (
    Counter,
    Worker,
    at_first,
    counters,
    joined,
    replayed,
    rounds,
    steps,
    times_applied,
    together,
    waiting,
)

import forked
from demopt import FolderExchange
from demopt.errors import ExchangeError, SettingsError
from demopt.replicator.rounds import join_results
from demopt.runs import log
from demopt.runs.open_round import OpenRound
from demopt.runs.store import ClosedError, ObjectStore, StoreError
from demopt.train.config import TrainConfig
from demopt.train.runs import worker as trainers


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("note", "x" * 5000, "note takes 5,002 bytes as JSON; give at most 3,072"),
        ("note", {1, 2}, "note cannot be written as JSON"),
        ("note", {"loss": math.inf}, "note cannot be written as JSON"),
        ("note", json.loads("[" * 40 + "]" * 40), "note is nested more than 32 deep"),
        ("total", 1e6, r"total is 1000000\.0; give a whole number"),
        ("wanted", "many", "wanted is 'many'; give a whole number"),
        ("wanted", -1, "wanted is -1; it must be at least 0"),
        ("total", 1 << 62, "total is .*; it must be at most"),
    ],
)
def test_message_that_others_would_refuse_is_refused_at_the_sender_and_nothing_is_lost(store, name, value, told):
    first, second = joined(store)
    holder = first.run if name == "note" else first.run.sequences
    usual = getattr(holder, name)
    setattr(holder, name, value)
    first.step()
    with pytest.raises((ValueError, TypeError), match=told):
        first.step()
    assert not log.look(store, 0).messages
    setattr(holder, name, "x" * 3000 if name == "note" else usual)
    first.run.leaving = torch.tensor(False)  # as a condition of a script may be
    rounds(first, second)
    assert (first.rounds, second.digest) == (1, first.digest)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"checkpoint_every": 0}, "checkpoint_every is 0; it must be at least 1"),
        ({"checkpoint_every": 10**9}, "checkpoint_every is 1000000000; it must be at most 100000000"),
        ({"checkpoint_every": 2.5}, "checkpoint_every is 2.5; give a whole number"),
        ({"late": -1}, "late is -1; it must lie in"),
        ({"patience": "long"}, "patience is 'long'; give a number"),
        ({"settings": {"x": object()}}, "settings cannot be written as JSON"),
        ({"settings": [1]}, r"settings is \[1\]; give a dict"),
        ({"keep_log": 1}, "keep_log is 1; give True or False"),
    ],
)
def test_wrong_arguments_of_a_folder_exchange_are_refused_before_anything_is_sent(tmp_path, wrong, told):
    with pytest.raises((ValueError, TypeError), match=told):
        FolderExchange(tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("late", value) for value in (-1, math.nan, "1", None, torch.zeros(2))),
        *(("rounds", value) for value in ("10", 0, 1.5, math.inf, True, torch.zeros(2))),
    ],
)
def test_attribute_of_a_folder_exchange_refuses_what_its_argument_does(name, value):
    run = FolderExchange(ObjectStore())
    usual = getattr(run, name)
    with pytest.raises((ValueError, TypeError), match=f"{name} is "):
        setattr(run, name, value)
    assert getattr(run, name) is usual


def test_state_of_a_later_round_does_not_start_a_run(store):
    first, there = (Worker(ObjectStore(), number).round(3) for number in (0, 2))
    state = first.optimizer.state_dict()
    with pytest.raises(SettingsError, match=r"w1 is at round 3, and .* holds no run; is its disk mounted\? A new run"):
        Worker(store, 1, state=state).join()
    del state["folder"]
    there.optimizer.load_state_dict(state)
    with pytest.raises(SettingsError, match="w2 is at round 3 of another training than the run in memory"):
        there.join()
    first.optimizer.regroup(FolderExchange(store))
    with pytest.raises(SettingsError, match="holds no run"):
        first.join()
    assert not any(store.list(folder) for folder in ("rounds", "checkpoints", "start", "moments"))
    Worker(store, 3).round()


def test_second_optimizer_of_one_folder_exchange_is_refused(store):
    first = Worker(store, 0)
    with pytest.raises(ValueError, match="belongs to another optimizer; give each optimizer one of its own"):
        Worker(store, 1, group=first.run)
    first.round()


def test_joiner_reads_the_run_before_it_serialises_weights(store, monkeypatch):
    first, joiner = Worker(store, 0).round(), Worker(store, 1)
    monkeypatch.setattr("demopt.runs.weights.checkpoint_of", None)
    assert joiner.join().digest == first.digest


def test_layer_that_is_frozen_while_a_round_is_in_flight_does_not_end_that_round(store):
    """The round is checked against its own layout. The next one is refused unsent, until the layer trains again."""
    first, second = joined(store, delay=1, sync_every=1, late=60.0)
    first.step()  # sends round 0, which waits for the second
    first.model[0].requires_grad_(False)
    second.step()
    with pytest.raises(SettingsError, match=r"^w\d has .*, frozen where the run in"):
        first.step()
    assert (first.rounds, first.run.row) == (1, 0)
    first.model[0].requires_grad_(True)
    steps(first, second)
    for worker in (first, second):
        worker.optimizer.flush()
    assert (first.rounds, first.digest) == (2, second.digest)
    assert not first.run.decided.refused


def test_interrupted_wait_leaves_the_round_in_flight_and_each_step_counts_once(store):
    first, second = joined(store, delay=1, sync_every=1, late=60.0)
    first.step()

    def interrupt():
        while not log.look(store, 0).messages:
            time.sleep(0.01)
        time.sleep(0.2)  # the main thread waits by then, or is interrupted on its way
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    breaking = threading.Thread(target=interrupt)
    breaking.start()
    with pytest.raises(KeyboardInterrupt):
        first.optimizer.flush()
    breaking.join()
    assert first.optimizer.replicator.in_flight
    second.step()
    for worker in (first, second):
        worker.optimizer.flush()
    assert (first.rounds, first.digest) == (1, second.digest)
    assert first.senders == ["w0", "w1"]
    assert first.run.row == 0


@contextlib.contextmanager
def interrupted(worker):
    """In the block a worker sends its message, and is interrupted before it knows the manifest."""
    wait = OpenRound._wait

    def interrupt(open_round):
        if open_round._run is worker.run:
            raise KeyboardInterrupt
        return wait(open_round)

    with pytest.raises(KeyboardInterrupt), patch.object(OpenRound, "_wait", interrupt):
        yield


@pytest.mark.parametrize("fails", [False, True])
def test_second_worker_of_one_name_sends_under_another_and_counts_once_after_an_error_too(store, fails):
    """As from a cloned machine: both messages are in the round."""
    first, second = joined(store)
    second.run.worker = first.run.worker
    first.run.late = 60.0  # it waits because of the hello that the second put under its old name
    with waiting(first.round, store):
        with interrupted(second) if fails else contextlib.nullcontext():
            second.round()
        while not first.run.received_bytes:  # until it has read that message
            time.sleep(0.005)
        first.run.late = 0.0
    second.optimizer.flush()
    assert second.run.worker.startswith("w0-")
    assert f"{log.message_name(0, 'w0')} is another worker's, or an earlier message of this one" in second.said[0]
    assert second.said[0].endswith(f"which is {second.run.worker} from now on")
    assert first.senders == ["w0", second.run.worker]
    assert (first.run.row, second.run.last.row, first.digest) == (0, 1, second.digest)


def test_worker_that_has_joined_is_refused_in_a_forked_process_and_one_that_was_only_built_trains_there(tmp_path):
    worker = Worker(tmp_path / "run", 0)
    assert forked.code_of(worker.round) == 0
    worker.round()

    def refused():
        with pytest.raises(RuntimeError, match="build the optimizer in the one that trains"):
            worker.round()

    assert forked.code_of(refused) == 0


def test_note_that_changes_while_its_message_is_under_way_is_sent_as_it_was(store):
    worker = Worker(store, 0).join()
    worker.run.note = {"loss": 1}
    with interrupted(worker):
        worker.round()
    worker.run.note["loss"] = 2
    worker.optimizer.rollback()  # it forgets no round of a folder
    worker.optimizer.flush()
    (sender,) = worker.run.decided.senders
    assert (sender.worker, sender.note, worker.run.last.row) == ("w0", {"loss": 1}, 0)


@pytest.mark.parametrize("wins", [0, 1])
@pytest.mark.usefixtures("still")
def test_fork_of_several_rounds_is_healed_and_no_step_counts_twice(wins):
    """The store splits into two parts; later it shows the manifests of one, and the messages of both."""
    said, (bare, workers) = [], counters()
    workers[1 - wins].run.say = said.append
    steps(*workers * 4)
    for worker in workers:
        worker.optimizer.resync()
    parts = [ObjectStore(), ObjectStore()]
    for part, worker in zip(parts, workers, strict=True):
        copy(bare, part)
        worker.run.store.inner.inner = part
        for _ in range(6 + 2 * (wins == worker.number)):
            worker.step()
    copy(parts[wins], bare)
    copy(parts[1 - wins], bare, only="message")
    for worker in workers:
        worker.run.store.inner.inner = bare
        for _ in range(4):
            worker.step()
    times = times_applied(bare, workers)
    told = "is another one in memory than this worker has applied; what this worker has not sent is dropped"
    assert [told in text for text in said[:-1]] == [True], said
    assert "a run needs one folder for all" in said[-1]
    for worker, counted in zip(workers, times, strict=True):
        gone = range(0) if worker.number == wins else range(4, 12)  # from the fork to the round that sees it
        assert counted == [float(step not in gone) for step in range(worker.taken)]
    assert workers[0].digest == replayed(bare)[-1]


@pytest.mark.usefixtures("still")
def test_copies_of_a_folder_that_a_program_keeps_alike_are_told():
    parts, said = [ObjectStore(), ObjectStore()], []
    workers = [Counter(parts[0], number) for number in range(2)]
    workers[1].run.say = said.append
    copy(*parts)
    workers[1].run.store.inner.inner = parts[1]
    for _ in range(3):
        steps(*[workers[0]] * 2)
        copy(*parts, only="message")  # the program keeps a manifest that is there already
        steps(*[workers[1]] * 2)
    assert ["a run needs one folder for all" in text for text in said] == [True], said


def copy(source, target, only=""):
    """Copies those objects of a store whose names end with `only` into another store, if they are absent there."""
    for each in obstore.list(source._store).collect():
        if each["path"].endswith(only):
            target.put_if_absent(each["path"], source.get(each["path"], 1 << 30) or b"")


@pytest.mark.parametrize("key", [None, bytes(32)])
@pytest.mark.parametrize(("ending", "share"), [(".message", 0.5), (".message", 0.0), ("/manifest", 0.5)])
def test_object_that_a_cache_gives_half_or_not_at_all_is_read_again(store, ending, share, key):
    first, second = joined(store, key=key)
    first.round(2)
    second.round(2)
    cache = Cache(store, ending, share)
    assert replayed(cache, key=key) == replayed(store, key=key)
    assert cache.known


@pytest.mark.parametrize("key", [None, bytes(32)])
def test_only_checkpoint_is_read_again_of_which_a_cache_gives_half(store, key):
    first, cache = Worker(store, 0, key=key).join(), Cache(store, "start/", 0.5)
    joiner = Worker(cache, 1, key=key)
    joiner.run._patient.patience = 60.0
    assert joiner.join().digest == first.digest
    assert cache.known


@pytest.mark.parametrize("key", [None, bytes(32)])
@pytest.mark.parametrize("body", [b"", b"<html>"])
@pytest.mark.parametrize("ending", ["/manifest", ".message"])
def test_false_answer_for_an_object_that_is_absent_is_none(ending, body, key):
    store, false = ObjectStore(), set()
    sleeper, first = joined(store, key=key, checkpoint_every=1)
    first.round(4)  # the first messages are deleted

    def answer(name, most, get=store.get):
        found = get(name, most)
        is_false = found is None and ending in name and name not in false
        false.add(name)
        return body if is_false else found

    store.get = answer
    assert sleeper.round(2).rounds == 5
    assert Worker(store, 2, key=key).join().digest == sleeper.digest
    assert any(ending in name for name in false)


@pytest.mark.usefixtures("still")
def test_note_of_a_trainer_has_the_sequences_of_the_message_in_flight_that_was_left_out():
    store, (worker, other) = counters(delay=1)
    trainer = object.__new__(trainers.Worker)
    trainer.run, trainer.optimizer, trainer.config = worker.run, worker.optimizer, TrainConfig(top_k=1)
    trainer._hear, trainer._validated, trainer.run.note = Mock(), {}, trainer._note
    for quicker in (other, worker):  # the worker is late for the first round
        for member in sorted((worker, other), key=lambda each: each is not quicker):
            for _ in range(2):
                member.run.sequences.in_steps += member is worker
                member.parameter.grad = torch.ones_like(member.parameter)
                member.optimizer.local_step()
            trainer._finish_round(1.0) if member is worker else member.optimizer.finish_round()
    manifests = [log.read_manifest(store, worker.run.record.identity, number) for number in range(2)]
    notes = [[each.note["sequences"] for each in manifest.senders if each.note] for manifest in manifests]
    assert notes == [[], [4]]


@pytest.mark.usefixtures("still")
def test_trainer_hears_of_each_round_also_of_one_after_which_the_message_is_sent_again_at_once():
    _, (worker, other) = counters()
    trainer, heard = object.__new__(trainers.Worker), []
    trainer.run, trainer.optimizer, trainer.config = worker.run, worker.optimizer, TrainConfig(top_k=1)
    trainer._hear = lambda *_: heard.append(worker.run.last and worker.run.last.manifest.round)
    trainer._validated, trainer.run.note = {}, trainer._note
    for _ in range(2):  # two rounds, for which the worker is late
        for member in (other, worker):
            member.parameter.grad = torch.ones_like(member.parameter)
            member.optimizer.local_step()
            trainer._finish_round(1.0) if member is worker else member.optimizer.finish_round()
    assert (worker.run.row, heard) == (0, [None, 0, 0, 1, 2])


def test_trainer_that_has_caught_up_shares_the_batch_out_among_the_members_of_now(store):
    slow, other, third = *joined(store), Worker(store, 2).join()
    trainer, told = trainers.Worker.__new__(trainers.Worker), []
    trainer.run, trainer._last, trainer._members, trainer._speeds, trainer._heard = slow.run, None, set(), {}, {}
    trainer._count, trainer.share_out, trainer.report = Mock(), told.append, Mock()
    other.run.leaving = True
    other.round()
    third.round(4)
    slow.round()
    assert slow.run.last.manifest.round < slow.run.decided.round
    trainer._hear(1.0)
    assert {*told[-1]} == {slow.run.worker, third.run.worker}


def test_stats_have_the_bytes_of_a_catch_up_that_an_error_has_ended_before(store, monkeypatch):
    slow, quick = joined(store)
    quick.round(2)
    away = Mock(side_effect=ExchangeError("away"))
    monkeypatch.setattr(slow.run, "results_of", at_first(slow.run.results_of, away))
    with pytest.raises(ExchangeError, match="away"):
        slow.round()
    monkeypatch.undo()
    before = slow.run.received_bytes
    slow.round()
    assert slow.optimizer.stats.received_bytes == slow.run.received_bytes - before > 0


def test_stats_after_a_catch_up_say_whether_the_own_round_was_skipped(store):
    slow, quick = joined(store)
    quick.round(2)
    slow.round()
    replicator = slow.optimizer.replicator
    replicator.apply_missed(join_results(replicator.wiring(), []), 0)  # a round that moved nothing
    assert not slow.optimizer.stats.skipped


@pytest.mark.parametrize("read", ["half", "closed"])
def test_message_whose_put_has_no_answer_and_that_cannot_be_read_for_a_moment_counts_once(read, monkeypatch):
    store, name, failed = ObjectStore(), "rounds/00000000/w0.message", []
    worker = Worker(store, 0, sync_every=1).join()
    worker.run.store.patience = 60.0
    put, get = store.put_if_absent, store.get

    def no_answer(key, data):
        won = put(key, data)
        if key == name and won:
            raise StoreError("500, after it was done")
        return won

    def for_a_moment(key, most):
        if key != name or failed:
            return get(key, most)
        failed.append(key)
        if read == "closed":
            raise ClosedError(f"{key} cannot be read")
        return get(key, most)[:-9]

    monkeypatch.setattr(store, "put_if_absent", no_answer)
    monkeypatch.setattr(store, "get", for_a_moment)
    worker.step()
    assert (worker.senders, worker.run.row, failed, worker.said) == (["w0"], 0, [name], [])


def test_message_that_its_worker_took_for_anothers_and_sent_again_counts_once(store):
    first, second = (Worker(store, seed, sync_every=1) for seed in range(2))
    placed, names = first.run._placed, []

    def unreadable(name, packed):
        there = placed(name, packed)
        if name.endswith(".message"):
            names.append(name)
        return b"" if names == [name] else there

    first.run._placed = unreadable
    together([first, second], 1)
    assert len(names) == 2, "the message was sent under one name only"
    # A manifest proposed between the two puts has the first, one that is proposed after a look between them the second.
    assert len(first.senders) == 2
    assert first.run.worker == first.senders[0]
    together([first, second], 2)
    assert (len(first.senders), first.digest) == (2, second.digest)


def test_draft_lists_a_message_once_that_is_there_under_two_names():
    first = log.Envelope("a run", 0, "w0", 1, leaves=False, stop=False, weights=None, note=None, before="", seconds=0.0)
    second = replace(first, worker=log.second_name("w0", log.digest(first.packed())))
    messages = {each.worker: (each, log.digest(each.packed())) for each in (first, second)}
    assert [each.worker for each in log.draft(first, None, messages, {}, {}).senders] == ["w0"]


def test_first_weights_that_a_busy_server_has_not_taken_are_put_again(store):
    put, taken = store.put_if_absent, []

    def put_if_absent(name, data):
        if name.startswith("start/") and not name.endswith(".race") and not taken:
            taken.append(name)
            return False
        return put(name, data)

    store.put_if_absent = put_if_absent
    first = Worker(store, 0)
    first.run.store.patience = 60.0
    first.join()
    assert store.list("start") == {taken[0].partition("/")[2]}
    assert Worker(store, 1).join().digest == first.digest


def test_first_weights_that_the_store_has_damaged_start_no_run(store):
    put = store.put_if_absent

    def put_if_absent(name, data):
        if name.startswith("start/") and not name.endswith(".race"):
            put(name, data[:-9])
            return False
        return put(name, data)

    store.put_if_absent = put_if_absent
    with pytest.raises(ExchangeError, match=r"start/.* is damaged in .*; try again"):
        Worker(store, 0).join()
    assert log.read_record(store) is None

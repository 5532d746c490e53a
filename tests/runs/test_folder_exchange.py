"""LocalDeMo through a store: the same bits for all, exact joining and replay, nothing lost or counted twice."""

import dataclasses
import functools
import json
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import stores
import torch
from workers import EXACTLY, Counter, Worker, at_first, joined, replayed, rounds, times_applied, together, waiting

import demopt
import problems
from demopt import DriftError, FolderExchange
from demopt.errors import DemoptError, ExchangeError, MessageError, SettingsError
from demopt.exchange import Threads
from demopt.replicator.route import Route
from demopt.runs import checkpoints, log
from demopt.runs import stop as stop_module
from demopt.runs.open_round import CoveredError, ForkedError, OpenRound
from demopt.runs.replay import replay
from demopt.runs.stop import put_stop
from demopt.runs.store import RECORD, ObjectStore, StoreError
from demopt.train.runs import command
from forked import wait_for


@pytest.mark.parametrize("delay", [0, 1])
def test_folder_gives_the_bits_of_an_all_gather(any_store, delay):
    through = [Worker(any_store, seed, weights=7, delay=delay, keep_log=True) for seed in range(3)]
    for worker in through:
        worker.run.store.patience = 60.0  # a server may be busy
    together(through, 4)
    group = Threads(3, 60.0)
    settings = {"weights": 7, "delay": delay, "clip_to_median": True}
    direct = [Worker(None, seed, group=exchange, **settings) for seed, exchange in enumerate(group.exchanges)]

    def train(exchange):
        while direct[exchange.rank].rounds < 4:
            direct[exchange.rank].step()

    group.run(train)
    assert {worker.digest for worker in through} == {worker.digest for worker in direct}
    assert replayed(any_store)[3] == through[0].digest


def test_joiner_has_the_bits_of_the_others_and_replay_agrees(store):
    first = Worker(store, 0, keep_log=True, checkpoint_every=2).round(5)
    second = Worker(store, 1).join()
    assert (second.rounds, second.digest) == (5, first.digest)
    together([first, second], 8)
    assert first.digest == second.digest == replayed(store)[-1]
    assert log.checkpoints(store) == [0, 2, 4, 6, 8]
    assert [len(each.senders) for each, _ in replay(store)] == [1] * 5 + [2] * 3


def test_worker_that_is_second_to_start_a_run_joins_it_and_leaves_no_weights_of_its_own(store):
    first, slow = Worker(store, 0), stores.Through(store)
    slow.put_if_absent = at_first(lambda *given: (first.join(), store.put_if_absent(*given))[1], store.put_if_absent)
    assert Worker(slow, 1).join().digest == first.digest
    assert store.list("start") == {first.run.record.identity}


def test_gradient_at_other_weights_is_dropped_by_the_step_that_joins(store):
    first, second = Worker(store, 0).round(), Worker(store, 1)
    second.step()
    assert second.digest == first.digest
    assert all(map(torch.equal, second.model.parameters(), second.optimizer._weights.global_of.values()))


def test_worker_that_is_always_late_is_expected_for_two_rounds_and_then_sends_at_once(store):
    first, second = joined(store, keep_log=True)
    second.optimizer.param_groups[0]["lr"] = 0.05  # workers at different steps may have different rates
    for left_out, expected in ((1, {"w0": 0, "w1": 1}), (0, {"w0": 0})):
        rounds(first, second)
        assert (second.run.left_out, first.run.decided.members) == (left_out, expected)
    assert second.rounds == first.rounds + 1
    assert second.digest == replayed(store)[-1]
    second.run.left_out = 5000  # as if another worker decided all rounds alone
    second.run.hello(second.rounds)
    assert second.run.seconds_needed == 600.0
    assert "this worker needs more than 600 s to be there" in second.said[-1]


def test_note_that_is_a_function_is_asked_for_each_message_also_one_that_is_sent_again(store):
    first, second = joined(store)
    second.run.note = lambda: second.rounds
    for _ in range(2):
        rounds(first, second)
    assert [(each.worker, each.note) for each in second.run.decided.senders] == [("w1", 2)]


def test_sequences_of_a_left_out_message_stay_unsent_if_the_next_gradient_is_not_finite(store):
    first, second = joined(store)
    second.run.sequences.in_steps = 3
    rounds(first, second)
    first.round()
    for worker in (second, Worker(store, 1, state=second.state()).join()):
        worker.run.sequences.in_steps += 5
        worker.model[0].weight.data.fill_(torch.nan)
        worker.optimizer.local_step()
        worker.optimizer.finish_round()
        assert worker.run.sequences.unsent == 3


def test_note_of_steps_that_were_not_finite_is_in_no_message_that_is_sent_again(store):
    first, second = joined(store)
    rounds(first, second)
    first.round()
    second.model[0].weight.data.fill_(torch.nan)
    second.run.note = "not finite"
    second.round()
    assert (second.run.left_out, second.run.decided.senders[0].note) == (2, None)


@pytest.mark.parametrize("end", ["rounds", "sequences"])
def test_late_worker_adds_no_round_to_a_run_that_has_ended(store, end):
    first, second = joined(store)
    for worker in (first, second):
        if end == "rounds":
            worker.run.rounds = 2
        else:
            worker.run.sequences.total = worker.run.sequences.wanted = 4
    for _ in range(2):
        first.run.sequences.take(4)
        rounds(first, second)
    assert second.run.left_out == 2
    assert (second.rounds, second.digest) == (2, first.digest)


def test_old_messages_go_once_checkpoints_cover_them_and_a_sleeper_takes_a_checkpoint(store):
    first, sleeper = Worker(store, 0, checkpoint_every=2, **EXACTLY).join(), Worker(store, 1, **EXACTLY)
    sleeper.step()
    first.round(9)
    assert [number for number in range(9) if log.look(store, number).messages] == [6, 7, 8]
    assert all(log.look(store, number).has_manifest for number in range(9))
    assert log.checkpoints(store) == [0, 6, 8]
    sleeper.step()
    assert (sleeper.rounds, sleeper.digest, sleeper.run.left_out) == (9, first.digest, 1)
    assert all(entry["error"].any() for entry in sleeper.optimizer.state.values()), "its message was in no round"
    with pytest.raises(CoveredError, match="a checkpoint has its round"):
        replayed(store)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("still")
def test_each_local_step_is_applied_once_whatever_fails(delay, seed):
    """The store may fail before any request, so that messages are sent whose senders do not know the outcome."""
    draw, bare = random.Random(seed), ObjectStore()
    workers = [Counter(bare, number, delay) for number in range(3)]
    failures = 0
    for _ in range(100):
        worker = draw.choice(workers)
        worker.failing = draw.choice((0, 0, 1, 2, 3, 4, 5, 6, 7, 8))
        try:
            worker.step()
        except ExchangeError:
            failures += 1
    assert failures > 10
    assert times_applied(bare, workers) == [[1.0] * worker.taken for worker in workers]


@pytest.mark.parametrize(
    ("gone", "told"),
    [("rounds/00000000/manifest", "is its disk mounted"), ("rounds/00000001/w1.message", "w1.message is gone")],
)
def test_wish_to_stop_ends_the_waits_of_a_round_and_each_local_step_is_applied_once(gone, told, tmp_path, monkeypatch):
    monkeypatch.setattr("demopt.runs.open_round.TOLD_AFTER", 0.1)
    store = stores.make("folder", tmp_path, monkeypatch)
    worker, other = Counter(store, 0, 0), Counter(store, 1, 0)
    worker.run._patient.patience = 600.0
    for _ in range(2):
        worker.step()
    for _ in range(4 if gone.endswith(".message") else 0):  # it misses the first round, and decides the second
        other.step()
    put_stop(store, 1, worker.run.record.identity)
    kept = store.get(gone, 1 << 20)
    store.delete([gone])
    worker.step()
    with pytest.raises(ExchangeError, match=told):
        worker.step()
    store.put_if_absent(gone, kept)
    while not worker.run.stopping:
        worker.step()
    assert times_applied(store, [worker, other]) == [[1.0] * each.taken for each in (worker, other)]


BAD = {
    "truncated": (lambda m: m.packed()[:-9], "bytes, this layout's have .* truncated"),
    "empty": (lambda _: b"", "is damaged: it holds no JSON"),
    "huge": (lambda m: m.packed() + bytes(100_000), "at most .* were expected"),
    "of another run": (lambda m: dataclasses.replace(m, run="x").packed(), "is of run x, expected"),
    "of another round": (lambda m: dataclasses.replace(m, round=7).packed(), "is of round 7, expected 1"),
    "of another worker": (lambda m: dataclasses.replace(m, worker="z").packed(), "is of worker z, expected bad"),
    "with another checksum": (lambda m: m.packed()[:-1] + b"\xff", "checksum does not match"),
    "with unknown entries": (lambda m: m.packed().replace(b'"note"', b'"nope"', 1), "is damaged: nope, note"),
    "with samples that are no number": (lambda m: m.packed().replace(b'"samples": 1', b'"samples": []'), "samples"),
    "with other weights": (lambda m: dataclasses.replace(m, weights=5).packed(), "its weights before the round differ"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_objects_are_refused_by_name_and_the_run_goes_on(case):
    make, told = BAD[case]
    store = ObjectStore()
    good = Worker(store, 0, keep_log=True, fingerprint_every=1).round()
    other = Worker(store, 1, fingerprint_every=1)
    other.run.worker = "bad"
    other.round()  # round 1, alone
    stores.put(store, log.message_name(1, "bad"), make(other.run.last.envelope))
    store.delete([f"{log.folder_of(1)}/manifest"])  # the round begins again
    good.round()
    assert good.rounds == 2
    assert list(good.run.decided.refused) == ["bad"]
    assert re.search(told, good.run.decided.refused["bad"]), good.run.decided.refused
    assert good.senders == ["w0"]
    assert replayed(store)[-1] == good.digest


def test_pseudo_gradient_that_is_not_finite_is_left_out_and_its_owner_goes_on_at_a_checkpoint_too(store):
    one, other = joined(store, checkpoint_every=1)
    before = other.digest
    other.step()
    other.model[0].weight.data.fill_(torch.nan)
    other.round()
    assert (other.run.decided.refused, other.senders) == ({"w1": "its gradient was not finite"}, [])
    assert (other.digest, other.run.left_out) == (before, 0)  # it was not late
    assert all(torch.isfinite(parameter).all() for parameter in other.model.parameters())
    rounds(one, other)
    assert (one.rounds, other.rounds) == (1, 2)
    assert other.said == ["round 1: this worker's message was refused: its gradient was not finite"]


def test_listed_object_that_was_changed_is_refused_and_nothing_is_applied(store):
    Worker(store, 0, keep_log=True).round()
    stores.change(store, log.message_name(0, "w0"), lambda data: data + b" ")
    with pytest.raises(MessageError, match="is not the object that the manifest of its round names"):
        Worker(store, 1).join()


@pytest.mark.parametrize(
    ("settings", "record", "told"),
    [
        ({"top_k": 5}, {}, "^w1 has .*top_k.* = 5.* where the run in .* has 12"),
        ({"sync_every": 3}, {}, "^w1 has sync_every = 3 where the run in .* has 2"),
        ({"delay": 1}, {}, "^w1 has delay = 1 where the run in .* has 0"),
        ({}, {"version": "0.1.0"}, f"was started by demopt 0.1.0, this is {demopt.__version__}"),
        ({}, {"format": 1}, "holds a run of format 1; this demopt has 3"),
    ],
)
def test_other_settings_version_or_format_are_told_at_once(store, settings, record, told):
    Worker(store, 0).step()
    stores.change(store, "run", lambda data: json.dumps({**json.loads(data), **record}).encode())
    with pytest.raises(MessageError if "format" in record else SettingsError, match=told):
        Worker(store, 1, **settings).join()


def test_worker_with_other_frozen_parameters_is_told_and_groups_stay_as_they_are(store):
    def worker(seed, value):
        frozen = torch.nn.Parameter(torch.full((3,), value), requires_grad=False)
        return Worker(store, seed, inner=lambda trained: torch.optim.SGD([*trained, frozen], 0.1)).join()

    first, same, other = worker(0, 1.0), worker(1, 1.0), worker(2, 2.0)
    assert first.said == same.said == []
    assert f"the frozen parameters of {other.run.worker} differ from those that the run in" in other.said[0]
    assert replayed(store) == []
    Worker(store, 3).optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})  # it has yet to join
    with pytest.raises(ValueError, match="a run in a folder keeps the parameters that it began with"):
        first.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    frozen = first.optimizer.param_groups[0]["params"][-1].requires_grad_(True)
    with pytest.raises(ValueError, match="those that train later with a learning rate of 0"):
        first.step()
    frozen.requires_grad_(False)
    first.round()


def test_drift_is_an_error_that_resync_mends_and_the_state_that_is_saved_then_knows_its_message(store):
    workers = joined(store, fingerprint_every=1)
    workers[1].optimizer.replicator.parameters[0].data.add_(1.0)
    with pytest.raises(DriftError, match=r"the weights of worker (w0 differ from those of w1|w1 differ .* w0)"):
        together([*workers], 1)
    drifted = min(workers, key=lambda worker: worker.rounds)
    again = Worker(store, 2, fingerprint_every=1, state=drifted.state())
    assert (again.join().rounds, again.said) == (1, [])
    drifted.optimizer.resync()
    assert [drifted.digest] == replayed(store)


def test_worker_whose_weights_differ_from_those_of_most_does_not_decide_the_round(store):
    *others, drifted = (Worker(store, number, late=60.0, fingerprint_every=1, sync_every=1) for number in range(3))
    for worker in (*others, drifted):
        worker.join()
    drifted.optimizer.replicator.parameters[0].data.add_(1.0)
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(worker.round) for worker in others]
        while len(log.look(store, 0).messages) < 2:  # the drifted one sends last, when it can read all others
            time.sleep(0.005)
        with pytest.raises(DriftError, match=r"the weights of worker w2 differ from those of w[01]"):
            drifted.round()
        assert {each.result().digest for each in ended} == {*replayed(store)}


@pytest.mark.usefixtures("still")
def test_round_that_is_applied_in_part_is_drift_and_after_resync_no_step_counts_twice(monkeypatch):
    store = ObjectStore()
    worker, other = (Counter(store, number) for number in range(2))

    def apply(route, decoded, number):
        monkeypatch.undo()
        worker.optimizer.replicator.parameters[0].data.add_(1.0)
        raise torch.OutOfMemoryError("device is full")

    monkeypatch.setattr(Route, "apply", apply)
    worker.step()
    worker.run.sequences.in_error = 1
    told = r"failed on this rank \(device is full\); its parameters are those of no round. Call resync\(\), which"
    with pytest.raises(DriftError, match=told):
        worker.step()
    worker.optimizer.resync()
    assert (worker.run.sequences.unsent, worker.run.sequences.in_error) == (0, 0)
    for each in (worker, worker, other, other):
        each.step()
    assert times_applied(store, [worker, other]) == [[1.0] * worker.taken, [1.0] * other.taken]


def test_resync_takes_the_newest_weights_instead_of_a_round_that_cannot_be_applied(store):
    first, late = joined(store, checkpoint_every=2)
    first.round(2)
    full = Mock(side_effect=torch.OutOfMemoryError("device is full"))
    late.optimizer.replicator.apply_missed = full
    with pytest.raises(torch.OutOfMemoryError):
        late.round()
    late.optimizer.resync()
    assert (late.rounds, late.digest) == (2, first.digest)


def test_worker_whose_saved_weights_have_drifted_takes_those_of_the_run_as_it_joins(store):
    first, drifts = joined(store, fingerprint_every=1)
    drifts.optimizer.replicator.parameters[0].data.add_(1.0)
    drifts.run.exchange_round = Mock(side_effect=ExchangeError("away"))
    with pytest.raises(ExchangeError, match="away"):
        drifts.round()
    first.round(2)
    again = Worker(store, 2, fingerprint_every=1, state=drifts.state()).join()
    assert (again.rounds, again.digest) == (2, first.digest)
    assert "the weights of worker w1 differ from those of w0; it takes the run's newest weights" in again.said
    again.round()
    assert again.run.row is not None


def test_checkpoint_of_a_fork_is_read_once_while_another_is_waited_for(store, monkeypatch):
    worker = Worker(store, 0, checkpoint_every=1).round()
    worker.run._patient.patience = 0.5
    monkeypatch.setattr("demopt.runs.checkpoints.read_checkpoint", read := Mock(side_effect=ForkedError("forked")))
    with pytest.raises(ExchangeError, match="has no checkpoint after round 1"):
        worker.optimizer._rounds._newest_checkpoint(least=1)
    assert read.call_count == 1


@pytest.mark.parametrize(
    "odd",
    [
        lambda _: {"marks": 3},
        lambda _: {"marks": [{}] * 4},
        lambda group: {"marks": group["marks"][1:]},
        lambda _: {"frozen": None},
    ],
)
def test_record_without_marks_that_could_be_compared_is_joined_without_a_word(odd, store):
    Worker(store, 0).join()
    record = json.loads(store.get(RECORD, 1 << 20))
    record["groups"][0] |= odd(record["groups"][0])
    stores.put(store, RECORD, json.dumps(record).encode())
    assert Worker(store, 0).join().said == []


@pytest.mark.parametrize("damage", ["cut", "a bit", "of another run"])
def test_damaged_checkpoint_is_refused_whole_and_the_one_before_is_taken(store, damage):
    first, stranger = (Worker(each, 0, checkpoint_every=1).round(3) for each in (store, ObjectStore()))
    change = {
        "cut": lambda data: data[:-4],
        "a bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        "of another run": lambda _: stranger.run.store.get("checkpoints/00000003", 1 << 20),
    }
    stores.change(store, "checkpoints/00000003", change[damage])
    second = Worker(store, 1).join()
    assert (second.rounds, second.digest) == (3, first.digest)
    assert "checkpoints/00000003 is damaged" in second.said[0]
    for name in ("checkpoints/00000002", log.checkpoint_name(first.run.record, 0)):
        stores.change(store, name, lambda data: data[:-4])
    third = Worker(store, 2).optimizer
    told = r"start/.* is damaged, or of another run or model"
    with problems.unchanged(third), pytest.raises(MessageError, match=told):
        third.join()


def adamw(parameters):
    """Two optimizers, of the first layer and of the second."""
    weight, bias, *second = parameters
    return [torch.optim.AdamW(each, lr=1e-3) for each in ([weight, bias], second)]


def moments(worker):
    return [entry for inner in worker.optimizer.inner for entry in inner.state.values()]


def test_joiner_without_moments_borrows_those_that_lie_whole_beside_the_newest_checkpoint(store):
    first = Worker(store, 0, checkpoint_every=2, inner=adamw).round(4)
    owner = Worker(store, 2, inner=adamw)
    owner.optimizer.inner[0].state[owner.model[0].weight]["step"] = torch.tensor(3.0)
    owner.join()
    assert moments(owner) == [{"step": torch.tensor(3.0)}]
    joiner = Worker(store, 1, inner=adamw)
    groups = [each.param_groups for each in joiner.optimizer.inner]
    joiner.join()
    assert joiner.digest == first.digest
    joiner.step()
    assert len(moments(joiner)) == 4
    for borrowed, lent in zip(moments(joiner), moments(first), strict=True):
        assert borrowed["step"] == lent["step"] == 8
        for name in ("exp_avg", "exp_avg_sq"):
            assert borrowed[name].dtype == torch.float32
            torch.testing.assert_close(borrowed[name], lent[name].bfloat16().float(), rtol=0, atol=0)
    assert all(each.param_groups is known for each, known in zip(joiner.optimizer.inner, groups, strict=True))
    assert store.list("moments") == {"00000002", "00000004"}
    lent = store.get("moments/00000004", 1 << 20)
    head = json.loads(lent.partition(b"\n")[0])
    shapes = [[each, "float32"] for each in ([0, 10**30], [0] * 70, [0, -1], [0, 0.5])] + [[[0], "float8_e4m3fn"]]
    other = [json.dumps({**head, "tensors": [each], "digest": log.digest(b"")}).encode() + b"\n" for each in shapes]
    _, whole = checkpoints._from_bytes("lent", lent)
    other += [checkpoints._to_bytes({**head, **each}, whole) for each in ({"run": "x"}, {"names": 3}, {"names": []})]
    other += [checkpoints._to_bytes(head, [each * torch.inf for each in whole])]
    for damaged in (
        lent[:-1],
        b"{}\n",
        *other,
    ):  # torn, empty, with impossible tensors, of another run, with wrong names, not finite
        stores.put(store, "moments/00000004", damaged)
        later = Worker(store, 3, inner=adamw).join()
        assert (later.digest, moments(later)) == (first.digest, [])
        assert "moments/00000004 is damaged" in later.said[0]
    first.optimizer.inner[0].state[first.model[0].weight]["notes"] = ["text"]
    first.round(2)
    assert store.list("moments") == {"00000004"}, "what is no tensor is not lent"


def test_moments_that_cannot_be_read_are_told_and_gradients_of_other_weights_dropped(store):
    Worker(store, 0, checkpoint_every=2, inner=adamw).round(2)
    joiner = Worker(stores.Through(store), 1, inner=adamw)
    found = joiner.run.store.list
    joiner.run.store.list = lambda folder: (
        found(folder) if folder != "moments" else Mock(side_effect=StoreError("away"))()
    )
    joiner.step()
    assert joiner.said == ["away; the inner optimizer starts with empty state"]
    assert all(parameter.grad is None for parameter in joiner.model.parameters())


def test_checkpoint_whose_put_was_done_without_an_answer_has_its_moments_too():
    bare, unanswered = ObjectStore(), []

    class NoAnswer(stores.Through):
        def put_if_absent(self, name, data):
            put = super().put_if_absent(name, data)
            if name == "checkpoints/00000001" and not unanswered:
                unanswered.append(name)
                raise StoreError("no answer")
            return put

    worker = Worker(NoAnswer(bare), 0, checkpoint_every=1, inner=adamw)
    worker.run._patient.patience = 600.0
    worker.round()
    assert (unanswered, bare.list("moments")) == (["checkpoints/00000001"], {"00000001"})


def test_moments_that_are_whole_numbers_or_empty_are_lent_as_they_are(store):
    worker = Worker(store, 0).round()
    rounds = worker.optimizer._rounds
    rounds.moments = lambda: {"codes": torch.tensor([257]), "none": torch.empty(0)}
    rounds.save()
    worker.run.wait_for_uploads()
    rounds.moments = dict
    found = rounds.lent_moments()
    assert (found["codes"].tolist(), found["none"].tolist()) == ([257], [])


def test_bytes_of_a_run_are_those_of_its_rounds_whatever_is_uploaded_beside_them(store):
    worker, costs = Worker(store, 0, checkpoint_every=1, sync_every=1, inner=adamw), []
    for _ in range(3):
        worker.round()
        costs.append(worker.optimizer.stats)
    counted = [sum(getattr(cost, name) for cost in costs) for name in ("sent_bytes", "received_bytes")]
    assert counted == [worker.run.sent_bytes, worker.run.received_bytes] != [0, 0]


@pytest.mark.parametrize(
    "changed",
    [
        lambda names, tensors: (names[:-1], tensors[:-1]),
        lambda names, tensors: ([name.replace("0.exp_avg_sq", "0.square_avg") for name in names], tensors),
        lambda names, tensors: (names, [each[:1] if each.dim() else each for each in tensors]),
        lambda names, tensors: (names, [each.view(-1) for each in tensors]),
        lambda names, tensors: (names, [each.int() for each in tensors]),
    ],
)
def test_lent_moments_of_other_names_shapes_or_kinds_are_told_and_not_taken(changed, store):
    Worker(store, 0, checkpoint_every=2, inner=adamw).round(2)
    name = "moments/00000002"
    head, tensors = checkpoints._from_bytes(name, store.get(name, 1 << 20))
    names, tensors = changed(head["names"], tensors)
    stores.put(store, name, checkpoints._to_bytes({**head, "names": names}, tensors))
    joiner, alone = Worker(store, 1, inner=adamw).join(), Worker(ObjectStore(), 1, inner=adamw).join()
    alone.model.load_state_dict(joiner.model.state_dict())
    with pytest.warns(UserWarning, match="the moments that the run lends do not fit the state of AdamW, AdamW"):
        joiner.step()
    alone.step()
    for mine, own in zip(moments(joiner), moments(alone), strict=True):
        assert mine.keys() == own.keys()
        assert all(torch.equal(mine[each], own[each]) for each in own)
    joiner.round()


@pytest.mark.parametrize("name", ["my laptop", "", "ü", "../x", "a" * 65, 5])
def test_name_of_a_worker_that_others_would_not_read_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"worker is .*; give 1 to 64 letters"):
        FolderExchange(os.fsencode(tmp_path)).worker = name


def test_exchange_that_has_joined_no_run_has_no_record_and_no_row(store):
    worker = Worker(store, 0)
    run = worker.run
    assert run.row is None
    with pytest.warns(UserWarning, match=r"shared\(\) came before join\(\)"), worker.optimizer.shared():
        pass
    with pytest.raises(RuntimeError, match="this worker has not joined the run yet"):
        _ = run.record
    with pytest.raises(ExchangeError, match="holds no run"):
        run.find_run()


def test_wait_for_an_object_is_told_once_and_ended_by_the_user(store, monkeypatch):
    monkeypatch.setattr("demopt.runs.exchange.TOLD_AFTER", 0.0)
    worker, asked = Worker(store, 0), iter([False, False, True])
    worker.run._patient.patience, worker.run.asked_to_stop = 600.0, lambda: next(asked)
    with pytest.raises(ExchangeError, match="it is gone"):
        worker.run.wait_for(lambda: None, "it is gone")
    assert worker.said == ["it is gone; waiting up to 60 s"]


def test_put_that_a_busy_server_refuses_although_the_name_is_free_is_repeated(store):
    worker, refused, put = Worker(store, 0).join(), set(), store.put_if_absent
    store.put_if_absent = lambda name, data: put(name, data) if name in refused else bool(refused.add(name))
    worker.run._patient.patience = 60.0
    assert worker.round().run.row == 0
    assert {log.message_name(0, "w0"), log.manifest_name(0)} <= refused


def test_worker_that_was_asked_to_stop_asks_nobody_to_wait_for_it(store):
    first, late = joined(store)
    late.run.asked_to_stop = lambda: True
    rounds(first, late)
    assert late.run.left_out == 1
    assert not log.look(store, 1).hellos


def test_demo_and_route_owner_refuse_a_folder(store):
    demo = demopt.DeMo([torch.nn.Parameter(torch.ones(4))])
    with pytest.raises(ValueError, match="too often for a folder"):
        demo.regroup(FolderExchange(store))
    with pytest.raises(ValueError, match=r"every worker reads every message.*use route 'gather' or 'auto'"):
        Worker(store, 0, top_k=None, route="owner", clip_to_median=False)
    alone = Worker(None, 0, group=Threads(1, 60.0).exchanges[0], top_k=None, route="owner")
    with pytest.raises(ValueError, match="every worker reads every message"):
        alone.optimizer.regroup(FolderExchange(store))


@pytest.mark.parametrize("comes", ["while it joins", "after an older one in the same round"])
def test_wish_to_stop_stops_a_worker(comes, tmp_path):
    address = f"{tmp_path}/run"
    first, worker = Worker(address, 0).join(), Worker(address, 1)
    worker.run.find_run()
    if comes != "while it joins":
        command.stop(address)
        worker.join()
    command.stop(address)
    if comes == "while it joins":
        with patch.object(first.run.wish, "hear"):
            first.round()  # the first worker does not obey it
        assert not worker.join().run.stopping
    worker.round()
    assert (first.run.stopping, worker.run.stopping) == (False, True)
    worker.optimizer.load_state_dict(worker.state())
    assert not worker.round().run.stopping, "it has come after that wish"


@pytest.mark.parametrize("case", ["an old number", "a damaged manifest"])
def test_wish_that_no_round_has_obeyed_is_heard(case, monkeypatch):
    worker = Worker(ObjectStore(), 0).round(4)
    if case == "an old number":
        monkeypatch.setattr(stop_module, "_SOON", 2)  # as where rounds take milliseconds
    else:
        damaged = Mock(side_effect=MessageError("damaged"))
        monkeypatch.setattr(stop_module, "read_manifest", at_first(damaged, stop_module.read_manifest))
    put_stop(worker.run.store, 0, worker.run.record.identity)
    assert worker.round(2).run.stopping


@pytest.mark.parametrize("read", ["after an error of find_run", "after an error of join", "cut", "never in time"])
def test_wish_that_was_obeyed_before_a_worker_came_stops_nobody(read):
    store = ObjectStore()
    first = Worker(store, 0).round()
    put_stop(store, first.rounds, first.run.record.identity)
    first.round()
    again = Worker(store, 1).round()
    late = Worker(stores.Cache(store, "stop", 0.8 if read == "cut" else 0.0), 2)
    late.run.store.patience = 60.0  # a cut object is read again
    if "error" in read:
        late.run.wish._store = Mock(get=at_first(Mock(side_effect=StoreError("away")), store.get), read=store.read)
        with pytest.raises(StoreError):
            late.run.find_run() if "find_run" in read else late.join()
    rounds(*[late, again] * 3)
    assert (first.run.stopping, again.run.stopping, late.run.stopping) == (True, False, False)


def test_trainer_that_goes_on_after_a_stop_stops_nobody_else(store):
    first = Worker(store, 0).round()
    put_stop(store, first.rounds, first.run.record.identity)
    first.round()
    late = Worker(store, 1).join()
    rounds(*[first, late] * 3)
    assert (first.run.stopping, late.run.stopping) == (True, False)


def test_wish_that_a_worker_has_heard_stops_it_without_the_others_after_nine_misses(store):
    run = Worker(store, 0).round().run
    for left_out, heard_at, stops in ((9, 0.0, False), (10, 0.0, True), (0, math.inf, True)):
        run.left_out, run.wish.heard_at = left_out, heard_at
        run.move_to(run.decided, stops=False)
        assert run.stopping == stops


@pytest.mark.parametrize("missed", ["before it joins", "as it joins", "after it has joined", "for long"])
@pytest.mark.parametrize("delay", [0, 1])
def test_worker_that_missed_the_end_of_a_run_ends_with_the_weights_of_the_others(missed, delay, tmp_path):
    """It adds no round; whoever comes later goes on."""
    address = f"{tmp_path}/run"
    first, worker = Worker(address, 0, delay=delay, checkpoint_every=2).round(), Worker(address, 1, delay=delay)
    if missed == "before it joins":
        command.stop(address)
    worker.run.find_run()
    if missed in ("after it has joined", "for long"):
        worker.join()
    if missed == "for long":  # until all messages that it has missed are deleted
        first.round(6)
    if missed != "before it joins":
        command.stop(address)
    while not first.run.stopping:
        first.round()
    worker.join()
    while not worker.run.stopping:
        worker.round()
    first.run.wait_for_uploads()
    assert log.newest(first.run.store, first.run.record.identity)[0] == first.rounds  # still the end of the run
    assert (worker.rounds, worker.digest) == (first.rounds, first.digest)
    assert not log.look(first.run.store, worker.rounds).hellos
    later = Worker(address, 2, delay=delay).join()
    assert (later.run.stopping, later.digest) == (False, first.digest)
    assert later.round(3).rounds == first.rounds + 3
    assert not later.run.stopping


@pytest.mark.parametrize("comes", ["before it has joined", "after it has slept"])
def test_worker_that_missed_a_stop_does_not_stop_those_who_went_on(comes, tmp_path):
    address = f"{tmp_path}/run"
    first, worker = Worker(address, 0, checkpoint_every=2).round(), Worker(address, 1)
    worker.run.find_run()
    if comes == "after it has slept":
        worker.join()
        first.round(6)
    command.stop(address)
    while not first.run.stopping:
        first.round()
    again = Worker(address, 2).round(4)
    worker.join()
    while not worker.run.stopping:
        worker.step()
    again.round(2)
    assert (worker.rounds, again.run.stopping) == (again.rounds - 2, False)


def test_worker_that_waits_long_says_for_whom(store, monkeypatch):
    monkeypatch.setattr("demopt.runs.open_round._LONG", 0.0)
    first, second = joined(store)
    first.run.late = 60.0
    with waiting(first.round, store):
        wait_for(lambda: first.said)
        second.round()
    assert first.said == ["round 1: waiting for w1"]


@pytest.mark.parametrize("within", ["a pause", "a request"])
def test_worker_that_slept_while_it_looked_for_others_has_not_waited_for_them(within, store, monkeypatch):
    first, second = joined(store)
    first.run.late, slept, waits, look, began = 600.0, [0.0], threading.Event(), log.look, time.monotonic()

    def sleep(seconds):
        time.sleep(seconds)
        waits.set()
        if within == "a pause" and slept[0] < 307.0:  # after the first: shorter ones are no sleep
            slept[0] += seconds + (0.9 if slept[0] else 300.0)

    def looked(*given):
        if within == "a request":
            slept[0] = 300.0 if waits.is_set() else 0.0
        return look(*given)

    clock = SimpleNamespace(monotonic=lambda: began + slept[0], sleep=sleep)  # a busy machine does not move it
    monkeypatch.setattr("demopt.runs.open_round.time", clock)
    monkeypatch.setattr(log, "look", looked)
    with waiting(first.round, store):
        wait_for(lambda: slept[0] > (306.0 if within == "a pause" else 0.0))
        second.round()
    if within == "a pause":
        assert first.run.last.waited_for == ("w1",)
        assert first.run.last.waited < 10
        assert first.run.last.slept == pytest.approx(300.0)
    else:
        assert first.run.last.waited_for == ()


def test_nobody_awaits_a_worker_that_left(tmp_path, capsys):
    address = f"{tmp_path}/run"

    def next_message():
        assert command.status(address, as_json=True) == 0
        return json.loads(capsys.readouterr().out)["workers"]["w0"]["next message"]

    worker = Worker(address, 0).round()
    assert next_message() == "awaited"
    worker.run.hello(worker.rounds, ahead=5)
    worker.run.leaving = True
    worker.optimizer.finish_round(last=True)
    assert not [*worker.run.store.list(log.folder_of(6))]
    assert next_message() == "none: it left"


def test_nobody_awaits_a_worker_whose_last_round_was_on_a_fork(store):
    worker = Worker(store, 0).round(2)
    worker.run.hello(worker.rounds, ahead=5)
    stores.change(store, log.manifest_name(1), lambda data: data.replace(b'"at": "20', b'"at": "30'))
    worker.run.leaving = True
    worker.optimizer.finish_round(last=True)
    assert worker.rounds == 2
    assert not store.list(log.folder_of(7))
    assert "round 2 is another one" in worker.said[0]


def test_nobody_awaits_a_worker_whose_run_ends_as_it_catches_up(store):
    first, late = joined(store)
    first.round()
    late.run.hello(late.rounds, ahead=5)
    first.run.wish.heard_at = 0.0
    first.round()
    late.round()
    assert (late.run.stopping, late.rounds, store.list(log.folder_of(5))) == (True, 2, set())


def test_worker_that_was_late_sends_no_empty_message_after_a_fork_has_dropped_its_content(store):
    worker = Worker(store, 0).round(2)
    worker.run.left_out = 3
    stores.change(store, log.manifest_name(1), lambda data: data.replace(b'"at": "20', b'"at": "30'))
    for _ in range(2):
        worker.step()
    assert "what this worker has not sent is dropped" in worker.said[0]
    assert worker.rounds == 2
    assert log.look(store, 2).messages <= {"w0"}  # from before it was told


def test_joiner_whose_weights_take_longer_than_messages_are_kept_asks_the_others_to_wait(store):
    first, slow = Worker(store, 0, checkpoint_every=2), stores.Through(store)
    first.round(4)

    def get(name, most):
        found = store.get(name, most)
        for _ in range(8 if name.startswith("checkpoints") else 0):
            if not log.look(store, first.rounds).hellos:  # otherwise it would wait there
                first.round()
        return found

    slow.get = get
    joiner, viewer = Worker(slow, 1), Worker(slow, 2)
    assert viewer.optimizer.observe() >= 4, "a checkpoint suffices"
    assert (joiner.join().rounds, joiner.digest) == (first.rounds, first.digest)
    assert "the others are asked to wait" in joiner.said[0]


def test_worker_that_catches_up_for_long_says_so(store, monkeypatch):
    monkeypatch.setattr("demopt.runs.weights._QUIET", 0.0)
    Worker(store, 0, keep_log=True).round(3)
    assert Worker(store, 1).join().said == ["catching up: at round 1"], "then once a minute"


def test_joiner_that_the_others_outrun_asks_them_to_wait(store):
    first, slow = Worker(store, 0, keep_log=True).round(), stores.Through(store)

    def get(name, most):
        if name.endswith("/manifest") and first.rounds < 60 and not log.look(store, first.rounds).hellos:
            first.round()  # a round per manifest that the joiner reads, unless asked to wait
        return store.get(name, most)

    slow.get = get
    assert Worker(slow, 1).join().rounds == first.rounds < 60


@pytest.mark.parametrize("older", [False, True])
def test_manifest_is_not_put_where_another_run_or_an_older_copy_has_replaced_the_run(older, store, monkeypatch):
    monkeypatch.setattr("demopt.runs.open_round.TOLD_AFTER", 0.0)
    worker = Worker(store, 0).round()
    wait, mine = OpenRound._wait, worker.run.record.identity.encode()

    def replaced(*given):
        if older:
            store.delete([log.manifest_name(0)])
        else:
            stores.change(store, RECORD, lambda data: data.replace(mine, b"another"))
        return wait(*given)

    monkeypatch.setattr(OpenRound, "_wait", replaced)
    with pytest.raises(DemoptError, match="the run is gone from" if older else "holds another run than this worker's"):
        worker.round()
    assert not log.look(store, 1).has_manifest


def test_worker_that_leaves_behind_the_others_writes_no_checkpoint(store):
    first, late = joined(store, checkpoint_every=50)
    first.round(4)
    late.step()
    late.run.leaving, late.run.asked_to_stop = True, lambda: True
    late.optimizer.finish_round(last=True)
    late.run.wait_for_uploads()
    assert late.rounds < first.rounds
    assert log.checkpoints(store) == [0]


def test_checkpoints_do_not_queue_behind_a_slow_upload_and_a_wait_for_it_is_told(store, monkeypatch):
    done, put = threading.Event(), store.put_if_absent
    store.put_if_absent = lambda name, data: (name.startswith("checkpoints") and done.wait(60.0), put(name, data))[1]
    worker = Worker(store, 0, checkpoint_every=1)
    while worker.rounds < 12:  # more than the requests that run at once
        worker.step()
    worker.run.say = lambda text: (worker.said.append(text), done.set())
    monkeypatch.setattr("demopt.runs.open_round.TOLD_AFTER", 0.0)
    worker.run.wait_for_uploads()
    assert log.checkpoints(store) == [0, 1]
    assert ["left out" in said for said in worker.said] == [True, False]
    worker.round()
    assert log.checkpoints(store) == [0, 1, 13]


def test_process_waits_at_its_end_for_an_upload_and_for_no_request():
    bare, waited = ObjectStore(), set()
    store = stores.Through(bare, lambda _: waited.add(not threading.current_thread().daemon))
    Worker(store, 0, checkpoint_every=1).round(2)
    assert waited == {False}
    script = """
import threading, time, torch
from demopt import FolderExchange, LocalDeMo
from demopt.runs.store import ObjectStore

class Slow(ObjectStore):
    def put_if_absent(self, name, data):
        if name == "checkpoints/00000001":
            ended.wait()
            time.sleep(0.3)
            print("uploaded")
        return super().put_if_absent(name, data)

ended = threading.Event()
p = torch.nn.Parameter(torch.ones(4, 4))
run = FolderExchange(Slow(), checkpoint_every=1)
optimizer = LocalDeMo(torch.optim.SGD([p], lr=0.1), sync_every=1, process_group=run)
p.grad = torch.ones(4, 4)
optimizer.step()
print("end")
ended.set()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (["end", "uploaded"], "")


def test_many_requests_at_once_take_few_threads_and_each_is_answered():
    run, seen = FolderExchange(ObjectStore()), set()

    def call(number):
        seen.add(threading.active_count())
        return number

    before = threading.active_count()
    for _ in range(20):
        assert run.together([functools.partial(call, number) for number in range(100)]) == [*range(100)]
    assert max(seen) <= before + 8


def test_error_of_an_upload_that_is_no_stores_is_raised_also_after_later_uploads():
    run = FolderExchange(ObjectStore())
    for call in (Mock(side_effect=MemoryError), Mock()):
        run.later(call)
    with pytest.raises(MemoryError):
        run.wait_for_uploads()


def test_last_message_of_a_round_is_decided_in_three_trips_to_the_store():
    """Requests side by side are one trip: the message and a look, the others' messages, the manifest."""
    bare, decided = ObjectStore(), threading.Event()

    def wait(call):
        if call == "list" and log.look(bare, 0).messages:
            decided.wait()  # the first worker does not look before the last one has decided

    first, last = Worker(stores.Through(bare, wait), 0, late=1e9).join(), Worker(bare, 1, late=1e9).join()
    trips, make = [], last.run.together
    last.run.together = lambda calls: (trips.append(calls), make(calls))[1]
    with waiting(first.round, bare):
        last.round()
        decided.set()
    assert len([*filter(None, trips)]) == 2, "and the manifest"
    assert (first.rounds, first.digest) == (1, last.digest)


@pytest.mark.parametrize("count", [1, 3])
def test_requests_of_a_round_are_those_of_the_documents(count):
    """Between two checkpoints. Lists have no upper limit: how often a worker looks again depends on speed."""
    bare, calls = ObjectStore(), []
    workers = [Worker(stores.Through(bare, calls.append), seed, checkpoint_every=100) for seed in range(count)]
    together(workers, 1)
    calls.clear()
    together(workers, 2)
    reads = count * (count + 1)
    assert reads <= calls.count("get") <= reads + count - 1  # again, if another's manifest comes between two requests
    assert count < calls.count("put_if_absent") <= 2 * count
    assert calls.count("list") >= count


def test_worker_whose_look_has_listed_its_own_message_does_not_read_that(monkeypatch):
    monkeypatch.setattr("demopt.runs.open_round._STILL_THERE", math.inf)  # put and look run side by side at any speed
    bare, calls = ObjectStore(), []

    def hook(call):
        calls.append(call)
        if call == "list" and worker.rounds:
            wait_for(lambda: log.look(bare, worker.rounds).messages)

    worker = Worker(stores.Through(bare, hook), 0, late=1e9, checkpoint_every=100)
    worker.round()
    calls.clear()
    worker.round()
    assert calls.count("get") == 2, "the manifest before, and the wish to stop"

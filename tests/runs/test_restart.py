"""A worker that dies between the put of its message and the round's manifest: its state goes on, once and exactly."""

import functools
import math
import signal
import threading
from contextlib import nullcontext, suppress
from dataclasses import replace
from unittest.mock import Mock, patch

import pytest
import stores
import torch
import torch.distributed.checkpoint as dcp
from workers import Counter, Worker, applied, at_first, counters, joined, replayed, rounds, steps, times_applied

import problems
from demopt.checkpoint import LoadPlanner, OptimizerState, Reader
from demopt.errors import DemoptError, ExchangeError, MessageError, SettingsError
from demopt.exchange import SingleRank
from demopt.runs import checkpoints, log
from demopt.runs.exchange import FolderExchange
from demopt.runs.open_round import CoveredError
from demopt.runs.store import RECORD, ObjectStore, StoreError
from demopt.train.runs.status import progress, status_of

pytestmark = pytest.mark.usefixtures("still")


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("decided", ["with it", "without it", "after the restart", "at a second join", "long ago"])
@pytest.mark.parametrize("saved", ["after the error", "before the message", "a step later"])
def test_work_of_a_message_that_was_undecided_at_a_restart_is_applied_once(delay, decided, saved):
    bare, away = ObjectStore(), threading.Event()

    def put_if_absent(name, data):
        if away.is_set() and name.endswith("/manifest"):
            raise StoreError("away")
        return bare.put_if_absent(name, data)

    silent = stores.Through(bare)
    silent.put_if_absent = put_if_absent
    other, dies = Counter(bare, 0, delay), Counter(silent, 1, delay)
    steps(*[other, dies] * 4)
    for worker in (other, dies):
        worker.optimizer.flush()
        worker.optimizer.resync()
    number = int(dies.optimizer.replicator.round_number)
    dies.step()
    state, kept = dies.state(), dies.taken
    away.set()
    with suppress(ExchangeError):
        dies.step()
        dies.optimizer.flush()
    name = log.message_name(number, "w1")
    message = bare.get(name, 1 << 20)
    if saved == "a step later":
        with suppress(ExchangeError):
            dies.step()
    if saved != "before the message":
        state, kept = dies.state(), dies.taken
    if decided == "without it":
        bare.delete([name])
    if decided not in ("after the restart", "at a second join"):
        steps(*[other] * (4 if decided == "long ago" else 2))
        other.optimizer.flush()
        senders = [each.worker for each in log.read_manifest(bare, other.run.record.identity, number).senders]
        assert ("w1" in senders) == (decided != "without it")
    bare.put_if_absent(name, message)
    again = Counter(silent, 1, delay, state, dies.taken)
    if decided == "at a second join":
        with nullcontext() if saved == "before the message" else pytest.raises(ExchangeError):
            again.join()
    away.clear()
    again.join()
    assert saved == "before the message" or again.optimizer.local_steps == (saved == "a step later")
    sent = applied(bare, again.optimizer.replicator.wiring().route.layout).view(-1, 128)[1, :kept].sum()
    is_dropped = saved == "before the message" and decided != "without it"  # all of it is in the later message
    assert again.run.sequences.unsent == (0 if is_dropped else kept - sent)
    steps(again, again, again)
    _, counts = times_applied(bare, [other, again])
    lost = range(kept, dies.taken)  # steps after the state was saved: in the message, or nowhere
    assert counts[:kept] == [1.0] * kept, counts[: again.taken]
    assert {counts[step] for step in lost} <= {float(decided != "without it")}
    assert counts[dies.taken :] == [1.0] * 3


def test_later_message_whose_round_is_covered_while_its_worker_joins_counts_once():
    bare, (other, dies) = counters()
    steps(other, dies, dies, dies)
    state = dies.state()
    dies.step()  # the message that the state does not know, and its round
    dies.optimizer._rounds.save()
    again = Counter(bare, 1, 0, state, dies.taken)
    inner, run, covered = again.optimizer._rounds, again.run, Mock(side_effect=CoveredError("covered"))
    undecided_at_first = patch.object(inner, "next_manifest", at_first(lambda: None, inner.next_manifest))
    with undecided_at_first, patch.object(run, "results_of", at_first(covered, run.results_of)):
        again.join()
    steps(again, again)
    _, counts = times_applied(bare, [other, again])
    assert set(counts) == {1.0}, counts


def test_message_that_a_state_does_not_know_counts_once_if_an_error_ends_the_first_join():
    bare = ObjectStore()
    other, dies = Counter(bare, 0), Counter(bare, 1)
    steps(other, dies, dies, dies)
    again = Counter(bare, 1, 0, dies.state(), dies.taken + 1)
    dies.step()
    away = patch.object(again.optimizer._rounds, "_drop_if_sent_since", side_effect=ExchangeError("away"))
    with away, pytest.raises(ExchangeError, match="away"):
        again.join()
    state = again.state()
    assert state["folder"]["before"] == log.digest_of(again.run.decided)
    again = Counter(bare, 1, 0, state, dies.taken).join()
    steps(again, again)
    _, counts = times_applied(bare, [other, again])
    assert set(counts) == {1.0}, counts


@pytest.mark.parametrize("is_gone", [False, True])
def test_message_that_a_state_does_not_know_counts_once_under_its_second_name(is_gone):
    bare = ObjectStore()
    other, dies = Counter(bare, 0), Counter(bare, 1)
    steps(other, dies, dies, dies)
    state, kept, number = dies.state(), dies.taken, int(dies.optimizer.replicator.round_number)
    bare.put_if_absent(log.message_name(number, "w1"), b"another object")
    dies.step()
    assert dies.run.worker.startswith("w1-")
    steps(other, other)
    name = log.message_name(number, dies.run.worker)
    message = bare.get(name, 1 << 20)
    other.optimizer._rounds.save()  # a checkpoint
    if is_gone:  # as after it without `keep_log`
        bare.delete([name])
    again = Counter(bare, 1, 0, state, dies.taken).join()
    assert again.run.sequences.unsent == 0
    bare.put_if_absent(name, message)
    steps(again, again, again)
    _, counts = times_applied(bare, [other, again])
    assert set(counts[:kept]) == {1.0}, counts


@pytest.mark.parametrize(("was_there", "is_gone"), [(False, False), (True, False), (True, True)])
def test_message_of_another_worker_whose_name_is_like_a_second_one_drops_nothing(was_there, is_gone):
    bare = ObjectStore()
    other, worker = Counter(bare, 0), Counter(bare, 1)
    other.run.worker = "w1-12345678"
    steps(*[other] * (2 if was_there else 1), worker, worker, worker)
    state, kept, unsent = worker.state(), worker.taken, worker.run.sequences.unsent
    steps(*[other] * 4)
    name = log.message_name(worker.run.sent_from, other.run.worker)
    message = bare.get(name, 1 << 20)
    assert message is not None
    other.optimizer._rounds.save()
    if is_gone:
        bare.delete([name])
    again = Counter(bare, 1, 0, state, worker.taken).join()
    assert again.run.sequences.unsent == unsent > 0
    bare.put_if_absent(name, message)
    steps(again, again, again)
    _, counts = times_applied(bare, [other, again])
    assert set(counts[:kept]) == {1.0}, counts


def test_steps_after_a_join_that_an_error_has_ended_are_not_dropped_with_those_before_it():
    bare = ObjectStore()
    other, dies = Counter(bare, 0), Counter(bare, 1)
    steps(other, dies, dies, dies)
    again = Counter(bare, 1, 0, dies.state(), dies.taken + 1)
    dies.step()  # the message that the state does not know
    with patch.object(again.run, "hello", side_effect=ExchangeError("away")), pytest.raises(ExchangeError):
        again.join()
    with patch.object(again.optimizer, "step", again.optimizer.local_step):
        again.step()
    again.join()
    steps(again, again)
    _, counts = times_applied(bare, [other, again])
    assert set(counts) == {1.0}, counts


def test_catch_up_that_an_error_has_ended_goes_on_before_the_next_message_and_each_step_counts_once():
    store, (late, other) = counters()
    steps(late, late, *[other] * 6)
    away = pytest.raises(ExchangeError, match="away")
    with away, patch.object(late.optimizer._rounds, "apply_manifest", side_effect=ExchangeError("away")):
        steps(late, late)  # left out of round 2; there is another one after it
    steps(late, late)
    assert (late.run.last.manifest.round, late.run.row) == (3, 0)
    assert late.optimizer.stats.payload_bytes == late.optimizer.replicator.message_bytes, "one message, none too late"
    assert times_applied(store, [late, other]) == [[1.0] * late.taken, [1.0] * other.taken]


def test_regrouping_with_the_same_run_keeps_the_message_of_a_loaded_state():
    store, (other, dies) = counters()
    steps(*[other, dies] * 2, dies)
    away = patch.object(dies.run, "propose", side_effect=ExchangeError("away"))
    with away, pytest.raises(ExchangeError, match="away"):
        dies.step()
    again = Counter(store, 1, 0, dies.state(), dies.taken)
    again.optimizer.regroup(again.run)
    steps(*[again.join(), other] * 2)
    assert times_applied(store, [other, again]) == [[1.0] * other.taken, [1.0] * again.taken]


def test_state_goes_on_without_a_checkpoint_and_with_its_unsent_steps(store):
    first, second = joined(store, keep_log=True)
    rounds(first, second, first, second)
    second.step()  # half of a round
    state = second.state()
    first.round()
    again = Worker(store, 2, state=state).join()
    assert not again.said
    assert (again.optimizer.local_steps, again.rounds, again.digest) == (1, first.rounds, first.digest)
    weights = zip(again.optimizer._weights.global_of.values(), again.model.parameters(), strict=True)
    assert not any(torch.equal(one, other) for one, other in weights), "the unsent step stays local"


@pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized")
def test_checkpoint_of_dcp_has_what_a_state_knows_of_the_run(store, tmp_path):
    first, again = Worker(store, 0).round(), Worker(store, 1)
    dcp.save({"optimizer": OptimizerState(first.optimizer)}, checkpoint_id=tmp_path)
    planner, state = LoadPlanner(), {"optimizer": OptimizerState(again.optimizer)}
    dcp.load(state, storage_reader=Reader(tmp_path), planner=planner)
    for finds in (lambda: None, again.run.find_run):  # the state has it until this worker joins
        finds()
        assert again.state()["folder"] == first.state()["folder"]


def test_record_that_was_deleted_is_back_with_the_next_checkpoint(store):
    first = Worker(store, 0, checkpoint_every=2).round()
    record = store.get(RECORD, 1 << 20)
    store.delete([RECORD])
    first.round()
    assert store.get(RECORD, 1 << 20) == record
    assert Worker(store, 1).join().digest == first.digest


@pytest.mark.parametrize("is_gone", [False, True], ids=["there", "gone"])
def test_checkpoints_are_written_by_a_worker_that_may_not_write_the_record(is_gone):
    Worker(store := ObjectStore(), 0, checkpoint_every=1).join()
    worker = Worker(store, 1, checkpoint_every=1).round()
    if is_gone:
        store.delete([RECORD])
    worker.run.store.patience, put, tries = 2.0, store.put_if_absent, []

    def denied(name, data):
        if name == RECORD:
            tries.append(name)
            raise StoreError("access denied", at_first=True)
        return put(name, data)

    store.put_if_absent = denied
    worker.round(3)
    assert log.checkpoints(store) == [0, 3, 4]
    assert (tries, worker.said) == ([RECORD] * 3 * is_gone, [])


def test_state_of_another_run_or_a_damaged_one_is_refused(store):
    first = Worker(ObjectStore(), 0)
    rounds(first, Worker(store, 1))
    state = first.state()
    with pytest.raises(SettingsError, match="the state is of another run"):  # although the state is at a later round
        Worker(store, 4, state=Worker(ObjectStore(), 5).round(3).state()).join()
    other, weights = Worker(store, 2, state=state), Worker(store, 3)
    with pytest.raises(SettingsError, match=r"the state is of another run than .* holds"):
        other.join()
    digest = other.digest
    with pytest.raises(MessageError, match="the saved message is of round 0, the state of round 1"):
        first.optimizer._rounds._resume_round(first.run.last.envelope, None, 0)
    with pytest.raises(MessageError, match="the saved message has 1 bytes, and this layout's another length"):
        first.optimizer._rounds._resume_round(replace(first.run.last.envelope, round=1, body=b"x"), None, 0)
    known, noise, beyond = state["folder"], torch.full((9,), 7, dtype=torch.uint8), {"in_error": 99}  # of `unsent`
    wrong = [{"message": 3}, {"message": noise}, {"worker": None}, {"worker": ""}, {"worker": "../w"}, {"before": 3}]
    lacking = [{k: known[k] for k in known if k != name} for name in ("run", "worker", "before", "message")]
    wrong += [{"run": ""}, {"read": "3"}, {"read": '["a"]'}, {"sent_from": -1}, {"unsent": -1}, {"in_message": "1"}]
    for folder in [{**known, **each} for each in [*wrong, beyond]] + lacking:
        for worker in (other, weights):
            with pytest.raises(ValueError, match="the state's entry 'folder' is damaged"):
                worker.optimizer.load_state_dict({**state, "folder": folder})
    assert other.digest == digest != weights.digest, "nothing has changed"
    with pytest.raises(ValueError, match="the state's entry 'folder' is damaged"):
        Worker(None, 0, group=SingleRank()).optimizer.load_state_dict({**state, "folder": "text"})


def test_state_of_round_0_goes_on_where_later_ones_were_known(store):
    worker = Worker(store, 0, keep_log=True).join()
    state = worker.state()
    digest = worker.round(2).digest
    worker.optimizer.load_state_dict(state)
    assert (worker.join().rounds, worker.digest) == (2, digest)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_state_of_a_fork_that_lost_goes_back_to_a_checkpoint(store, is_interrupted):
    first = Worker(store, 0, keep_log=True).round()
    state = first.state()
    assert isinstance(state["folder"]["before"], str)
    state["folder"]["before"] = "00" * 16
    again = Worker(store, 1, state=state)
    again.optimizer.replicator.parameters[0].data.add_(1.0)  # as on the other branch
    if is_interrupted:  # as soon as it has the first checkpoint's weights
        rounds = again.optimizer._rounds

        def interrupted(checkpoint, take=rounds.take):
            take(checkpoint)
            signal.raise_signal(signal.SIGINT)

        rounds.take = at_first(interrupted, rounds.take)
        with pytest.raises(KeyboardInterrupt):
            again.join()
    again.join()
    assert (again.rounds, again.digest) == (1, first.digest)
    assert "round 1 is another one in" in again.said[0]


def test_state_of_the_branch_that_the_run_went_on_from_goes_on_although_the_store_shows_the_other_branch(store):
    first = Worker(store, 0, keep_log=True).round()
    state, digest = first.state(), first.round().digest
    stores.change(store, log.manifest_name(0), lambda packed: packed.replace(b'"author": "w0"', b'"author": "w9"'))
    again = Worker(store, 1, state=state).join()
    assert (again.rounds, again.digest) == (2, digest)


@pytest.mark.parametrize(("fails", "rounds"), [("results_of", 2), ("propose", 1)])
def test_worker_that_dropped_its_error_on_a_fork_goes_on_with_the_run_where_the_store_fails_then(store, fails, rounds):
    worker = Worker(store, 0, keep_log=True).round()
    with patch.object(worker.run, fails, side_effect=ExchangeError("away")), pytest.raises(ExchangeError):
        worker.round()
    again, name = Worker(store, 0, state=worker.state()), log.manifest_name(0)
    shown = store.get(name, 1 << 20)
    stores.put(store, name, shown.replace(b'"author": "w0"', b'"author": "w9"'))
    with patch.object(again.run, "known_manifest", side_effect=ExchangeError("away")), pytest.raises(ExchangeError):
        again.join()
    stores.put(store, name, shown)
    assert again.join().rounds == rounds
    assert not any(group.momentum.any() for group in again.optimizer.replicator.wiring().chunk_groups)
    if rounds == 1:  # the message of the state is in the open round
        again.round()
    worker.optimizer.flush()
    assert again.digest == worker.digest == replayed(store)[-1]


@pytest.mark.parametrize("restarts", [False, True])
def test_run_that_went_on_from_another_manifest_than_the_store_shows_is_followed_by_its_checkpoint(store, restarts):
    first = Worker(store, 0, checkpoint_every=2).round()
    state, shown = first.state(), store.get(log.manifest_name(0), 1 << 20)
    stores.put(store, log.manifest_name(0), shown.replace(b'"author": "w0"', b'"author": "w9"'))
    other = Worker(store, 1).round()
    stores.put(store, log.manifest_name(0), shown)
    first = Worker(store, 2, state=state).join() if restarts else first.round()
    assert (first.rounds, first.digest) == (2, other.digest)
    assert any("round 2 follows another round" in text for text in first.said)


def test_replay_leaves_out_a_checkpoint_of_a_fork_that_the_run_has_left(store, caplog):
    first = Worker(store, 0, keep_log=True, checkpoint_every=1).round(2)
    name, mine = log.checkpoint_name(first.run.record, 1), log.read_manifest(store, first.run.record.identity, 0).digest
    stores.change(store, name, lambda packed: packed.replace(mine.encode(), b"00" * 16))
    assert replayed(store)[-1] == first.digest
    assert "checkpoints/00000001 follows another manifest than rounds/00000000/manifest: it is of a fork" in caplog.text


def test_first_manifest_of_a_run_that_follows_another_one_is_damaged(store):
    Worker(store, 0, keep_log=True).round()
    stores.change(store, log.manifest_name(0), lambda data: data.replace(b'"before": ""', b'"before": "00"'))
    with pytest.raises(MessageError, match="the manifest of round 0 is damaged: it follows another one"):
        Worker(store, 1).join()
    with pytest.raises(DemoptError, match="follows another"):
        replayed(store)


def test_state_in_a_round_that_is_not_finite_has_none_of_its_sequences():
    worker = Counter(ObjectStore(), 0)
    worker.step()
    worker.parameter.data[-1] = math.inf
    away = patch.object(worker.run, "results_of", side_effect=ExchangeError("away"))
    with away, pytest.raises(ExchangeError, match="away"):
        worker.step()
    assert worker.state()["folder"]["unsent"] == 0
    assert (worker.run.sequences.unsent, worker.optimizer.flush(), worker.run.sequences.unsent) == (2, None, 0)


def test_undecided_message_of_a_state_that_starts_another_run_is_in_the_error_of_that():
    worker = Counter(ObjectStore(), 0)
    worker.step()
    with patch.object(log, "propose", side_effect=ExchangeError("away")), pytest.raises(ExchangeError, match="away"):
        worker.step()
    state = worker.state()
    early = {**state, "folder": {**state["folder"], "in_error": 0}}  # as before the message
    for each in (state, early):
        again = Counter(ObjectStore(), 1, state=each).join()
        assert (again.run.sequences.unsent, again.run.sequences.in_error) == (2, 2)


def test_state_in_a_round_that_is_not_finite_keeps_what_was_unsent_before():
    store, (worker, other) = counters()
    steps(other, other, worker, worker)  # `worker` is left out of the round
    worker.step()
    worker.parameter.data[-1] = math.inf
    away = patch.object(log, "propose", side_effect=ExchangeError("away"))
    with away, pytest.raises(ExchangeError, match="away"):
        worker.step()
    again = Counter(store, 0, 0, worker.state(), 4)
    assert times_applied(store, [again.join(), other])[0] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("restarts", [False, True])
def test_older_weights_that_a_resync_left_at_an_error_lose_no_step_and_no_name(restarts):
    store, (worker, other) = counters()
    steps(*[worker, other] * 2, *[worker] * 10)  # at the end nobody expects the other one any more
    with patch.object(worker.optimizer._rounds, "apply_manifest", side_effect=ExchangeError("away")):
        with pytest.raises(ExchangeError, match="away"):
            worker.optimizer.resync()
        worker.step()
    worker.run.late = 60.0
    if restarts:
        worker = Counter(store, 0, 0, worker.state(), worker.taken).join()
    worker.run.say = pytest.fail
    worker.step()
    assert worker.run.worker == "w0"
    assert times_applied(store, [worker, other]) == [[1.0] * 14, [1.0] * 2]


@pytest.mark.parametrize("behind", [False, True])
def test_state_that_was_loaded_has_no_round_before_it_joins(behind):
    store, (worker, other) = counters()
    steps(*[other, worker] * 3)
    state = worker.state()
    steps(worker, *[other] * 5)
    if behind:
        away = patch.object(worker.optimizer._rounds, "apply_manifest", side_effect=ExchangeError("away"))
        with away, pytest.raises(ExchangeError, match="away"):
            steps(worker, worker)
    worker.optimizer.load_state_dict(state)
    worker.run.say = pytest.fail
    worker.optimizer.flush()
    with pytest.raises(RuntimeError, match="has not joined the run yet; the first step, or join"):
        worker.optimizer.finish_round()
    worker.run.say = str
    counts = times_applied(store, [worker.join(), other])
    assert counts[0][:3] == [1.0] * 3


def test_join_reads_again_no_round_that_its_state_has_followed():
    store, (worker, other) = counters()
    steps(worker, *[other] * 10)
    worker.optimizer._rounds._catch_up()
    again, names = Counter(store, 0, 0, worker.state(), worker.taken), []
    again.run.store.get = lambda name, most, get=again.run.store.get: (names.append(name), get(name, most))[1]
    again.join()
    assert not any(name < log.folder_of(4) for name in names if name.startswith("rounds/"))


def test_message_counts_once_whose_round_is_covered_where_the_checkpoint_cannot_be_read_yet():
    bare, (other, dies) = counters()
    steps(other, dies)
    no_checkpoint = pytest.raises(ExchangeError, match="has no checkpoint after round 1")
    with no_checkpoint, patch.object(dies.run, "results_of", Mock(side_effect=CoveredError("covered"))):
        dies.step()
    state = dies.state()
    steps(other, other, other)
    other.optimizer._rounds.save()
    bare.delete(log.pieces(bare, range(1)))
    again = Counter(bare, 1, 0, state, dies.taken).join()
    steps(again, again)
    assert again.run.last.row == 0
    assert all(parameter.sum() == -dies.taken - other.taken - 2 for parameter in again.optimizer.replicator.parameters)


# Objects that are gone, of a run of four rounds with checkpoints after two and four

STATES = ("checkpoints/00000002", "checkpoints/00000004", "start")
BEGUN = "has rounds of a run whose object run is gone"


@pytest.mark.parametrize(
    ("gone", "running", "joining", "observing", "replaying", "status"),
    [
        (
            ["rounds/00000003/manifest"],
            "3/manifest of the run is gone from .*is its disk mounted",
            *["rounds/00000003/manifest is gone"] * 3,
            3,
        ),
        (["rounds/00000002/manifest"], None, None, None, "rounds/00000002/manifest is gone", 4),
        (["rounds/00000002/manifest", STATES[1]], None, *["rounds/00000002/manifest is gone"] * 3, 2),
        (["run"], None, BEGUN, BEGUN, BEGUN, 4),
        ([STATES[1]], None, None, None, None, 4),
        (STATES[:2], None, None, None, None, 4),
        (STATES, None, *["has no object start"] * 3, 4),
    ],
    ids=str,
)
@patch("demopt.runs.replay.FolderExchange", functools.partial(FolderExchange, patience=0.0))
def test_object_that_is_gone_is_named_where_it_is_needed(gone, running, joining, observing, replaying, status):
    """By a worker, a joiner, an observer (export), the replay, and the status; None: it goes on."""
    store = ObjectStore()
    first, joiner, observer = (Worker(store, seed, checkpoint_every=2, keep_log=True) for seed in range(3))
    first.round(4)
    record, digest = first.run.record, first.digest
    store.delete(log.checkpoint_name(record, 0) if name == "start" else name for name in gone)
    found = status_of(store, record, "here")
    assert (found["round"], found["step"], progress(found)) == (status, None, f"round {status}")  # a script's run
    for call, expected, told in (
        (lambda: replayed(store)[-1], digest, replaying),
        (lambda: (observer.optimizer.observe(), observer.digest)[1], digest, observing),
        (lambda: joiner.join().digest, digest, joining),
        (lambda: (first.round(), first.rounds)[1], 5, running),
    ):
        error = ExchangeError if told is running else DemoptError
        with nullcontext() if told is None else pytest.raises(error, match=told):
            assert call() == expected


def test_model_that_is_loaded_after_the_state_of_a_worker_is_told(store):
    first, alone = Worker(store, 0).round(), Worker(None, 2, group=SingleRank())
    steps(first, alone)
    again = Worker(store, 1, state=first.state())
    for worker in (first, again, alone):
        mine = problems.values(worker.optimizer)
        with pytest.raises(RuntimeError, match=r"observe (with a new optimizer|is for a run in a folder)"):
            worker.optimizer.observe()
        assert problems.same(problems.values(worker.optimizer), mine), "its step stays"
    torch.nn.init.ones_(again.model[0].weight)
    with pytest.warns(UserWarning, match="the weights were changed after load_state_dict"):
        again.join()


def test_nobody_waits_for_an_observer_however_far_it_follows(store):
    first, observer = Worker(store, 0, keep_log=True).round(9), Worker(store, 1)
    assert (observer.optimizer.observe(), observer.digest) == (9, first.digest)
    assert not [number for number in range(40) if observer.run.worker in log.look(store, number).hellos]


@pytest.mark.parametrize(("fails", "resumes"), [("hello", True), ("hello", False), ("read_checkpoint", False)])
def test_join_that_an_outage_ended_may_come_again_and_is_of_no_run_without_its_weights(store, fails, resumes):
    first = Worker(store, 0).round(2)
    again = Worker(store, 1, state=first.state() if resumes else None)
    holder = again.run if fails == "hello" else checkpoints
    with patch.object(holder, fails, side_effect=ExchangeError("away")), pytest.raises(ExchangeError, match="away"):
        again.join()
    assert ("folder" in again.state()) == (fails == "hello")
    assert (again.join().rounds, again.digest) == (2, first.digest)
    assert "folder" in again.state()


def test_what_to_do_about_a_damaged_manifest_or_an_older_copy_of_a_run_is_told_and_goes_on():
    store, newest = ObjectStore(), "rounds/00000003/manifest"
    first, joiner, again = (Worker(store, seed, checkpoint_every=2) for seed in range(3))
    first.round(4)
    stores.put(store, newest, b"garbage")
    with pytest.raises(ExchangeError, match="delete it and the checkpoints after it: then its round is decided again"):
        joiner.join()
    assert not joiner.said
    store.delete([newest, STATES[1]])
    with pytest.raises(DemoptError, match=r"not so far: it is an older copy; .*delete state\.pt"):
        Worker(store, 3, state=first.state()).join()
    again.round()
    assert again.senders == ["w0", "w2"]


def test_status_of_a_run_with_a_damaged_manifest_before_its_checkpoint_is_told(store):
    first = Worker(store, 0, checkpoint_every=2).round(4)
    stores.put(store, "rounds/00000001/manifest", b"garbage")
    found = status_of(store, first.run.record, "here")
    assert (found["round"], found["checkpoint"], found["seconds_per_round"] is None) == (4, 4, False)


def test_message_of_a_round_that_is_long_over_is_not_put_again_after_a_restart(store, monkeypatch):
    first, second = joined(store, checkpoint_every=1)
    monkeypatch.setattr(second.run, "put", Mock(side_effect=ExchangeError("away")))
    with pytest.raises(ExchangeError, match="away"):
        second.round()
    first.round(4)  # its checkpoints delete the old messages
    again = Worker(store, 1, late=60.0, state=second.state())
    monkeypatch.setattr(again.run, "put", put := Mock(wraps=again.run.put))
    assert again.join().rounds == 4
    assert put.call_args_list == []

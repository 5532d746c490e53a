"""The sequences that a run reads: each exactly once per epoch, whoever comes, leaves, is late or dies."""

import copy
import random
import threading
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from unittest.mock import Mock

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from test_protocol import ACTIONS, MOST, InTurns, actions_of, schedule
from workers import Counter as Counting
from workers import Worker, joined

import demopt
from demopt.errors import ExchangeError, SettingsError
from demopt.exchange import SingleRank
from demopt.runs import log
from demopt.runs.reading import Reading, Reads, count
from demopt.runs.stop import put_stop
from demopt.runs.store import ObjectStore, Store
from demopt.train.config import TrainConfig
from demopt.train.runs import worker as trainers

TOTAL = 24


class Reader(InTurns):
    """A worker whose tokens are the numbers that it has read, plus one; how many it wants differs each time."""

    def work(self) -> None:
        self.run.sequences.total, self.run.sequences.wanted = TOTAL, 1 + (self.number + self.rounds) % 4
        if len(self.tokens.pending) + 3 <= MOST:
            self.tokens.pending += [number + 1 for number in self.run.sequences.take(3)]


def lost(bare: Store) -> set[int]:
    """The numbers that manifests take from workers that have sent no message."""
    identity, found, number, before = log.read_record(bare).identity, set[int](), 0, None
    while (manifest := log.read_manifest(bare, identity, number)) is not None:
        for worker in before.reading.held if before and before.reading else ():
            if worker not in {*manifest.reading.held, *(sender.worker for sender in manifest.senders)}:
                found |= {*before.reading.numbers(worker)}
        before, number = manifest, number + 1
    return found


@hypothesis.given(st.lists(ACTIONS, min_size=10, max_size=50))
@hypothesis.settings(max_examples=max(60, hypothesis.settings.default.max_examples // 2))
@hypothesis.example(  # a message of fewer than half of the members, whose worker then dies
    actions_of("go 0 1, join 0 1, die 0 1, go 0 4, join 0 1, go 1 1, join 0 1, go 0 1, go 0 1, go 1 1")
)
def test_run_reads_every_number_and_twice_only_what_a_lost_worker_held(actions):
    with schedule(Reader) as (bare, workers, carry_out):
        for action, who, turns in actions:
            carry_out(action, who, turns)
        for turn in range(4000):
            if not any(worker.alive for worker in workers):  # stopped, or all have left: another one goes on
                carry_out("join", 0, 1)
            for worker in workers:
                worker.turn("late" if turn < 60 or turn % 40 < 20 else "go")  # nobody waits for the dead for ever
            if done := [worker.tokens.applied for worker in workers if worker.run.sequences.are_all_read]:
                break
        assert all(worker.error is None for worker in workers), [worker.error for worker in workers]
        read, gone = Counter(token - 1 for token in done[0]), lost(bare)
    assert {*read} == {*range(TOTAL)}, "a number was never read"
    assert {number for number, times in read.items() if times > 1} <= gone, "a number was read twice"


def reads_ahead(sampler, batches):
    """The batches as a DataLoader with workers gives them: it asks for one ahead before it hands one on."""

    class MultiProcessingDataLoaderIter:  # as torch's is named
        def ask(self, most: int) -> list[list[int]]:
            return [*islice(asked, most)]

    asked, loader = iter(sampler), MultiProcessingDataLoaderIter()
    waiting = deque(loader.ask(batches))
    while waiting:
        waiting.extend(loader.ask(1))
        yield waiting.popleft()


class Fetcher:
    """Asks for one batch before it hands one on, to know which is the last."""

    def batches(self, sampler):
        asked = iter(sampler)
        held = next(asked, None)
        while held is not None:
            following = next(asked, None)
            yield held
            held = following


@pytest.mark.parametrize(
    ("module", "given"),
    [("lightning.pytorch.loops.fetchers", {}), ("timm.data.loader", {}), ("a.script", {"prefetches": True})],
)
def test_loop_that_asks_for_one_batch_ahead_leaves_none_out_of_the_rounds(module, given, monkeypatch):
    monkeypatch.setattr(Fetcher, "__module__", module)
    worker, read = Worker(ObjectStore(), 0, sync_every=3), list[int]()
    for batch in Fetcher().batches(demopt.RunSampler(worker.optimizer, 48, batch=4, **given)):
        worker.step()
        read += batch
    assert sorted(read) == [*range(48)]
    assert (worker.run.is_over, worker.optimizer.local_steps) == (True, 0)


def test_loop_that_asks_for_one_batch_ahead_unknown_to_the_sampler_is_told():
    worker = Worker(ObjectStore(), 0, sync_every=3)
    batches = Fetcher().batches(demopt.RunSampler(worker.optimizer, 48, batch=4))
    for _ in islice(batches, 11):
        worker.step()
    next(batches)
    with pytest.warns(
        UserWarning, match="came after the run's end, so no round has it: give RunSampler prefetches=True"
    ):
        worker.step()


def test_worker_that_prefetches_is_not_told_to_prefetch_when_others_have_read_its_batches(recwarn):
    first, lost = joined(ObjectStore(), sync_every=3)
    batches = demopt.RunSampler(lost.optimizer, 48, batch=2, prefetches=True)
    ahead = iter(batches)
    next(ahead), next(ahead)
    for _ in demopt.RunSampler(first.optimizer, 48, batch=2):
        first.step()
    lost.step()
    lost.optimizer.finish_round()
    assert lost.run.is_over
    lost.step()
    assert not [each for each in recwarn if "prefetches" in str(each.message)]


@pytest.mark.parametrize("ahead", [0, 1, 5])
@pytest.mark.parametrize("delay", [0, 1])
def test_sampler_reads_every_sequence_once_per_epoch_with_joiners_leavers_and_other_batches(delay, ahead):
    store, read, futures = ObjectStore(), Counter[int](), list[Future[None]]()
    lock, both = threading.Lock(), threading.Barrier(2)

    def work(number: int) -> None:
        worker = Worker(store, number, late=60.0, delay=delay).join()
        if number < 2:
            both.wait(200.0)  # so that neither reads everything before the other is there
        sampler = demopt.RunSampler(worker.optimizer, 101, batch=2 + number, epochs=2)
        for batch in reads_ahead(sampler, ahead) if ahead else sampler:
            worker.step()
            with lock:
                read.update(batch)
            if number == 0 and worker.rounds >= 2 and len(futures) == 2:
                futures.append(pool.submit(work, 2))
            if number == 1 and worker.rounds >= 4:
                worker.run.leaving = True
                worker.optimizer.finish_round(last=True)
                break
        assert worker.run.is_over or worker.run.leaving
        assert (worker.optimizer.local_steps, worker.run.sequences.in_steps) == (0, 0)
        worker.run.wait_for_uploads()

    with ThreadPoolExecutor(3) as pool:
        futures += [pool.submit(work, number) for number in range(2)]
        for future in futures:  # a third one comes on the way
            future.result()
    assert len(futures) == 3
    assert read == Counter(dict.fromkeys(range(101), 2))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_sequences_of_a_live_worker_whose_name_something_else_has_in_a_round_count_once(delay, is_late):
    store, read, names, both = ObjectStore(), Counter[int](), Counter[str](), threading.Barrier(2)
    store.put_if_absent(log.message_name(5, "w0"), b"another object")

    def work(number: int) -> None:
        worker = Worker(store, number, late=0.5 if is_late else 3.0, delay=delay).join()
        both.wait(200.0)
        for batch in demopt.RunSampler(worker.optimizer, 101, batch=2):
            worker.step()
            read.update(batch)
            names[worker.run.worker] += 1
            time.sleep(2.2 if worker.rounds == 5 and number and not is_late else 0.0)  # until `put` has read it again

    with ThreadPoolExecutor(2) as pool:
        [*pool.map(work, range(2))]
    assert read == Counter(dict.fromkeys(range(101), 1))


def test_sequences_of_a_worker_late_once_before_its_name_is_taken_in_one_round_count_once():
    bare, read = ObjectStore(), list[int]()
    other, worker = Counting(bare, 0), Counting(bare, 1)
    for each in (other, worker):
        each.run.sequences.total, each.run.sequences.wanted = 60, 4

    def step(each):
        numbers = each.run.sequences.take(1)
        each.run.sequences.in_steps += len(numbers) - 1  # as `Counter` counts one
        if each is worker:
            read.extend(numbers)
        each.step()

    for _ in range(8):
        step(worker)
    number, put = int(worker.optimizer.replicator.round_number), worker.run.put

    def late(mine):
        while mine.round in (number, number + 1) and worker.run.manifest(mine.round) is None:
            step(other)
        return put(mine)

    worker.run.put = late
    bare.put_if_absent(log.message_name(number + 1, "w1"), b"another object")
    for _ in range(16):
        step(worker)
    assert sorted(set(read)) == sorted(read)


def test_reads_of_a_worker_that_restarts_in_a_round_in_which_something_else_has_its_name_are_counted():
    previous = log.Manifest(
        "a run", 4, "w0", [], {}, {"w0": 0, "w1": 0}, {}, "", reading=Reading(100, 8, {"w0": [(0, 4)], "w1": [(4, 8)]})
    )

    def sent(worker, read, note=None):
        return log.Envelope(
            "a run", 5, worker, 1, False, False, None, note, previous.digest, 0.0, b"", Reads(read, 4, 100)
        )

    def renamed(message):
        return replace(message, worker=log.second_name("w1", log.digest(message.packed())))

    mine = sent("w0", 4)
    for note in range(6):  # which decides the order of the two second names
        both = renamed(sent("w1", 4, note)), renamed(sent("w1", 0, note))
        messages = {each.worker: (each, log.digest(each.packed())) for each in (mine, *both)}
        assert log.draft(mine, previous, messages, {"w1": "another"}, {}).reading.position == 8


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads, as newer Python says
def test_data_loader_with_workers_reads_every_sequence_once():
    worker, read = Worker(ObjectStore(), 0, sync_every=3), list[int]()
    sampler = demopt.RunSampler(worker.optimizer, 50, batch=4)
    for batch in torch.utils.data.DataLoader(range(50), batch_sampler=sampler, num_workers=2):
        assert worker.run.sequences.unsent <= 3 * 4  # what is read ahead is not counted
        worker.step()
        read += batch.tolist()
    assert sorted(read) == [*range(50)]
    assert worker.run.is_over
    assert worker.optimizer.local_steps == 0


def test_state_does_not_count_what_a_loader_has_read_ahead():
    worker = Worker(ObjectStore(), 0)
    for _ in islice(reads_ahead(demopt.RunSampler(worker.optimizer, 50, batch=2), 4), 5):
        worker.step()
    again = Worker(worker.run.store, 0, state=worker.state())
    batches = [batch for batch in demopt.RunSampler(again.optimizer, 50, batch=2) if again.step() is None or batch]
    assert sum(map(len, batches)) == 50 - 5 * 2


def test_lost_workers_sequences_that_come_after_a_loaders_end_are_told_and_read_by_the_next_loop():
    store, read = ObjectStore(), list[int]()
    lost, worker = Worker(store, 0).join(), Worker(store, 1)
    lost.run.sequences.total, lost.run.sequences.wanted = 8, 6
    lost.round()
    sampler = demopt.RunSampler(worker.optimizer, 8, batch=2)

    def loop() -> None:
        for batch in reads_ahead(sampler, 3):
            worker.step()
            read.extend(batch)

    with pytest.warns(UserWarning, match="iterate again"):
        loop()
    assert len(read) == 2
    loop()
    assert (sorted(read), worker.run.is_over) == ([*range(8)], True)


@pytest.mark.parametrize(
    "steps", [lambda n: n not in (2, 6), lambda n: n > 1, lambda n: n % 2], ids=["skip", "first", "half"]
)
def test_batch_whose_step_a_loop_skips_counts_as_read(steps):
    worker, given = Worker(ObjectStore(), 0, sync_every=2), 0
    for batch in demopt.RunSampler(worker.optimizer, 20, batch=2):
        given += len(batch)
        if steps(given // 2):
            worker.step()
    assert (given, worker.run.is_over, worker.optimizer.local_steps) == (20, True, 0)


def test_batch_that_a_loop_skips_counts_as_read_also_where_its_loader_reads_ahead():
    worker, given = Worker(ObjectStore(), 0, sync_every=2), 0
    for batch in reads_ahead(demopt.RunSampler(worker.optimizer, 40, batch=2), 3):
        given += len(batch)
        if given not in (12, 20):
            worker.step()
    assert (given, worker.run.is_over, worker.optimizer.local_steps) == (40, True, 0)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("change", ["load", "resync"])
def test_each_sequence_counts_once_where_steps_are_dropped_in_a_loop_that_reads_ahead(change, delay):
    worker, kept, state = Worker(ObjectStore(), 0, sync_every=6, delay=delay), [], None
    for batch in reads_ahead(demopt.RunSampler(worker.optimizer, 80, batch=2), 4):
        assert not worker.run.is_over
        worker.step()
        kept.append(batch)
        if len(kept) == 8 and state is None:
            state = worker.state()
        elif len(kept) == 10 and state:
            if change == "load":
                worker.optimizer.load_state_dict(state)
                kept = kept[:8]
            else:
                dropped = worker.optimizer.local_steps
                worker.optimizer.resync()
                kept = kept[:-dropped]
            state = {}
    assert Counter(chain.from_iterable(kept)) == Counter(range(80))
    assert worker.run.is_over


def test_step_after_an_error_in_the_rounds_that_end_a_loaders_run_ends_it(monkeypatch):
    worker = Worker(ObjectStore(), 0, sync_every=3, delay=1)
    batches = reads_ahead(demopt.RunSampler(worker.optimizer, 20, batch=2), 3)
    for _ in islice(batches, 9):
        worker.step()
    next(batches)
    exchange = worker.run.exchange_round
    monkeypatch.setattr(worker.run, "exchange_round", Mock(side_effect=ExchangeError("away")))
    with pytest.raises(ExchangeError, match="away"):
        worker.step()
    monkeypatch.setattr(worker.run, "exchange_round", exchange)
    worker.step()
    assert worker.run.is_over


def test_loop_that_was_left_at_its_loaders_end_says_nothing_in_the_next_samplers(recwarn):
    worker = Worker(ObjectStore(), 0, sync_every=3)
    for _ in islice(reads_ahead(demopt.RunSampler(worker.optimizer, 50, batch=4), 4), 10):
        worker.step()
    for _ in demopt.RunSampler(worker.optimizer, 50, batch=4):
        worker.step()
    assert worker.run.is_over
    assert not [each for each in recwarn if "iterate again" in str(each.message)]


def test_worker_whose_rounds_have_more_sequences_than_there_are_numbers_wants_all():
    worker = Worker(ObjectStore(), 0, sync_every=10**20)
    assert len(next(iter(demopt.RunSampler(worker.optimizer, 24, batch=2)))) == 2
    assert worker.run.sequences.left == 22
    trainer = Mock(config=TrainConfig(sync_every=10**12), batch_of=lambda _: 10**11)
    trainers.Worker._want(trainer)
    assert trainer.run.sequences.wanted == (1 << 62) - 1


def test_state_knows_what_its_local_steps_have_read():
    read, store, state = Counter[int](), ObjectStore(), None
    for steps in (5, 99):
        worker = Worker(store, 0, state=state)
        for batch in islice(demopt.RunSampler(worker.optimizer, 20, batch=2), steps):
            worker.step()
            read.update(batch)
        state = worker.state()
        assert len(state["folder"]["read"]) == 2 * worker.optimizer.local_steps
    assert read == Counter(range(20))


def test_state_saved_again_before_a_join_knows_what_local_steps_since_it_was_loaded_have_read():
    worker = Worker(ObjectStore(), 0).join()
    worker.run.sequences.total, worker.run.sequences.wanted = 40, 6
    worker.round()
    ahead = worker.run.sequences.take(2, ahead=True)
    worker.optimizer.load_state_dict(worker.state())
    worker.optimizer.local_step()
    saved = worker.state()["folder"]
    assert (saved["read"], saved["unsent"], saved["in_error"]) == (ahead, 2, 0)


def test_sampler_gives_out_again_what_local_steps_that_resync_drops_have_read():
    worker, given = Worker(ObjectStore(), 0, sync_every=4), []
    for batch in demopt.RunSampler(worker.optimizer, 24, batch=2):
        worker.step()
        given += batch
        if len(given) == 14:  # three steps after a round
            worker.optimizer.resync()
    assert given[14:20] == given[8:14]
    assert sorted(given[:8] + given[14:]) == [*range(24)]


def test_message_of_a_sampler_weighs_as_its_unsent_sequences_also_after_a_break_of_the_loop():
    worker, weights = Worker(ObjectStore(), 0, sync_every=4, top_k=None), []
    sampler = demopt.RunSampler(worker.optimizer, 64, batch=4)
    while not worker.run.is_over:
        for _ in islice(sampler, 3):
            worker.step()
            weights += [each.samples for each in worker.run.decided.senders] * (worker.optimizer.local_steps == 0)
    assert weights == [16] * 4


def test_run_that_has_read_all_has_one_checkpoint_of_its_end_also_if_its_trainer_goes_on():
    worker = Worker(ObjectStore(), 0, sync_every=2)
    for _ in demopt.RunSampler(worker.optimizer, 20, batch=2):
        worker.step()
    ended = worker.rounds
    assert worker.round(2).rounds == ended + 2
    assert log.checkpoints(worker.run.store) == [0, ended]


def test_worker_that_the_last_round_has_left_out_saves_the_end_of_the_run():
    store = ObjectStore()
    late, other = (Worker(store, number).join() for number in range(2))
    late.run.rounds = other.run.rounds = 1
    other.optimizer._rounds.save = Mock()  # as if it died there
    for worker in (other, late):
        worker.round()
    assert (late.run.row, log.checkpoints(store)) == (None, [0, 1])


@pytest.mark.parametrize("delay", [0, 1])
def test_message_of_a_sampler_that_brings_what_a_left_out_one_had_weighs_as_much(delay):
    store = ObjectStore()
    late, other = (Worker(store, n, sync_every=2, top_k=None, delay=delay).join() for n in range(2))
    late.run.note = lambda: {"sequences": late.run.sequences.unsent}
    batches = iter(demopt.RunSampler(late.optimizer, 80, batch=2))
    other.run.sequences.total, sent = 80, []
    while len(sent) < 3:
        other.round(2 if len(sent) == 1 else 0)  # it decides rounds alone
        next(batches)
        late.step()
        if late.run.row is not None and late.run.last.manifest.round not in [number for number, *_ in sent]:
            sender = late.run.last.manifest.senders[late.run.row]
            sent.append((late.run.last.manifest.round, sender.samples, sender.note["sequences"]))
    assert [samples for _, samples, _ in sent] == [max(1, sequences) for *_, sequences in sent]


def test_sampler_goes_on_after_a_state_is_loaded_in_its_loop():
    worker, read, state = Worker(ObjectStore(), 0), Counter[int](), None
    for number, batch in enumerate(demopt.RunSampler(worker.optimizer, 40, batch=2)):
        worker.step()
        read.update(batch)
        if number == 7:
            state = copy.deepcopy(worker.optimizer.state_dict())
        elif number == 11:
            worker.optimizer.load_state_dict(state)
    assert {*read} == {*range(40)}
    assert worker.run.sequences.are_all_read


@pytest.mark.parametrize("in_error", [0, 2])
def test_sequences_of_local_steps_that_resync_drops_are_given_out_again_and_no_longer_counted(in_error):
    worker = Worker(ObjectStore(), 0).join()
    worker.run.sequences.total, worker.run.sequences.wanted = 40, 6
    worker.round()
    given = worker.run.sequences.take(6)
    worker.run.sequences.in_steps, worker.run.sequences.in_error = 6 - in_error, in_error
    worker.step()
    worker.optimizer.resync()
    assert (worker.run.sequences.unsent, worker.run.sequences.take(6)) == (in_error, given[in_error:])


def test_state_knows_what_its_error_has_read_where_the_catch_up_after_a_resync_has_failed(monkeypatch):
    worker = Worker(ObjectStore(), 0).join()
    worker.run.sequences.total, worker.run.sequences.wanted = 40, 6
    worker.round()
    given = worker.run.sequences.take(6)
    worker.run.sequences.in_steps, worker.run.sequences.in_error = 4, 2
    worker.step()
    monkeypatch.setattr(worker.run, "manifest", Mock(side_effect=ExchangeError("away")))
    with pytest.raises(ExchangeError, match="away"):
        worker.optimizer.resync()
    assert worker.state()["folder"]["read"] == given[:2]


@pytest.mark.parametrize("delay", [0, 1])
def test_no_sequence_is_read_again_after_a_stop_by_who_has_it_in_a_state(delay):
    read, store, state = Counter[int](), ObjectStore(), None
    for life in range(2):
        worker = Worker(store, 0, state=state, delay=delay)
        for batch in demopt.RunSampler(worker.optimizer, 40, batch=2):
            worker.step()
            read.update(batch)
            if (life, sum(read.values())) == (0, 14):
                put_stop(store, worker.rounds, worker.run.record.identity)
        state = worker.state()
        assert worker.run.stopping == (life == 0)
    assert read == Counter(range(40))


def test_what_a_stopped_worker_holds_is_read_by_others_once_nothing_else_is_left():
    before = log.Manifest(
        "r", 3, "a", [], {}, {}, {}, "", stop=True, reading=Reading(8, 4, {"a": [(0, 2)], "b": [(2, 4)]})
    )
    for number, rest in ((4, [(2, 4)]), (5, [(2, 4)]), (6, [])):
        said = log.Envelope("r", number, "a", 1, False, False, None, None, "", 0.0, reads=Reads(2, 2, 8))
        before = log.draft(said, before, {"a": (said, "")}, {}, {})
        assert before.reading.held.get("b", []) == rest
    assert before.reading.held == {"a": [(2, 4)]}


def test_worker_with_other_data_is_refused_before_it_sends():
    store = ObjectStore()
    next(iter(demopt.RunSampler(Worker(store, 0).optimizer, 10, batch=2)))
    with pytest.raises(SettingsError, match="11 sequences in all epochs"):
        next(iter(demopt.RunSampler(Worker(store, 1).optimizer, 11, batch=2)))
    with pytest.raises(TypeError, match="FolderExchange"):
        demopt.RunSampler(Worker(None, 0, group=SingleRank()).optimizer, 10, batch=2)


@pytest.mark.parametrize("seed", [1.0, None, "1", torch.tensor(0.5), torch.tensor([1, 2]), True])
def test_sampler_refuses_a_seed_that_is_no_whole_number_before_the_run_starts(seed):
    run = Worker(ObjectStore(), 0)
    with pytest.raises(TypeError, match=r"seed is .*; give a whole number"):
        demopt.RunSampler(run.optimizer, 16, batch=4, seed=seed)


def test_sampler_reads_in_the_order_of_a_seed_whatever_its_type():
    numpy = pytest.importorskip("numpy")
    for seed in (3, 5000, -1):
        orders = [
            next(iter(demopt.RunSampler(Worker(ObjectStore(), 0).optimizer, 16, batch=16, seed=given)))
            for given in (seed, numpy.int64(seed), numpy.int32(seed), torch.tensor(seed))
        ]
        assert orders == [orders[0]] * 4


@pytest.mark.parametrize("make", [torch.optim.AdamW, demopt.DeMo, lambda _: None])
def test_sampler_refuses_an_optimizer_that_is_in_no_run(make):
    with pytest.raises(TypeError, match="RunSampler asks a run in a folder"):
        demopt.RunSampler(make([torch.nn.Parameter(torch.zeros(2))]), 10, batch=2)


def test_spans_stay_few_over_a_long_run():
    """Returned numbers are handed out first, so holes close."""
    schedule, wanted = random.Random(0), {f"w{number}": 20 for number in range(16)}
    reading = Reading(10**6).after({}, wanted)
    for number in range(1000):
        gone = schedule.choice(list(wanted))
        wanted = {name: size for name, size in wanted.items() if name != gone} | {f"n{number}": 20}
        reading = reading.after({name: schedule.randint(0, 20) for name in reading.held}, wanted)
    assert sum(map(len, reading.held.values())) + len(reading.returned) < 100
    assert count(reading.returned) < 1000

"""Others can write a run's folder, without its key or with it: nothing is lost, nobody halts, no escape is printed."""

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import threading
import time
import types

import hypothesis
import obstore
import pytest
import servers
import stores
import torch
from hypothesis import strategies as st
from workers import Worker, at_first, joined, replayed, rounds, together, waiting

from demopt.errors import DemoptError, ExchangeError, MessageError
from demopt.runs import log, open_round
from demopt.runs.disk import Disk
from demopt.runs.key import ForeignError, Keyed, read_key
from demopt.runs.reading import Reading, Reads
from demopt.runs.stop import StopWish, put_stop, read_stop
from demopt.runs.store import ClosedError, ObjectStore, StoreError, open_store
from demopt.train.runs.status import status_of

KEY = bytes(range(32))
RUN = "0123456789abcdef"
MESSAGE = log.Envelope(RUN, 3, "w-1", 5, False, False, None, {"loss": 2.5}, "00" * 16, 1.5, b"body", Reads(1, 2, 9))
SENDER = log.Sender("w-1", "00" * 16, 5, {"loss": 2.5})
READING = Reading(9, 4, {"w-1": [(0, 2)]}, [(2, 3)])
MANIFEST = log.Manifest(RUN, 3, "w-1", [SENDER], {}, {"w-1": 0}, {"w-1": 1.5}, "00" * 16, reading=READING)
RECORD = log.Record(RUN, "0.3.0", {"sync_every": "2"}, [["a", "b"]], [{"parameters": [[[4], "float32"]]}], 20, False)


@pytest.mark.parametrize("taken", [b"", b"garbage", bytes(100), bytes(1 << 23)])
@pytest.mark.parametrize("name", ["rounds/00000003/manifest", "rounds/00000003/w-1.message", "checkpoints/00000020"])
def test_name_that_a_stranger_took_holds_the_runs_own_object_all_the_same(name, taken, store):
    store.put_if_absent(name, taken)
    one, other, newcomer = (Keyed(store, KEY) for _ in range(3))
    assert one.put_if_absent(name, b"own")
    assert not other.put_if_absent(name, b"later")
    Keyed(store, bytes(32)).put_if_absent(name, b"of another key")
    folder, _, leaf = name.rpartition("/")
    for each in (one, other, newcomer):
        assert each.get(name, 99) == each.read(name, 99, bytes) == b"own"
        assert each.list(folder) == {leaf}
        store.delete([name])  # the stranger's own, in between
    assert not newcomer.put_if_absent(name, b"again")
    newcomer.delete([name])
    assert Keyed(store, KEY).list(folder) == set()


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda place: os.symlink("/etc/passwd", place)])
def test_folder_pipe_or_link_in_the_place_of_a_manifest_is_none(make, tmp_path):
    bare = Disk(tmp_path / "run")
    bare.put_if_absent("rounds/00000003/w-1.message", b"x")
    make(tmp_path / "run" / "rounds" / "00000003" / "manifest")
    one, other = Keyed(bare, KEY), Keyed(bare, KEY)
    assert log.propose(one, MANIFEST) == MANIFEST
    assert log.propose(other, dataclasses.replace(MANIFEST, author="w-2")) is None
    assert log.read_manifest(other, RUN, 3) == MANIFEST
    assert log.look(other, 3).has_manifest


def test_another_key_is_seen_at_the_object_run_and_puts_no_second_one(store):
    other = Keyed(store, bytes(32))
    assert [each.put_if_absent("run", b"{}") for each in (Keyed(store, KEY), other)] == [True, False]
    with pytest.raises(ForeignError, match="give the run's own --key-file, or none"):
        log.read_record(other)


def test_odd_names_are_no_workers_and_are_not_deleted(tmp_path):
    bare, place = Disk(tmp_path / "run"), tmp_path / "run" / "rounds" / "00000003"
    odd = ["a b.message", "\x1b[31mred.hello", "x\ny.message", "..message", "é.hello", ".hello", "a.message~12"]
    odd += ["x" * 65 + ".hello", "[b].hello", "sub/w-2.message", "\udcff~1", "\udcff.message"]  # no text: bytes
    (place / "sub").mkdir(parents=True)
    for name in [*odd, "w-1.message"]:
        (place / name).write_bytes(b"x")
    keyed = Keyed(bare, KEY)
    keyed.put_if_absent("rounds/00000003/w-2.message", b"x")
    for store, own in ((bare, "w-1"), (keyed, "w-2")):
        seen = log.look(store, 3)
        assert (seen.messages, seen.hellos) == ({own}, set())
    bare.delete(log.pieces(bare, [3]))
    assert [name for name in [*odd, "w-1.message"] if (place / name).exists()] == odd
    (tmp_path / "run" / "checkpoints").mkdir()
    for name in ("٣", "²", "3", "00000020", "000000020", "-0000001"):
        (tmp_path / "run" / "checkpoints" / name).write_bytes(b"x")
    assert log.checkpoints(bare) == [0, 20]


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("listed", [{"ghost.message", "w1.message"}, {"ghost.message~"}])
def test_message_that_is_listed_and_cannot_be_read_halts_no_round(listed, key):
    """As where a listing runs ahead, or a stranger has put another kind of object."""
    store = ObjectStore()
    found = store.list
    store.list = lambda folder: found(folder) | (listed if folder.startswith("rounds/") else set())
    first, second = joined(store, key=key)
    rounds(first, second)
    assert (first.run.last.row, second.digest) == (0, first.digest)


@pytest.mark.parametrize("key", [None, KEY])
def test_object_that_alone_cannot_be_read_halts_nobody_unless_all_need_it(key):
    store = ObjectStore()
    first, second = joined(store, key=key)
    place = Keyed(store, key)._place if key else str
    closed = {"stop", *(f"rounds/00000000/{name}" for name in ("w0.message", "w9.message", "w9.hello"))}
    closed = {*map(place, closed)}
    for name in closed:
        store.put_if_absent(name, b"")

    def get(name, most, get=store.get):
        if name in closed:
            raise ClosedError(f"{name} cannot be read")
        return get(name, most)

    store.get = get
    together([first, second], 3)
    for each in (first, second):
        each.optimizer.resync()
    assert first.digest == second.digest
    closed.add(name := place(log.manifest_name(first.rounds)))
    with pytest.raises(DemoptError, match=f"{name} cannot be read"):
        together([first, second], first.rounds + 1)
    manifests = {each for each in store.list(log.folder_of(first.rounds)) if "manifest" in each}
    assert manifests <= {name.rpartition("/")[2]}


@pytest.mark.parametrize("depth", [39, 600, 100_000])
def test_json_that_would_exhaust_the_stack_of_a_reader_is_damaged(depth):
    with contextlib.nullcontext() if depth < 40 else pytest.raises(MessageError, match="x is damaged"):
        log.json_of("x", b'{"a":' + b"[" * depth + b"]" * depth + b"}")
    with pytest.raises(MessageError, match="x is damaged: it holds a list"):
        log.json_of("x", b"[]")


def test_hello_counts_only_if_it_was_written_with_the_key_for_this_run_and_round():
    bare = ObjectStore()
    keyed = Keyed(bare, KEY)
    for worker, run, number in (("w-1", RUN, 3), ("w-2", "another", 3), ("w-3", RUN, 2)):
        log.put_hello(keyed, number, run, worker, 1.5)
    place = keyed._place
    bare.put_if_absent("rounds/00000003/ghost.hello", RUN.encode())
    bare.put_if_absent(place("rounds/00000003/w-3.hello"), bare.get(place("rounds/00000002/w-3.hello"), 99))
    assert log.look(keyed, 3).hellos == {"w-1", "w-2", "w-3"}
    assert [log.read_hello(keyed, 3, RUN, name) for name in ("w-1", "w-4")] == [1.5, None]
    for each, name in ((keyed, "w-2"), (keyed, "w-3"), (bare, "ghost")):
        with pytest.raises(MessageError):
            log.read_hello(each, 3, RUN, name)


def test_hellos_are_read_few_at_a_look_and_one_that_cannot_be_read_yet_at_the_next(store):
    run = Worker(store, 0).join().run
    log.put_hello(store, 0, run.record.identity, "w-1", 1.5)
    attached = open_round.Attached(dataclasses.replace(MESSAGE, worker=run.worker), None, 0.0)
    box = open_round.OpenRound(
        run, None, types.SimpleNamespace(round_number=0), torch.empty(0, dtype=torch.uint8), attached
    )
    box.look()
    run.store.get = at_first(lambda *_: None, run.store.get)
    box.read_new()
    assert (box.hellos, box.untried_hellos) == ({}, [])
    box.read_new()
    assert box.hellos["w-1"][0] == 1.5
    box.seen = log.Seen(set(), {f"ghost-{number}" for number in range(300)}, False)
    assert len(box.untried_hellos) == 64


@pytest.mark.parametrize("kind", ["hello", "message"])
def test_round_ends_although_a_stranger_puts_more_between_any_two_looks(kind, store):
    first, second = joined(store, key=KEY, late=0.1)
    names, found = iter(range(200)), store.list  # a look too many is an error

    def floods(folder):
        name = next(names)
        store.put_if_absent(f"{folder}/ghost-{name}.{kind}", bytes(100))
        return found(folder)

    store.list = floods
    rounds(first, second)  # the first one waits for the second in vain
    assert (first.senders, second.senders) == (["w0"], ["w0"])


def test_round_ends_although_a_worker_that_dies_as_it_starts_says_hello_again_and_again(store):
    worker = Worker(store, 0, late=0.3).join()
    names, found = iter(range(200)), store.list  # a look too many is an error

    def restarts(folder):
        if folder.startswith("rounds/"):
            log.put_hello(store, worker.rounds, worker.run.record.identity, f"again-{next(names)}", 0.0)
        return found(folder)

    store.list = restarts
    rounds(worker)
    assert worker.rounds == 1


def test_round_ends_although_more_hellos_than_are_read_at_a_look_are_gone(store):
    worker = Worker(store, 0).join()
    for number in range(150):
        log.put_hello(store, 0, worker.run.record.identity, f"ghost-{number}", 1.0)
    get, more = store.get, iter(range(500))  # a read too many is an error
    store.get = lambda name, *most: get(name, *most) if "ghost" not in name or next(more) < 0 else None
    rounds(worker)
    assert worker.senders == ["w0"]


def test_manifest_is_bounded_and_strangers_are_no_members():
    """A refused message makes nobody a member, so nobody is waited for because of it."""
    names = [f"w-{number:05d}" for number in range(3000)]
    many = {name: (dataclasses.replace(MESSAGE, worker=name, note="x" * 3000), "00" * 16) for name in names}
    refused = {f"ghost-{number}": "\x1b[2J" * 1000 for number in range(3000)}
    before = dataclasses.replace(MANIFEST, members={"w-02999": 1, "w-02998": 0})
    hellos = {f"hello-{number}": 1.0 for number in range(30_000)}
    manifest = log.draft(MESSAGE, before, many, refused, hellos)
    data = json.dumps(dataclasses.asdict(manifest)).encode()
    assert len(data) < log.MOST_JSON
    assert log._manifest(data, RUN, 3) == manifest
    assert {"w-02999", "w-02998"} <= {sender.worker for sender in manifest.senders}  # expected workers come first
    with pytest.raises(MessageError, match="round 3, expected"):
        log._manifest(data, RUN, 4)
    before = dataclasses.replace(MANIFEST, members={"silent": 0, "not-finite": 0}, seconds={})
    few = log.draft(MESSAGE, before, {"w-1": (MESSAGE, "0")}, {"ghost-1": "bad", "not-finite": "bad"}, {})
    assert few.members == {"silent": 1, "not-finite": 0, "w-1": 0}
    assert few.seconds == {"silent": 0.0, "not-finite": 0.0, "w-1": 1.5}
    assert few.refused == {"ghost-1": "bad", "not-finite": "bad"}
    assert log.draft(MESSAGE, None, {"w-2": (dataclasses.replace(MESSAGE, stop=True), "0")}, {}, {}).stop


@pytest.mark.parametrize(
    "reading",
    [
        Reading(9, 4, {"\x7f" * 1_400_000: [(0, 1)]}, []),  # a stranger can write its manifest shorter
        Reading(1 << 40, 1_000_000, {}, [(number, number + 1) for number in range(0, 1_000_000, 2)]),
    ],
    ids=["a name", "many spans"],
)
def test_manifest_after_a_strangers_long_reading_can_be_read(reading):
    values = dataclasses.asdict(dataclasses.replace(MANIFEST, reading=reading))
    raw = json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
    assert len(raw) < log.MOST_JSON
    author = dataclasses.replace(MESSAGE, round=4)
    manifest = log.draft(author, log._manifest(raw, RUN, 3), {"w-1": (author, "00" * 16)}, {}, {})
    data = json.dumps(dataclasses.asdict(manifest)).encode()
    assert len(data) < log.MOST_JSON
    assert log._manifest(data, RUN, 4) == manifest
    assert manifest.reading.held == {"w-1": [(reading.unread, reading.unread + 2)]}


def test_wish_to_stop_is_of_one_run():
    store = ObjectStore()
    put_stop(store, 7, RUN)
    assert read_stop(store, RUN) is not None
    with pytest.raises(MessageError, match="stop is of another run"):
        read_stop(store, "another")
    log.propose(store, dataclasses.replace(MANIFEST, round=7))  # by a worker that has not heard of it
    wish = StopWish(store, str)
    wish.begin(RUN)
    assert (wish.asked_in(is_joining=True), wish.asked_in(is_joining=False)) == (7, None)
    stores.put(store, "stop", f"{RUN} soon".encode())
    assert (wish.hear(), wish.asked_in(is_joining=False)) == (False, None)
    stores.put(store, "stop", f"{RUN} 8 0\n".encode())
    assert (wish.hear(), wish.asked_in(is_joining=False)) == (True, 8)
    heard_at = wish.heard_at
    assert (wish.hear(), wish.heard_at) == (True, heard_at)


def test_checkpoints_far_beyond_the_newest_manifest_are_none():
    store = ObjectStore()
    for number in (150, 250, 10**8 - 1):
        store.put_if_absent(f"checkpoints/{number:08d}", b"x")
    assert log.reached(store, lambda number: MANIFEST if number < 160 else None) == [0, 150, 250]


NUMBERS = st.integers(-(10**30), 10**30) | st.floats()
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8) | st.sampled_from(["w-1", RUN]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
READERS = {
    "message": (MESSAGE, lambda data: log.read_message("message", data, RUN, 3, "w-1")),
    "manifest": (MANIFEST, lambda data: log._manifest(data, RUN, 3)),
    "run": (RECORD, lambda data: log._record("here", data)),
}


def written(value):
    values = dataclasses.asdict(value)
    values.pop("body", None)
    return values


@pytest.mark.parametrize("kind", READERS)
@hypothesis.given(data=st.data())
def test_object_of_another_is_read_or_refused_whatever_it_holds(kind, data):
    """And what is read can be used: names are names, numbers are finite and in range."""
    value, read = READERS[kind]
    values = written(value)
    place = data.draw(st.sampled_from([values, *values.get("senders", [])]))
    entry = data.draw(st.sampled_from([*place, "unknown"]))
    if data.draw(st.booleans()):
        place[entry] = data.draw(JSON)
    else:
        place.pop(entry, None)
    raw = json.dumps(values).encode() + b"\n"
    raw = data.draw(st.just(raw) | st.integers(0, len(raw)).map(lambda cut: raw[:cut]) | st.binary(max_size=200))
    try:
        found = read(raw)
    except DemoptError as error:
        assert str(error).isprintable()  # noqa: PT017
        return
    if kind == "manifest":
        names = [found.author, *found.members, *found.refused, *(sender.worker for sender in found.senders)]
        assert all(log.NAME.fullmatch(name) for name in names)
        assert all(1 <= sender.samples < 2**32 for sender in found.senders)
        assert all(type(rounds) is int and rounds >= 0 for rounds in found.members.values())
        assert all(reason.isprintable() for reason in (*found.refused.values(), found.at))
    if kind == "run":
        assert found.checkpoint_every >= 1
        assert all(name.isprintable() and text.isprintable() for name, text in found.facts.items())


ESCAPE = "\x1b]0;owned\x07\x1b[2J"
SENT = {"worker": "a", "digest": "", "samples": 1, "note": None}
IMPOSSIBLE = {
    "manifest": [
        {"author": ESCAPE}, {"members": {ESCAPE: 0}}, {"refused": {"w-1": ESCAPE}}, {"refused": {ESCAPE: "r"}},
        {"author": "../../etc"}, {"author": "w" * 65}, {"author": ""}, {"author": "[/bold]"}, {ESCAPE: 1},
        {"at": ESCAPE}, *({"senders": each} for each in (1, [1], [{"worker": 1}], [{**SENT, "worker": ESCAPE}])),
        *({"senders": [{**SENT, "samples": samples}]} for samples in (0, 2**32, True)),
        {"senders": [SENT] * 2}, {"members": {"a": "b"}}, {"members": {"a": -1}}, {"round": 3.0},
        {"reading": []}, {"reading": {}}, *({"reading": {**written(READING), **change}} for change in (
            {"unread": "4"}, {"unread": True}, {"total": 3}, {"held": 5}, {"held": {"a": 5}},
            {"held": {"a": [[2, 2]]}}, {"held": {"a": [[0.0, 2]]}},
            {"held": {"a": [[0, 5]]}, "returned": []},  # a number that nobody has had
            {"returned": [[1, 3]]},  # one number twice
        )),
    ],
    "message": [{"reads": reads} for reads in ([1, 2], [-1, 2, 3], [0, 0, 1 << 63], "many")],
    "run": [
        {"checkpoint_every": 0}, {"checkpoint_every": True}, {"facts": {"a": 1}}, {"facts": {"a": ESCAPE}},
        {"version": ESCAPE}, {"run": "../x"}, {"config_facts": [[1]]},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "change"), [(kind, change) for kind in IMPOSSIBLE for change in IMPOSSIBLE[kind]])
def test_object_with_impossible_entries_is_damaged(kind, change):
    value, read = READERS[kind]
    assert read(json.dumps(written(value)).encode())
    with pytest.raises(MessageError, match=f"{kind} is damaged") as told_by:
        read(json.dumps({**written(value), **change}).encode())
    assert str(told_by.value).isprintable()


def test_note_that_readers_take_is_not_too_deep_for_the_manifest_that_has_it():
    deep = [json.loads("[" * depth + "]" * depth) for depth in range(1, 40)]
    for note in deep:
        with contextlib.suppress(MessageError):
            sent = log.read_message("m", dataclasses.replace(MESSAGE, note=note).packed(), RUN)
            manifest = dataclasses.replace(MANIFEST, senders=[dataclasses.replace(SENDER, note=sent.note)])
            assert log.propose(ObjectStore(), manifest) == manifest
    assert sent.note == deep[32], "the deepest one that an honest worker sends"


DELETE = "\x7f" * 300  # one byte each, but six as `json.dumps` writes them


@pytest.mark.parametrize("note", [[DELETE] * 2, {DELETE: DELETE}, [1e9] * 300, DELETE])
def test_note_is_refused_if_a_manifest_would_write_it_longer_than_an_honest_one(note):
    text = json.dumps(note, ensure_ascii=False).replace("1000000000.0", "1e9")
    raw = json.dumps(written(MESSAGE)).replace('{"loss": 2.5}', text).encode() + b"\nbody"
    assert len(raw) < log.MOST_ENVELOPE
    fits = len(json.dumps(note)) <= log.MOST_NOTE
    assert fits == (note == DELETE)
    with contextlib.nullcontext() if fits else pytest.raises(MessageError, match=r"its note takes .* bytes as JSON"):
        assert log.read_message("m", raw, RUN, 3, "w-1").note == note


@pytest.mark.parametrize("note", ["NaN", "Infinity", "1e999", "-1e400"])
def test_number_that_is_not_finite_is_no_note(note):
    raw = json.dumps(written(MESSAGE)).replace("2.5", note).encode() + b"\n"
    with pytest.raises(MessageError, match="no JSON"):
        log.read_message("m", raw, RUN, 3, "w-1")


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o644, 0o640, 0o604])
def test_key_file_that_others_can_read_is_warned_of(mode, tmp_path, caplog):
    (tmp_path / "key").write_text(KEY.hex() + "\n")
    (tmp_path / "key").chmod(mode)
    with caplog.at_level(logging.WARNING, "demopt"):
        assert read_key(tmp_path / "key") == KEY
    assert ("can be read by other users" in caplog.text) == (mode not in (0o600, 0o400))
    assert KEY.hex() not in caplog.text


def test_store_that_lets_two_racing_puts_win_is_refused_before_the_run_is_there():
    """A server that first looks for the object and then puts it: only puts one after the other get true answers."""
    store, looked, two = ObjectStore(), itertools.count(1), threading.Event()

    def put_if_absent(name, data):
        absent = store.get(name, 1 << 30) is None
        if absent and name.endswith(".race"):  # the first one to look goes on when a second one has looked
            if next(looked) > 1:
                two.set()
            assert two.wait(200)
        if absent:
            obstore.put(store._store, name, data)
        return absent

    store.put_if_absent = put_if_absent
    with pytest.raises(ExchangeError, match="puts an object over another one where it must not"):
        Worker(store, 0).join()
    assert log.read_record(store) is None
    assert store.list("start") == set()


def test_run_with_a_key_goes_on_beside_a_stranger_who_makes_every_name_first(store):
    """Names of all kinds and future rounds, with nonsense or copies; joiners and replay get the run's weights, too."""
    first = Worker(store, 0, key=KEY, keep_log=True, checkpoint_every=2).round()
    with pytest.raises(MessageError, match=r"run is damaged.*has a key, give it"):
        Worker(store, 1).join()
    place = Keyed(store, KEY)._place
    message, manifest = (store.get(place(f"rounds/00000000/{name}"), 1 << 20) for name in ("w0.message", "manifest"))
    store.put_if_absent("stop", first.run.record.identity.encode() + b" 0 0")
    for number in range(1, 9):
        for name, copied in (("manifest", manifest), ("w0.message", message), ("ghost.message", message)):
            store.put_if_absent(f"{log.folder_of(number)}/{name}", copied if number % 2 else bytes(100))
        for name in (f"{log.folder_of(number)}/ghost.hello", f"checkpoints/{number:08d}", f"moments/{number:08d}"):
            store.put_if_absent(name, bytes(100))
    store.put_if_absent("checkpoints/00009999", bytes(100))
    first.round(5)
    assert status_of(Keyed(store, KEY), first.run.record, "")["round"] == 6
    assert first.run.decided.refused == {}
    second = Worker(store, 1, key=KEY).join()
    assert (first.rounds, second.rounds, second.digest) == (6, 6, first.digest)
    rounds(first, second)
    assert (second.rounds, second.digest) == (7, first.digest)
    assert replayed(store, key=KEY)[-1] == first.digest
    assert not first.run.stopping
    assert first.said == []
    assert [*first.run.decided.members] == ["w0", "w1"]


def test_many_checkpoints_of_a_stranger_cost_who_looks_for_the_newest_one_few_requests(store):
    first = Worker(store, 0, key=KEY, checkpoint_every=2).round(5)
    for number in range(300):
        store.put_if_absent(f"checkpoints/{10**8 - 1 - number:08d}", bytes(100))
    counted = stores.Through(store)
    assert status_of(Keyed(counted, KEY), first.run.record, "")["checkpoint"] == 4
    assert Worker(counted, 1, key=KEY).join().digest == first.digest
    assert len(counted.calls) < 100


def test_checkpoint_of_another_that_does_not_follow_from_the_messages_is_said_and_nothing_is_deleted(store):
    worker = Worker(store, 0, checkpoint_every=1)
    stores.put(store, "checkpoints/00000003", b"{}")
    worker.round(3)
    assert "checkpoints/00000003 is another one than follows from the messages; nothing is deleted" in worker.said[0]
    assert all(log.look(store, number).messages for number in (1, 2))
    worker.round()
    assert worker.rounds == 4


@pytest.mark.parametrize(("rounds", "fate"), [(1, "is lost, because no round follows"), (2, "counts later")])
def test_fate_of_messages_of_fewer_than_half_of_the_members_is_told(store, rounds, fate):
    first, *_ = (Worker(store, seed).join() for seed in range(3))
    first.run.rounds = rounds
    first.round()
    assert first.said[-1].endswith(f"what they have sent {fate}")


def test_holder_of_the_key_moves_nothing_by_deciding_early_but_forges(store):
    liar, *others, joiner = (Worker(store, seed, key=KEY, weights=0, checkpoint_every=100) for seed in range(4))
    for worker in (liar, *others):
        worker.join()
    before, propose = others[0].digest, liar.run.propose
    liar.round()  # it waits for nobody
    assert (liar.run.decided.senders, liar.digest) == ([], before)
    assert any("round 1: fewer than half of its members have sent a message" in text for text in liar.said)
    together([liar, *others], 2)  # its work counts then
    assert liar.senders == ["w0", "w1", "w2"]

    def forge(manifest):
        sent = liar.optimizer.replicator.round
        own = log.Sender("w0", log.digest(open_round.envelope_of(sent.attached, sent.message).packed()), 1)
        return propose(dataclasses.replace(manifest, senders=[own], members={"w0": 0}))

    liar.run.late, liar.run.propose = 0.0, forge
    liar.round()
    assert liar.senders == ["w0"]
    for parameter in liar.optimizer.replicator.parameters:
        parameter.data.add_(1.0)
    liar.optimizer._rounds.save()
    liar.run.wait_for_uploads()
    assert joiner.join().digest == liar.digest


def test_worker_that_is_left_out_twice_although_its_message_was_there_says_so_and_its_work_counts(monkeypatch):
    monkeypatch.setattr(open_round, "_SEEN", 0.0)
    store, may_decide = stores.Through(ObjectStore()), threading.Event()
    blind, victim = Worker(store, 0, late=60.0, sync_every=1).join(), Worker(store, 1, late=1e9, sync_every=1)
    propose, decide = blind.run.propose, victim.run.propose

    def itself_alone(manifest):
        own = [sender for sender in manifest.senders if sender.worker == "w0"]
        return propose(dataclasses.replace(manifest, senders=own))

    # The victim may see the other's message before the other's manifest.
    blind.run.propose, victim.run.propose = itself_alone, lambda manifest: may_decide.wait() and decide(manifest)
    for turn in range(2):
        may_decide.clear()
        with waiting(victim.step, store, victim.rounds):
            known = len(store.calls)
            while len(store.calls) < known + 3:  # the victim looks again, and sees no manifest
                time.sleep(0.01)
            blind.run.late = 0.0
            blind.step()
            if turn:  # left out for the second time, it sends its work again at once, and decides that round itself
                victim.run.late = 0.0
            may_decide.set()
    assert [text for text in victim.said if "lacks this worker's message, which was there before" in text]
    assert victim.run.left_out == 0
    assert victim.senders == ["w1"]


def test_message_that_came_after_the_manifest_was_not_overlooked(monkeypatch):
    monkeypatch.setattr(open_round, "_SEEN", 0.0)
    other, victim = joined(ObjectStore(), sync_every=1)
    put, decides = victim.run.put, torch.enable_grad()(other.step)
    victim.run.put = lambda mine: (decides(), put(mine))[1]
    victim.step()
    assert (victim.run.row, victim.run.last.overlooked) == (None, False)


def test_wish_to_stop_is_obeyed_by_a_worker_that_a_member_leaves_out_of_every_round():
    worker = Worker(store := ObjectStore(), 0).join()
    identity, exchange_round = worker.run.record.identity, worker.run.exchange_round

    def unheard(*given):
        assert worker.rounds < 50
        chain = log.digest_of(worker.run.decided)
        log.propose(store, log.Manifest(identity, worker.rounds, "liar", [], {}, {}, {}, chain))
        return exchange_round(*given)

    worker.run.exchange_round = unheard
    put_stop(store, 0, identity)
    while not worker.run.stopping:
        worker.round()


def test_workers_with_rights_to_their_own_names_alone_train_together_and_cannot_delete_each_others(monkeypatch):
    """The recipe of docs/folder.md for a bucket. Old messages of others stay, and the worker says so."""
    servers.environment("s3", monkeypatch)
    place, workers = f"s3://bucket/recipe-{os.urandom(8).hex()}", []
    Worker(place, 0, checkpoint_every=1, sync_every=1).join()  # the bucket's owner starts the run
    for name in ("alice", "bob"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", name)
        workers.append(Worker(place, 0, checkpoint_every=1, sync_every=1))
        workers[-1].run.worker, workers[-1].run.store.patience = f"{name}-1", 600.0
        workers[-1].join()
    for _ in range(4):
        for worker in workers:
            worker.round()
    alice, bob = (worker.run.store for worker in workers)
    number = next(number for number in range(8) if "alice-1" in log.look(bob, number).messages)
    theirs = log.message_name(number, "alice-1")
    before = bob.get(theirs, 1 << 20)
    own = open_store(place)  # bob's, without patience
    for call in (lambda: own.delete([theirs]), lambda: own.put_if_absent(log.message_name(number, "alice-2"), b"x")):
        with pytest.raises(ExchangeError, match="access denied"):
            call()
    assert bob.get(theirs, 1 << 20) == before
    assert max(sum("what is old was not deleted" in text for text in worker.said) for worker in workers) == 1
    assert len(log.checkpoints(alice)) > 2


def test_rounds_of_a_deletion_that_failed_are_deleted_after_the_next_checkpoint():
    store, is_away = ObjectStore(), [True]
    delete = store._delete

    def fails_at_first(name):
        if is_away:
            raise StoreError("away")
        delete(name)

    store._delete = fails_at_first
    worker = Worker(stores.Through(store), 0, checkpoint_every=2)
    worker.run.store.patience = 0.1
    worker.round(4)
    is_away.clear()
    worker.round(2)
    assert log.look(store, 4).messages
    assert not log.pieces(store, range(4))


def test_requests_of_a_checkpoint_stay_as_few_where_nothing_may_be_deleted():
    store, tried = ObjectStore(), list[str]()

    def denied(name):
        tried.append(name)
        raise StoreError("access denied", at_first=True)

    store._delete = denied
    counted = stores.Through(store)
    worker = Worker(counted, 0, checkpoint_every=2)
    counts = []
    for _ in range(6):
        worker.round(2)
        counts.append((len(counted.calls), len(tried)))
        counted.calls.clear()
        tried.clear()
    assert counts[-1] == counts[-2] == counts[-3]

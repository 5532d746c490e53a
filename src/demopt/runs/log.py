"""The objects of a run, and the decision about a round. docs/folder.md lists the objects, with who writes them.

Others write these objects, so each is checked: its types, its numbers, and that names have only letters, digits and -.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from functools import cache, cached_property, partial
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

from demopt.errors import ExchangeError, MessageError, SettingsError
from demopt.replicator.wiring import fact_told
from demopt.runs.key import ForeignError
from demopt.runs.reading import Reading, Reads, count, reading_of, reads_of
from demopt.runs.store import MOST_JSON, RECORD, Store
from demopt.validation import first_difference
from demopt.version import __version__
from demopt.wire.message import MOST_SAMPLES

FORMAT = 3
MOST_ROUNDS = 10**8  # of a run: their numbers have eight digits
MOST_SILENT = 2  # rounds without a message after which a worker is not waited for
MOST_DEPTH = 40  # nested lists and dicts
NOTE_DEPTH = 32  # those of a note, which is some levels down in a manifest
MOST_MEMBERS = 1000  # workers in a manifest
MOST_REFUSED = 100  # reasons in a manifest, and letters in each
MOST_ENVELOPE = 1 << 12  # bytes of an envelope before its message
MOST_NOTE = MOST_ENVELOPE - 1024  # bytes of a note, as `json.dumps` writes it
_LOST = 100  # manifests that may be gone before a checkpoint; with more gone, it is not looked at

T = TypeVar("T")
DTYPES = {  # that tensors in a run may have, with the bytes of an element
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
MOST_TENSORS = 1 << 41  # bytes
_MOST_DIMENSIONS = 64  # that torch's functions take
NAME = re.compile(r"[A-Za-z0-9-]{1,64}")  # of a worker, or of a run
_PIECE = re.compile(r"([A-Za-z0-9-]{1,64})\.(message|hello)")
_NUMBERS = {  # the least and the most of each
    "round": (0, MOST_ROUNDS - 1), "samples": (1, MOST_SAMPLES), "checkpoint_every": (1, MOST_ROUNDS),
    "members": (0, 100),
}  # fmt: skip
_INTEGERS = (-(2**63), 2**64 - 1)  # of the others


@dataclass(frozen=True)
class Record:
    """The identity of a run. Joining workers must have the same `facts`; `groups` suffice to replay the run."""

    identity: str  # drawn at random
    version: str  # of demopt
    facts: dict[str, str]
    config_facts: list[list[str]]  # those of them that are the optimizer's, not the replicator's: a replay needs them
    #: Each group's settings; of its parameters "parameters" (shape, dtype), "param_names", "marks" (`marks_of`, to tell
    #: their order), "frozen" (a hash).
    groups: list[dict[str, Any]]
    checkpoint_every: int
    keep_log: bool
    settings: dict[str, Any] = field(default_factory=dict)  # the trainer's
    format: int = FORMAT


@dataclass(frozen=True)
class Envelope:
    """A worker's object in a round: a line of JSON, then its message, `body`. `note` is the user's, such as a loss."""

    run: str
    round: int
    worker: str
    samples: int
    leaves: bool  # it is this worker's last message
    stop: bool  # this worker has seen the wish to stop
    weights: int | None  # their fingerprint before the round, in the rounds that compare it
    note: Any
    before: str  # digest of the manifest of the round before, as this worker knows it
    seconds: float  # that this worker needs from the end of a round until its message is put
    body: bytes = b""
    reads: Reads | None = None

    def packed(self) -> bytes:
        head = asdict(self)
        del head["body"]
        return json.dumps(head).encode() + b"\n" + self.body


@dataclass(frozen=True)
class Sender:
    worker: str
    digest: str  # of the whole object
    samples: int  # for people to read: the weight that counts is in the message's header
    note: Any = None


@dataclass(frozen=True)
class Manifest:
    """A round as all workers apply it. `members`: the workers expected next, with their rounds of silence."""

    run: str
    round: int
    author: str
    senders: list[Sender]  # none if they would be fewer than half as many as the members
    refused: dict[str, str]  # reasons, by worker
    members: dict[str, int]
    seconds: dict[str, float]  # that each member says it needs for a round
    before: str  # digest of the manifest of the round before: manifests are a chain
    stop: bool = False
    weights: int | None = None  # their fingerprint before the round, as the author has it
    at: str = ""  # UTC, by the author's clock, for people to read: nothing depends on it
    reading: Reading | None = None  # who reads which sequences next

    @cached_property
    def digest(self) -> str:
        """The digest of the content, as the next manifest and messages name it."""
        return digest(json.dumps(asdict(self)).encode())


@dataclass(frozen=True)
class Seen:
    """A round's objects at one moment: the workers with a message and with a hello, and whether there is a manifest."""

    messages: set[str]
    hellos: set[str]
    has_manifest: bool


def digest(data: bytes) -> str:
    """Returns the digest of an object, as manifests name it."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# The draft of a manifest: the first put decides


def digest_of(manifest: Manifest | None) -> str:
    """Returns a manifest's digest; an empty text for None, before the first round."""
    return "" if manifest is None else manifest.digest


def expected(previous: Manifest | None, hellos: Iterable[str]) -> set[str]:
    """Returns the workers that a round waits for: members of the manifest before it, and workers with a hello."""
    return {*(previous.members if previous else ()), *hellos}


def draft(
    author: Envelope,
    previous: Manifest | None,
    messages: Mapping[str, tuple[Envelope, str]],
    refused: Mapping[str, str],
    hellos: Mapping[str, float],
) -> Manifest:
    """Returns the manifest that `author` proposes: all valid messages with their digests, in the order of the names.

    `previous`: that of the round before. `hellos`: the seconds that workers with a hello need. Not expected next:
    workers that leave, and those silent for `MOST_SILENT` rounds. A refused message makes nobody a member, because it
    may be a stranger's.
    """
    # A worker that takes its own message for another's sends it again: one of the two counts.
    again = {second_name(worker, its_digest) for worker, (_, its_digest) in messages.items()}
    messages = {worker: found for worker, found in messages.items() if worker not in again}
    awaited = expected(previous, hellos)
    heard = sorted(messages, key=lambda worker: (worker not in awaited, worker))[:MOST_MEMBERS]
    members: dict[str, int] = {}  # expected next, and so without those that leave
    for worker in sorted([*heard, *sorted(awaited.difference(heard))][:MOST_MEMBERS]):
        found = messages.get(worker)
        silent = 0 if found or worker in refused else (previous.members.get(worker, 0) if previous else 0) + 1
        if silent < MOST_SILENT and not (found and found[0].leaves):
            members[worker] = silent
    applied = {worker: messages[worker] for worker in sorted(heard)} if _moves(heard, members) else {}
    senders = [Sender(worker, its_digest, each.samples, each.note) for worker, (each, its_digest) in applied.items()]
    reasons = {worker: legible(reason, MOST_REFUSED) for worker, reason in [*refused.items()][:MOST_REFUSED]}
    needs = {**(previous.seconds if previous else {}), **hellos}
    needs |= {worker: each.seconds for worker, (each, _) in messages.items()}
    # After a stop, too, members keep what they hold: they may be back.
    reading = _reading(author, previous, members, {worker: each for worker, (each, _) in applied.items()})
    if stop := author.stop or any(each.stop for each, _ in messages.values()):
        members = {}  # all end; whether enough had sent was decided above, with them
    return Manifest(
        run=author.run,
        round=author.round,
        author=author.worker,
        senders=senders,
        refused=reasons,
        members=members,
        seconds={worker: needs.get(worker, 0.0) for worker in members},
        before=digest_of(previous),
        stop=stop,
        weights=author.weights,
        at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        reading=reading,
    )


def _moves(senders: Sized, members: Sized) -> bool:
    """Whether a round moves the weights: its senders, also those that leave, are at least half as many as `members`.

    Otherwise a member that decides before the others have sent would move them alone, and no median bounds one message.
    """
    return 2 * len(senders) >= len(members)


def _reading(
    author: Envelope, previous: Manifest | None, members: Iterable[str], messages: Mapping[str, Envelope]
) -> Reading | None:
    """Returns who reads which sequences next. A silent member keeps what it holds.

    A worker that stopped keeps them, too, because its state may have work on them, until no others are left to read.
    """
    known = previous.reading if previous else None
    if known is None:
        if author.reads is None:
            return None
        known = Reading(author.reads.total)
    if len(json.dumps(asdict(known))) > MOST_JSON // 2:  # a stranger's: this manifest would be too long to read
        known = Reading(known.total, known.unread)  # what was handed out counts as read
    known = replace(known, held={_name_in(messages, worker): spans for worker, spans in known.held.items()})
    said = {worker: each.reads for worker, each in messages.items() if each.reads is not None}
    wanted = {worker: count(known.held.get(worker, ())) for worker in members}
    wanted |= {worker: said[worker].wanted for worker in wanted if worker in said}
    if previous and (known.returned or known.unread < known.total):
        away = known.held.keys() - previous.members.keys() - messages.keys()
        wanted |= {worker: count(known.held[worker]) for worker in away}
    return known.after({worker: reads.read for worker, reads in said.items()}, wanted)


def _name_in(messages: Mapping[str, Envelope], worker: str) -> str:
    """Returns the name that a worker's message has: its second one where something else has the first."""
    if worker in messages:
        return worker
    # After a restart in the same round it may have two such messages: the one from before has read more.
    found = {name: sent.reads.read for name, sent in messages.items() if sent.reads and has_second_name(sent, worker)}
    return max(found, key=found.__getitem__, default=worker)


# Reading and writing


def folder_of(number: int) -> str:
    return f"rounds/{number:08d}"


def read_record(store: Store) -> Record | None:
    """Returns the run in a store; None if there is none. MessageError if it is of another format."""
    return read(store, RECORD, MOST_JSON, partial(_record, store.address))


def put_record(store: Store, record: Record) -> None:
    """Starts a run, unless one is there."""
    store.put_if_absent(RECORD, json.dumps(asdict(record)).encode())


def check_races(store: Store, record: Record, together: Callable[[list[Callable[[], bool]]], list[bool]]) -> None:
    """Lets eight puts race for one name, side by side as `together` makes calls; ExchangeError if two win."""
    name = f"{checkpoint_name(record, 0)}.race"
    won = together([partial(store.put_if_absent, name, f"{racer}".encode()) for racer in range(8)])
    with suppress(ExchangeError):  # without the right to delete, it stays
        store.delete([name])
    if sum(won) > 1:
        told = "puts an object over another one where it must not (If-None-Match); update it, or use another store"
        raise ExchangeError(f"{store.address} {told}")


def look(store: Store, number: int) -> Seen:
    names = store.list(folder_of(number))
    found = [piece.groups() for piece in map(_PIECE.fullmatch, names) if piece]
    messages, hellos = ({worker for worker, kind in found if kind == each} for each in ("message", "hello"))
    return Seen(messages, hellos, "manifest" in names)


def hello_name(number: int, worker: str) -> str:
    return f"{folder_of(number)}/{worker}.hello"


def put_hello(store: Store, number: int, run: str, worker: str, seconds: float) -> None:
    """Asks the others to wait in a round for a worker that needs `seconds` from the end of the round before."""
    store.put_if_absent(hello_name(number, worker), f"{run} {seconds:.3f}".encode())


def read_hello(store: Store, number: int, run: str, worker: str) -> float | None:
    """Returns the seconds in a worker's hello, None where there is none; MessageError if it is none of this run."""
    name = hello_name(number, worker)
    if (data := store.get(name, MOST_ENVELOPE)) is None:
        return None
    found = re.fullmatch(rb"([A-Za-z0-9-]+) (\d{1,9}\.\d{3})", data)
    if found is None or found[1] != run.encode():
        raise MessageError(f"{name} is no hello of this run")
    return float(found[2])


def second_name(worker: str, digest_of_message: str) -> str:
    """Returns the name under which a worker sends a message if the name of another worker is the same."""
    return f"{worker[:50]}-{digest_of_message[:8]}"


def has_second_name(sent: Envelope, worker: str) -> bool:
    """Whether a message is that of `worker` under its second name: the digest of the one under the first proves it."""
    is_alike = sent.worker.startswith(second_name(worker, ""))  # otherwise nothing is hashed
    return is_alike and sent.worker == second_name(worker, digest(replace(sent, worker=worker).packed()))


def message_name(number: int, worker: str) -> str:
    return f"{folder_of(number)}/{worker}.message"


def read_message(name: str, data: bytes, run: str, number: int | None = None, worker: str | None = None) -> Envelope:
    """Returns a message, its body unchecked; MessageError if the rest is damaged or of another run, round or worker."""
    head, _, body = data.partition(b"\n")
    values = json_of(name, head, NOTE_DEPTH + 1)
    if values.get("reads") is not None:
        values["reads"] = reads_of(name, values["reads"])
    message = object_of(Envelope, name, {**values, "body": body})
    for entry, wanted in (("run", run), ("round", number), ("worker", worker)):
        if wanted is not None and (came := getattr(message, entry)) != wanted:
            raise MessageError(f"{name} is of {entry} {came}, expected {wanted}")
    if (size := len(json.dumps(message.note))) > MOST_NOTE:  # a raw 0x7f takes six in the manifest
        raise MessageError(f"{name} is damaged: its note takes {size:,} bytes as JSON, of at most {MOST_NOTE:,}")
    return message


def manifest_name(number: int) -> str:
    return f"{folder_of(number)}/manifest"


def read_manifest(store: Store, run: str, number: int) -> Manifest | None:
    """Returns a round's manifest; None if the round is open."""
    try:
        return read(store, manifest_name(number), MOST_JSON, lambda data: _manifest(data, run, number))
    except ForeignError:
        return None  # a stranger's: for those with the key the round is open


def propose(store: Store, manifest: Manifest) -> Manifest | None:
    """Puts the manifest if the round has none, and returns it as others read it; None if the round has one."""
    data = json.dumps(asdict(manifest)).encode()
    won = store.put_if_absent(manifest_name(manifest.round), data)
    return _manifest(data, manifest.run, manifest.round) if won else None


def checkpoint_name(record: Record, number: int) -> str:
    """Returns the name of the weights after `number` rounds."""
    return f"checkpoints/{number:08d}" if number else f"start/{record.identity}"


def moments_name(number: int) -> str:
    """Returns the name of the inner optimizer's state that lies beside a checkpoint."""
    return f"moments/{number:08d}"


def checkpoints(store: Store) -> list[int]:
    """Returns the rounds after which there are checkpoints, ascending, 0 for the start."""
    return [0, *numbered(store, "checkpoints")]


def reached(store: Store, manifest: Callable[[int], Manifest | None]) -> list[int]:
    """The same without those far beyond the newest manifest: they are a stranger's, who may have put many."""
    found = checkpoints(store)
    decided, unknown = 0, found[-1]  # rounds
    if unknown and manifest(unknown - 1) is None:
        while decided < unknown:
            middle = (decided + unknown) // 2
            decided, unknown = (decided, middle) if manifest(middle) is None else (middle + 1, unknown)
        found = [number for number in found if number <= decided + _LOST]
    return found


def newest(store: Store, run: str) -> tuple[int, Manifest | None]:
    """Returns the newest checkpoint's round and the manifest before it, without which a checkpoint is a stranger's."""
    manifest = cache(partial(read_manifest, store, run))
    for number in filter(None, reversed(reached(store, manifest))):
        if (before := manifest(number - 1)) is not None:
            return number, before
    return 0, None


def numbered(store: Store, folder: str) -> list[int]:
    """Returns the rounds after which a folder has an object, ascending."""
    return sorted(int(name) for name in store.list(folder) if re.fullmatch("[0-9]{8}", name))


def pieces(store: Store, numbers: Iterable[int]) -> list[str]:
    """Returns the names of the messages and hellos of some rounds, which are deleted once a checkpoint covers them."""
    folders = map(folder_of, numbers)
    return [f"{folder}/{name}" for folder in folders for name in store.list(folder) if _PIECE.fullmatch(name)]


# Checking what others wrote


def read(store: Store, name: str, most: int, parse: Callable[[bytes], T]) -> T | None:
    """Returns an object, parsed, or None. A damaged one is read again.

    A cache may serve a part of an object as the whole, and a proxy its own page for an absent one.
    """
    try:
        found = store.get(name, most)
        return None if found is None else parse(found)
    except MessageError:
        return store.read(name, most, parse)


def check_facts(record: Record, facts: dict[str, str], address: str, worker: str) -> None:
    """Raises SettingsError, naming a difference, if facts or version of `worker` differ from the run's."""
    if record.version != __version__:
        theirs = legible(record.version, 40)
        raise SettingsError(f"the run in {address} was started by demopt {theirs}, this is {__version__}; install that")
    if (differing := first_difference(record.facts, facts)) is not None:
        name, there, here = differing
        name, there = legible(fact_told(name, facts), 200), legible(there, 500)
        thaw = "; call requires_grad_(True) before step() and finish_round()" if here == f"{there}, frozen" else ""
        raise SettingsError(f"{worker} has {name} = {here} where the run in {address} has {there}{thaw}")


def legible(text: str, most: int) -> str:
    """Returns a text of others without characters that a terminal would obey, cut to `most` letters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


def object_of(kind: type[T], name: str, values: Mapping[str, Any]) -> T:
    """Builds an object from JSON; MessageError if an entry is missing, unknown, of another type or out of range."""
    known: dict[str, Any] = {each.name: each.type for each in fields(kind)}  # type: ignore[arg-type]
    wrong = set(values).symmetric_difference(known)
    wrong |= {entry for entry in known.keys() - wrong if not _fits(entry, known[entry], values[entry])}
    if wrong:
        raise MessageError(f"{name} is damaged: {', '.join(sorted(legible(each, 40) for each in wrong)[:9])}")
    return kind(**values)


def shapes_of(name: str, value: Any) -> list[tuple[list[int], str]]:
    """Returns the shapes and dtypes of tensors; MessageError if they are none, or of more than `MOST_TENSORS` bytes."""
    found, size = [], 0
    for each in value if isinstance(value, list) else [None]:
        match each:
            case [list(shape), str(dtype)] if (
                dtype in DTYPES
                and len(shape) <= _MOST_DIMENSIONS
                and all(type(n) is int and 0 <= n < MOST_TENSORS for n in shape)
            ):
                found.append((shape, dtype))
                size += math.prod(shape) * DTYPES[dtype]
            case _:
                raise MessageError(f"{name} is damaged: {legible(repr(each), 80)} is no shape and dtype")
    if size > MOST_TENSORS:
        raise MessageError(f"{name} is damaged: its tensors have {size:,} bytes")
    return found


def _fits(entry: str, kind: Any, value: Any) -> bool:
    """Whether a value from JSON has the type `kind`, and is possible for `entry`."""
    parts = get_args(kind)
    if kind is Any or kind in (Reading, Reads):  # which `reading_of` and `reads_of` have checked
        return True
    if isinstance(kind, UnionType):
        return any(_fits(entry, part, value) for part in parts)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits("", parts[0], each) for each in value)
    if get_origin(kind) is dict:
        names = entry in ("members", "refused", "seconds")
        return isinstance(value, dict) and all(
            (NAME.fullmatch(key) if names else key.isprintable()) and _fits(entry, parts[1], each)
            for key, each in value.items()
        )
    if type(value) is not kind:
        return False
    if kind is int:
        least, most = _NUMBERS.get(entry, _INTEGERS)
        return bool(least <= value <= most)
    if kind is float:  # seconds
        return bool(0.0 <= value < 1e9)  # False for NaN
    if kind is str:
        return bool(NAME.fullmatch(value)) if entry in ("run", "identity", "worker", "author") else value.isprintable()
    return True


def _record(address: str, data: bytes) -> Record:
    try:
        values = json_of(RECORD, data)
    except MessageError as error:
        raise MessageError(f"{error}; if the run in {address} has a key, give it (--key-file)") from None
    if values.get("format") != FORMAT:
        came = legible(repr(values.get("format")), 40)
        raise MessageError(f"{address} holds a run of format {came}; this demopt has {FORMAT}")
    return object_of(Record, RECORD, values)


def _manifest(data: bytes, run: str, number: int) -> Manifest:
    name = manifest_name(number)
    values = json_of(name, data)
    listed = values.get("senders")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise MessageError(f"{name} is damaged: its senders are {legible(repr(listed), 80)}")
    senders = [object_of(Sender, name, each) for each in listed]
    reading = None if (read := values.get("reading")) is None else reading_of(name, read)
    manifest = object_of(Manifest, name, {**values, "senders": senders, "reading": reading})
    if (manifest.run, manifest.round) != (run, number):
        raise MessageError(f"{name} is of run {manifest.run}, round {manifest.round}, expected {run}, {number}")
    if len({sender.worker for sender in senders}) < len(senders):
        raise MessageError(f"{name} is damaged: it lists a worker twice")
    # A stranger's may list too few; `draft` has dropped them in ours. After a stop there are no members: all counts.
    return manifest if _moves(senders, manifest.members) else replace(manifest, senders=[])


def json_of(name: str, data: bytes, most: int = MOST_DEPTH) -> dict[str, Any]:
    """Returns a JSON object whose numbers are finite; MessageError if it is anything else."""

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError("not finite")
        return value

    try:
        found = json.loads(data, parse_float=number, parse_constant=number)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{name} is damaged: it holds no JSON") from error
    if not isinstance(found, dict):
        raise MessageError(f"{name} is damaged: it holds a {type(found).__name__}")
    if is_deeper(found, most):
        raise MessageError(f"{name} is damaged: it is nested more than {most} deep")
    return found


def is_deeper(value: Any, most: int) -> bool:
    """Whether lists and dicts are nested more than `most` deep: `asdict` exhausts the stack of some readers then."""
    level = [value]
    for _ in range(most + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [value for values in inner for value in values]
    return bool(level)

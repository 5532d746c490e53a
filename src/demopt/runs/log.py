"""The objects of a run, and the decision about a round. docs/folder.md specifies them.

    run                                   identity: settings, shapes, versions          put if absent
    start/RUN                             the first weights
    rounds/00000012/WORKER.message        the message of a worker in round 12
    rounds/00000012/WORKER.hello          a worker that has caught up asks to be waited for
    rounds/00000012/manifest              the round's senders, in order                  put if absent
    checkpoints/00000040                  the weights after 40 rounds                    put if absent
    moments/00000040                      the inner optimizer's state of its writer      put if absent
    stop                                  a wish to stop

Everything that workers must agree on is in the manifest. It is put if absent, so there is one for each round, and it
is never deleted: a worker that has slept cannot open an old round again.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from typing import Any, TypeVar, get_origin

from demopt.errors import ExchangeError, MessageError
from demopt.runs.store import Store

FORMAT = 2
MOST_SILENT = 2  # rounds without a message after which a worker is not waited for
MOST_JSON = 1 << 22  # bytes of a record or manifest
MOST_ENVELOPE = 1 << 12  # bytes of a message before its body
RECORD, STOP = "run", "stop"

T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """The identity of a run. Joining workers must have the same `facts`; `groups` suffice to replay the run."""

    identity: str  # drawn at random
    version: str  # of demopt
    facts: dict[str, str]
    config_facts: list[list[str]]
    #: Settings of each parameter group, and of each parameter "parameters" (shape, dtype), "param_names" and "marks".
    groups: list[dict[str, Any]]
    checkpoint_every: int
    keep_log: bool
    settings: dict[str, Any] = field(default_factory=dict)  # the trainer's
    format: int = FORMAT


@dataclass(frozen=True)
class Message:
    """A worker's message in a round. `note` is the user's, such as a loss; `weights`: a fingerprint, if one is due."""

    run: str
    round: int
    worker: str
    samples: int
    leaves: bool  # it is this worker's last message
    stop: bool  # this worker has seen the wish to stop
    weights: int | None
    note: Any
    body: bytes = b""

    def packed(self) -> bytes:
        """Returns the object: a line of JSON, then the body."""
        head = asdict(self)
        del head["body"]
        return json.dumps(head).encode() + b"\n" + self.body


@dataclass(frozen=True)
class Sender:
    """An entry of a manifest."""

    worker: str
    digest: str  # of the whole object
    samples: int
    note: Any = None


@dataclass(frozen=True)
class Manifest:
    """A round as all workers apply it. `members`: the workers expected next, with their rounds of silence."""

    run: str
    round: int
    author: str
    senders: list[Sender]
    refused: dict[str, str]  # reasons, by worker
    members: dict[str, int]
    stop: bool = False
    weights: int | None = None
    at: str = ""  # UTC, by the author's clock, for people to read: nothing depends on it


@dataclass(frozen=True)
class Seen:
    """A round's objects at one moment: the workers with a message, those with a hello, and whether it is decided."""

    messages: set[str]
    hellos: set[str]
    decided: bool


def digest(data: bytes) -> str:
    """Returns the digest of an object, as manifests name it."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


# The decision


def expected(before: Manifest | None, seen: Seen) -> set[str]:
    """Returns the workers that the round waits for: members of the previous manifest, and workers with a hello.

    Examples:
        >>> before = Manifest("r", 0, "a", [], {}, {"a": 0, "b": 1})
        >>> sorted(expected(before, Seen(set(), {"c"}, False)))
        ['a', 'b', 'c']
    """
    return set(before.members if before else ()) | seen.hellos


def decide(
    author: Message,
    before: Manifest | None,
    seen: Seen,
    messages: Mapping[str, tuple[Message, str]],
    refused: Mapping[str, str],
) -> Manifest:
    """Returns the manifest that `author` proposes: all valid messages with their digests, in the order of the names.

    Not expected: workers that leave, and those that were silent for `MOST_SILENT` rounds in a row.
    """
    members: dict[str, int] = {}
    for worker in sorted(expected(before, seen) | set(messages) | set(refused)):
        sent = messages.get(worker)
        silent = 0 if sent or worker in refused else (before.members.get(worker, 0) if before else 0) + 1
        if silent < MOST_SILENT and not (sent and sent[0].leaves):
            members[worker] = silent
    senders = [
        Sender(worker, mark, message.samples, message.note) for worker, (message, mark) in sorted(messages.items())
    ]
    stop = author.stop or any(message.stop for message, _ in messages.values())
    return Manifest(
        run=author.run,
        round=author.round,
        author=author.worker,
        senders=senders,
        refused=dict(refused),
        members={} if stop else members,
        stop=stop,
        weights=author.weights,
        at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


# Reading and writing


def folder_of(number: int) -> str:
    """Returns the folder of a round.

    Examples:
        >>> folder_of(12)
        'rounds/00000012'
    """
    return f"rounds/{number:08d}"


def read_record(store: Store) -> Record | None:
    """Returns the run in a store; None if there is none. MessageError if it is of another format."""
    found = store.get(RECORD, MOST_JSON)
    if found is None:
        return None
    try:
        values = _json(RECORD, found)
    except MessageError as error:
        raise MessageError(f"{error}; if the run in {store.address} has a key, give it (--key-file)") from None
    if values.get("format") != FORMAT:
        raise MessageError(f"{store.address} holds a run of format {values.get('format')!r}; this demopt has {FORMAT}")
    return _checked(Record, RECORD, values)


def put_record(store: Store, record: Record) -> Record:
    """Starts a run, or finds the one that is there; returns it. ExchangeError if the store overwrites it."""
    data = json.dumps(asdict(record)).encode()
    if store.put_if_absent(RECORD, data) and store.put_if_absent(RECORD, data):
        store.delete([RECORD])
        raise ExchangeError(
            f"{store.address} puts an object over another one where it must not (If-None-Match): its rounds would not "
            "be decided once; update the server, or use another store"
        )
    found = read_record(store)
    assert found is not None
    return found


def look(store: Store, number: int) -> Seen:
    """Returns the present objects of a round."""
    names = store.list(folder_of(number))

    def workers(kind: str) -> set[str]:
        return {name.removesuffix(kind) for name in names if name.endswith(kind)}

    return Seen(workers(".message"), workers(".hello"), "manifest" in names)


def message_name(number: int, worker: str) -> str:
    """Returns the name of a worker's message."""
    return f"{folder_of(number)}/{worker}.message"


def read_message(name: str, data: bytes, run: str, number: int, worker: str) -> Message:
    """Returns a message with an unchecked body; MessageError if the rest does not fit its name."""
    head, _, body = data.partition(b"\n")
    message = _checked(Message, name, {**_json(name, head), "body": body})
    for field_name, came, wanted in (
        ("run", message.run, run),
        ("round", message.round, number),
        ("worker", message.worker, worker),
    ):
        if came != wanted:
            raise MessageError(f"{name} is of {field_name} {came}, expected {wanted}")
    return message


def read_manifest(store: Store, run: str, number: int) -> Manifest | None:
    """Returns a round's manifest; None if the round is open."""
    found = store.get(_manifest_name(number), MOST_JSON)
    return None if found is None else _manifest(found, run, number)


def propose(store: Store, manifest: Manifest) -> Manifest | None:
    """Puts the manifest if the round has none, and returns it as others read it; None if the round has one."""
    data = json.dumps(asdict(manifest)).encode()
    won = store.put_if_absent(_manifest_name(manifest.round), data)
    return _manifest(data, manifest.run, manifest.round) if won else None


def checkpoint_name(record: Record, number: int) -> str:
    """Returns the name of the weights after `number` rounds."""
    return f"checkpoints/{number:08d}" if number else f"start/{record.identity}"


def moments_name(number: int) -> str:
    """Returns the name of the inner optimizer's state that lies beside a checkpoint."""
    return f"moments/{number:08d}"


def checkpoints(store: Store) -> list[int]:
    """Returns the rounds after which there are checkpoints, ascending, 0 for the start."""
    return [0, *sorted(int(name) for name in store.list("checkpoints") if name.isdecimal())]


def clear(store: Store, numbers: Iterable[int]) -> None:
    """Deletes messages and hellos of rounds that a checkpoint covers; their manifests stay."""
    for number in numbers:
        folder = folder_of(number)
        store.delete(f"{folder}/{name}" for name in store.list(folder) if name != "manifest")


def _manifest_name(number: int) -> str:
    return f"{folder_of(number)}/manifest"


def _manifest(data: bytes, run: str, number: int) -> Manifest:
    name = _manifest_name(number)
    values = _json(name, data)
    listed = values.get("senders")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise MessageError(f"{name} is damaged: its senders are {listed!r:.80}")
    senders = [_checked(Sender, name, each) for each in listed]
    manifest = _checked(Manifest, name, {**values, "senders": senders})
    if (manifest.run, manifest.round) != (run, number):
        raise MessageError(f"{name} is of run {manifest.run}, round {manifest.round}, expected {run}, {number}")
    return manifest


def _json(name: str, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{name} is damaged: it holds no JSON") from error
    if not isinstance(found, dict):
        raise MessageError(f"{name} is damaged: it holds a {type(found).__name__}")
    return found


def _checked(kind: type[T], name: str, values: Mapping[str, Any]) -> T:
    """Builds an object from JSON; MessageError if an entry is missing, unknown or of another type."""
    known: dict[str, Any] = {each.name: each.type for each in fields(kind)}  # type: ignore[arg-type]
    wrong = set(values).symmetric_difference(known)
    for entry in known.keys() - wrong:
        wanted, value = known[entry], values[entry]
        plain = get_origin(wanted) if get_origin(wanted) in (dict, list) else object if wanted is Any else wanted
        if not isinstance(value, plain) or (wanted is int and isinstance(value, bool)):
            wrong.add(entry)
    if wrong:
        raise MessageError(f"{name} is damaged: {', '.join(sorted(wrong))}")
    return kind(**values)

"""A run's progress, and the workers that it waits for: read from its folder, without joining."""

import statistics
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from demopt.errors import MessageError, printable
from demopt.runs import log
from demopt.runs.log import Manifest, Record, Seen
from demopt.runs.store import Store
from demopt.train.screen import duration

#: The numbers in a worker's note that others read, and the largest of each that a training run can have.
NUMBERS = {"loss": 1e6, "val_loss": 1e6, "sequences": float(1 << 32), "before": float(1 << 53), "speed": 1e9}
SPANS = (32, 16, 8, 4, 2, 1)  # rounds over which to time a round: the first span with the same author at both ends
SKEW = 60.0  # seconds that clocks may differ by


def status_of(store: Store, record: Record, address: str) -> dict[str, Any]:
    """Returns the progress of a run and of its workers, by name. Times are by the workers' clocks."""
    number, last = log.newest(store, record.identity)
    checkpoint = number
    while (following := log.read_manifest(store, record.identity, number)) is not None:  # the open round has none
        last, number = following, number + 1
    settings, seen = record.settings, log.look(store, number)
    senders = {sender.worker: sender for sender in last.senders} if last else {}
    counts = {name: value for name, value in settings.items() if type(value) is int and 0 < value < 1 << 62}
    steps, every, evaluated = counts.get("steps"), counts.get("sync_every", 0), counts.get("eval_every")  # 0: a script
    done, reading = min(number * every, steps or 1 << 62), last.reading if last else None
    read = reading.position / reading.total if reading and reading.total else None
    state = "done" if read == 1 or (steps is not None and done >= steps) else "open"
    if state == "open" and last and last.stop and not (seen.hellos or seen.messages):
        state = "stopped"
    awaited = log.expected(last, seen.hellos) if state == "open" else set()
    workers: dict[str, dict[str, Any]] = {}
    for worker in sorted({*senders, *awaited, *(seen.messages if state == "open" else ())}):
        row = workers[worker] = {"samples": senders[worker].samples} if worker in senders else {}
        if state == "open":
            row["next message"] = _message(worker, last, seen)
    each = _seconds_of_a_round(store, record, last)
    missing = (steps - done) / every if steps is not None and every and state == "open" else 0
    return {
        "run": record.identity,
        "address": address,
        "demopt": record.version,
        "round": number,
        "step": done if every else None,
        "steps": steps,
        "epochs": counts.get("epochs"),
        "epoch": counts["epochs"] * read if read is not None and "epochs" in counts else None,
        "loss": _mean(senders, "loss"),
        "val_loss": _mean(senders, "val_loss"),
        "val_step": max(0, done - 1) // evaluated * evaluated if evaluated else None,  # the last before the message
        "checkpoint": checkpoint,
        "log": "kept" if record.keep_log else "since the last but one checkpoint",
        "decided": last.at if last else None,
        "author": last.author if last else None,
        "seconds_ago": _seconds_between(last.at if last else "", datetime.now(timezone.utc).isoformat()),
        "seconds_per_round": each,
        "seconds_left": round(missing * each) if each and missing else None,
        "state": state,
        "workers": workers,
        "refused": last.refused if last else {},
    }


def shown(found: dict[str, Any]) -> Group:
    """Returns the status for a terminal: three lines, and a table of workers."""
    parts = [progress(found)] + ([f"round {found['round']}"] if found["step"] is not None else [])
    parts += [f"epoch {found['epoch']:.2f} of {found['epochs']}"] if found["epoch"] is not None else []
    parts += [f"loss {found['loss']:.3f}"] if found["loss"] is not None else []
    validated = f" after step {found['val_step']}" if found["val_step"] else ""
    parts += [f"val {found['val_loss']:.3f}{validated}"] if found["val_loss"] is not None else []
    ago = found["seconds_ago"]
    whose = f" by the clock of {found['author']}" if ago is not None and ago > SKEW else ""  # which may be wrong
    times = [f"last round {duration(ago)} ago{whose}"] if ago is not None else []
    times += [f"one per {found['seconds_per_round']:.3g} s"] if found["seconds_per_round"] else []
    times += [f"{duration(found['seconds_left'])} left"] if found["seconds_left"] else []
    kept = f"checkpoint after round {found['checkpoint']}, log {found['log']}, demopt {found['demopt']}"
    lines = [f"{found['state']}: run {found['run']} in {found['address']}", "  ".join(parts), "  ".join(times), kept]
    more = ["next message"] if found["state"] == "open" else []
    table = Table("worker", Column("samples", justify="right"), *more, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for worker, row in found["workers"].items():
        table.add_row(Text(printable(worker)), *(str(row.get(name, "")) for name in ("samples", *more)))
    for worker, reason in found["refused"].items():
        table.add_row(Text(printable(worker)), "", Text(printable(f"refused: {reason}")))
    return Group(*(Text(printable(line)) for line in lines if line), *([table] if table.rows else []))


def progress(found: dict[str, Any]) -> str:
    """Returns the step of a run, or the round if a script has started it, because its steps are unknown."""
    if found["step"] is None:
        return f"round {found['round']}"
    return f"step {found['step']}" + (f" of {found['steps']}" if found["steps"] else "")


def _message(worker: str, last: Manifest | None, seen: Seen) -> str:
    """Returns whether a worker's message for the open round is there, awaited and why, or will not come."""
    if worker in seen.messages:
        return "here"
    if last and (silent := last.members.get(worker, 0)):
        return f"awaited: silent for {silent} of {log.MOST_SILENT} rounds"
    if worker in seen.hellos:
        return "awaited: it has joined"
    return "awaited" if last and worker in last.members else "none: it left"


def _mean(senders: dict[str, Any], name: str) -> float | None:
    """Returns the mean of a number in the last round's notes."""
    numbers = [note[name] for note in (numbers_of(sender.note) for sender in senders.values()) if name in note]
    return round(sum(numbers) / len(numbers), 4) if numbers else None


def _seconds_of_a_round(store: Store, record: Record, last: Manifest | None) -> float | None:
    """Returns the mean time of the last rounds."""
    for span in SPANS:
        with suppress(MessageError):  # whoever needs a damaged one reports it
            if last and last.round >= span and (before := log.read_manifest(store, record.identity, last.round - span)):
                if before.author != last.author:  # two clocks, one of which may be hours ahead
                    continue
                seconds = _seconds_between(before.at, last.at)
                return None if seconds is None else round(seconds / span, 2)
    return None


def _seconds_between(one: str, other: str) -> float | None:
    """Returns the seconds between two times of manifests; None if one is not a time, or a clock is wrong."""
    with suppress(ValueError, TypeError, OverflowError):
        found = (datetime.fromisoformat(other) - datetime.fromisoformat(one)).total_seconds()
        return max(0.0, round(found, 1)) if found > -SKEW else None
    return None


def sequences_so_far(store: Store, run: str, last: Manifest | None) -> int:
    """Returns the sequences of all messages up to a manifest: its own, and the earlier ones that its senders report."""
    while last is not None and not last.senders:  # it moved nothing
        last = log.read_manifest(store, run, last.round - 1) if last.round else None
    notes = [numbers_of(sender.note) for sender in last.senders] if last else []
    before = statistics.median_high(note.get("before", 0) for note in notes) if notes else 0
    return int(before + sum(note.get("sequences", 0) for note in notes))


def numbers_of(note: Any) -> dict[str, float]:
    """Returns the known numbers in a note; ignores anything else that another worker has put there."""
    found = note if isinstance(note, dict) else {}
    known = {name: value for name, value in found.items() if name in NUMBERS and type(value) in (int, float)}
    return {name: value for name, value in known.items() if 0 <= value <= NUMBERS[name]}

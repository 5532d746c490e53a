"""`demopt join`, `status`, `stop` and `replay`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demopt.train.config import InputError

if TYPE_CHECKING:
    from demopt.runs.log import Manifest, Record
    from demopt.runs.store import Store

Address = Annotated[str, typer.Argument(help="The run: a path, s3://bucket/name, gs:// or az://.")]
KeyFile = Annotated[str | None, typer.Option(help="The run's key, if it has one.")]


def join(
    address: Address,
    data: Annotated[list[str] | None, typer.Option(help="As of train. Default: as the run names it.")] = None,
    model: Annotated[str | None, typer.Option(help="The run's --model, if it is elsewhere here.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="The run's --tokenizer, likewise.")] = None,
    out: Annotated[str, typer.Option(help="This worker's own folder.")] = "runs/joined",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads; 0: the cores.", min=0)] = 0,
    late: Annotated[float, typer.Option(help="Seconds that a round waits for workers that are late.", min=0)] = 10.0,
    key_file: KeyFile = None,
) -> int:
    """Train along in a run: settings and weights come from its folder."""
    print(f"joining {address} ...", flush=True)  # importing torch takes seconds
    from demopt.train.runs.worker import settings_of, train_in_folder

    own = {"out": out, "device": device, "threads": threads, "late": late, "data": data or None, "model": model}
    own["tokenizer"] = tokenizer
    return train_in_folder(settings_of(address, key_file, own))


def status(
    address: Address,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    key_file: KeyFile = None,
) -> int:
    """Show the progress of a run and its workers."""
    found = _status(*open_run(address, key_file), address)
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"run {found['run']} in {address}", show_header=False)
    for name in ("demopt", "round", "step", "steps", "loss", "checkpoint", "log", "decided", "state"):
        if found[name] is not None:
            table.add_row(name, str(found[name]))
    for worker, each in found["workers"].items():
        table.add_row(worker, ", ".join(f"{name} {value}" for name, value in each.items()))
    for worker, reason in found["refused"].items():
        table.add_row(worker, f"refused: {reason}")
    Console().print(table)
    return 0


def stop(address: Address, key_file: KeyFile = None) -> int:
    """Stop a run on all machines: each finishes its round and saves."""
    from demopt.runs import log

    store, record = open_run(address, key_file)
    number = _open_round(store, record)
    log.put_stop(store, number, record.identity)
    print(f"all workers will stop after {number + 1} or {number + 2} rounds; demopt join {address} goes on from there")
    return 0


def export(
    address: Address,
    out: Annotated[str, typer.Option(help="Folder for the model.")],
    model: Annotated[str | None, typer.Option(help="The run's --model, if it is elsewhere here.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="The run's --tokenizer, likewise.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run with --lora: the whole model, not the adapters.")
    ] = False,
    key_file: KeyFile = None,
) -> int:
    """Save the newest common weights of a run as a model of transformers, without joining it."""
    from demopt.train.runs.export import export_model

    rounds = export_model(address, out, key_file, {"model": model, "tokenizer": tokenizer, "merge": merge})
    print(f"the model after {rounds} rounds is in {out}")
    return 0


def replay(address: Address, key_file: KeyFile = None) -> int:
    """Compute a run's weights again from the first ones and every message, bit for bit (needs --keep-log)."""
    from demopt.runs.exchange import CoveredError
    from demopt.runs.weights import replay as rounds

    last = None
    open_run(address, key_file)
    try:
        for last in rounds(address, key_of(key_file)):
            if sys.stderr.isatty():
                print(f"round {last[0].round + 1}", end="\r", file=sys.stderr, flush=True)
    except CoveredError as error:
        raise InputError(f"{error}: this run's log was not kept (demopt train --keep-log)") from None
    if last is None:
        raise InputError(f"the run in {address} has no round yet")
    print(f"weights after {last[0].round + 1} rounds: sha256 {last[1]}")
    return 0


def open_run(address: str, key_file: str | None) -> tuple[Store, Record]:
    """Returns the store and the record of a run that is there; InputError if it is not, or the key file holds none."""
    from demopt.runs import log
    from demopt.runs.exchange import FolderExchange
    from demopt.runs.store import full

    try:
        if "://" not in (place := full(address)) and not Path(place).is_dir():  # opening it would make it
            raise InputError(
                f"{address} is no folder here; is its disk mounted? To start a run: demopt train --run {address}"
            )
        store = FolderExchange(address, patience=30.0, key=key_of(key_file)).store
    except ValueError as error:
        raise InputError(str(error)) from None
    record = log.read_record(store)
    if record is None:
        raise InputError(f"{address} holds no run; start one with demopt train --run {address}")
    return store, record


def key_of(key_file: str | None) -> bytes | None:
    """Returns the key in a file; None without a file."""
    from demopt.runs.key import read_key

    return read_key(key_file) if key_file else None


def _open_round(store: Store, record: Record) -> int:
    """Returns the first round without a manifest: those since the newest checkpoint are tried one by one."""
    from demopt.runs import log

    number = log.checkpoints(store)[-1]
    while log.read_manifest(store, record.identity, number) is not None:
        number += 1
    return number


def _status(store: Store, record: Record, address: str) -> dict[str, Any]:
    from demopt.runs import log

    number = _open_round(store, record)
    last: Manifest | None = log.read_manifest(store, record.identity, number - 1) if number else None
    settings, seen = record.settings, log.look(store, number)
    senders = {sender.worker: sender for sender in last.senders} if last else {}
    losses = [s.note["loss"] for s in senders.values() if isinstance(s.note, dict) and s.note.get("loss") is not None]
    steps, done = settings.get("steps"), number * settings.get("sync_every", 1)
    state = "done" if steps is not None and done >= steps else "open"
    if state == "open" and last and last.stop and not (seen.hellos or seen.messages):
        state = "stopped"
    awaited = log.expected(last, seen) if state == "open" else set()
    present = seen.messages if state == "open" else set()
    workers: dict[str, dict[str, Any]] = {}
    for worker in sorted({*senders, *awaited, *present}):
        row = workers[worker] = {"samples": senders[worker].samples} if worker in senders else {}
        if state == "open":
            if last and (silent := last.members.get(worker, 0)):
                row["rounds silent"] = silent
            row["next message"] = "here" if worker in present else "awaited" if worker in awaited else "none: it left"
    return {
        "run": record.identity,
        "address": address,
        "demopt": record.version,
        "round": number,
        "step": min(done, steps) if steps else done,
        "steps": steps,
        "loss": round(sum(losses) / len(losses), 4) if losses else None,
        "checkpoint": log.checkpoints(store)[-1],
        "log": "kept" if record.keep_log else "since the last but one checkpoint",
        "decided": last.at if last else None,
        "state": state,
        "workers": workers,
        "refused": last.refused if last else {},
    }

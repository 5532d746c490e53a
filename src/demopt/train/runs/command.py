"""`demopt join`, `status`, `stop` and `replay`."""

import json
import shlex
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demopt.output import is_read
from demopt.train.config import CONFIG, InputError, read_file

if TYPE_CHECKING:
    from demopt.runs.exchange import FolderExchange

WATCH_SECONDS = 5.0  # between two looks


class NoRunError(InputError):
    """The address is valid, but there is no run: `train` starts one."""


Address = Annotated[str, typer.Argument(help="The run: a path, s3://bucket/name, gs:// or az://.")]
KeyFile = Annotated[str | None, typer.Option(help="The run's key, if it has one.")]


def join(
    address: Address,
    data: Annotated[list[str] | None, typer.Option(help="As of train. Default: as the run names it.")] = None,
    model: Annotated[str | None, typer.Option(help="The run's --model, if it is elsewhere here.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="The run's --tokenizer, likewise.")] = None,
    out: Annotated[str, typer.Option(help="This worker's own folder.")] = "runs/joined",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps or xpu.")] = "auto",
    batch: Annotated[int | None, typer.Option(help="Sequences per forward pass, with --global-batch.", min=1)] = None,
    threads: Annotated[int, typer.Option(help="Threads; 0: OMP_NUM_THREADS, or the cores.", min=0)] = 0,
    late: Annotated[float, typer.Option(help="Seconds that a round waits for workers that are late.", min=0)] = 10.0,
    key_file: KeyFile = None,
) -> int:
    """Train along in a run: settings and weights come from its folder."""
    from demopt.train.out import OutFolder

    folder = OutFolder(Path(out))
    print(f"joining {address} ...", flush=True)  # importing torch takes seconds
    from demopt.train.runs.worker import settings_to_join, train_in_folder

    own = {"out": out, "device": device, "threads": threads, "late": late, "data": data or None, "model": model}
    own |= {"tokenizer": tokenizer, "batch": batch}
    return train_in_folder(*settings_to_join(address, key_file, own), folder)


def status(
    address: Address,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until the run ends.")] = False,
    key_file: KeyFile = None,
) -> int:
    """Show the progress of a run and its workers."""
    from demopt.train.runs.status import shown, status_of

    run = open_run(address, key_of(key_file))
    if as_json:
        print(json.dumps(status_of(run.store, run.record, address), indent=1))
        return 0
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) if watch and console.is_terminal else nullcontext() as live:
        while True:
            found = status_of(run.store, run.record, address)
            if live is None:
                console.print(shown(found))
            else:
                live.update(shown(found), refresh=True)
            if not watch or found["state"] != "open" or not is_read():
                return 0
            time.sleep(WATCH_SECONDS)


def stop(address: Address, key_file: KeyFile = None) -> int:
    """Stop a run on all machines: each finishes its round and saves."""
    from demopt.runs.stop import put_stop
    from demopt.train.runs.status import progress, status_of

    run = open_run(address, key_of(key_file))
    found = status_of(run.store, run.record, address)
    number, by_script = found["round"], found["step"] is None
    key = f" --key-file {typed(key_file)}" if key_file else ""
    again = "its script" if by_script else f"demopt join {typed(address)}{key}"
    if found["state"] != "open":
        saves = "" if by_script else "; demopt export saves its model"
        more = saves if found["state"] == "done" else f"; {again} goes on"
        print(f"nothing to stop: the run is {found['state']} after {progress(found)}{more}")
        return 0
    put_stop(run.store, number, run.record.identity)
    most = len(found["workers"]) + 2  # they take turns reading the wish, and pass it on in their next message
    print(f"all workers will stop within {most} rounds; go on with: {again}")
    return 0


def export(
    address: Address,
    out: Annotated[str, typer.Option(help="Folder for the model.")],
    model: Annotated[str | None, typer.Option(help="The run's --model, if it is elsewhere here.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="The run's --tokenizer, likewise.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="With --lora: the whole model, not the adapters.")] = False,
    key_file: KeyFile = None,
) -> int:
    """Save the newest common weights of a run as a model of transformers, without joining it."""
    from demopt.train.runs.worker import export_model

    rounds = export_model(address, key_file, {"out": out, "model": model, "tokenizer": tokenizer, "merge": merge})
    print(f"the model after {rounds} rounds is in {out}")
    return 0


def replay(address: Address, key_file: KeyFile = None) -> int:
    """Compute a run's weights again from the first ones and every message, bit for bit (needs --keep-log)."""
    from demopt.runs.open_round import CoveredError
    from demopt.runs.replay import replay as rounds

    last, run = None, open_run(address, key_of(key_file), patience=600.0)
    try:
        for last in rounds(run.store):
            if sys.stderr.isatty():
                print(f"round {last[0].round + 1}", end="\r", file=sys.stderr, flush=True)
    except CoveredError as error:
        told = "; restore it" if run.record.keep_log else ": this run's log was not kept (demopt train --keep-log)"
        raise InputError(f"{error}{told}") from None
    if last is None:
        raise InputError(f"the run in {address} has no round yet")
    print(f"weights after {last[0].round + 1} rounds: sha256 {last[1]}")
    return 0


def key_of(key_file: str | None) -> bytes | None:
    """Returns the key in a file, which is read once, because it may be a pipe. InputError if it holds none."""
    from demopt.runs.key import read_key

    try:
        return read_key(key_file) if key_file else None
    except ValueError as error:
        raise InputError(str(error)) from None


def open_run(address: str, key: bytes | None, patience: float = 30.0, flags: str = "") -> "FolderExchange":
    """Opens an existing run; NoRunError if there is none, InputError if the address is invalid.

    `flags`: for the command in the error that starts a run.
    """
    from demopt.runs.exchange import FolderExchange
    from demopt.runs.store import full, in_time

    try:
        is_bucket = "://" in (place := full(address))
        is_there = is_bucket or in_time(address, Path(place).exists)
        run = FolderExchange(address, patience=patience, key=key) if is_there else None
    except ValueError as error:
        raise InputError(str(error)) from None
    if run is None or run.read_record() is None:  # opening an absent folder would create it
        of_out = {}
        with suppress(InputError):  # as it mostly has no such file
            of_out = read_file(Path(place, CONFIG))
        if "optimizer" in of_out:
            its = f"its --run is {typed(str(of_out['run']))}" if of_out.get("run") else "which trained without --run"
            raise NoRunError(f"{address} is the --out of a worker, {its}")
        what, to = (
            "is no folder here" if run is None else "holds no run",
            "to" if is_bucket else "is its disk mounted? To",
        )
        raise NoRunError(f"{address} {what}; {to} start a run: demopt train --run {typed(address)}{flags}")
    run.find_run()
    return run


def typed(place: str) -> str:
    """Returns an address or a path as it is typed into a shell; one with a dash in front would be a flag.

    Examples:
        >>> print(typed("s3://bucket/mine"), typed("my run"), typed("-run"))
        s3://bucket/mine 'my run' ./-run
    """
    return shlex.quote(f"./{place}" if place.startswith("-") else place)

"""The --out folder: where each file is, its metrics, and a lock that lets one run at a time write to it."""

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from demopt.errors import DemoptError, first_line
from demopt.train.config import CHECKPOINTS, CONFIG, IDENTITY, InputError, TrainConfig, read_run

Row = dict[str, Any]  # the metrics of a step
_OF_RUNS = ("run", "stop", "start", "rounds", "checkpoints", "moments", ".partial")  # what a run's folder holds
_READ = {"step", "tokens", "payload_bytes", "sent_bytes", "received_bytes", "step_seconds"}  # counts, in every row


class OutFolder:
    """The paths in an --out folder. `old_stop`: the last change of its file `stop` before the command; -1: none."""

    def __init__(self, root: Path, old_stop: int | None = None) -> None:
        self.root = root
        self.config = root / CONFIG
        self.metrics = root / "metrics.jsonl"  # one JSON object per step
        self.checkpoints = root / CHECKPOINTS  # the last two
        self.model = root / "model"  # the trained model, in transformers' format
        self.merged = root / "merged"  # with --merge: the model with its adapters in it
        self.picture = root / "loss.svg"
        self.stop = root / "stop"  # while it exists, the run saves a checkpoint after the current step and stops
        self.identity = root / IDENTITY  # the identity of the run, if that is in a folder
        self.state = root / "state.pt"  # of a worker that left such a run
        self.written = [*vars(self).values(), root / "tensorboard", root / "wandb"][1:]  # without `root`
        self.old_stop = _changed(self.stop) if old_stop is None else old_stop

    @property
    def old(self) -> list[Path]:
        """The paths that may be an earlier run's: all that are written, except a `stop` for this run."""
        return [place for place in self.written if place != self.stop or _changed(place) == self.old_stop]

    @property
    def asks_to_stop(self) -> bool:
        return os.path.exists(self.stop)  # not `Path.exists`, which raises if a share is away for a moment

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an error in writing files, such as a full disk, into a DemoptError of one line."""
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:
            of_torch = isinstance(error, RuntimeError)  # torch.save, in its own words
            if of_torch and not re.search("inline_container|iostream", str(error)):
                raise
            told = "is its disk full? " if of_torch else ""
            reason = getattr(error, "strerror", None) or told + first_line(error)
            raise DemoptError(f"--out {self.root}: cannot be written: {reason}") from error

    def refuse_if_taken(self, config: TrainConfig) -> None:
        """Raises InputError if the folder holds another run, or files of no known run, or if both flags are given."""
        if config.overwrite and config.resume:
            raise InputError("--overwrite deletes the run that --resume continues; give one of them")
        is_run = self.config.exists() and "optimizer" in read_run(self.root)  # not the config.json of a model
        if is_run and not (config.resume or config.overwrite):
            other = "go on with --resume, replace it with --overwrite, or give another --out"
            raise InputError(f"--out {self.root} already holds a run; {other}")
        self.refuse_sources(config, self.written)
        if not is_run and (there := [place.name for place in self.old if place.exists()]):
            raise InputError(f"--out {self.root} holds {there[0]}, and no run that it is of; give another --out")
        files = (self.metrics, self.picture, self.identity, self.state)
        if odd := [place.name for place in files if place.exists() and not place.is_file() and not config.overwrite]:
            raise InputError(f"--out {self.root}: {odd[0]} is no file; delete it, or give another --out")

    def refuse_sources(self, config: TrainConfig, written: Iterable[Path]) -> None:
        """Raises InputError if the run, or a file that it reads, is this folder or in one of the places `written`."""
        named = [("--model", config.model), ("--tokenizer", config.tokenizer), ("--key-file", config.key_file)]
        named += [("--data", each) for each in config.data]
        from demopt.runs.store import full  # not above: it imports torch, which takes seconds

        run = None
        with suppress(ValueError):  # no run, or an invalid one, reported where it is opened
            named.append(("--run", run := full(config.run or "")))
        root = self.root.resolve()
        places = {Path(os.path.realpath(place)) for place in written}  # even a link to itself
        for name, source in named:
            place = Path(source or "").resolve()
            if source not in (None, "", "bytes") and (place == root or places & {place, *place.parents}):
                raise InputError(f"--out {self.root} would replace {name} {source}; give another --out")
        inside = [place for place in root.parents if root.relative_to(place).parts[0] in _OF_RUNS]
        for place in (root, *inside):
            if str(place) == run or ((place / "run").is_file() and (place / "start").is_dir()):
                raise InputError(f"--out {self.root} is in the folder of a run; each worker's --out is another one")

    @contextmanager
    def claimed(self, config: TrainConfig) -> Iterator[None]:
        """Locks the folder for a run, and records its settings. With --overwrite, deletes only files of a run."""
        with ExitStack() as held:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                self._lock(held.enter_context((self.root / ".lock").open("w")).fileno())
                self.refuse_if_taken(config)
                for place in reversed(self.old):  # the record goes last
                    if config.overwrite or place == self.stop:
                        _delete(place)
                text = json.dumps(config.record(), indent=2) + "\n"
                write_whole(self.config, lambda aside: aside.write_text(text, encoding="utf-8"))
            except OSError as error:
                raise InputError(f"--out {self.root}: cannot be written: {error.strerror}") from None
            yield

    def _lock(self, descriptor: int) -> None:
        """Locks an open file until it is closed; InputError if a run has locked it."""
        try:
            with suppress(ModuleNotFoundError):
                if sys.platform == "win32":
                    import msvcrt

                    msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
                else:
                    import fcntl

                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # of Linux and macOS; of Windows
            raise InputError(f"--out {self.root}: a run is at work in it; wait for its end or stop it") from None
        except OSError as error:  # a share or a FUSE disk without locks
            print(f"--out {self.root}: not locked against a second run: {error.strerror}", file=sys.stderr)

    def require_shared(self) -> None:
        """Raises InputError if this rank does not see the folder that rank 0 has claimed."""
        if not self.config.exists():
            raise InputError(f"--out {self.root} is not the folder that rank 0 writes to; it must be a shared one")

    def read_metrics(self) -> list[Row]:
        """Returns the rows of metrics.jsonl; skips invalid lines, such as one that a killed process left half done."""
        rows = []
        for line in self.metrics.read_bytes().splitlines() if self.metrics.exists() else ():
            with suppress(ValueError, RecursionError, OverflowError):
                row = json.loads(line)
                if isinstance(row, dict) and all(_fits(row.get(name), name) for name in row.keys() | _READ):
                    rows.append(row)
        return rows

    def rewind_metrics(self, step: int) -> None:
        """Drops the lines after `step`; a resumed run repeats those steps."""
        rows = [row for row in self.read_metrics() if row["step"] <= step]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_whole(self.metrics, lambda aside: aside.write_text(text, encoding="utf-8"))


def _changed(place: Path) -> int:
    """Returns when a file was changed last, in its file system's nanoseconds; -1 if there is none."""
    with suppress(OSError):
        return place.stat().st_mtime_ns
    return -1


def _delete(place: Path) -> None:
    """Deletes a file or a folder; of a folder on another disk, which is a link or a mount, only the content."""
    if not place.is_dir():
        place.unlink(missing_ok=True)
        return
    for each in place.iterdir():
        shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()
    if not (place.is_symlink() or place.is_mount()):
        place.rmdir()


def _fits(value: Any, name: str) -> bool:
    """Whether a row can have the value: a finite number; null if it was not finite, or not measured."""
    return math.isfinite(value) if isinstance(value, int | float) else value is None and name not in _READ


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file so that at any moment it is wholly the old or wholly the new one; `write` gets another path."""
    aside = path.with_suffix(".partial")
    try:
        aside.open("wb").close()  # raises the system's error, where torch would raise its own
        write(aside)
        sync(aside)
        aside.replace(path)
    finally:
        with suppress(OSError):  # a full disk would stay full
            aside.unlink()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)  # Windows syncs no file that is open for reading only
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

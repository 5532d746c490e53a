"""Feeds damaged files to everything that reads files: each must be refused in one line, or make sense.

    python benchmarks/fuzz_files.py --files 200000 --results benchmarks/results/fuzz-files.json

Token files, text as JSONL, config files (JSON and TOML), metrics.jsonl, the record of a checkpoint without checksums,
all files of one with them, and the runs of `demopt compare`. Bits are flipped, parts cut off, repeated or overwritten;
in text, numbers and words are replaced by others that JSON can hold, such as 1e999, -1, null or 4,000 brackets. What is
not refused must be whole: tokens inside the vocabulary, settings of their types, rows from which tables can be made.
Exits with 1 on anything else, and prints the file's number, with which `--first` repeats it.
"""

import argparse
import collections
import contextlib
import dataclasses
import io
import json
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import fuzz_results
import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from demopt.compare.results import collect
from demopt.compare.run import Source
from demopt.compare.scale import Scale
from demopt.compare.store import read_rows
from demopt.compare.studies import chosen
from demopt.compare.sweep import Plan
from demopt.train import checkpoint, records, sources, summary
from demopt.train.assemble import read_file
from demopt.train.config import InputError, TrainConfig
from demopt.train.data import Corpus, batch, load_corpus
from demopt.train.folder import RunFolder
from demopt.train.team import Team

WORDS = (
    b"1e999", b"-1", b"0", b"null", b"true", b"{}", b"[]", b'""', b"1.5", b"9" * 40, b"NaN", b'"\\ud800"', b"[" * 4000,
    b'"step"', b"\xff\xfe", b"-0.0",
)  # fmt: skip
SCALE = Scale(steps=2, workers=2)
PLAN = Plan(chosen("reduction", ["reduction mean"]), SCALE, Source("text"), lr=1e-3)
TEXT = b"some words to read and to predict, some of them twice. " * 40
ROW = {"step": 1, "loss": 2.0, "lr": 0.1, "tokens": 64, "payload_bytes": 8, "sent_bytes": 8, "received_bytes": 8}


class WrongError(Exception):
    """Raised for an outcome that is neither a refusal nor a file that makes sense."""


@dataclass(frozen=True)
class Target:
    """A file of a folder that is mutated, and what reads it."""

    name: str
    file: str
    read: Callable[[Path], None]


def tokens_of(corpus: Corpus) -> None:
    """Raises WrongError unless all tokens are in the vocabulary, and windows can be drawn."""
    for tokens in (corpus.train, corpus.val):
        for row in tokens.rows:
            if len(row) and not 0 <= int(row.min()) <= int(row.max()) < corpus.vocab_size:
                raise WrongError(f"tokens from {row.min()} to {row.max()}, vocabulary {corpus.vocab_size}")
    batch(corpus.train, TrainConfig(sequence=4, batch=2), step=1, rank=0)


def read_tokens(folder: Path, name: str) -> None:
    tokens_of(load_corpus(TrainConfig(data=(str(folder / name),), sequence=4)))


def read_documents(folder: Path) -> None:
    for document in sources.documents(TrainConfig(data=(str(folder / "text.jsonl"),))):
        if not isinstance(document, bytes):
            raise WrongError(f"a document is {type(document).__name__}")


def read_config(folder: Path, name: str) -> None:
    config = TrainConfig(**read_file(folder / name))
    if TrainConfig(**json.loads(json.dumps(config.record(), allow_nan=False))) != dataclasses.replace(
        config, **{f.name: f.default for f in dataclasses.fields(config) if f.metadata["action"]}
    ):
        raise WrongError("the record is not the settings")


def read_metrics(folder: Path) -> None:
    run = RunFolder(folder)
    rows = run.read_metrics()
    with contextlib.redirect_stdout(io.StringIO()):
        if rows:
            summary.print_table(rows, TrainConfig(workers=2), 100, 1.0)
    run.rewind_metrics(2)
    if run.read_metrics() != [row for row in rows if row["step"] <= 2]:
        raise WrongError("rewinding changed the rows before")


def read_runs(folder: Path) -> None:
    rows = read_rows(folder / "runs.jsonl")
    for result in collect(PLAN, rows):
        json.dumps(result.record(), allow_nan=False)
        result.seconds(1e8)


def read_checkpoint(folder: Path) -> None:
    path = folder / "checkpoints" / "step-00000003"
    records.check_bytes(path, Team(0, 1, torch.device("cpu")))
    raise WrongError("the damage was not noticed")


def read_record(folder: Path) -> None:
    saved = records.read(folder / "older" / "step-00000003")
    records.check_same_run(saved, TrainConfig().record(), "text")
    if not isinstance(saved.step, int):
        raise WrongError(f"step {saved.step!r}")


def targets() -> list[Target]:
    """Returns the targets."""
    files = ("__0_0.distcp", ".metadata", "run.json", "checksums.json")
    return [
        Target("token file .npy", "tokens.npy", lambda folder: read_tokens(folder, "tokens.npy")),
        Target("token file .bin", "tokens.bin", lambda folder: read_tokens(folder, "tokens.bin")),
        Target("text as JSONL", "text.jsonl", read_documents),
        Target("config .json", "config.json", lambda folder: read_config(folder, "config.json")),
        Target("config .toml", "settings.toml", lambda folder: read_config(folder, "settings.toml")),
        Target("metrics.jsonl", "metrics.jsonl", read_metrics),
        Target("runs.jsonl", "runs.jsonl", read_runs),
        Target("record of a checkpoint", "older/step-00000003/run.json", read_record),
        *(Target(f"checkpoint {name}", f"checkpoints/step-00000003/{name}", read_checkpoint) for name in files),
    ]


def prepare(folder: Path) -> None:
    """Writes all the files."""
    generator = np.random.default_rng(0)
    np.save(folder / "tokens.npy", generator.integers(0, 300, 500, dtype=np.uint16))
    generator.integers(0, 300, 500, dtype=np.uint16).tofile(folder / "tokens.bin")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"line {n} " * 9}) + "\n" for n in range(9)))
    record = TrainConfig(preset="tiny", data=("a", "b")).record()
    (folder / "config.json").write_text(json.dumps(record, indent=2))
    (folder / "settings.toml").write_text('preset = "tiny"\nsteps = 30\nlr = 0.5\ndata = ["a", "b"]\ncompile = true\n')
    rows = [{**ROW, "step": n, "val_loss": 2.0, "step_seconds": 0.1, "optimizer_seconds": 0.1} for n in range(1, 5)]
    rows = [{**row, "exchange_seconds": 0.01} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = PLAN.run(PLAN.study.entries[0], 1e-3, 0)
    curve = [{"step": n, "val_loss": 2.0, "sent_bytes": 8 * n, "received_bytes": 8 * n} for n in (0, 1, 2)]
    told = {"key": run.key, "name": run.entry.name, **run.facts(), **ROW, "val_loss": 1.5, "curve": curve, "seconds": 1}
    told |= {"step_seconds": 0.1, "command": run.command(), "date": "today", "machine": "this", "torch": "2"}
    (folder / "runs.jsonl").write_text(json.dumps(told) + "\n")
    for place in ("checkpoints", "older"):
        path = folder / place / "step-00000003.partial"
        path.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is a single process
            save_sharded({"a": torch.arange(40.0)}, storage_writer=FileSystemWriter(path), no_dist=True)
        names = checkpoint.checksums(path.glob("__0_*"))
        checkpoint._finish(path, path.with_suffix(""), records.Saved(3, "text", record, 9), names)
    (folder / "older" / "step-00000003" / "checksums.json").unlink()


def mutated(data: bytes, generator: random.Random) -> bytes:
    """Returns other bytes."""
    if not data:
        return b"\0"
    found, kind = bytearray(data), generator.random()
    start = generator.randrange(len(data))
    stop = min(len(data), start + generator.choice((1, 2, 4, 16, 200)))
    if kind < 0.35:
        for _ in range(generator.choice((1, 1, 2, 8))):
            found[generator.randrange(len(found))] ^= 1 << generator.randrange(8)
    elif kind < 0.5:
        del found[start:stop]
    elif kind < 0.58:
        del found[start:]
    elif kind < 0.66:
        found[start:start] = data[start:stop]
    elif kind < 0.72:
        found[start:stop] = generator.randbytes(stop - start)
    else:  # a number or a word of a text becomes another
        places = [match.span() for match in re.finditer(rb'-?\d[\d.e+-]*|"[^"\n]*"|true|false|null', data)]
        start, stop = generator.choice(places) if places else (start, stop)
        found[start:stop] = generator.choice(WORDS)
    return bytes(found)


def verdict(target: Target, folder: Path) -> str:
    """Returns "refused" or "read"; WrongError for everything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.read(folder)
    except InputError as error:
        if "\n" in str(error):
            raise WrongError(f"more than one line: {error}") from error
        return "refused"
    except WrongError:
        raise
    except Exception as error:
        raise WrongError(f"{type(error).__name__}: {error}") from error
    return "read"


def fuzz(numbers: range) -> tuple[collections.Counter[tuple[str, str]], list[str]]:
    """Returns the verdicts by target, and the failures, of the mutations of these numbers."""
    counts, wrong = collections.Counter[tuple[str, str]](), []
    everything = targets()
    no_waiting = mock.patch("demopt.train.folder.sync")  # for the disk
    with tempfile.TemporaryDirectory() as root, no_waiting:
        folder = Path(root)
        prepare(folder)
        for number in numbers:
            target = everything[number % len(everything)]
            file = folder / target.file
            before = file.read_bytes()
            after = mutated(before, random.Random(number))
            if after != before:
                file.write_bytes(after)
                try:
                    says = verdict(target, folder)
                except WrongError as error:
                    says = "wrong"
                    trace = "".join(traceback.format_exception(error)[-4:])
                    wrong.append(f"file {number}, {target.name}: {error}\n{trace}")
                counts[target.name, says] += 1
                file.write_bytes(before)
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=200_000, help="how many are mutated")
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--results", type=Path, help="a JSON file for the counts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    started, size = time.monotonic(), 2000
    counts, wrong = collections.Counter[tuple[str, str]](), list[str]()
    for first in range(given.first, given.first + given.files, size):
        counted, found = fuzz(range(first, min(first + size, given.first + given.files)))
        counts += counted
        wrong += found
        if given.results is not None:
            fuzz_results.write(given.results, "files", counts, wrong, time.monotonic() - started)
    return fuzz_results.tell("files", counts, wrong, time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())

"""Reads documents, as bytes, from files, folders, JSONL, the standard library or the hub; a folder sorted by name."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from demopt.errors import one_line
from demopt.train.config import InputError, TrainConfig
from demopt.train.folder import RunFolder

TOKEN_SUFFIXES = (".npy", ".bin")
# Left out of the standard library: tests, which some builds lack, and folders that are not part of it.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def token_files(config: TrainConfig) -> list[Path]:
    """Return the token files that --data names, empty if it names text; InputError if it names both."""
    files = [file for name in config.data if Path(name).exists() for file in _files(Path(name), config)]
    tokens = [file for file in files if file.suffix in TOKEN_SUFFIXES]
    if tokens and (len(tokens) < len(files) or any(not Path(name).exists() for name in config.data)):
        raise InputError(f"--data mixes token files ({tokens[0]}) with text; give one kind")
    return tokens


def documents(config: TrainConfig) -> list[bytes]:
    """Return the documents that --data names, one per file, JSONL line or dataset row."""
    if not config.data:
        return list(_standard_library())
    found: list[bytes] = []
    for name in config.data:
        before = len(found)
        if Path(name).exists():
            for file in _files(Path(name), config):
                found.extend(_jsonl(file, config.text_field) if file.suffix == ".jsonl" else _text(file))
        else:
            found.extend(_hub(name, config))
        if len(found) == before:
            raise InputError(f"--data {name}: no text in it")
    return found


def _standard_library() -> Iterator[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in NOT_LIBRARY]  # others' packages may be many: not entered
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    for name in sorted(names):
        yield from _text(root / name)


def _files(path: Path, config: TrainConfig) -> list[Path]:
    """Return `path` itself, or all files below a folder sorted by name, without hidden ones and those of --out."""
    if path.is_file():
        return [path]
    out = Path(config.out).resolve()
    ours = {out} if path.resolve() in out.parents else {place.resolve() for place in RunFolder(out).written}
    below = ((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())
    seen = [file for name, file in sorted(below) if not any(part.startswith(".") for part in name.split("/"))]
    return [file for file in seen if ours.isdisjoint((file.resolve(), *file.resolve().parents))]


def _text(file: Path) -> Iterator[bytes]:
    """Yield the file as one document, or nothing if it is empty or binary."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"--data {file}: {error.strerror}") from None
    if content.strip() and b"\0" not in content[:8192]:
        yield content


def _jsonl(file: Path, text_field: str) -> Iterator[bytes]:
    with file.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _row(json.loads(line), text_field, f"{file}:{number}")
        except UnicodeDecodeError as error:
            raise InputError(f"--data {file}: not UTF-8: {error.reason}") from None
        except RecursionError:
            raise InputError(f"--data {file}:{number}: brackets inside brackets, too deep to read") from None
        except json.JSONDecodeError as error:
            raise InputError(f"--data {file}:{number}: not JSON: {error.msg} at column {error.colno}") from None


def _row(row: object, text_field: str, where: str) -> bytes:
    if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
        fields = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
        raise InputError(f"--data {where}: no text under {text_field!r} (found {fields}); see --text-field")
    text: str = row[text_field]
    return text.encode("utf-8", "replace")


def _hub(name: str, config: TrainConfig) -> Iterator[bytes]:
    if not config.online:
        hint = "no such file or folder; to fetch a dataset of that name from the hub add --online"
        raise InputError(f"--data {name}: {hint}")
    import datasets

    path, _, subset = name.partition(":")
    try:
        rows = datasets.load_dataset(path, subset or None, split="train")
    except Exception as error:  # datasets has no common base class for "not found", "no network" and "bad name"
        raise InputError(f"--data {name}: {one_line(error)}") from None
    for number, row in enumerate(rows):
        yield _row(row, config.text_field, f"{name}, row {number}")

"""Checksums inside a checkpoint, so that bytes that changed on the disk are found, with the file's name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from demopt.errors import one_line
from demopt.train.config import InputError

CHECKSUMS = "checksums.json"
BLOCK = 1 << 22  # bytes hashed at once


def checksum(file: Path) -> str:
    """Return a hash of the file's bytes.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "a"
        ...     _ = file.write_bytes(b"abc")
        ...     checksum(file)
        'cf4ab791c62b8d2b2109c90275287816'
    """
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as opened:
        while block := opened.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def checksums(files: Iterable[Path]) -> dict[str, str]:
    """Return the checksums of files by name."""
    return {file.name: checksum(file) for file in sorted(files)}


def write_checksums(folder: Path, known: dict[str, str]) -> Path:
    """Write the checksums of a folder's files beside them; return the new file."""
    file = folder / CHECKSUMS
    file.write_text(_text(known), encoding="utf-8")
    return file


def _text(known: dict[str, str]) -> str:
    return json.dumps(dict(sorted(known.items())), indent=1) + "\n"


def damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Return what is wrong with the files of a checkpoint, None if nothing is.

    `part` of `parts`: looks at its share of the files alone, so that ranks can share the work. Checkpoints that were
    written before there were checksums have none and pass.
    """
    try:
        text = (folder / CHECKSUMS).read_text(encoding="utf-8")
        known = json.loads(text)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return f"{folder / CHECKSUMS} cannot be read: {one_line(error)}"
    if not isinstance(known, dict) or text != _text(known):
        return f"{folder / CHECKSUMS} is damaged: it does not read as it was written"
    if missing := sorted(set(known).symmetric_difference(file.name for file in folder.iterdir()) - {CHECKSUMS}):
        return f"{folder / ascii(missing[0])[1:-1]} is missing, or missing among the checksums"
    for name in sorted(known)[part::parts]:
        file = folder / name
        try:
            if checksum(file) != known[name]:
                return f"{file} is damaged: its bytes are not those that were written"
        except OSError as error:
            return f"{file} cannot be read: {error.strerror}"
    return None


def refuse_damaged(folder: Path, older: Iterable[Path], part: int = 0, parts: int = 1) -> None:
    """Raise InputError if a checkpoint is damaged; it names the newest of the `older` ones that is whole."""
    wrong = damage(folder, part, parts)
    if wrong is None:
        return
    whole = [path for path in sorted(older, reverse=True) if path != folder and damage(path) is None]
    cure = f"{whole[0].name} is whole: remove {folder} to go on from that" if whole else "no older one is whole"
    raise InputError(f"--resume: {wrong}; {cure}")

"""The key of a run: made once, copied to every machine by the user, and needed to join."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from demopt.train.config import InputError

VARIABLE = "DEMOPT_KEY"


def key(file: Annotated[Path, typer.Argument(help="File to write; it must not exist.")]) -> int:
    """Make the key of a run. Copy the file to every machine, by a way that you trust, and give it as --key-file."""
    make_key(file)
    print(f"{file}: a new key; copy it to every machine and start all of them with --key-file {file}")
    return 0


def make_key(path: Path) -> None:
    """Write a new key to a file that only its owner may read; InputError if the file exists.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     make_key(Path(folder) / "run.key")
        ...     len(read_key(str(Path(folder) / "run.key")))
        32
    """
    from demopt.exchange.sealed import KEY_BYTES

    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InputError(f"{path} exists; a key is not overwritten, delete it yourself") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(KEY_BYTES) + "\n")


def read_key(path: str | None) -> bytes | None:
    """Return the key in a file, or in the environment variable DEMOPT_KEY if no file is given; None without either."""
    if path is None:
        return _parse(os.environ[VARIABLE], VARIABLE) if VARIABLE in os.environ else None
    try:
        text = Path(path).read_text(encoding="ascii")
    except OSError as error:
        raise InputError(f"--key-file {path}: {error.strerror}; make a key with demopt key {path}") from None
    except UnicodeError:
        text = ""
    return _parse(text, f"--key-file {path}")


def hand_on(key: bytes) -> None:
    """Leave the key to the processes that this one starts."""
    os.environ[VARIABLE] = key.hex()


def _parse(text: str, source: str) -> bytes:
    from demopt.exchange.sealed import KEY_BYTES

    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InputError(f"{source} holds no key: wanted {2 * KEY_BYTES} hexadecimal digits, as demopt key makes them")
    return key

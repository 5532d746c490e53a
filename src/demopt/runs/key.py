"""The key of a run: a worker with a key accepts only objects written with the same key."""

import hashlib
import hmac
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from demopt.errors import MessageError
from demopt.runs.store import RECORD, Store

KEY_BYTES = 32
TAG_BYTES = 32
T = TypeVar("T")
_MOST = 1 << 12  # letters of a key file that are read
_log = logging.getLogger("demopt")


class ForeignError(MessageError):
    """An object was not written with this run's key."""


class Keyed(Store):
    """A store with a keyed BLAKE2b of name and content at the start of each object. It does not encrypt.

    The name is part of the hash, so that an object cannot be moved to another round or to another worker. In the store
    it ends with letters that only the key yields, so that no stranger can take it first; objects without them are
    ignored. The object `run` also lies under its plain name, where a wrong key shows.

    Examples:
        >>> from demopt.runs.store import ObjectStore
        >>> bare = ObjectStore()
        >>> Keyed(bare, bytes(32)).put_if_absent("run", b"{}"), Keyed(bare, bytes(32)).get("run", most=9)
        (True, b'{}')
        >>> Keyed(bare, bytes([1] * 32)).get("run", most=9)
        Traceback (most recent call last):
        demopt.runs.key.ForeignError: run was not written with this run's key; give the run's own --key-file, or none
    """

    def __init__(self, inner: Store, key: bytes) -> None:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise ValueError(f"the key is not of {KEY_BYTES} bytes; make one with secrets.token_bytes({KEY_BYTES})")
        self._inner, self._key, self.address = inner, key, inner.address

    def get(self, name: str, most: int) -> bytes | None:
        for place in self._places(name):
            if (found := self._inner.get(place, most + TAG_BYTES)) is not None:
                return self._opened(name, found)
        return None

    def read(self, name: str, most: int, parse: Callable[[bytes], T]) -> T | None:
        for place in self._places(name):
            found = self._inner.read(place, most + TAG_BYTES, lambda data: parse(self._opened(name, data)))
            if found is not None:
                return found
        return None

    def put_if_absent(self, name: str, data: bytes) -> bool:
        # For `run`, the plain name decides; the other one stays if a stranger fills an empty file of the plain name.
        return all(self._inner.put_if_absent(place, self._sealed(name, data)) for place in self._places(name)[::-1])

    def list(self, folder: str) -> set[str]:
        names = self._inner.list(folder)
        own = {name.partition("~")[0] for name in names}
        return {name for name in own if self._place(f"{folder}/{name}").rpartition("/")[2] in names}

    def delete(self, names: Iterable[str]) -> None:
        self._inner.delete(map(self._place, names))

    def _place(self, name: str) -> str:
        """Returns the name under which an object lies."""
        return f"{name}~{self._tag(name, b'')[:8].hex()}"

    def _places(self, name: str) -> tuple[str, ...]:
        return (self._place(name), name) if name == RECORD else (self._place(name),)

    def _sealed(self, name: str, data: bytes) -> bytes:
        return self._tag(name, data) + data

    def _opened(self, name: str, sealed: bytes) -> bytes:
        """Returns the sealed content; ForeignError if its tag is wrong."""
        tag, data = sealed[:TAG_BYTES], sealed[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(name, data)):
            raise ForeignError(f"{name} was not written with this run's key; give the run's own --key-file, or none")
        return data

    def _tag(self, name: str, data: bytes) -> bytes:
        tag = hashlib.blake2b(digest_size=TAG_BYTES, key=self._key, person=b"demopt run 2")
        tag.update(len(name).to_bytes(8, "little") + name.encode())
        tag.update(data)
        return tag.digest()


def read_key(path: str | Path) -> bytes:
    """Returns the key in a file of 64 hexadecimal digits; ValueError if it holds none. Warns if others can read it."""
    try:
        with Path(path).open(encoding="ascii") as file:
            mode, key = os.fstat(file.fileno()).st_mode, bytes.fromhex(file.read(_MOST).strip())
    except OSError as error:
        told = f"key file {path}: {error.strerror}; copy the run's key, or make one for a new run: openssl rand -hex 32"
        raise ValueError(told) from None
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"key file {path} holds no key; wanted {2 * KEY_BYTES} hexadecimal digits")
    if os.name != "nt" and mode & 0o077:
        _log.warning("key file %s can be read by other users (mode %o): chmod 600 %s", path, mode & 0o777, path)
    return key

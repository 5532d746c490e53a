"""The key of a run: a worker with a key accepts only objects written with the same key."""

import hashlib
import hmac
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from demopt.errors import MessageError
from demopt.runs.store import ClosedError, Store

KEY_BYTES = 32
TAG_BYTES = 32
T = TypeVar("T")
_MOST = 1 << 22  # bytes of another's object in the place of one that is put
_log = logging.getLogger("demopt")


class ForeignError(MessageError):
    """An object was not written with this run's key."""


class Keyed(Store):
    """A store with a keyed BLAKE2b of name and content at the start of each object. It does not encrypt.

    The name is part of the hash, so that an object cannot be moved to another round or to another worker. A stranger
    may take a name first. Such an object is none, and the run's own lies under a second name that only the key tells.
    The object `run` has no second name: there a wrong key is seen.

    Examples:
        >>> from demopt.runs.store import ObjectStore
        >>> bare = ObjectStore()
        >>> Keyed(bare, bytes(32)).put_if_absent("a", b"weights"), Keyed(bare, bytes(32)).get("a", most=9)
        (True, b'weights')
        >>> Keyed(bare, bytes([1] * 32)).get("a", most=9)
        Traceback (most recent call last):
        demopt.runs.key.ForeignError: a was not written with this run's key; give the run's own --key-file, or none
    """

    def __init__(self, inner: Store, key: bytes) -> None:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise ValueError(f"the key is not of {KEY_BYTES} bytes; make one with secrets.token_bytes({KEY_BYTES})")
        self._inner, self._key, self.address = inner, key, inner.address
        self._foreign: set[str] = set()  # names that a stranger has taken

    def get(self, name: str, most: int) -> bytes | None:
        def at(place: str) -> bytes | None:
            found = self._inner.get(place, most + TAG_BYTES)
            return None if found is None else self._opened(name, found)

        if name in self._foreign:
            return at(self._second(name))
        try:
            return at(name)
        except ClosedError:  # it may be the run's own, of a worker with other rights
            raise
        except MessageError as error:
            if "/" not in name or (found := at(self._second(name))) is None:
                raise ForeignError(error.reason) from None
            return found

    def read(self, name: str, most: int, parse: Callable[[bytes], T]) -> T | None:
        """As `Store`. A name that holds a foreign object for seconds, and not for a moment, is a stranger's."""
        if name in self._foreign:
            second = self._second(name)
            return self._inner.read(second, most + TAG_BYTES, lambda data: parse(self._opened(name, data)))
        whole: list[bytes] = []

        def opened(data: bytes) -> T:
            whole[:] = [self._opened(name, data)]
            return parse(whole[0])

        try:
            return self._inner.read(name, most + TAG_BYTES, opened)
        except MessageError as error:
            if whole or "/" not in name or isinstance(error, ClosedError):
                raise
            self._foreign.add(name)
            if (found := self.get(name, most)) is None:
                raise ForeignError(error.reason) from None
            return parse(found)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        sealed = self._tag(name, data) + data
        if name not in self._foreign:
            if self._inner.put_if_absent(name, sealed):
                return True
            try:
                self._inner.read(name, max(len(sealed), _MOST), lambda found: self._opened(name, found))
                return False
            except MessageError as error:
                if "/" not in name or isinstance(error, ClosedError):
                    return False
                self._foreign.add(name)
        return self._inner.put_if_absent(self._second(name), sealed)

    def list(self, folder: str) -> set[str]:
        names = self._inner.list(folder)
        own = {name.partition("~")[0] for name in names if "~" in name}
        own = {name for name in own if self._second(f"{folder}/{name}").rpartition("/")[2] in names}
        self._foreign.update(f"{folder}/{name}" for name in own)
        return own | {name for name in names if "~" not in name and f"{folder}/{name}" not in self._foreign}

    def delete(self, names: Iterable[str]) -> None:
        names = tuple(names)
        self._inner.delete([*names, *(self._second(name) for name in names if name in self._foreign)])

    def _opened(self, name: str, sealed: bytes) -> bytes:
        """Returns what was sealed; ForeignError if the tag is another."""
        tag, data = sealed[:TAG_BYTES], sealed[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(name, data)):
            raise ForeignError(f"{name} was not written with this run's key; give the run's own --key-file, or none")
        return data

    def _second(self, name: str) -> str:
        return f"{name}~{self._tag(name, b'')[:8].hex()}"

    def _tag(self, name: str, data: bytes) -> bytes:
        tag = hashlib.blake2b(digest_size=TAG_BYTES, key=self._key, person=b"demopt run")
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

"""The key of a run: a worker with a key accepts only objects written with the same key."""

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from demopt.errors import MessageError
from demopt.runs.store import Store

KEY_BYTES = 32
TAG_BYTES = 32


class Keyed(Store):
    """A store with a keyed BLAKE2b of name and content at the start of each object. It does not encrypt.

    The name is part of the hash, so that an object cannot be moved to another round or to another worker.

    Examples:
        >>> from demopt.runs.store import ObjectStore
        >>> bare = ObjectStore()
        >>> Keyed(bare, bytes(32)).put_if_absent("a", b"weights"), Keyed(bare, bytes(32)).get("a", most=9)
        (True, b'weights')
        >>> Keyed(bare, bytes([1] * 32)).get("a", most=9)
        Traceback (most recent call last):
        demopt.errors.MessageError: a was not written with this run's key; give the run's own --key-file
    """

    def __init__(self, inner: Store, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"the key has {len(key)} bytes; a run's key has {KEY_BYTES}: secrets.token_bytes(32)")
        self._inner, self._key, self.address = inner, key, inner.address

    def get(self, name: str, most: int) -> bytes | None:
        found = self._inner.get(name, most + TAG_BYTES)
        if found is not None and not hmac.compare_digest(found[:TAG_BYTES], self._tag(name, found[TAG_BYTES:])):
            raise MessageError(f"{name} was not written with this run's key; give the run's own --key-file")
        return None if found is None else found[TAG_BYTES:]

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._inner.put_if_absent(name, self._tag(name, data) + data)

    def list(self, folder: str) -> set[str]:
        return self._inner.list(folder)

    def delete(self, names: Iterable[str]) -> None:
        self._inner.delete(names)

    def _tag(self, name: str, data: bytes) -> bytes:
        tag = hashlib.blake2b(digest_size=TAG_BYTES, key=self._key, person=b"demopt run")
        tag.update(len(name).to_bytes(8, "little") + name.encode())
        tag.update(data)
        return tag.digest()


def read_key(path: str | Path) -> bytes:
    """Returns the key in a file of 64 hexadecimal digits; ValueError if it holds none."""
    try:
        key = bytes.fromhex(Path(path).read_text(encoding="ascii").strip())
    except OSError as error:
        raise ValueError(
            f"key file {path}: {error.strerror}; copy the run's key, or make one for a new run: openssl rand -hex 32"
        ) from None
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"key file {path} holds no key; wanted {2 * KEY_BYTES} hexadecimal digits")
    return key

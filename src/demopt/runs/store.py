"""Stores: the five calls that a run makes to a folder or bucket, through obstore (the extra `run`)."""

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from demopt.errors import ExchangeError, MessageError, first_line

T = TypeVar("T")
_PAUSES = (0.05, 5.0)  # seconds between attempts: the first, and the longest
_TOLD_AFTER = 2.0  # seconds of failing until the user hears about it
CLOUDS = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https")


class StoreError(ExchangeError):
    """A request failed and may succeed later: the store is away, slow, or answered with 503.

    Examples:
        >>> str(StoreError("s3://bucket/run: 503 Slow Down"))
        's3://bucket/run: 503 Slow Down'
    """


class Store(ABC):
    """Named objects of bytes. Names are relative to the run's folder, such as `rounds/00000012/manifest`.

    A put is atomic: readers see all of an object or nothing.
    """

    address: str = "memory"

    @abstractmethod
    def get(self, name: str, most: int) -> bytes | None:
        """Returns an object, or None if it is absent. MessageError if it has more than `most` bytes: it is not read."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Writes an object, over an older one if there is one."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Writes an object unless it exists; returns whether it did. Of calls that race, exactly one writes."""

    @abstractmethod
    def list(self, folder: str) -> dict[str, int]:
        """Returns the sizes of the objects below a folder, by their names in it."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; absent ones are no error."""


class ObjectStore(Store):
    """A folder of this machine, or a bucket: an obstore behind the five calls. Without `store`, one in memory.

    Examples:
        >>> store = ObjectStore()
        >>> store.put_if_absent("a/b", b"first"), store.put_if_absent("a/b", b"second"), store.get("a/b", most=9)
        (True, False, b'first')
        >>> store.list("a")
        {'b': 5}
    """

    def __init__(self, store: Any = None, address: str = "memory") -> None:
        import obstore.store

        self.address = address
        self._store = obstore.store.MemoryStore() if store is None else store

    def get(self, name: str, most: int) -> bytes | None:
        import obstore

        def read() -> bytes | None:
            found = obstore.get(self._store, name)
            if found.meta["size"] > most:
                raise MessageError(f"{name} has {found.meta['size']:,} bytes, and at most {most:,} were expected")
            return bytes(found.bytes())

        try:
            return self._call(read)
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        import obstore

        self._call(lambda: obstore.put(self._store, name, data))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotSupportedError

        try:
            try:
                self._call(lambda: obstore.put(self._store, name, data, mode="create"))
            except NotSupportedError:  # WebDAV has no such put, but a copy that does not overwrite
                aside = f"{name}.{time.time_ns()}"
                self.put(aside, data)
                try:
                    self._call(lambda: obstore.copy(self._store, aside, name, overwrite=False))
                finally:
                    self.delete([aside])
        except AlreadyExistsError:
            return False
        return True

    def list(self, folder: str) -> dict[str, int]:
        import obstore

        found = self._call(lambda: obstore.list(self._store, folder).collect())
        return {each["path"][len(folder) + 1 :]: each["size"] for each in found}

    def delete(self, names: Iterable[str]) -> None:
        import obstore

        for name in names:
            try:
                self._call(partial(obstore.delete, self._store, name))
            except FileNotFoundError:
                continue

    def _call(self, call: Callable[[], T]) -> T:
        """Makes a request; StoreError if it may succeed later, ExchangeError if it never will."""
        from obstore import exceptions as kinds

        try:
            return call()
        except (kinds.AlreadyExistsError, kinds.NotSupportedError, FileNotFoundError):
            raise
        except (kinds.PermissionDeniedError, kinds.UnauthenticatedError, PermissionError) as error:
            raise ExchangeError(f"{self.address}: access denied: {first_line(error)}") from error
        except (kinds.BaseError, OSError) as error:
            raise StoreError(f"{self.address}: {first_line(error)}") from error


class Patient(Store):
    """Repeats requests that fail, for `patience` seconds in a row, and reports when the store is away and back."""

    def __init__(self, inner: Store, patience: float, say: Callable[[str], None]) -> None:
        self.inner, self.address = inner, inner.address
        self.say = say
        self.requests = 0  # sent so far
        self.patience = patience

    def get(self, name: str, most: int) -> bytes | None:
        return self._repeat(lambda: self.inner.get(name, most))

    def put(self, name: str, data: bytes) -> None:
        self._repeat(lambda: self.inner.put(name, data))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """As `Store`, but False may also mean that an attempt of ours succeeded without an answer: read it back."""
        return self._repeat(lambda: self.inner.put_if_absent(name, data))

    def list(self, folder: str) -> dict[str, int]:
        return self._repeat(lambda: self.inner.list(folder))

    def delete(self, names: Iterable[str]) -> None:
        names = tuple(names)
        self._repeat(lambda: self.inner.delete(names))

    def _repeat(self, call: Callable[[], T]) -> T:
        began, told = time.monotonic(), False
        for attempt in itertools.count():
            self.requests += 1
            try:
                result = call()
            except StoreError as error:
                away = time.monotonic() - began
                if away > self.patience:
                    raise ExchangeError(f"the store did not answer for {away:.0f} s: {error}") from error
                if away > _TOLD_AFTER and not told:
                    told = True
                    self.say(f"the store does not answer, waiting up to {self.patience:g} s: {error}")
                time.sleep(min(_PAUSES[1], _PAUSES[0] * 2**attempt))
                continue
            if told:
                self.say(f"the store answers again, after {time.monotonic() - began:.0f} s")
            return result
        raise AssertionError("unreachable")


def open_store(address: str) -> ObjectStore:
    """Opens a path, or an address such as s3://bucket/name, gs://, az:// or https://.

    Credentials come from the environment, as each cloud's own tools name them (AWS_ACCESS_KEY_ID,
    GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, ...); AWS_ENDPOINT_URL names another S3 server.
    """
    try:
        import obstore.store
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "obstore is missing; install it with: pip install 'demopt[run]'", name="obstore"
        ) from None
    scheme, separator, rest = address.partition("://")
    try:
        if separator and scheme in CLOUDS:
            once: Any = {"max_retries": 0}  # `Patient` repeats, and reports
            return ObjectStore(obstore.store.from_url(address.rstrip("/"), retry_config=once), address)
        if separator and scheme != "file":
            raise ValueError(f"a run's address begins with {', '.join(CLOUDS)} or is a path; this one is {address!r}")
        folder = Path(rest if separator else address).expanduser().resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return ObjectStore(obstore.store.LocalStore(folder), address)
    except (obstore.exceptions.BaseError, OSError) as error:
        raise ValueError(f"{address}: cannot be opened: {first_line(error)}") from error

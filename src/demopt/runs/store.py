"""Stores: the four calls that a run makes to a folder or bucket, through obstore (the extra `run`)."""

import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from demopt.errors import ExchangeError, MessageError, first_line

T = TypeVar("T")
_PAUSES = (0.05, 5.0)  # seconds between attempts: the first, and the longest
_TOLD_AFTER = 2.0  # seconds of failing until the user hears about it
_FIRST_PATIENCE = 30.0  # seconds, at most, before the first answer: an address may be wrong
_SILENCE = 10.0  # seconds without a byte from the server after which a request has failed
_SLOWEST = 32_000  # bytes per second of an upload; a server is silent until it has all of it
CLOUDS = ("s3", "gs", "az")
_METADATA = "169.254.169.254"  # the server that virtual machines of a cloud ask for credentials


class StoreError(ExchangeError):
    """A request failed and may succeed later: the store is away, slow, or answered with 503."""


class Store(ABC):
    """Named objects of bytes. Names are relative to the run's folder, such as `rounds/00000012/manifest`.

    A put is atomic: readers see all of an object or nothing.
    """

    address: str = "memory"

    @abstractmethod
    def get(self, name: str, most: int) -> bytes | None:
        """Returns an object, or None if it is absent. MessageError if it has more than `most` bytes: it is not read."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Writes an object unless it exists; returns whether it did. Of calls that race, exactly one writes."""

    @abstractmethod
    def list(self, folder: str) -> set[str]:
        """Returns the names, in it, of the objects below a folder."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; absent ones are no error."""


class ObjectStore(Store):
    """A folder of this machine, or a bucket: an obstore behind the four calls. Without `store`, one in memory.

    Examples:
        >>> store = ObjectStore()
        >>> store.put_if_absent("a/b", b"first"), store.put_if_absent("a/b", b"second"), store.get("a/b", most=9)
        (True, False, b'first')
        >>> store.list("a")
        {'b'}
    """

    def __init__(
        self, store: Any = None, address: str = "memory", patient: Callable[[float], Any] | None = None
    ) -> None:
        """`patient` opens the same store with requests that wait some seconds for a silent server."""
        import obstore.store

        self.address = address
        self._store = obstore.store.MemoryStore() if store is None else store
        self._patient = functools.cache(patient) if patient else lambda _: self._store

    def get(self, name: str, most: int) -> bytes | None:
        import obstore

        def read() -> bytes | None:
            try:
                found = obstore.get(self._store, name)
            except FileNotFoundError:
                return None
            if found.meta["size"] > most:
                raise MessageError(f"{name} has {found.meta['size']:,} bytes, and at most {most:,} were expected")
            return bytes(found.bytes())

        return self._call(read)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        def write() -> bool:
            try:
                obstore.put(self._for(data), name, data, mode="create")
            except AlreadyExistsError:
                return False
            return True

        return self._call(write)

    def list(self, folder: str) -> set[str]:
        import obstore

        found = self._call(lambda: obstore.list(self._store, folder).collect())
        return {each["path"][len(folder) + 1 :] for each in found}

    def delete(self, names: Iterable[str]) -> None:
        import obstore

        def remove(name: str) -> None:
            with suppress(FileNotFoundError):
                obstore.delete(self._store, name)

        for name in names:
            self._call(functools.partial(remove, name))

    def _for(self, data: bytes) -> Any:
        """Returns the store whose requests wait long enough for an upload of this length."""
        doublings = math.ceil(math.log2(1 + len(data) // _SLOWEST / _SILENCE))
        return self._patient(_SILENCE * 2**doublings) if doublings else self._store

    def _call(self, call: Callable[[], T]) -> T:
        """Makes a request; StoreError if it may succeed later, ExchangeError if it never will."""
        from obstore import exceptions as kinds

        try:
            return call()
        except FileNotFoundError as error:
            raise ExchangeError(f"{self.address}: no such bucket or folder; create it, or correct the name") from error
        except (kinds.PermissionDeniedError, kinds.UnauthenticatedError, PermissionError) as error:
            raise ExchangeError(f"{self.address}: access denied: {first_line(error)}") from error
        except kinds.NotSupportedError as error:
            raise ExchangeError(
                f"{self.address}: this store lacks a call that a run needs: {first_line(error)}"
            ) from error
        except (kinds.BaseError, OSError) as error:
            text = first_line(error)
            if _METADATA in text:
                text = "no credentials: set those of this cloud, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise StoreError(f"{self.address}: {text}") from error


class Patient(Store):
    """Repeats requests that fail, for `patience` seconds in a row, and reports when the store is away and back."""

    def __init__(self, inner: Store, patience: float, say: Callable[[str], None]) -> None:
        self.inner, self.address = inner, inner.address
        self.say = say
        self.requests = 0  # sent so far
        self.patience = patience
        self._answered = False  # once at least
        self._away: float | None = None  # since when, if the user has heard about it

    def get(self, name: str, most: int) -> bytes | None:
        return self._repeat(lambda: self.inner.get(name, most))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """As `Store`, but False may also mean that an attempt of ours succeeded without an answer: read it back."""
        return self._repeat(lambda: self.inner.put_if_absent(name, data))

    def list(self, folder: str) -> set[str]:
        return self._repeat(lambda: self.inner.list(folder))

    def delete(self, names: Iterable[str]) -> None:
        names = tuple(names)
        self._repeat(lambda: self.inner.delete(names))

    def _repeat(self, call: Callable[[], T]) -> T:
        began, attempt = time.monotonic(), 0
        while True:
            self.requests += 1
            try:
                result = call()
            except StoreError as error:
                away = time.monotonic() - began
                limit = self.patience if self._answered else min(self.patience, _FIRST_PATIENCE)
                if away > limit:
                    raise ExchangeError(f"the store did not answer for {away:.0f} s: {error}") from error
                if away > _TOLD_AFTER and self._away is None:
                    self._away = began
                    self.say(f"the store does not answer, waiting up to {limit:g} s: {error}")
                time.sleep(min(_PAUSES[1], _PAUSES[0] * 2**attempt))
                attempt += 1
                continue
            self._answered = True
            since, self._away = self._away, None  # at once: requests run in several threads
            if since is not None:
                self.say(f"the store answers again, after {time.monotonic() - since:.0f} s")
            return result


def open_store(address: str) -> ObjectStore:
    """Opens a path, or an address such as s3://bucket/name, gs:// or az://.

    Credentials come from the environment, as each cloud's own tools name them (AWS_ACCESS_KEY_ID,
    GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, ...); AWS_ENDPOINT_URL names another S3 server.
    """
    try:
        import obstore.store
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "obstore is missing; install it with: pip install 'demopt[run]'", name="obstore"
        ) from None
    scheme, separator, _ = address.partition("://")
    if separator and scheme not in CLOUDS:
        raise ValueError(
            "a run's address begins with s3://, gs:// or az://, or is a path (a server of your own: s3:// with "
            f"AWS_ENDPOINT_URL); this one is {address!r}"
        )

    def cloud(seconds: float) -> Any:
        return obstore.store.from_url(
            address.rstrip("/"),  # AWS_ENDPOINT_URL may be http://
            client_options={"allow_http": True, "timeout": "1h", "read_timeout": f"{seconds:.0f}s"},
            retry_config={"max_retries": 0},  # `Patient` repeats, and reports
        )

    try:
        if separator:
            return ObjectStore(cloud(_SILENCE), address, cloud)
        folder = Path(address).expanduser().resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return ObjectStore(obstore.store.LocalStore(folder), address)
    except (obstore.exceptions.BaseError, OSError) as error:
        raise ValueError(f"{address}: cannot be opened: {first_line(error)}") from error

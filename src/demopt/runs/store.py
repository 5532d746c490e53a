"""Stores: the four calls that a run makes to a folder, or to a bucket through obstore (the extra `run`)."""

import functools
import math
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import unquote, urlsplit

from demopt.errors import ExchangeError, MessageError, first_line
from demopt.exchange.background import in_thread
from demopt.runs.failures import CREDENTIALS, DeniedError, StoreError, is_away, told

T = TypeVar("T")
_PAUSES = (0.025, 5.0)  # seconds between attempts: the first, and the longest
_TOLD_AFTER = 2.0  # seconds of failing until the user hears about it
_FIRST_PATIENCE = 30.0  # seconds, at most, before the first answer: an address may be wrong
_LONG_SILENCE = 60.0  # seconds of silence on a disk, at most, for a long object, unless it needs more
_SLOW_DISK = 1_000_000  # bytes per second of a disk that needs more
_DAMAGED = 2.0  # seconds of reading a damaged object again: a cache may have half of it
_SILENCE = 10.0  # seconds without a byte from a server, or without an end on a disk, after which a request has failed
_SLOWEST = 32_000  # bytes per second of an upload; a server is silent until it has all of it
MOST_JSON = 1 << 23  # bytes of a record or manifest
_PAGE = "a web page came instead of the store's answer; does this network, or a proxy, want a login first?"
RECORD = "run"  # the object that tells one run from another
CLOUDS = ("s3", "gs", "az")


class ClosedError(MessageError):
    """One object cannot be read, though others can: by its own key or rights, or because it is archived."""


class Store(ABC):
    """Objects of bytes, named as `rounds/00000012/manifest`. A put is atomic: readers see all of it or nothing."""

    address: str = "memory"
    has_end = True  #: whether each request ends: those to a share that is away may not

    @abstractmethod
    def get(self, name: str, most: int) -> bytes | None:
        """Returns an object, or None if it is absent. MessageError if it has more than `most` bytes: it is not read."""

    def read(self, name: str, most: int, parse: Callable[[bytes], T]) -> T | None:
        """Returns an object that was damaged, parsed; None if it is absent now."""
        found = self.get(name, most)
        return None if found is None else parse(found)

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Writes an object unless it exists; returns whether it did. Of calls that race, exactly one writes."""

    @abstractmethod
    def list(self, folder: str) -> set[str]:
        """Returns the names of the objects in a folder, relative to it."""

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; absent ones are no error, and one that may not be deleted is an error, after all others."""
        denied = None
        for name in names:
            try:
                self._delete(name)
            except StoreError as error:
                if not error.at_first:
                    raise
                denied = error
        if denied is not None:
            raise denied

    def _delete(self, name: str) -> None:
        raise NotImplementedError


class ObjectStore(Store):
    """A bucket: an obstore behind the four calls. Without `store`, objects in memory.

    Examples:
        >>> store = ObjectStore()
        >>> store.put_if_absent("a/b", b"first"), store.put_if_absent("a/b", b"second"), store.get("a/b", most=9)
        (True, False, b'first')
        >>> store.list("a")
        {'b'}
    """

    def __init__(self, store: Any = None, address: str = "memory", patient: Any = None) -> None:
        """`patient(seconds)` opens the same store with requests that wait that long for a silent server."""
        import obstore.store

        self.address, self._obstore = address, obstore
        self._store = obstore.store.MemoryStore() if store is None else store
        self._patient = functools.cache(patient) if patient else lambda _: self._store
        self._cut: dict[str, int] = {}  # uploads of a name that took too long: the next one may take twice as long

    def get(self, name: str, most: int) -> bytes | None:
        found = self._found(name)
        if found is None:
            return None
        size = found.meta["size"]
        with told(self.address):
            data = bytes(found.bytes()) if size <= most else b""
        # A server may take the random beginning of a keyed object for a tag of HTML, but a page begins with letters.
        if "text/html" in str(found.attributes.get("Content-Type", "")) and data[:64].isascii():
            raise StoreError(f"{self.address}: {_PAGE}", at_first=True)
        if size > most:
            raise MessageError(f"{name} has {size:,} bytes, and at most {most:,} were expected")
        return data

    def _found(self, name: str) -> Any:
        """Asks for an object; returns the beginning of the answer, or None. ClosedError if only others can be read."""
        try:
            with told(self.address):
                return self._obstore.get(self._store, name)
        except StoreError as error:
            cause = error.__cause__
            if isinstance(cause, FileNotFoundError) and not re.search("NoSuchBucket|ContainerNotFound", str(cause)):
                return None
            if error.at_first and name != RECORD:
                with suppress(StoreError):
                    if self._found(RECORD):
                        raise ClosedError(f"{name} cannot be read, though {RECORD} can: {error}") from cause
            raise

    def put_if_absent(self, name: str, data: bytes) -> bool:
        doublings = math.ceil(math.log2(1 + len(data) // _SLOWEST / _SILENCE)) + self._cut.get(name, 0)
        seconds, began = _SILENCE * 2.0**doublings, time.monotonic()  # that it may wait for the server
        with told(self.address):
            try:
                store = self._patient(seconds) if seconds > _SILENCE else self._store
                e_tag = self._obstore.put(store, name, data, mode="create")["e_tag"] or ""
            except self._obstore.exceptions.AlreadyExistsError as error:
                if ": 412 " in str(error):
                    return False
                with suppress(FileNotFoundError):  # a 409 may come from another put, under way, which may fail
                    self._obstore.head(self._store, name)
                    return False
                raise
            except Exception:
                if time.monotonic() - began >= 0.9 * seconds:  # timers are not exact
                    self._cut[name] = min(self._cut.get(name, 0) + 1, 4)
                raise
            self._cut.pop(name, None)
        if e_tag.startswith("W/") and self.get(name, len(data)) != data:  # no store's: of a page that is no error
            raise StoreError(f"{self.address}: {_PAGE}", at_first=True)
        return True

    def list(self, folder: str) -> set[str]:
        with told(self.address):
            found = self._obstore.list(self._store, folder).collect()
        names = {each["path"].removeprefix(f"{folder}/") for each in found}
        return {name for name in names if "/" not in name}

    def _delete(self, name: str) -> None:
        try:
            with told(self.address), suppress(FileNotFoundError):
                self._obstore.delete(self._store, name)
        except StoreError:
            raise
        except ExchangeError as error:  # as on Google's S3 endpoint; a run goes on without
            text = f"{self.address}: this server cannot delete objects (DeleteObjects); delete them with its own tools"
            raise StoreError(text, at_first=True) from error


class _Request(Generic[T]):
    """A request, made again after each failure. One to a disk may never end: then the same one is waited for again.

    The main thread makes none itself, because signal handlers run there.
    """

    def __init__(self, store: Store, kind: str, call: Callable[[], T], size: int) -> None:
        self._store, self._kind, self._call = store, kind, call
        # A get that is left behind is waited for again; a put may be the last request, at the end of its process.
        longest = _LONG_SILENCE if kind == "get" else max(_LONG_SILENCE, size / _SLOW_DISK)
        self._silence = min(_SILENCE + size / _SLOWEST, longest)
        self._elsewhere = not store.has_end or threading.current_thread() is threading.main_thread()
        self.pending: Future[T] | None = None  # left behind if nobody waits for it any more
        self._until = 0.0  # the time (monotonic) after which a disk counts as silent

    def result(self) -> T:
        """Makes the request, or waits for the pending one. Also raises StoreError if it does not end in time."""
        if self.pending is None:
            if not self._elsewhere:
                return self._call()
            self.pending, self._until = in_thread(self._call), time.monotonic() + self._silence
        left = None if self._store.has_end else max(self._until - time.monotonic(), 0.0)
        if wait([self.pending], left).not_done:
            raise StoreError(f"{self._store.address}: the disk does not answer (a {self._kind} has no end)")
        ended, self.pending = self.pending, None
        return ended.result()


class Patient(Store):
    """Repeats requests that fail, for `patience` seconds in a row, and reports when the store is away and back.

    While it waits, `asked_to_stop` may end it, as Ctrl-C does.
    """

    def __init__(self, inner: Store, patience: float, say: Callable[[str], None]) -> None:
        self.inner, self.address, self.patience, self.say = inner, inner.address, patience, say
        self.asked_to_stop: Callable[[], bool] = lambda: False
        self._answered: set[str] = set()  # the kinds of requests that have succeeded once at least
        self._away: float | None = None  # since when, if the user has heard about it
        self._reasons: set[str] = set()  # those that the user has heard since
        self._failing: set[_Request[Any] | str] = set()  # requests failing since then, and the kinds of those given up

    def get(self, name: str, most: int) -> bytes | None:
        return self._repeat("get", lambda: self.inner.get(name, most), most)

    def read(self, name: str, most: int, parse: Callable[[bytes], T]) -> T | None:
        """As `Store`, but repeated for two seconds while the object is damaged."""
        return self._repeat("get", lambda: self.inner.read(name, most, parse), most, _DAMAGED)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """As `Store`, but False may also mean that an attempt of ours succeeded without an answer: read it back."""
        return self._repeat("put", lambda: self.inner.put_if_absent(name, data), len(data))

    def list(self, folder: str) -> set[str]:
        return self._repeat("list", lambda: self.inner.list(folder))

    def delete(self, names: Iterable[str]) -> None:
        names = tuple(names)
        self._repeat("delete", lambda: self.inner.delete(names), _SLOWEST * len(names))  # a second each

    def _repeat(self, kind: str, call: Callable[[], T], size: int = 0, damaged: float = 0.0) -> T:
        """Makes a request until it succeeds. `size`: bytes, at most. `damaged`: seconds to repeat a damaged read."""
        size = 0 if kind == "get" and size <= MOST_JSON else size  # most are far shorter
        request = _Request(self.inner, kind, call, size)
        try:
            result = self._answer(request, kind, size, damaged)
        except MessageError:
            self._note_answer(request, kind)
            raise
        except BaseException:  # given up: the user has heard that, say, puts fail, until another put is answered
            if request in self._failing:
                self._failing |= {kind} - {"delete"}  # what cannot be deleted may stay
                self._failing -= {request}
            raise
        self._answered.add(kind)
        self._note_answer(request, kind)
        return result

    def _note_answer(self, request: _Request[Any], kind: str) -> None:
        """Tells the user that the store is back, once no failure that they have heard of remains.

        Other requests may succeed all the time, such as messages on a disk that has no room for a checkpoint.
        """
        self._failing -= {request, kind}
        if self._failing:
            return
        since, self._away = self._away, None  # at once: requests run in several threads
        self._reasons.clear()
        if since is not None:
            self.say(f"the store answers again, after {time.monotonic() - since:.0f} s")

    def _answer(self, request: _Request[T], kind: str, size: int, damaged: float) -> T:
        began, attempt, long = time.monotonic(), 0, False
        while True:
            try:
                return request.result()
            except MessageError:
                if time.monotonic() - began >= min(self.patience, damaged):
                    raise
            except StoreError as error:
                if attempt == 0:  # a long first attempt was no silence, or this process slept
                    began = max(began, time.monotonic() - min(_SILENCE, self.patience / 2))
                away, known = time.monotonic() - began, kind in self._answered
                stays = kind == "delete"  # what cannot be deleted may stay
                limit = self.patience if known and not stays else min(self.patience, _FIRST_PATIENCE)
                limit += size // _SLOWEST if request.pending and self.patience else 0
                if error.at_first and (stays or not known):
                    raise DeniedError(str(error)) from error
                if away >= limit:
                    raise ExchangeError(f"the store did not answer for {away:.0f} s: {error}") from error
                if long := away > _TOLD_AFTER:
                    self._away = began if self._away is None else min(began, self._away)
                    self._failing |= {request}
                    if (reason := str(error).removeprefix(self.address).partition(" (")[0]) not in self._reasons:
                        self._reasons.add(reason)
                        self.say(f"the store does not answer, waiting up to {limit:g} s: {error}")
                if long and self.asked_to_stop():
                    raise ExchangeError(f"stopped while the store did not answer: {error}") from error
            attempt += 1
            end = time.monotonic() + min(_PAUSES[1], _PAUSES[0] * 2.0 ** min(attempt, 9), self.patience)
            while (left := end - time.monotonic()) > 0 and self.patience and not (long and self.asked_to_stop()):
                if request.pending is None:
                    time.sleep(min(left, 0.1))
                elif wait([request.pending], min(left, 0.1)).done:
                    break


def in_time(address: str, call: Callable[[], T]) -> T:
    """Makes the system's calls on a path in another thread: on a share that is away nothing else may end them."""
    begun = in_thread(call)
    if wait([begun], _FIRST_PATIENCE).not_done:
        raise ExchangeError(f"{address}: the disk has not answered for {_FIRST_PATIENCE:.0f} s")
    try:
        return begun.result()
    except OSError as error:
        if is_away(error):
            raise ExchangeError(f"{address}: the disk does not answer ({error.strerror})") from error
        raise


def full(address: str) -> str:
    """Returns an address in full, the same text for the same place. ValueError if it is no address.

    ExchangeError if it is on a disk that does not answer.

    Examples:
        >>> full("S3://bucket/mine/"), full("mine/") == full(str(Path("mine").resolve())), full("file:///tmp/my%20run")
        ('s3://bucket/mine', True, '/tmp/my run')
    """
    if not address.strip() or not address.isprintable():
        raise ValueError(f"a run's address is a path or s3://bucket/name, gs:// or az://; this is {address!r}")
    scheme, colon, place = address.partition(":")
    scheme = scheme.lower() if colon else ""
    path = address
    if scheme == "file":
        parts = urlsplit(address)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
            raise ValueError(f"{address}: a file:// address has three slashes and a whole path; or give the path alone")
        path = unquote(parts.path)
    other = r"[\w+.-]{2,}:/|[\w.-]+@[\w.-]+:|[^\w./~-]*(s3|gs|az|file|https?)\W*//"  # other addresses, also mistyped
    if scheme not in CLOUDS and not re.match(other, path, re.IGNORECASE):

        def resolved() -> str:
            found = Path(path).expanduser().resolve()
            found.exists()  # or an error: too long a name, for example
            return str(found)

        try:
            return in_time(address, resolved)
        except (RuntimeError, OSError, ValueError) as error:
            raise ValueError(f"{address}: is no path here: {first_line(error)}") from None
    if scheme not in CLOUDS:
        known = "s3://, gs:// or az://, or is a path (a server of your own: s3:// with AWS_ENDPOINT_URL)"
        raise ValueError(f"a run's address begins with {known}; this one is {address!r}")
    bucket, *names = place.removeprefix("//").rstrip("/").split("/")
    if not place.startswith("//") or not re.fullmatch(r"[\w.-]+", bucket):
        raise ValueError(f"{address}: names no bucket; wanted {scheme}://BUCKET/NAME")
    for name in names:  # clients and servers change other letters, each in its own way
        if not re.fullmatch(r"[\w.+=@-]+", name, re.ASCII) or set(name) == {"."}:
            raise ValueError(f"{address}: wanted letters, digits and . _ + = @ - in each part of a name, not {name!r}")
    return "/".join((f"{scheme}://{bucket}", *names))


def open_store(address: str) -> Store:
    """Opens a path (which it makes), or an address such as s3://bucket/name, gs:// or az://.

    Credentials come from the environment, as each cloud's own tools name them (AWS_ACCESS_KEY_ID,
    GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT, ...); AWS_ENDPOINT_URL names another S3 server.
    """
    from demopt.runs.disk import Disk

    place = full(address)
    scheme, separator, path = place.partition("://")
    if not separator:
        try:
            return in_time(address, lambda: Disk(place))
        except OSError as error:
            reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
            raise ValueError(f"{address}: cannot be opened: {reason}") from error
    try:
        import obstore.store
    except ModuleNotFoundError:
        raise ModuleNotFoundError("obstore is missing; install it with: pip install obstore", name="obstore") from None
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        if not re.match(r"https?://[^/]", os.environ.get(name) or "http://x"):
            raise ValueError(f"{name} is {os.environ[name]!r}; wanted http://HOST:PORT or https://HOST")
    read = {"s3": "AWS_", "az": "AZURE_STORAGE_"}.get(scheme)
    for name, value in os.environ.items():  # as from a file with Windows' line ends, at which the client panics
        if read and name.startswith(read) and not (value == value.strip() and value.isprintable()):
            raise ValueError(f"{name} begins or ends with a space or has unprintable letters; set it anew")
    kinds = {"s3": obstore.store.S3Store, "gs": obstore.store.GCSStore, "az": obstore.store.AzureStore}
    bucket, _, prefix = path.partition("/")
    # The names of the az command, which obstore does not know
    az = {"AZURE_STORAGE_ACCOUNT": "account_name", "AZURE_STORAGE_KEY": "account_key"} if scheme == "az" else {}
    own = {name: f"AZURE_STORAGE_{to.upper()}" for name, to in az.items()}
    given: Any = {az[name]: os.environ[name] for name in az if os.environ.get(name) and own[name] not in os.environ}

    def cloud(seconds: float) -> Any:
        return kinds[scheme](
            bucket,
            prefix=prefix or None,
            **given,
            client_options={"allow_http": True, "timeout": "7d", "read_timeout": f"{seconds:.0f}s"},
            retry_config={"max_retries": 0},  # `Patient` repeats, and reports
        )

    try:
        return ObjectStore(cloud(_SILENCE), place, cloud)
    except (obstore.exceptions.BaseError, OSError) as error:
        missing = re.search("Missing|Account must be specified", str(error))
        cause = CREDENTIALS if missing else f"{first_line(error)}; correct the credentials in the environment"
        raise ValueError(f"{address}: cannot be opened: {cause}") from error

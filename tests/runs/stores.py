"""Stores for tests: in memory, a folder, real servers; and stores that fail, crash, or hand over to another thread."""

import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import servers

from demopt.runs.store import ObjectStore, Store, StoreError, open_store


class Crash(BaseException):
    """The process ends here."""


class Wrapped(Store):
    """Calls `before` with the name of each call, in front of it, and `after` behind it."""

    def __init__(self, inner: Store, before: Callable[[str], None], after: Callable[[str], None] | None = None) -> None:
        self.inner, self.before, self.after = inner, before, after or (lambda _: None)

    def _do(self, call: str, *given: Any) -> Any:
        self.before(call)
        result = getattr(self.inner, call)(*given)
        self.after(call)
        return result

    def get(self, name: str, most: int) -> bytes | None:
        return self._do("get", name, most)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._do("put_if_absent", name, data)

    def list(self, folder: str) -> set[str]:
        return self._do("list", folder)

    def delete(self, names: Iterable[str]) -> None:
        self._do("delete", tuple(names))


def put(store: Store, name: str, data: bytes) -> None:
    """Writes an object, over an older one if there is one: a run never does."""
    store.delete([name])
    assert store.put_if_absent(name, data)


def busy(inner: Store, seed: int, share: float = 0.1) -> Store:
    """A store that answers 503 to a share of all requests: half of them before, half after it has done them."""
    draw, lock = random.Random(seed), threading.Lock()

    def fail(call: str) -> None:
        with lock:
            if draw.random() < share / 2:
                raise StoreError("503 Slow Down")

    return Wrapped(inner, fail, fail)


def make(kind: str, place: Any, monkeypatch: pytest.MonkeyPatch) -> Store:
    if kind == "memory":
        return ObjectStore()
    if kind == "folder":
        return open_store(str(place / "run"))
    servers.environment(kind, monkeypatch)
    return open_store(f"{servers.BUCKETS[kind][1]}/{place.name}/{random.randrange(1 << 60)}")

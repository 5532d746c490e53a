"""Stores for tests: in memory, a folder, real servers; and stores that fail, crash, or hand over to another thread."""

import random
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import servers

from demopt.runs.store import ObjectStore, Store, open_store

STILL = types.SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None, time_ns=time.time_ns)  # time stands still


@contextmanager
def time_by(clock: Any, *more: str) -> Iterator[None]:
    """The modules of a run take their time from a clock."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("exchange", "open_round", "stop", "weights", *more):
            patch.setattr(f"demopt.runs.{module}.time", clock)
        yield


class Crash(BaseException):
    """The process ends here."""


class Through(Store):
    """Passes calls on to another store, after passing each one's name to `before`; `calls` has all names."""

    def __init__(self, inner: Store, before: Callable[[str], object] = str) -> None:
        self.inner, self.address = inner, inner.address
        self.before, self.calls = before, list[str]()

    def get(self, name: str, most: int) -> bytes | None:
        return self._pass("get", name, most)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._pass("put_if_absent", name, data)

    def list(self, folder: str) -> set[str]:
        return self._pass("list", folder)

    def delete(self, names: Iterable[str]) -> None:
        self._pass("delete", tuple(names))

    def _pass(self, call: str, *given: Any) -> Any:
        self.calls.append(call)
        self.before(call)
        return getattr(self.inner, call)(*given)


class Cache(Through):
    """A cache that returns a share of an object as if it were whole, or nothing, the first two times it is read."""

    def __init__(self, inner: Store, kind: str, share: float) -> None:
        super().__init__(inner)
        self.kind, self.share, self.known = kind, share, Counter[str]()

    def get(self, name: str, most: int) -> bytes | None:
        found = super().get(name, most)
        if found is None or self.kind not in name or self.known[name] == 2:
            return found
        self.known[name] += 1
        return found[: int(self.share * len(found))] or None


def race(store: Store, racers: int, races: int, size: Callable[[int], int]) -> None:
    """Threads put objects of `size(race)` bytes at the same moment: in each race one wins, and its bytes are whole."""
    barrier = threading.Barrier(racers)

    def run(me: int) -> list[int]:
        won = []
        for number in range(races):
            barrier.wait()
            if store.put_if_absent(f"rounds/{number}", bytes([me]) * size(number)):
                won.append(number)
        return won

    with ThreadPoolExecutor(racers) as pool:
        won = list(pool.map(run, range(racers)))
    assert sorted(number for each in won for number in each) == list(range(races))
    for me, numbers in enumerate(won):
        assert all(store.get(f"rounds/{each}", most=size(each)) == bytes([me]) * size(each) for each in numbers[:50])
    assert store.list("rounds") == {str(number) for number in range(races)}


def put(store: Store, name: str, data: bytes) -> None:
    """Writes an object, replacing an older one, which a run never does."""
    store.delete([name])
    assert store.put_if_absent(name, data)


def change(store: Store, name: str, changed: Callable[[bytes], bytes]) -> None:
    """Replaces an object's bytes by `changed` of them."""
    put(store, name, changed(store.get(name, 1 << 20) or b""))


def make(kind: str, place: Any, monkeypatch: pytest.MonkeyPatch) -> Store:
    if kind == "memory":
        return ObjectStore()
    if kind == "folder":
        return open_store(str(place / "run"))
    servers.environment(kind, monkeypatch)
    return open_store(f"{servers.BUCKETS[kind][1]}/{place.name}/{random.randrange(1 << 60)}")

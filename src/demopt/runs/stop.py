"""The wish to stop a run: `demopt stop` puts it, all workers hear of it, and the next round obeys it."""

import math
import re
import time
from collections.abc import Callable
from contextlib import suppress

from demopt.errors import ExchangeError, MessageError
from demopt.runs.log import MOST_ENVELOPE
from demopt.runs.store import Store

STOP = "stop"


def put_stop(store: Store, number: int, run: str) -> None:
    """Asks all workers to stop: a new wish each time, so that those who join later can tell it from an old one."""
    wish = f"{run} {number} {time.time_ns()}\n".encode()
    with suppress(MessageError):  # another's object
        if store.put_if_absent(STOP, wish):
            return
        store.delete([STOP])
        if store.put_if_absent(STOP, wish) or store.get(STOP, MOST_ENVELOPE) == wish:
            return
    raise ExchangeError(f"{store.address}: there is an object {STOP} that cannot be deleted; delete it")


def read_stop(store: Store, run: str) -> bytes | None:
    """Returns the newest wish to stop this run, if there is one. MessageError if the object is no such wish."""
    found = store.get(STOP, MOST_ENVELOPE)
    if found is not None and found.partition(b" ")[0] != run.encode():
        raise MessageError(f"{STOP} is of another run")
    return found


class StopWish:
    """The wish to stop a run, as one worker hears it. A wish that was there before the worker is for others."""

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        self._store, self._say = store, say
        self._run = ""  # its identity, once the worker knows it
        self._old: bytes | None = None  # that was there before the worker
        self.heard_at = math.inf  # the time (monotonic) when the worker read a newer one; its messages say so

    @property
    def is_heard(self) -> bool:
        return self.heard_at < math.inf

    def begin(self, run: str) -> None:
        """From now on the worker is in the run: only a wish that comes later is for it."""
        self._run = run
        self._old, self.heard_at = self._read(), math.inf

    def hear(self) -> bool:
        """Whether there is one for this worker; reads it until then."""
        if self._run and not self.is_heard and self._read() not in (None, self._old):
            self.heard_at = time.monotonic()
        return self.is_heard

    def asked_in(self) -> int | None:
        """Returns the round that was open when the wish for this worker came; None if there is none."""
        wish = self._read()
        if wish in (None, self._old):
            return None
        found = re.fullmatch(rb"\S+ (\d{1,8}) .*\s*", wish or b"")
        return int(found[1]) if found else 0

    def _read(self) -> bytes | None:
        try:
            return read_stop(self._store, self._run)
        except MessageError as error:  # another object of that name, maybe a stranger's
            self._say(f"{error}; it is ignored")
            return None

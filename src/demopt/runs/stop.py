"""The wish to stop a run: `demopt stop` puts it, all workers hear of it, and the next round obeys it."""

import math
import re
import time
from collections.abc import Callable
from contextlib import suppress

from demopt.errors import ExchangeError, MessageError
from demopt.runs.failures import DeniedError
from demopt.runs.log import MOST_ENVELOPE, MOST_ROUNDS, read, read_manifest
from demopt.runs.store import Store

STOP = "stop"
_SOON = 100  # rounds within which all workers have heard of a wish: they take turns at reading it


def put_stop(store: Store, number: int, run: str) -> None:
    """Asks all workers to stop: a new wish each time, so that those who join later can tell it from an old one."""
    wish = f"{run} {number} {time.time_ns()}\n".encode()
    with suppress(MessageError):  # another's object
        if store.put_if_absent(STOP, wish):
            return
        try:
            store.delete([STOP])
        except DeniedError as error:
            text = f"{store.address}: there is an object {STOP} that may not be deleted; delete it with other rights"
            raise ExchangeError(f"{text}, or with the server's own tools ({error})") from error
        if store.put_if_absent(STOP, wish) or store.get(STOP, MOST_ENVELOPE) == wish:
            return
    raise ExchangeError(f"{store.address}: there is an object {STOP} that cannot be deleted; delete it")


def read_stop(store: Store, run: str, again: bool = True) -> bytes | None:
    """Returns the newest wish to stop this run, if there is one. MessageError if the object is no such wish.

    `again`: reads a damaged one again.
    """

    def wish(found: bytes) -> bytes:
        if not re.fullmatch(rb"%b \d{1,8} \d+\n" % run.encode(), found):
            raise MessageError(f"{STOP} is of another run")
        return found

    if again:
        return read(store, STOP, MOST_ENVELOPE, wish)
    found = store.get(STOP, MOST_ENVELOPE)
    return found and wish(found)


def _asked_in(wish: bytes) -> int:
    return int(wish.split()[1])


class StopWish:
    """The wish to stop a run, as one worker hears it. A wish from before the worker came is for the others.

    But if they obey it while the worker is still joining, the worker ends with them.
    """

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        self._store, self._say = store, say
        self._run = ""  # its identity, once the worker knows it
        self._old: bytes | None = None  # that was there before the worker
        self._is_old_open = False  # nobody had obeyed it when the worker came
        self._obeyed: bytes | None = None  # the last one that a round obeyed before this worker heard it
        self.heard_at = math.inf  # the time (monotonic) when the worker read a newer one; its messages say so

    @property
    def is_heard(self) -> bool:
        return self.heard_at < math.inf

    def begin(self, run: str) -> None:
        """From now on the worker is in the run: only a wish that comes later is for it."""
        self._run = run
        self._old, self.heard_at = self._read(), math.inf
        self._is_old_open = self._old is not None and not self._is_obeyed(self._old, _SOON)

    def hear(self) -> bool:
        """Whether there is a wish for this worker; reads until there is. One that a round has obeyed is for nobody."""
        if self._run and not self.is_heard and (wish := self._read(again=False)) not in (None, self._old, self._obeyed):
            if self._is_obeyed(wish):
                self._obeyed = wish
            else:
                self.heard_at = time.monotonic()
        return self.is_heard

    def asked_in(self, is_joining: bool) -> int | None:
        """Returns the round that was open when the wish for this worker came; None if there is none."""
        wish = self._read()
        if wish is None or (wish == self._old and not (is_joining and self._is_old_open)):
            return None
        return _asked_in(wish)

    def _is_obeyed(self, wish: bytes, most: int = MOST_ROUNDS) -> bool:
        """Whether one of the `most` rounds after a wish has ended the run, or all have passed without obeying it."""
        number = _asked_in(wish)
        for each in range(number, number + most):
            with suppress(MessageError):  # whoever needs a damaged one says so
                if (manifest := read_manifest(self._store, self._run, each)) is None or manifest.stop:
                    return manifest is not None
        return True

    def _read(self, again: bool = True) -> bytes | None:
        try:
            return read_stop(self._store, self._run, again)
        except MessageError as error:  # another object of that name, maybe a stranger's
            self._say(f"{error}; it is ignored")
            return None

"""The cost of a day of a run through a folder or bucket: requests, bytes, and money at given prices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from demopt.runs.exchange import pause
from demopt.train.config import InputError

WAIT = 0.1  # of a round's computing: how long a worker waits for the last one, on average
DAY = 86400.0


@dataclass(frozen=True)
class Prices:
    """Money per million writes and lists, per million reads, and per GB that leaves the store."""

    write: float
    read: float
    gigabyte: float


@dataclass(frozen=True)
class Day:
    """A day of a run. `writes` includes lists, which cost as much; deletes are free."""

    rounds: float
    writes: float
    reads: float
    put_bytes: float
    read_bytes: float
    money: float


def prices_of(text: str) -> Prices:
    """Returns the prices in a text of three numbers.

    Examples:
        >>> prices_of("5,0.4,0.09")
        Prices(write=5.0, read=0.4, gigabyte=0.09)
    """
    try:
        write, read, gigabyte = (float(part) for part in text.split(","))
    except ValueError:
        write = -1.0
    if not (write >= 0 and read >= 0 and gigabyte >= 0):
        raise InputError(
            f"--store-prices is {text!r}; give three prices: per million writes, per million reads, per GB read, such "
            "as 5,0.4,0.09"
        )
    return Prices(write, read, gigabyte)


def day(
    message_bytes: int, checkpoint_bytes: int, workers: int, compute: float, latency: float, every: int, prices: Prices
) -> Day:
    """Returns the cost of a day. `compute`: seconds of a round's local steps; `every`: rounds between checkpoints.

    Per round and worker: a message, a manifest and a list are written or listed, and one more list whenever a waiting
    worker looks again; the wish to stop, the manifest and all other messages are read.
    """
    wait, looks = WAIT * compute, 0
    waited = 0.0
    while waited < wait and pause(waited) < pause(math.inf):
        waited += pause(waited) + latency
        looks += 1
    looks += math.ceil(max(wait - waited, 0.0) / (pause(math.inf) + latency))
    rounds = DAY / (compute + wait + 3 * latency)
    writes = rounds * (workers * (3 + looks) + (2 + every) / every)
    reads = rounds * workers * (workers + 1)
    put_bytes = rounds * (workers * message_bytes + checkpoint_bytes / every)
    read_bytes = rounds * workers * (workers - 1) * message_bytes
    money = writes / 1e6 * prices.write + reads / 1e6 * prices.read + read_bytes / 1e9 * prices.gigabyte
    return Day(rounds, writes, reads, put_bytes, read_bytes, money)

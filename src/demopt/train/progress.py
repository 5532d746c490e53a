"""Where a run stands while it trains: takes in each step's row, and is what the dashboard and the plain lines show."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rich.filesize import decimal

from demopt.exchange.wrappers import all_reduce_bytes
from demopt.train.config import TrainConfig
from demopt.train.method import FLOAT32_BYTES

RECENT = 50  # steps that speed and seconds are the mean of
POINTS = 32  # of the loss, at most, in the dashboard
BARS = "▁▂▃▄▅▆▇█"

Row = dict[str, Any]


def workers(config: TrainConfig, rows: list[Row]) -> int:
    """Return how many workers trained; where they come and go, in most steps.

    Examples:
        >>> workers(TrainConfig(workers=1), [{"members": 3}, {"members": 2}, {"members": 3}])
        3
    """
    return int(statistics.mode(row.get("members", config.workers) for row in rows))


class Progress:
    """Where a run stands; `done` steps were done before this start, which bytes and times do not count."""

    def __init__(
        self, config: TrainConfig, done: int, parameters: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config, self.step = config, done
        self._parameters = parameters
        self.row: Row = {}
        self.validated: tuple[int, float] | None = None
        self.losses = Thinned(POINTS)
        self.sent, self.received = 0, 0
        self._before, self._clock, self._began = done, clock, clock()
        self._recent: deque[Row] = deque(maxlen=RECENT)

    def add(self, row: Row) -> None:
        """Take in the row of one more step."""
        self.row, self.step = row, row["step"]
        self._recent.append(row)
        self.sent += row["sent_bytes"]
        self.received += row["received_bytes"]
        if math.isfinite(row["loss"]):
            self.losses.add(row["loss"])
        if "val_loss" in row:
            self.validated = row["step"], row["val_loss"]

    @property
    def dense_bytes(self) -> int:
        """What DDP would send and receive in a step, of as many workers as there are."""
        return all_reduce_bytes(FLOAT32_BYTES * self._parameters, workers(self.config, [self.row]))

    @property
    def steps(self) -> int:
        """The steps since this start, at least 1."""
        return max(1, self.step - self._before)

    @property
    def elapsed(self) -> float:
        """Seconds since this start, evaluations and saving included."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds to the end, if the steps to come take as long as those since this start."""
        return self.elapsed / self.steps * (self.config.steps - self.step)

    @property
    def tokens_a_second(self) -> float:
        """Tokens of all workers in a second of recent steps."""
        seconds: float = sum(row["step_seconds"] for row in self._recent)
        each_steps: int = sum(row.get("members", self.config.workers) for row in self._recent)
        return self.config.tokens_per_step // self.config.workers * each_steps / seconds

    def seconds(self) -> dict[str, float]:
        """Return the mean seconds of a recent step: "step", and of its parts those that were timed."""
        count = len(self._recent)
        means = {"step": sum(row["step_seconds"] for row in self._recent) / count}
        for name in ("optimizer", "exchange"):
            if self.row[f"{name}_seconds"] is not None:
                means[name] = sum(row[f"{name}_seconds"] for row in self._recent) / count
        rest = means["step"] - sum(value for name, value in means.items() if name != "step")
        return {"step": means["step"], "forward and backward": max(0.0, rest), **means}


class Thinned:
    """A row of numbers as at most `most` means over equally many of them.

    Examples:
        >>> row = Thinned(4)
        >>> for number in range(6):
        ...     row.add(number)
        >>> row.means
        [0.5, 2.5, 4.5]
    """

    def __init__(self, most: int) -> None:
        self.means: list[float] = []
        self._most, self._each = most, 1
        self._sum, self._count = 0.0, 0

    def add(self, number: float) -> None:
        """Add a number; the mean appears with the last of its numbers."""
        self._sum += number
        self._count += 1
        if self._count < self._each:
            return
        self.means.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.means) == self._most:
            pairs = zip(self.means[::2], self.means[1::2], strict=True)
            self.means = [(one + other) / 2 for one, other in pairs]
            self._each *= 2


def spark(numbers: list[float]) -> str:
    """Return a row of bars, as high as the numbers on a logarithmic scale.

    Examples:
        >>> spark([5.5, 3.0, 2.0, 1.6, 1.5])
        '█▅▃▁▁'
    """
    if len(numbers) < 2 or min(numbers) <= 0 or min(numbers) == max(numbers):
        return ""
    low, high = math.log(min(numbers)), math.log(max(numbers))
    return "".join(BARS[round((math.log(number) - low) / (high - low) * (len(BARS) - 1))] for number in numbers)


def clock(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds.

    Examples:
        >>> clock(59.7), clock(3723)
        ('0:01:00', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def line(progress: Progress) -> str:
    """Return a run's progress in one plain line."""
    now = progress
    val = f"  val {now.validated[1]:.3f}" if now.validated else ""
    up, down = (decimal(round(total / now.steps)) for total in (now.sent, now.received))
    return (
        f"step {now.step}/{now.config.steps}  loss {now.row['loss']:.3f}{val}  {now.tokens_a_second:,.0f} tokens/s  "
        f"{up} up {down} down a step  {clock(now.elapsed)} gone {clock(now.left)} left{_churn(now.row)}"
    )


def _churn(row: Row) -> str:
    """Return who lives, and what changes have cost, if workers may come and go."""
    if "members" not in row:
        return ""
    members, retries = _plural(row["members"], "member"), _plural(row["retries"], "round")
    return f"  {members}, {retries} retried, {row['lost_seconds']:.1f} s lost"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def facts(progress: Progress) -> list[tuple[str, str]]:
    """Return what the dashboard says, each with its name."""
    now, row = progress, progress.row
    told = [("loss", f"{row['loss']:.4f} nats a token")]
    if now.validated:
        told.append(("validation", f"{now.validated[1]:.4f} nats a token at step {now.validated[0]:,}"))
    told.append(("speed", f"{now.tokens_a_second:,.0f} tokens a second"))
    told.append(("seconds", _seconds(now)))
    if now.sent or now.received:
        told.append(("bytes", _bytes(now)))
    told.append(("members", _churn(row).strip() or _plural(now.config.workers, "worker")))
    told.append(("time", f"{clock(now.elapsed)} since the start"))
    return told


def _seconds(now: Progress) -> str:
    means = now.seconds()
    whole = means.pop("step")
    parts = ", ".join(f"{value:.3f} {name}" for name, value in means.items())
    return f"{whole:.3f} a step: {parts}" + ("" if "exchange" in means else " (exchange too)")


def _bytes(now: Progress) -> str:
    up, down = (decimal(round(total / now.steps)) for total in (now.sent, now.received))
    mean = f"{up} up, {down} down a step; {decimal(now.sent)} up, {decimal(now.received)} down since the start"
    return mean + (f"; dense gradients: {decimal(now.dense_bytes)} each way a step" if now.dense_bytes else "")

"""The cost of the last step."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Stats(Mapping[str, Any]):
    """Bytes, coefficients and seconds of this rank's last step. Also works as a mapping: stats["kept"], dict(stats).

    `payload_bytes` is the length of this rank's message; `sent_bytes` and `received_bytes` count its traffic on the
    chosen route; `kept` is the number of coefficients in the message; `seconds` holds the host's time in "extract",
    "exchange" and "apply"; `skipped` means that no rank applied anything because some rank's gradient was not finite;
    `route` names the route and the reason for it; `consolidated_bytes` counts the traffic of `consolidate_state_dict`
    since.

    Examples:
        >>> stats = Stats(payload_bytes=10)
        >>> stats.payload_bytes, stats["kept"], "route" in stats
        (10, 0, True)
    """

    payload_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    kept: int = 0
    skipped: bool = False
    route: str = ""
    consolidated_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        if name not in _NAMES:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)

    def timed(self, stage: str, started: float, **changes: Any) -> "Stats":
        """Returns a copy with changes, and the seconds since `started` (time.perf_counter) added to a stage."""
        spent = self.seconds.get(stage, 0.0) + time.perf_counter() - started
        return replace(self, seconds={**self.seconds, stage: spent}, **changes)

    def with_exchange_of(self, older: "Stats") -> "Stats":
        """Returns a copy with the cost of an older round that this step exchanged and applied."""
        seconds = {**self.seconds, **{name: spent for name, spent in older.seconds.items() if name != "extract"}}
        costs = {name: getattr(older, name) for name in ("sent_bytes", "received_bytes", "skipped")}
        return replace(self, seconds=seconds, **costs)


_NAMES = tuple(entry.name for entry in fields(Stats))

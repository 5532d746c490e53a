"""The cost of the last step."""

import time
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Stats:
    """Bytes, coefficients and seconds of this rank's last step.

    With `LocalDeMo(delay=1)` they are those of the round that the step, or `flush`, applied.

    `payload_bytes` is the length of this rank's message; `sent_bytes` and `received_bytes` count its traffic on the
    chosen route; `kept` is the number of coefficients in the message; `seconds` holds the host's time in "extract",
    "exchange" and "apply"; `skipped` means that no rank applied anything because some rank's gradient was not finite;
    `route` names the route and the reason for it; `consolidated_bytes` counts the traffic of `consolidate_state_dict`
    since.

    Examples:
        >>> Stats(payload_bytes=10).kept
        0
    """

    payload_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    kept: int = 0
    skipped: bool = False
    route: str = ""
    consolidated_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, stage: str, started: float, **changes: Any) -> "Stats":
        """Returns a copy with changes, and the seconds since `started` (time.perf_counter) added to a stage."""
        spent = self.seconds.get(stage, 0.0) + time.perf_counter() - started
        return replace(self, seconds={**self.seconds, stage: spent}, **changes)

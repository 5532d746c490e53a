"""What the last step cost."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Stats:
    """Bytes, coefficients and seconds of this rank's last step. Also a mapping: stats["kept"], dict(stats).

    `payload_bytes` is the length of this rank's message; `sent_bytes` and `received_bytes` are what left and reached
    this rank on the chosen route; `seconds` has the host's time in "extract", "exchange" and "apply"; `skipped` says
    that no rank applied anything because some rank's gradient was not finite; `route` says which was taken, and why.

    Example:
        >>> stats = Stats(payload_bytes=10)
        >>> stats.payload_bytes, stats["kept"]
        (10, 0)
    """

    payload_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    kept: int = 0
    skipped: bool = False
    route: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    def keys(self) -> Iterator[str]:
        """Names of the figures."""
        return (entry.name for entry in fields(self))

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

"""What the commands say to a person, who may have gone: a closed terminal, `| head`, a full disk. The work goes on."""

import io
import os
import sys
from errno import EIO, EPIPE
from typing import Any

from demopt.errors import printable

_LONGEST = 1000  # letters at each end of a line, which may quote a whole file


class Outlet(io.RawIOBase):
    """The file below a stream, which drops what it cannot take; `lost` says why, or is empty: the reader has left."""

    lost: str | None = None

    def __init__(self, stream: Any) -> None:
        self._stream = stream  # without `stream` the file would be closed
        self._file = file = getattr(stream.buffer, "raw", stream.buffer)
        self.isatty, self.fileno = file.isatty, file.fileno  # type: ignore[method-assign]

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return int(self._file.write(data) or len(data))
        except OSError as error:
            self.lost = self.lost or ("" if error.errno in (EIO, EPIPE) else str(error.strerror))
            return len(data)


def open_outlets() -> Outlet:
    """Puts an `Outlet` below the two standard streams of this process; returns that of stdout."""
    for name in ("stderr", "stdout"):
        # The number of a closed stream is free: a file that took it would get what libraries print.
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        buffer = io.BufferedWriter(outlet := Outlet(stream))
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=True))
    return outlet


def is_read() -> bool:
    """Whether stdout has taken all so far: a command that shows something again and again ends where nobody reads."""
    below = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return not isinstance(below, Outlet) or below.lost is None


def tell(text: str, code: int = 0) -> int:
    """Writes a line to stderr, and returns `code`; below Python's buffers, at which a signal may find the process."""
    stream: Any = sys.stderr
    lines = [
        line if len(line) <= 2 * _LONGEST else f"{line[:_LONGEST]} ... {line[-_LONGEST:]}"
        for line in printable(text).split("\n")
    ]
    told = "\n".join(lines)
    stream.buffer.raw.write(f"demopt: {told}\n".encode(stream.encoding, "backslashreplace"))
    return code

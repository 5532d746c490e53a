"""The commands' output. Their work goes on if it cannot be written: a closed terminal, `| head`, a full disk."""

import io
import os
import sys
from errno import EIO, EPIPE
from typing import Any

from demopt.errors import printable

_LONGEST = 1000  # characters kept at each end of a line, which may quote a whole file


class Outlet(io.RawIOBase):
    """The file below a stream; drops output that it cannot write. `lost` says why, and is empty if the reader left."""

    lost: str | None = None

    def __init__(self, stream: Any) -> None:
        self._stream = stream  # keeps the file open
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
        # A closed stream's file number is free: the next file opened would take it and get the output of libraries.
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        buffer = io.BufferedWriter(outlet := Outlet(stream))
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=True))
    return outlet


def is_read() -> bool:
    """Whether stdout has taken all output so far: a command that repeats its output ends when nobody reads it."""
    below = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return not isinstance(below, Outlet) or below.lost is None


def tell(text: str, code: int = 0) -> int:
    """Writes a line to stderr and returns `code`. Bypasses Python's buffers, which a signal may have interrupted."""
    stream: Any = sys.stderr
    lines = [
        line if len(line) <= 2 * _LONGEST else f"{line[:_LONGEST]} ... {line[-_LONGEST:]}"
        for line in printable(text).split("\n")
    ]
    told = "\n".join(lines)
    stream.buffer.raw.write(f"demopt: {told}\n".encode(stream.encoding, "backslashreplace"))
    return code

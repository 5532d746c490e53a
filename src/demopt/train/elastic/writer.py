"""Who writes for a folder that several replicas share."""

from __future__ import annotations

import fcntl

from demopt.train.folder import RunFolder


class Writer:
    """The right to write for this folder: one living replica has it, and the kernel passes it on when that dies."""

    def __init__(self, folder: RunFolder) -> None:
        self._lock = (folder.root / ".writer").open("w")
        self.mine = False

    def asks(self) -> bool:
        """Return whether this replica writes."""
        if not self.mine:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.mine = True
            except BlockingIOError:
                pass
        return self.mine

"""A run in a real terminal: the dashboard, and what Ctrl-C and a killed worker leave behind."""

import fcntl
import os
import pty
import re
import signal
import struct
import termios
import threading

import pytest
from train_runs import LIMIT, start_held, workers_of

from demopt.train.dashboard import STOPPING
from demopt.train.folder import RunFolder

SHOW, HIDE = "\x1b[?25h", "\x1b[?25l"


class Terminal:
    """A terminal of 60 columns, and what was written to it."""

    def __init__(self):
        self.keyboard, self.screen = pty.openpty()
        fcntl.ioctl(self.screen, termios.TIOCSWINSZ, struct.pack("4H", 24, 60, 0, 0))
        self._seen = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        while True:
            try:
                part = os.read(self.keyboard, 1 << 16)
            except OSError:  # nobody has it open any more
                return
            self._seen += part

    def close(self):
        os.close(self.screen)
        self._reader.join(LIMIT)
        os.close(self.keyboard)
        return self._seen.decode()


@pytest.mark.parametrize("end", ["Ctrl-C", "killed"])
def test_train_leaves_a_clean_terminal(tmp_path, text, monkeypatch, end):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    terminal = Terminal()
    folder = RunFolder(tmp_path / "run")
    process = start_held(
        folder.root, text, number=3, stdin=terminal.screen, stdout=terminal.screen, stderr=terminal.screen
    )
    assert folder.live.exists()
    if end == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    else:
        os.kill(workers_of(process)[0], signal.SIGKILL)
    code = process.wait(LIMIT)
    seen = terminal.close()
    assert code == (130 if end == "Ctrl-C" else 1)
    assert seen.rindex(SHOW) > seen.rindex(HIDE)
    assert re.search(r"step \d/12", seen)  # the dashboard
    assert "2 workers" in seen
    told = "stopped after step 3 of 12, saved." if end == "Ctrl-C" else "demopt: rank 0 was ended by SIGKILL"
    assert seen.rindex(told) > seen.rindex(SHOW)
    assert (STOPPING in seen) == (end == "Ctrl-C")
    assert not folder.live.exists()

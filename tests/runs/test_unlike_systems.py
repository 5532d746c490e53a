"""Workers on systems that lack what Linux has decode a run to the same bits."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import forked

FLAGS = """
--preset tiny --layers 1 --sequence 32 --batch 2 --eval-every 100000 --eval-sequences 6 --threads 1 --steps 10
--sync-every 5 --late 1 --checkpoint-every 100 --keep-log
"""
# As on another system: no locks and network calls of fcntl, no affinity, no SIGHUP, no kernels that were compiled.
POORER = """
import os, signal, sys
from pathlib import Path
import psutil, pydantic.dataclasses, torch, torch.distributed.checkpoint, transformers
sys.modules["fcntl"] = None

del os.sched_getaffinity, signal.SIGHUP
from demopt.kernels import loader
loader.LIBRARY = Path("nowhere")
from demopt import cli
cli.main()
"""


def test_worker_without_kernels_locks_and_signals_of_linux_has_the_same_bits(tmp_path: Path) -> None:
    text, run = str(Path(sysconfig.get_path("stdlib"), "textwrap.py")), str(tmp_path / "run")
    first = forked.demopt("train", "--run", run, "--out", tmp_path / "first", "--data", text, *FLAGS.split())
    assert first.returncode == 0, first.stderr
    command = [sys.executable, "-c", POORER, "join", run, "--out", str(tmp_path / "second"), "--threads", "1"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert second.returncode == 0, second.stderr
    digest = first.stdout.rpartition("sha256 ")[2]
    assert len(digest) == 65
    assert second.stdout.endswith(digest)
    assert forked.demopt("replay", run).stdout.endswith(digest)

"""torchrun's own elasticity, for those who have no lighthouse: restarts, and other numbers of machines."""

import os
import socket
import subprocess
import sys

from train_runs import LIMIT, SMALL, STEPS, metrics, timeless, wait_for, weights

# Python imports this in every process that finds it: a worker whose rank is among DIES dies before step 8 of the first
# start, and leaves the file LOST.
DIES = """
import os, signal
from pathlib import Path
if os.environ.get("RANK", "none") in os.environ.get("DIES", "") and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    import demopt.train.loop as loop
    rate = loop.learning_rate
    def dying(config, step):
        if step == 8:
            Path(os.environ["LOST"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return rate(config, step)
    loop.learning_rate = dying
"""


def _torchrun(tmp_path, text, *flags, **more):
    """A start of `demopt train --resume auto` by torchrun, in a session of its own."""
    (tmp_path / "sitecustomize.py").write_text(DIES)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "torch.distributed.run", *flags, "-m", "demopt.cli", "train", *SMALL]
    command += ["--data", str(text), "--out", str(tmp_path / "run"), "--resume", "auto"]
    # torchrun keeps one store for all restarts, with the addresses of workers that are gone (docs/elastic.md)
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": path, **more}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=env, start_new_session=True, **pipes)


def test_worker_killed_under_torchrun_is_restarted_and_the_run_is_bit_for_bit(tmp_path, text, finished):
    more = {"DIES": "1", "LOST": str(tmp_path / "lost")}
    running = _torchrun(tmp_path, text, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", **more)
    told, _ = running.communicate(timeout=LIMIT)
    assert running.returncode == 0, told
    assert "going on after step 6" in told
    assert timeless(metrics(tmp_path / "run")) == timeless(metrics(finished[0]))
    assert weights(tmp_path / "run") == weights(finished[0])


def test_machine_lost_under_torchrun_leaves_a_run_of_one(tmp_path, text):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    # how long the first waits for the second, which may be slow to start; and how long until a silent one is lost
    quick = "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=8"
    flags = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    flags += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "lost", "--rdzv-conf", quick]
    lost = tmp_path / "lost"
    left = _torchrun(tmp_path, text, *flags)
    wait_for(lambda: _listens(port), left)  # this one keeps the store, without which the other could not go on either
    gone = _torchrun(tmp_path, text, *flags, DIES="01", LOST=str(lost))
    try:
        wait_for(lost.exists, gone)
        gone.kill()
        told, _ = left.communicate(timeout=LIMIT)
    finally:
        for machine in (left, gone):
            with machine:  # closes its pipes
                machine.kill()
    assert left.returncode == 0, told
    assert "workers: 2 until now, 1 from here" in told
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))


def _listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0

"""Workers that die, fail, disagree, or are started by torchrun."""

import os
import shutil
import signal
import socket
import subprocess

import pytest
import torch
import train_runs
from train_runs import COMMAND, LIMIT, SMALL, alive, metrics, steps_done, weights, workers_of

import ranks
from demopt.train import worker
from demopt.train.config import InputError, SharedInputError, TrainConfig
from demopt.train.data import Corpus, Tokens
from demopt.train.folder import RunFolder
from demopt.train.team import Team

# Python imports this module in every process that finds it: here it breaks rank 1 at its third step.
BREAK_RANK_1 = """
import os
if os.environ.get("RANK") == "1":
    import demopt.train.loop as loop
    rate = loop.learning_rate
    def broken(config, step):
        if step == 3:
            raise RuntimeError("the third step is broken")
        return rate(config, step)
    loop.learning_rate = broken
"""


def test_killed_worker_ends_the_run(tmp_path, text):
    out = tmp_path / "run"
    process = train_runs.start(out, text, "--steps", 100000)
    train_runs.wait_for(lambda: steps_done(out) >= 4, process)
    workers = workers_of(process)
    assert sorted(workers) == [0, 1]
    os.kill(workers[1], signal.SIGKILL)
    _, told = process.communicate(timeout=LIMIT)  # long before --timeout, 600 s, has passed
    assert process.returncode == 1
    assert "rank 1 was ended by SIGKILL" in told
    assert f"demopt train --resume --out {out}" in told
    assert not any(map(alive, workers.values()))


def test_killed_launcher_leaves_no_orphan(tmp_path, text):
    out = tmp_path / "run"
    process = train_runs.start(out, text, "--steps", 100000)
    train_runs.wait_for(lambda: steps_done(out) >= 1, process)
    workers = workers_of(process)
    with pytest.raises(InputError, match="a run is at work in it"), RunFolder(out).held():
        pass
    process.kill()
    train_runs.wait_for(lambda: not any(map(alive, workers.values())))
    process.communicate()


def test_worker_error_comes_with_rank_and_traceback(tmp_path, monkeypatch, text):
    (tmp_path / "sitecustomize.py").write_text(BREAK_RANK_1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    result = train_runs.run(tmp_path / "run", text)
    assert result.returncode == 1
    assert "rank 1 failed" in result.stderr
    assert "RuntimeError: the third step is broken" in result.stderr
    assert result.stderr.count("Traceback") == 1


def test_workers_refuse_unlike_data(tmp_path, text):
    (tmp_path / "other.txt").write_text("something else entirely. " * 400)
    both = _by_hand(tmp_path / "a", ["--data", text], ["--data", tmp_path / "other.txt"])
    assert [code for code, _ in both] == [2, 2]
    assert "rank 1 has other data than rank 0" in both[0][1]
    assert both[0][1].count("\n") == 1
    assert both[1][1] == ""


def _compared(exchange, top_k):
    config = TrainConfig(top_k=top_k if exchange.rank else 32)
    team = Team(exchange.rank, exchange.world_size, torch.device("cpu"), exchange)
    worker._compare(config, Corpus(Tokens(()), Tokens(()), 256, "fingerprint", 1.0), team)


def test_workers_refuse_unlike_settings():
    ranks.threads(_compared, 2, 32)
    with pytest.raises(SharedInputError, match="rank 1 was started with top_k=7, rank 0 with top_k=32; start all"):
        ranks.threads(_compared, 2, 7)


def test_overwrite_by_torchrun_leaves_a_run_at_work_alone(tmp_path, text, finished):
    out = shutil.copytree(finished[0], tmp_path / "run")
    with RunFolder(out).held():
        ((code, told),) = _by_hand(out, ["--data", text, "--overwrite"])
    assert code == 2
    assert f"--out {out}: a run is at work in it" in told
    assert metrics(out) == metrics(finished[0])
    assert weights(out) == weights(finished[0])


def _by_hand(out, *flags_by_rank):
    """Exit code and standard error of workers that were started one by one, as on two machines."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    running = []
    for rank, flags in enumerate(flags_by_rank):
        place = {"RANK": rank, "WORLD_SIZE": len(flags_by_rank), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        env = os.environ | {name: str(value) for name, value in place.items()}
        command = [*COMMAND, *SMALL, "--out", str(out), *map(str, flags)]
        running.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    told = [process.communicate(timeout=LIMIT)[1] for process in running]
    return [(process.returncode, text) for process, text in zip(running, told, strict=True)]

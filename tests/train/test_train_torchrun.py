"""Under torchrun: a worker that is lost is started again, and the run goes on by itself."""

from train_runs import SMALL, metrics, timeless, weights

import forked

# Rank 1 dies before step 8 of the first start.
SCRIPT = """
import os, signal
from demopt import cli
from demopt.train import loop

rate = loop.learning_rate
def dying(config, step):
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], step) == ("1", "0", 8):
        os.kill(os.getpid(), signal.SIGKILL)
    return rate(config, step)
loop.learning_rate = dying
cli.main()
"""


def test_worker_killed_under_torchrun_is_restarted_and_the_run_is_bit_for_bit(tmp_path, text, finished, monkeypatch):
    # torchrun keeps one store for all restarts, with the addresses of workers that are gone
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ["train", *SMALL, "--data", str(text), "--out", str(tmp_path / "run"), "--resume-auto"]
    done = forked.torchrun(tmp_path / "script.py", *flags, ranks=2, cwd=tmp_path, restarts=1)
    assert done.returncode == 0, done.stderr
    assert "going on after step 6" in done.stdout
    assert timeless(metrics(tmp_path / "run")) == timeless(metrics(finished[0]))
    assert weights(tmp_path / "run") == weights(finished[0])

"""demopt.integrations.transformers beside what DistributedDataParallel does; examples/hf_trainer.py resumes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="needs accelerate: make test-integrations")


def test_trainer_with_demo_averages_over_the_tokens_of_all_ranks_as_ddp_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("token_mean.py")
    done = subprocess.run([*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "bit-identical" not in done.stderr
    told = re.findall(r"apart ([\d.e+-]+), without ([\d.e+-]+)", done.stdout)
    assert len(told) == 2
    for apart, without in told:
        assert float(apart) < 1e-5 < 1e-3 < float(without)  # float32 sums in another order; what the setting changes

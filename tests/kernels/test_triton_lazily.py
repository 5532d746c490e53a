"""Without Triton everything imports, and nothing is covered; with it, `import demopt` does not load it."""

import subprocess
import sys

PROBE = """
import sys
{before}
import torch
loaded = "triton" in sys.modules
import demopt
from demopt.kernels import triton_kernels
assert ("triton" in sys.modules) == loaded
for device in ("cpu", "cuda"):
    print(triton_kernels.covers((64, 64), torch.float32, torch.device(device)))
"""


def _run(before: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE.format(before=before)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_kernels_cover_nothing_without_triton() -> None:
    assert _run('sys.modules["triton"] = None') == ["False"] * 2


def test_kernels_decide_coverage_without_importing_triton() -> None:
    assert _run("")[0] == "False"

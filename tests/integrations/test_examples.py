"""Each script of examples/ runs on two ranks, and once more from the middle, to the same bits."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forked

EXAMPLES = Path(__file__).parents[2] / "examples"
PYTHON, TORCHRUN = "python", "torchrun"
GUESSING = 5.5  # the loss, in nats a byte, of one who knows nothing: ln 256
# how it starts two ranks, its options for fewer steps, the middle of which is not the end of a round, and the packages
# that it needs
SCRIPTS = {
    "raw_loop": (TORCHRUN, ("--steps", "8"), ()),
    "hf_trainer": (TORCHRUN, ("--steps", "8"), ("transformers", "accelerate")),
    "lora": (TORCHRUN, ("--steps", "8"), ("transformers", "peft")),
    "hf_accelerate": (TORCHRUN, ("--steps", "58"), ("accelerate",)),
    "lightning_strategy": (PYTHON, ("--steps", "4"), ("lightning",)),
    "titan": (TORCHRUN, (), ("torchtitan",)),
    "ray_train": (PYTHON, ("--steps", "8"), ("ray",)),
}


def _run(name, folder, *options):
    """What two ranks tell: the part of the steps that was done before, their last loss, and their fingerprint."""
    launcher, steps, _ = SCRIPTS[name]
    script, arguments = EXAMPLES / f"{name}.py", [*steps, "--out", str(folder / "out"), *options]
    if launcher == TORCHRUN:
        done = forked.torchrun(script, *arguments, ranks=2, cwd=folder)
    else:
        environment = os.environ | {"RAY_DEDUP_LOGS": "0"}
        command = [sys.executable, str(script), *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "bit-identical" not in done.stderr  # the warning of dense synchronisation
    assert "had not sent yet" not in done.stderr  # nobody loads another rank's state
    told = re.findall(r"steps (\d+) to (\d+):(?: loss ([\d.]+),)? fingerprint ([0-9a-f]{16})", done.stdout)
    if name == "ray_train":
        told = list(set(told))  # Ray shows what workers print twice
    assert len(told) == 2, done.stdout
    return [(int(first) / int(last), loss, fingerprint) for first, last, loss, fingerprint in told]


@pytest.mark.parametrize(("name", "optimizer"), [*((name, "LocalDeMo") for name in SCRIPTS), ("hf_trainer", "DeMo")])
def test_example_resumes_from_the_middle_bit_for_bit(name, optimizer, tmp_path):
    missing = [package for package in SCRIPTS[name][2] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: make test-integrations")
    options = ["--demo"] if optimizer == "DeMo" else []
    whole, resumed = (_run(name, tmp_path, *options) for _ in range(2))
    assert [first for first, _, _ in whole + resumed] == [0, 0, 0.5, 0.5]
    assert len({fingerprint for _, _, fingerprint in whole + resumed}) == 1
    assert max(float(loss or 0) for _, loss, _ in whole) < GUESSING


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short_and_mark_the_lines_that_matter(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert re.findall(r"# <- (\d)", text) == ["1", "2"]

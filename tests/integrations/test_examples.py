"""Each script of examples/ runs on two ranks, and once more from the middle, to the same bits."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forked

EXAMPLES = Path(__file__).parents[2] / "examples"
PYTHON, TORCHRUN = "python", "torchrun"
GUESSING = 5.5  # the loss, in nats per byte, of uniform guesses: ln 256
# By script: how it starts two ranks, its options for fewer steps, whose middle is not the end of a round, and the
# packages that it needs.
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
    """The reports of two ranks: the fraction of the steps done before, the last loss, and the fingerprint."""
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
        told = list(set(told))  # Ray shows the workers' output twice
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


#: An example's answer, on a machine with one GPU, to its question before it takes GPUs: two ranks cannot share one.
WITH_ONE_GPU = {
    "fsdp2": "cpu", "hf_trainer": True, "hf_accelerate": True, "lightning_strategy": "cpu", "titan": True,
    "ray_train": False,
}  # fmt: skip


@pytest.mark.parametrize(("name", "answer"), WITH_ONE_GPU.items())
def test_two_ranks_compute_on_the_cpu_unless_each_has_a_gpu(name, answer, monkeypatch):
    asks = re.compile(r"(cuda|accelerator)\.(is_available|device_count)")
    nodes = ast.walk(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8")))
    values = [each.test if isinstance(each, ast.If) else getattr(each, "value", None) for each in nodes]
    asked = [ast.unparse(each) for each in values if isinstance(each, ast.Compare | ast.IfExp | ast.UnaryOp | ast.Call)]
    question, answers = min(filter(asks.search, asked), key=len), []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for count in (1, 2):
        for module in (torch.cuda, torch.accelerator):
            monkeypatch.setattr(module, "is_available", lambda: True)
            monkeypatch.setattr(module, "device_count", lambda count=count: count)
        answers.append(eval(question, {"torch": torch, "os": os}))
    assert answers[0] == answer != answers[1]


def test_make_train_does_not_want_a_gpu_for_each_of_its_workers():
    (flags,) = re.findall(r"demopt train (.*)", (EXAMPLES.parent / "Makefile").read_text(encoding="utf-8"))
    assert "--workers 2 --device cpu" in flags

"""Where there is no GPU, the Triton kernels of these tests run in its interpreter.

A kernel is interpreted if the variable is set when it is defined and when it runs. It is set then alone, so that other
tests, and the processes that they start, do not see it.
"""

import importlib
import importlib.util

import pytest
import torch

INTERPRETED = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()

if INTERPRETED:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in ("extract", "apply"):
            importlib.import_module(f"demopt.kernels.triton_{name}_programs")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")

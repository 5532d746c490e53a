"""Where there is no GPU, Triton kernels of these tests run in its interpreter; tests/conftest.py has defined them."""

import importlib.util

import pytest
import torch

INTERPRETED = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")

"""A store of each kind, and a clock that stands still."""

import types

import pytest
import stores

pytest.importorskip("obstore", reason="obstore is missing: pip install 'demopt[run]'")


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path, monkeypatch):
    return stores.make(request.param, tmp_path, monkeypatch)


@pytest.fixture(params=["memory", "folder", "s3", "azure"])
def any_store(request, tmp_path, monkeypatch):
    return stores.make(request.param, tmp_path, monkeypatch)


@pytest.fixture
def still(monkeypatch):
    """Time stands still, for workers in one thread: nobody comes if one waits."""
    clock = types.SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None)
    for module in ("exchange", "inbox", "weights"):
        monkeypatch.setattr(f"demopt.runs.{module}.time", clock)

"""A store of each kind, and a clock that stands still."""

import pytest

pytest.importorskip("obstore", reason="obstore is missing: pip install 'demopt[run]'")

import stores


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path, monkeypatch):
    return stores.make(request.param, tmp_path, monkeypatch)


@pytest.fixture(params=["memory", "folder", "s3", "azure"])
def any_store(request, tmp_path, monkeypatch):
    return stores.make(request.param, tmp_path, monkeypatch)


@pytest.fixture
def still():
    """Time stands still, for workers in one thread: while one waits, no other can come."""
    with stores.time_by(stores.STILL):
        yield

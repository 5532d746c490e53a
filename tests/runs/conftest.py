"""A store of each kind."""

import pytest
import stores

pytest.importorskip("obstore", reason="obstore is missing: pip install 'demopt[run]'")


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path, monkeypatch):
    return stores.make(request.param, tmp_path, monkeypatch)


@pytest.fixture(params=["memory", "folder", "s3", "azure"])
def any_store(request, tmp_path, monkeypatch):
    return stores.make(request.param, tmp_path, monkeypatch)

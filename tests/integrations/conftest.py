"""What tests of frameworks share."""

import os
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _environment():
    """Lightning leaves LOCAL_RANK behind, by which Accelerate in the next test would think it was launched."""
    with mock.patch.dict(os.environ):
        yield

"""What all tests share: one thread for torch, reproducible hypothesis runs, and the pool of rank processes."""

from collections.abc import Iterator

import hypothesis
import pytest
import torch

import ranks

torch.set_num_threads(1)
hypothesis.settings.register_profile(
    "demopt",
    deadline=None,  # a first torch operation takes longer than the default allows
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("demopt")


@pytest.fixture(scope="session", autouse=True)
def _rank_processes() -> Iterator[None]:
    yield
    ranks.POOL.close()

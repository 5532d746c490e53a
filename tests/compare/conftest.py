"""A small text, and one matrix with given gradients."""

import sysconfig
from pathlib import Path

import pytest
import torch

from demopt.simulate.method import Fleet


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "calendar.py"
    file.write_bytes((Path(sysconfig.get_path("stdlib")) / "calendar.py").read_bytes())
    return file


@pytest.fixture
def matrix():
    """A 12 x 8 matrix of ones as the only parameter of a model."""
    layer = torch.nn.Linear(8, 12, bias=False)
    torch.nn.init.ones_(layer.weight)
    return layer


@pytest.fixture
def gradients():
    """Those of three workers at two steps, [2][3]."""
    random = torch.Generator().manual_seed(0)
    return [[torch.randn(12, 8, generator=random) for _ in range(3)] for _ in range(2)]


@pytest.fixture
def walk(matrix):
    """walk(method, gradients of a step, lr): one step with given gradients; the method's cost."""

    def step(method, given, lr):
        method.begin(lr)
        for rank, gradient in enumerate(given):
            method.enter(rank)
            matrix.weight.grad = gradient.clone()
            method.take(rank)
        cost = method.finish()
        method.settle()
        return cost

    return step


@pytest.fixture
def fleet(matrix):
    return Fleet(matrix, world_size=3)

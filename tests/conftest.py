"""What all tests share: one thread for torch, reproducible hypothesis runs, and the pool of rank processes."""

import importlib
import importlib.util
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

import ranks
from demopt.kernels import codec
from demopt.kernels.compiled import compiled

# A kernel is interpreted if the variable is set when it is defined, and Triton's own functions are defined when it is
# first imported: so before any test imports it, and with the variable set for no longer, for other processes to see.
if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for kernel in ("extract", "apply"):
            importlib.import_module(f"demopt.kernels.triton_{kernel}_programs")

torch.set_num_threads(1)
hypothesis.settings.register_profile(
    "demopt",
    deadline=None,  # a first torch operation takes longer than the default allows
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("demopt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-kernels", action="store_true", help="as where there was no C compiler")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--without-kernels"):
        os.environ["DEMOPT_TESTS_WITHOUT_KERNELS"] = "1"  # for the rank processes
        ranks.forget_kernels()


@pytest.fixture(scope="session", autouse=True)
def _rank_processes() -> Iterator[None]:
    yield
    ranks.POOL.close()


@pytest.fixture(params=["compiled", "torch"])
def codec_used(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Bits by the compiled kernels, then by torch."""
    if request.param == "torch":
        monkeypatch.setattr(codec, "covers", lambda _: False)
    elif compiled() is None:
        pytest.skip("demopt was installed without a C compiler")
    return str(request.param)

"""Shared by all tests: one thread for torch, reproducible hypothesis runs, and the pool of rank processes."""

import signal
import sys

import hypothesis
import pytest
import torch

import ranks
from demopt import cli
from demopt.kernels import gate

# Started in the background or by nohup, this process ignores these signals, and its children would, too.
for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)

torch.set_num_threads(1)
hypothesis.settings.register_profile(
    "demopt",
    deadline=None,  # the first torch operation takes longer than the default allows
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
usual = hypothesis.settings.get_profile("demopt")
hypothesis.settings.register_profile("nightly", usual, max_examples=5000, derandomize=False)
hypothesis.settings.load_profile("demopt")  # make nightly: --hypothesis-profile=nightly


@pytest.fixture(scope="session", autouse=True)
def _rank_processes():
    yield
    ranks.POOL.close()


@pytest.fixture
def command(monkeypatch, capsys):
    """command(*words): the output of `demopt WORDS`; with another `code`, its one line about the mistake."""

    def run(*words, code=0):
        monkeypatch.setattr(sys, "argv", ["demopt", *map(str, words)])
        capsys.readouterr()  # drops the test's own output
        with pytest.raises(SystemExit) as end:
            cli.main()
        told = capsys.readouterr()
        assert (end.value.code or 0) == code, told.err
        assert not code or (told.err.startswith("demopt: ") and told.err.count("\n") == 1), told.err
        return told.err if code else told.out

    return run


@pytest.fixture(params=["compiled", "torch"])
def bits_by(request, monkeypatch):
    """The compiled kernels, then only torch operations, as if demopt was installed without a C compiler."""
    gate.library.cache_clear()
    if request.param == "torch":
        monkeypatch.setattr(gate, "LIBRARY", gate.LIBRARY.with_name("none"))
    elif gate.library() is None:
        pytest.skip("demopt was installed without a C compiler")
    yield str(request.param)
    monkeypatch.undo()
    gate.library.cache_clear()

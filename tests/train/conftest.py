"""Text to train on, and runs that several tests look at."""

import sysconfig
from pathlib import Path

import pytest
from train_runs import here, once, run

LOCAL = ("--optimizer", "local", "--top-k", "40")
CASES = {
    "demo": (),
    "adamw": ("--optimizer", "adamw", "--accumulate", "2"),
    "local": LOCAL,
    "delay": (*LOCAL, "--delay", "1", "--sync-every", "3", "--outer-momentum", "0.3", "--values", "2-bit"),
}


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder with a little of the standard library."""
    folder = tmp_path_factory.mktemp("text")
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("abc", "bisect", "calendar", "copy", "csv", "fnmatch", "heapq", "shlex", "textwrap"):
        (folder / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory, text):
    """runs(case): the folder of a whole run, to read only, and what it printed."""

    def whole(case):
        make = run if case == "demo" else here
        return once(tmp_path_factory, case, lambda out: make(out, text, *CASES[case]))

    return whole


@pytest.fixture(scope="session")
def finished(runs):
    """A whole run of DeMo, in processes of its own: its folder and what it printed."""
    return runs("demo")

"""Text to train on, and runs that several tests look at."""

import importlib.util
import sysconfig
from pathlib import Path

import pytest
from train_runs import here, once, run


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder with a little of the standard library."""
    folder = tmp_path_factory.mktemp("text")
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("abc", "bisect", "calendar", "copy", "csv", "fnmatch", "heapq", "shlex", "textwrap"):
        (folder / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory, text):
    """A whole run of DeMo: its folder and what it printed."""
    return once(tmp_path_factory, "demo", lambda out: run(out, text))


@pytest.fixture(scope="session")
def finished_adamw(tmp_path_factory, text):
    """The same run with AdamW, and a tracker if it is installed."""
    tracked = ["--tracker", "tensorboard"] if importlib.util.find_spec("tensorboard") else []
    flags = ["--optimizer", "adamw", "--accumulate", "2", *tracked]
    return once(tmp_path_factory, "adamw", lambda out: here(out, text, *flags))

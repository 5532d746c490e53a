"""Doctests that can be imported here (those for frameworks cannot everywhere), and the number of processes."""

import importlib.util
import os

import pytest

collect_ignore_glob = []
for name in ("accelerate", "lightning", "ray", "torchtitan", "transformers"):
    if importlib.util.find_spec(name) is None:
        collect_ignore_glob.append(f"src/demopt/integrations/{name}.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for processes that they have started."""
    return (os.cpu_count() or 1) + 1

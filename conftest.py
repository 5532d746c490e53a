"""Doctests import every module; those for Triton and for frameworks need what is not to be had everywhere."""

import importlib.util
import os

import pytest

collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["src/demopt/kernels/triton_chunks.py", "src/demopt/kernels/triton_*_programs.py"]
for name in ("accelerate", "lightning", "ray", "torchtitan", "transformers"):
    if importlib.util.find_spec(name) is None:
        collect_ignore_glob.append(f"src/demopt/integrations/{name}.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: a third of the time tests wait for other processes."""
    return (os.cpu_count() or 1) + 1

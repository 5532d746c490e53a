"""Runs a part of the suite with other versions of Python and torch, each in an environment of its own: make compat.

pip takes torch from the index in PIP_EXTRA_INDEX_URL, if it is set: builds for CPUs are a tenth of the size.
"""

import nox

PAIRS = [("3.10", "2.6.0"), ("3.11", "2.13.0"), ("3.11", "2.14.1"), ("3.12", "2.13.0"), ("3.13", "2.13.0")]
NEEDED = ("hatchling", "pytest", "pytest-timeout", "hypothesis", "numpy", "psutil", "rich", "typer", "transformers")
TESTS = ["tests/wire", "tests/golden", "tests/local", "tests/optim", "tests/kernels", "tests/package/test_imports.py"]
OF_TRAIN = ["tests/checkpoint", "tests/runs"]  # only with a torch that demopt train supports
nox.options.error_on_missing_interpreters = True  # a pair that was skipped is not a pair that passed


@nox.session
@nox.parametrize("python,torch", PAIRS)
def compat(session: nox.Session, torch: str) -> None:
    """Installs demopt as a wheel, with the newest of everything but torch, and runs the tests."""
    trains = tuple(map(int, torch.split(".")[:2])) >= (2, 10)
    session.install(f"torch=={torch}")
    session.install(".[train]" if trains else ".[run]", *NEEDED)
    session.run("pytest", *(session.posargs or [*TESTS, *(OF_TRAIN if trains else [])]))

"""The kernels compile for GPUs that are not there, fit them, and keep what exactness and speed need."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each kernel came to on Hopper; in a process of its own, because here they are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("triton_compile.py"), "90"],
        capture_output=True, text=True, timeout=240, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def test_triton_kernels_keep_chunks_in_registers(report: dict[str, dict[str, Any]]) -> None:
    some = 64  # bytes of a call, or of a few numbers; chunks that spill take hundreds
    assert {name: kernel for name, kernel in report.items() if kernel["stack"] > some} == {}


def test_triton_kernels_fit_twice_on_a_multiprocessor(report: dict[str, dict[str, Any]]) -> None:
    assert all(kernel["shared"] <= 100 * 1024 for kernel in report.values())


def test_triton_apply_fuses_no_multiply_add(report: dict[str, dict[str, Any]]) -> None:
    """decay p - lr sign is two roundings, as on a CPU."""
    assert {name: kernel["fused"] for name, kernel in report.items() if name.startswith("apply")} == dict.fromkeys(
        (name for name in report if name.startswith("apply")), 0
    )


def test_triton_kernels_do_not_specialise_on_counts(report: dict[str, dict[str, Any]]) -> None:
    assert not [name for name, kernel in report.items() if kernel["specialised"]]

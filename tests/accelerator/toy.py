"""Device "toy" (toy.cpp): builds it, registers it in this process, and counts what runs on it.

    toy.register()
    x = torch.zeros(3, device="toy")
    with toy.counting() as counts: ...    # of this thread; then counts["launches"], counts["syncs"]

Only processes that tests start for it register it: a process cannot get rid of a device again.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("toy.cpp")
FOLDER = Path(__file__).parents[2] / ".pytest_cache" / "toy"
COMPILER = shutil.which("g++") or shutil.which("clang++")
_MODULE: list[Any] = []


def build() -> Path:
    """The compiled device, which one process builds while others wait: half a minute, once for a version of torch."""
    key = hashlib.blake2b(SOURCE.read_bytes() + torch.__version__.encode(), digest_size=8).hexdigest()
    built = FOLDER / f"toy-{key}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            folders = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
            libraries = cpp_extension.library_paths()[0]
            command = [
                COMPILER, "-O1", "-std=c++20", "-shared", "-fPIC", "-w", "-DTORCH_EXTENSION_NAME=toy_device",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                *(f"-isystem{folder}" for folder in folders), str(SOURCE), "-o", str(built.with_suffix(".part")),
                f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
            ]  # fmt: skip
            subprocess.run(command, check=True)
            built.with_suffix(".part").rename(built)
    return built


def register() -> Any:
    """The compiled module, whose device "toy" this process has from now on."""
    if _MODULE:
        return _MODULE[0]
    spec = importlib.util.spec_from_file_location("toy_device", build())
    assert spec is not None
    assert spec.loader is not None
    _MODULE.append(importlib.util.module_from_spec(spec))
    spec.loader.exec_module(_MODULE[0])
    torch.utils.rename_privateuse1_backend("toy")
    module = types.ModuleType("torch.toy")

    def ignore(*anything: Any) -> None:
        del anything

    made: dict[str, Any] = {
        "is_available": lambda: True, "is_initialized": lambda: True, "_is_in_bad_fork": lambda: False,
        "_lazy_init": ignore, "manual_seed_all": ignore, "manual_seed": ignore,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": ignore,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "current_stream": lambda *_: torch.accelerator.current_stream(),
        "synchronize": lambda *_: torch.accelerator.current_stream().synchronize(),
        "stream": lambda stream: stream, "device": contextlib.nullcontext,
    }  # fmt: skip
    for name, value in made.items():
        setattr(module, name, value)
    torch._register_device_module("toy", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return _MODULE[0]


@contextlib.contextmanager
def counting() -> Iterator[dict[str, int]]:
    """What this thread runs inside: launches, copies, waits, and launches by operator; filled at the end."""
    found: dict[str, int] = {}
    _MODULE[0].count(True)
    try:
        yield found
    finally:
        found.update(_MODULE[0].count(False))


def memory() -> tuple[int, int]:
    """The bytes that tensors hold now, and the most that they held since the last call."""
    found: tuple[int, int] = _MODULE[0].memory()
    return found


def races() -> set[str]:
    """The accesses since the last call that no event orders: on a GPU, races."""
    found: set[str] = _MODULE[0].races()
    return found

"""Device "toy": a pretend accelerator for tests on machines without one.

    x = torch.zeros(3, device="toy")
    with toy.counting() as counts: ...    # what this thread runs: counts["launches"], counts["syncs"]

Operators are the CPU's, on the same data; an operator refuses tensors on two devices, as on CUDA.
Copies to the host with non_blocking=True arrive when the host next waits; until then the target holds garbage.
toy.cpp has the streams, and the memory that the host may not touch. Only processes that tests start for it register
the device: a process cannot unregister one.
"""

import contextlib
import functools
import hashlib
import importlib.util
import shutil
import subprocess
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils import cpp_extension
from torch.utils._pytree import tree_leaves, tree_map

import ranks

SOURCE = Path(__file__).with_name("toy.cpp")
FOLDER = Path(__file__).parents[2] / ".pytest_cache" / "toy"
POOL = ranks.Pool()
COMPILER = shutil.which("g++") or shutil.which("clang++")
#: Operators whose result has a size that depends on data: the host waits for it.
SIZED = {"nonzero", "masked_select", "equal", "_unique2", "repeat_interleave", "bincount"}
_LOADED: list[Any] = []  # the compiled module, and libraries of operators
_OF_THREAD = threading.local()
_ARRIVING: list[tuple[int, Tensor, Tensor]] = []  # per copy: its stream, its target on the host, and the data
_LOCK = threading.Lock()
LACKING: set[torch.dtype] = set()  #: dtypes that the device lacks, as MPS lacks float64


def build() -> Path:
    """The compiled device, which one process builds while others wait: half a minute, once per version of torch."""
    key = hashlib.blake2b(SOURCE.read_bytes() + torch.__version__.encode(), digest_size=8).hexdigest()
    built = FOLDER / f"toy-{key}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / "lock"):
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


def register() -> None:
    """Gives this process the device "toy"."""
    if _LOADED:
        return
    spec = importlib.util.spec_from_file_location("toy_device", build())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.on_wait(lambda stream: _wait(stream, "synchronize"))
    torch.utils.rename_privateuse1_backend("toy")
    made = types.ModuleType("torch.toy")
    vars(made).update(
        is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 1, current_device=lambda: 0,
        _is_in_bad_fork=lambda: False, manual_seed_all=lambda _: None, device=contextlib.nullcontext,
        current_stream=torch.accelerator.current_stream, stream=lambda stream: stream,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )  # fmt: skip
    torch._register_device_module("toy", made)
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _LOADED.extend((module, every, aten))
    every.fallback(_run, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    aten.impl("_copy_from_and_resize", lambda self, to: _copy_from(self, to.resize_(self.shape)), "PrivateUse1")
    aten.impl("_local_scalar_dense", _local_scalar, "PrivateUse1")
    for full in torch._C._dispatch_get_all_op_names():
        # On an unknown device they loop over the tensors; on CUDA they are few kernels.
        if full.startswith(("aten::_foreach_", "aten::_fused_adam")):
            name, _, overload = full.removeprefix("aten::").partition(".")
            operator = getattr(getattr(torch.ops.aten, name), overload or "default")
            aten.impl(operator, functools.partial(_run, operator), "PrivateUse1")
    # autograd starts its threads for all devices at the first backward; two threads whose first came at once have hung
    torch.ones(1, requires_grad=True, device="cpu").sum().backward()


def call(rank: int, world_size: int, function: Any, *args: Any) -> Any:
    """The value of a test's function, in a process that has the device."""
    register()
    return function(rank, world_size, *args)


def run(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """The values of `function(rank, world_size, *args)` in processes with the device, in a gloo group."""
    if COMPILER is None:
        pytest.skip("no C++ compiler: the toy accelerator cannot be built")
    build()  # before the pool's clock starts
    return ranks.values_of(POOL.outcomes(call, world_size, function, *args))


each = functools.partial(ranks.each, run=run)  # each of these ranks, with the device, runs the test


# Operators


@functools.cache
def _facts(operator: Any) -> tuple[str, list[str], set[str], set[str]]:
    """The name of an operator, its arguments' names, those that are tensors, and those that it writes to."""
    arguments = operator._schema.arguments
    tensors = {each.name for each in arguments if str(each.type) in ("Tensor", "Optional[Tensor]")}
    written = {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write}
    return operator._schema.name.removeprefix("aten::"), [each.name for each in arguments], tensors, written


def _run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator of the device: the CPU's, on the same memory."""
    device = _LOADED[0]
    name, names, tensors, written = _facts(operator)
    values = dict(zip(names, args, strict=False)) | kwargs
    given: list[tuple[Tensor, Tensor]] = []  # device tensors, each with its alias on the CPU
    made: list[Tensor] = []
    strangers: list[Tensor] = []

    def enter(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        if value.device.type == "toy":
            _require(value.dtype)
            given.append((value, device.host(value)))
            return given[-1][1]
        # CUDA, too, takes single numbers and indices from the host
        if value.dim() and not name.startswith(("index", "_index_put")):
            strangers.append(value)
        return value

    def leave(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for original, alias in given:
            if alias is value:
                return original
        _require(value.dtype)
        made.append(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="toy"))
        device.host(made[-1]).copy_(value)
        return made[-1]

    entered = tree_map(enter, values)
    for key in tensors:  # a number in place of a tensor becomes one, and must not change the result's type
        if isinstance(entered.get(key), bool | int | float):
            beside = next(value for value in reversed(entered.values()) if isinstance(value, Tensor))
            entered[key] = torch.tensor(entered[key], dtype=torch.result_type(beside, entered[key]))
    if given and strangers:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got toy:0 and cpu")
    result = operator(**entered)
    targets = [each for target in written for each in tree_leaves(values.get(target)) if isinstance(each, Tensor)]
    for original, alias in given:
        if original.shape != alias.shape:  # an out= that the operator has resized
            device.host(original.resize_(alias.shape)).copy_(alias)
    result = tree_map(leave, result)
    device.launch(name, [original for original, _ in given], targets + made)
    lists = [value for value in values.values() if isinstance(value, list) and value and isinstance(value[0], Tensor)]
    kernels = _kernels(name, lists)
    _count("launches", kernels)
    _count(name, kernels)
    if name in SIZED:
        _wait(device.stream(), name)
    return result


def _require(dtype: torch.dtype) -> None:
    if dtype in LACKING:
        raise TypeError(f"Cannot convert a toy Tensor to {dtype}: the device has none")


def _kernels(name: str, lists: list[list[Tensor]]) -> int:
    """About how many kernels CUDA launches for an operator; one kernel's arguments hold 48 tensors of a list."""
    if name.startswith(("sort", "nonzero", "median")):
        return 3
    tensors = max(map(len, lists), default=1)
    return -(-tensors // 48) if name.startswith(("_foreach", "_fused", "cat")) else 1


def _copy_from(self: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    if not to.numel():
        return to
    _require(to.dtype)
    device = _LOADED[0]
    up, down = self.device.type != "toy", to.device.type != "toy"
    data = self if up else device.host(self)
    if down and non_blocking:
        arriving = device.stream(), to, data.clone()
        to.as_strided((to.numel(),), (1,)).view(torch.uint8).fill_(0xA5)
        with _LOCK:
            _ARRIVING.append(arriving)
    else:
        (to if down else device.host(to)).copy_(data)
    device.launch("copy_", [self], [to])
    _count("to device" if up else "to host" if down else "launches")
    if not up and not down:
        _count("copy_")
    elif not non_blocking:
        _wait(device.stream(), "copy to device" if up else "copy to host")
    return to


def _local_scalar(self: Tensor) -> Any:
    _LOADED[0].launch("item", [self], [])
    _count("to host")
    _wait(_LOADED[0].stream(), "item")
    return _LOADED[0].host(self).item()


def _wait(stream: int, why: str) -> None:
    """The host waits for a stream, whose copies then arrive."""
    _LOADED[0].ended(stream)
    _count("syncs")
    _count(f"sync {why}")
    with _LOCK:
        arrived = [each for each in _ARRIVING if each[0] == stream]
        _ARRIVING[:] = [each for each in _ARRIVING if each[0] != stream]
    for _, to, data in arrived:
        to.copy_(data)


# What tests ask


def _count(what: str, times: int = 1) -> None:
    counts = getattr(_OF_THREAD, "counts", None)
    if counts is not None:
        counts[what] = counts.get(what, 0) + times


@contextlib.contextmanager
def counting(on: bool = True) -> Iterator[dict[str, int]]:
    """Counts this thread's launches, copies, waits, and launches by operator inside; if not `on`, nothing."""
    before = getattr(_OF_THREAD, "counts", None)
    found = dict[str, int]()
    _OF_THREAD.counts = found if on else None
    try:
        yield found
    finally:
        _OF_THREAD.counts = before


def memory() -> tuple[int, int]:
    """The bytes that tensors hold now, and the most that they held since the last call."""
    return _LOADED[0].memory()


def races() -> set[str]:
    """The accesses since the last call that no event orders: on a GPU, races."""
    return _LOADED[0].races()

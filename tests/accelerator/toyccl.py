"""Backend "toyccl": behaves as nccl does, for tensors of device "toy", over gloo.

A collective runs on the group's own stream, after the work already on the caller's stream; `wait` makes the caller's
stream wait for it, and the host only if a timeout is given. CPU tensors are refused.

Torch would use a group written in Python for both parts of "cpu:gloo,toy:toyccl", so it cannot have two backends.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TOY = "toy"  # by name: the device exists only once it is registered
CALLS: list[str] = []  # the collectives of this process


class Work(dist.Work):
    """A finished collective, whose result a stream may use only after waiting for an event."""

    def __init__(self, done: torch.Event) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream(TOY).wait_event(self._done)
        if timeout is not None:
            self._done.synchronize()
        return True


class ToyCCL(dist.ProcessGroup):
    """A process group for device tensors, which torch calls as it calls nccl's."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("toyccl", store), rank, size, timeout)
        self._stream = torch.Stream(TOY)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(TOY)]

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "toyccl"

    def _run(self, name: str, given: list[Tensor], out: list[Tensor], call: Callable[..., Any]) -> Any:
        if any(tensor.is_cpu for tensor in (*given, *out)):
            raise RuntimeError("No backend type associated with device type cpu")
        CALLS.append(name)
        caller, written, done = torch.accelerator.current_stream(TOY), torch.Event(TOY), torch.Event(TOY)
        written.record(caller)
        self._stream.wait_event(written)
        torch.accelerator.set_stream(self._stream)
        sent, received = [tensor.cpu() for tensor in given], [torch.empty_like(tensor, device="cpu") for tensor in out]
        call(sent, received).wait()
        for tensor, came in zip(out, received, strict=True):
            tensor.copy_(came)
        done.record(self._stream)
        torch.accelerator.set_stream(caller)
        return Work(done)

    def _allgather_base(self, out: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self._run("all_gather", [given], [out], lambda i, o: self._gloo._allgather_base(o[0], i[0]))

    all_gather_single = _allgather_base

    def alltoall_base(self, out: Tensor, given: Tensor, outs: Any, ins: Any, opts: Any = None) -> Any:
        return self._run("all_to_all", [given], [out], lambda i, o: self._gloo.alltoall_base(o[0], i[0], outs, ins))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._run("all_reduce", tensors, tensors, lambda i, o: self._gloo.allreduce([o[0].copy_(i[0])], opts))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._run("broadcast", tensors, tensors, lambda i, o: self._gloo.broadcast([o[0].copy_(i[0])], opts))

    def gather(self, out: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> Any:
        rows = [row for each in out for row in each]
        return self._run("gather", given, rows, lambda i, o: self._gloo.gather([o] if o else [], i, opts))


def register() -> None:
    """Adds the backend to torch, once."""
    if "toyccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("toyccl", ToyCCL, devices=["toy"])

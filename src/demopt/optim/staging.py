"""Copies between accelerators and the host, in pieces, through two buffers for each device.

One piece travels while the host reads or fills the other. The device runs nothing but copies, on a stream of their own,
and no memory of the device is needed.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from demopt.kernels.gate import extent

PIECE_BYTES = 1 << 26
_ALIGNMENT = 64  # bytes

Pair = tuple[Tensor, Tensor]  # of equal shapes: a source and a target
Load = list[tuple[Tensor, Tensor, Tensor]]  # parts of a buffer, each with those of a source and a target


class Staging:
    """Copies tensors; makes the buffers for a device at its first use. A copy of this object has none of them."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, _Lane] = {}

    def copy(self, pairs: Iterable[Pair]) -> None:
        """Copies each first tensor to the second, converting dtypes on the host."""
        found: defaultdict[tuple[str, torch.device], list[Pair]] = defaultdict(list)
        for source, target in pairs:
            if source.device == target.device and target.is_cpu:
                target.copy_(source)
            elif source.device == target.device:
                found["along", target.device].append((source, target))
            elif source.stride() != target.stride() or extent(source) != source.nbytes:
                target.copy_(source)  # not in one piece of memory: torch copies it by a detour
            elif source.is_cpu:
                found["up", target.device].append((source, target))
            else:
                found["down", source.device].append((source, target))
        for (way, device), mine in found.items():
            if way == "along":
                sources, targets = zip(*mine, strict=True)
                torch._foreach_copy_(targets, sources)  # in few operations: an accelerator pays for each
                continue
            try:
                self._lanes[device] = lane = self._lanes.get(device) or _Lane(device)
            except (RuntimeError, NotImplementedError, TypeError):  # without streams, as MPS: torch copies one by one
                for source, target in mine:
                    target.copy_(source)
            else:
                lane.up(mine) if way == "up" else lane.down(mine)

    def __reduce__(self) -> tuple[type["Staging"], tuple[()]]:
        return Staging, ()


class _Lane:
    """The buffers and the stream for one device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device)
        self._events = [torch.Event(device), torch.Event(device)]

    def down(self, pairs: list[Pair]) -> None:
        """Device to host; returns when all is there."""
        before: tuple[int, Load] | None = None
        with self._on_stream():
            for slot, load in self._loads(pairs, source_travels=True):
                for staged, source, _ in load:
                    staged.copy_(source, non_blocking=True)
                self._events[slot].record(self._stream)
                if before:
                    self._unload(*before)
                before = slot, load
            if before:
                self._unload(*before)

    def up(self, pairs: list[Pair]) -> None:
        """Host to device; what this thread launches from now on sees it."""
        with self._on_stream():
            for slot, load in self._loads(pairs, source_travels=False):
                self._events[slot].synchronize()  # for the load before the last, which was in this buffer
                for staged, source, target in load:
                    staged.copy_(source)
                    target.copy_(staged, non_blocking=True)
                self._events[slot].record(self._stream)
        for event in self._events:
            torch.accelerator.current_stream(self._device).wait_event(event)

    def _unload(self, slot: int, load: Load) -> None:
        self._events[slot].synchronize()
        for staged, _, target in load:
            target.copy_(staged)

    def _loads(self, pairs: list[Pair], source_travels: bool) -> Iterator[tuple[int, Load]]:
        """Yields each load with the number of its buffer, in which elements have the same dtype as on the device."""
        load: Load = []
        slot = used = 0
        for pair in pairs:
            count, dtype = pair[0].numel(), pair[0 if source_travels else 1].dtype
            source, target = (each.as_strided((count,), (1,)) for each in pair)  # in the order of memory
            most = PIECE_BYTES // dtype.itemsize
            for start in range(0, count, most):
                stop = min(start + most, count)
                size = (stop - start) * dtype.itemsize
                if used + size > PIECE_BYTES:
                    yield slot, load
                    slot, used, load = 1 - slot, 0, []
                staged = self._buffers[slot, used : used + size].view(dtype)
                load.append((staged, source[start:stop], target[start:stop]))
                used += -(-size // _ALIGNMENT) * _ALIGNMENT
        if load:
            yield slot, load

    @cached_property
    def _buffers(self) -> Tensor:  # uint8 [2, bytes]
        try:
            return torch.empty(2, PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        except (RuntimeError, NotImplementedError):  # there is no page-locked memory for the device
            return torch.empty(2, PIECE_BYTES, dtype=torch.uint8, device="cpu")

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """The context of the lane's stream, which is behind all that this thread has launched."""
        current, here = torch.accelerator.current_stream(), torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(here)
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(here)
            torch.accelerator.set_stream(current)  # and the current device: the calls above made theirs current

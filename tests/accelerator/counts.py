"""Counts what a step launches and waits for on the toy, with the parameters of GPT-2 124M, or of a narrow one.

    python tests/accelerator/counts.py [--width 768] [--operators] [ROW...]

Two ranks in threads; counts rank 0's third step, and LocalDeMo's second round. The launches of 124M parameters (width
768) and of 3.5M (width 128) are the same: there are as many parameters, in the same chunk groups, and where launches
depend on numbers of elements, in `_narrowed`, those are 36 times smaller too.
"""

import argparse
import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import toy

import demopt
from demopt.codec import decompress
from demopt.exchange import Exchange, Threads
from demopt.wire import checksum, message

WIDTH = 768  # of 124M parameters


def shapes(width: int) -> list[tuple[int, ...]]:
    """GPT-2 with 124M parameters, for width 768; a narrower one has fewer tokens and places too."""
    norms, inner = 4 * [(width,)], 4 * width
    attention = [(3 * width, width), (3 * width,), (width, width), (width,)]
    mlp = [(inner, width), (inner,), (width, inner), (width,)]
    tokens, places = 50257 * width // WIDTH, 1024 if width == WIDTH else width  # whole chunks
    return [(tokens, width), (places, width), *12 * [*norms, *attention, *mlp], (width,), (width,)]


@contextlib.contextmanager
def _narrowed(width: int) -> Iterator[None]:
    """Makes smaller what bounds an operation: blocks of lists of tensors, blocks of checksums, batches of matrices."""
    part = (width / WIDTH) ** 2
    block, batch = int(checksum.BLOCK * part), int(decompress._BATCH_ELEMENTS * part)
    device, combine = toy.register(), Threads._combine

    def uncounted(threads: Threads) -> None:
        counting = device.counts(False)
        combine(threads)
        device.counts(counting)

    with (
        mock.patch.object(Threads, "_combine", uncounted),  # the thread that comes last does it
        mock.patch.object(checksum, "BLOCK", block),
        mock.patch.object(message, "BLOCK", block),
        mock.patch.object(decompress, "_BATCH_ELEMENTS", batch),
    ):
        checksum._weights.cache_clear()
        device.block(math.ceil(65536 * part))
        yield
    checksum._weights.cache_clear()
    device.block(65536)


def _muon(params: list[torch.nn.Parameter]) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    return [p for p in params[2:] if p.dim() == 2], [*params[:2], *(p for p in params if p.dim() == 1)]


def _demo_muon(params: list[torch.nn.Parameter], exchange: Exchange) -> torch.optim.Optimizer:
    matrices, rest = _muon(params)
    groups = [{"params": matrices, "update": "muon"}, {"params": rest, "update": "adamw"}]
    return demopt.DeMo(groups, process_group=exchange)


def _local(params: list[torch.nn.Parameter], exchange: Exchange) -> torch.optim.Optimizer:
    inner = torch.optim.AdamW(params, foreach=True)
    return demopt.LocalDeMo(inner, sync_every=2, route="gather", process_group=exchange)


def _local_owner(params: list[torch.nn.Parameter], exchange: Exchange) -> torch.optim.Optimizer:
    return demopt.LocalDeMo(torch.optim.SGD(params, lr=0.1), sync_every=1, route="owner", process_group=exchange)


def _torch_muon(params: list[torch.nn.Parameter], exchange: Exchange) -> torch.optim.Optimizer:
    return torch.optim.Muon(_muon(params)[0])


def _adamw(params: list[torch.nn.Parameter], exchange: Exchange) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, foreach=True)


def _demo(params: list[torch.nn.Parameter], exchange: Exchange) -> torch.optim.Optimizer:
    return demopt.DeMo(params, process_group=exchange)


Make = Callable[[list[torch.nn.Parameter], Any], torch.optim.Optimizer]
METHODS: dict[str, tuple[Make, int, torch.dtype]] = {  # the step to count, and the dtype
    "DeMo signum": (_demo, 2, torch.float32),
    "DeMo bfloat16": (_demo, 2, torch.bfloat16),
    "DeMo muon": (_demo_muon, 2, torch.float32),
    "LocalDeMo step": (_local, 2, torch.float32),
    "LocalDeMo round": (_local, 3, torch.float32),
    "LocalDeMo round, owner": (_local_owner, 2, torch.float32),
    "AdamW": (_adamw, 2, torch.float32),
    "torch Muon, matrices alone": (_torch_muon, 2, torch.float32),
}


def count(name: str, width: int) -> dict[str, int]:
    """The counts of one row."""
    make, counted, dtype = METHODS[name]
    toy.register()
    drawing = threading.Lock()

    def work(exchange: Exchange) -> dict[str, int]:
        with drawing:
            torch.manual_seed(0)
            params = [torch.nn.Parameter(0.02 * torch.randn(shape).to("toy", dtype)) for shape in shapes(width)]
            optimizer = make(params, exchange)
        found: dict[str, int] = {}
        for step in range(counted + 1):
            for number, parameter in enumerate(params):
                parameter.grad = torch.full_like(parameter, 0.1 * (number + step + 1 + exchange.rank))
                parameter.grad.view(-1)[:: 2 + exchange.rank] *= -1
            if exchange.rank == 0 and step == counted:
                with toy.counting() as found:
                    optimizer.step()
            else:
                optimizer.step()
        return found

    with _narrowed(width):
        threads = Threads(2, timeout=3000.0)
        counts = threads.run(work)[0]
        threads.close()
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--operators", action="store_true", help="list launches by operator")
    parser.add_argument("rows", nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for row in args.rows or METHODS:
        counts = count(row, args.width)
        totals = [f"{counts.pop(total, 0)} {total}" for total in ("launches", "syncs", "to device", "to host")]
        print(row, *totals, flush=True)
        if args.operators:
            print("   ", ", ".join(f"{n} {name}" for name, n in sorted(counts.items(), key=lambda each: -each[1])))

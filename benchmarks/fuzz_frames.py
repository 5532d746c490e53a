"""Feeds mutated frames to everything that reads frames: each must be refused with a MessageError, or make sense.

    python benchmarks/fuzz_frames.py --frames 1000000 --results benchmarks/results/fuzz-frames.json

A frame is what a rank receives from another: a message (gather), a part sent to an owner or a relay, an answer of an
owner or a relay; with momenta in it (DeMo) or movements (LocalDeMo). The frame of one of two ranks is mutated: bits
flipped, regions swapped or overwritten, header fields changed, bodies replaced by random bytes, frames cut short or
extended; three in five get a correct checksum again. What is not refused must decode to a finite direction of the right
size. Exits with 1 on anything else, and prints the frame's number, with which `--first` repeats it.
"""

import argparse
import collections
import math
import multiprocessing
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fuzz_results
import torch
from torch import Tensor
from torch.nn import Parameter

from demopt import DeMo, MessageError
from demopt.core.update import Nesterov
from demopt.exchange import SingleRank
from demopt.optim.chunk_group import ChunkGroup, build
from demopt.optim.compress import Workspace, compress
from demopt.optim.routes.choice import ROUTES
from demopt.optim.routes.route import Route
from demopt.wire import frame
from demopt.wire.checksum import checksum
from demopt.wire.frame import Header

WORLD, VICTIM, CULPRIT = 2, 0, 1
SHAPES = [(9, 8), (5,)]
FLOATS, STEPPED = ("float32", "bfloat16", "float64"), ("int8", "2-bit", "sign")
MOVEMENT = {"momentum": 0.25, "gradient_scale": "sum"}  # what LocalDeMo makes of DeMo
HEADER_FIELDS = [(0, 4), (4, 2), (6, 2), (8, 8), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8), (56, 8)]


class WrongError(Exception):
    """Raised for an outcome that is neither a refusal nor a valid message."""


class Scripted(SingleRank):
    """The exchange of one of two ranks; what it receives is given beforehand."""

    def __init__(self, parts: Tensor) -> None:
        self.rank, self.world_size = VICTIM, WORLD
        self.parts = parts

    def all_gather(self, message_B: Tensor) -> Tensor:
        """Returns all headers, or an owner's answer as the only row."""
        return self.parts if message_B.numel() == frame.HEADER_BYTES else message_B.unsqueeze(0)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        del parts_WB
        return self.parts


@dataclass(frozen=True)
class Target:
    """Well-formed rows [W, B], and the function that reads them: it returns "valid" or "skipped"."""

    name: str
    rows: Tensor
    read: Callable[[Tensor], str]


def targets(codecs: tuple[str, ...] = (*FLOATS, *STEPPED)) -> list[Target]:
    """Returns the targets: every route, each of these codecs, and every place where frames are read."""
    found: list[Target] = []
    for values in codecs:
        for transform in ("dct", "identity") if values in ("float32", "sign") else ("dct",):
            settings = {"values": values, "transform": transform, "clip_to_median": values == "int8"}
            for name in ("gather", "owner", "relay"):
                found += _route_targets(name, settings)
    for values in [codec for codec in codecs if codec in STEPPED]:
        for update in ("sgd", Nesterov(beta=0.9)):
            for name in ("gather", "relay"):
                found += _route_targets(name, {"values": values, "update": update, **MOVEMENT}, " movement")
    return found


def mutated(rows: Tensor, generator: random.Random) -> Tensor:
    """Returns the rows with the culprit's mutated; a change of length applies to all rows."""
    data = bytearray(bytes(rows[CULPRIT].tolist()))
    kind = generator.random()
    if kind < 0.02:
        return _of_another_length(rows, generator)
    if kind < 0.45:
        for _ in range(generator.choice((1, 1, 1, 2, 8))):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    elif kind < 0.6:
        size = generator.randrange(1, 1 + len(data) // 2)
        first, second = sorted(generator.sample(range(len(data) - size + 1), 2)) if size < len(data) else (0, 0)
        data[first : first + size], data[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )
        data = data[: rows.shape[1]].ljust(rows.shape[1], b"\0")
    elif kind < 0.75 and len(data) > frame.HEADER_BYTES:
        data[frame.HEADER_BYTES :] = generator.randbytes(len(data) - frame.HEADER_BYTES)
    elif kind < 0.85:
        at, size = generator.choice(HEADER_FIELDS)
        small = generator.randrange(17).to_bytes(8, "little")[:size]
        data[at : at + size] = generator.choice((generator.randbytes(size), small, b"\xff" * size))
    elif kind < 0.97:
        start = generator.randrange(frame.HEADER_BYTES, len(data) + 1)
        size = generator.randrange(1, 9)
        data[start : start + size] = generator.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * len(
            data[start : start + size]
        )
    else:
        data = bytearray(generator.randbytes(len(data)))
    after = rows.clone()
    after[CULPRIT] = torch.frombuffer(data, dtype=torch.uint8)
    return sealed(after) if generator.random() < 0.6 else after


def sealed(rows: Tensor) -> Tensor:
    """Gives the culprit's row a correct checksum, as a hostile sender would."""
    size = len(rows[CULPRIT]) if (len(rows[CULPRIT]) - frame.HEADER_BYTES) % 8 == 0 else frame.HEADER_BYTES
    part = rows[CULPRIT, :size]
    part[56:64] = 0
    part[56:64] = checksum(part.clone()).reshape(1).view(torch.uint8)
    return rows


def verdict(target: Target, rows: Tensor) -> str:
    """Returns "refused", "valid" or "skipped"; WrongError for everything else."""
    try:
        return target.read(rows)
    except MessageError as error:
        accusation = target.name.endswith("answer") and "refused by" in str(error)  # the culprit may accuse any rank
        if rows.shape == target.rows.shape and error.rank != CULPRIT and not accusation:
            raise WrongError(f"rank {error.rank} is blamed: {error}") from error
        return "refused"
    except WrongError:
        raise
    except Exception as error:
        raise WrongError(f"{type(error).__name__}: {error}") from error


def _of_another_length(rows: Tensor, generator: random.Random) -> Tensor:
    size = generator.choice((0, 1, 63, 64, 65, rows.shape[1] - 1, rows.shape[1] + 1, rows.shape[1] + 8))
    return torch.nn.functional.pad(rows, (0, size - rows.shape[1]))


def _route_targets(name: str, settings: dict[str, object], kind: str = "") -> Iterator[Target]:
    ranks = [_rank(name, rank, settings) for rank in range(WORLD)]
    messages = [route.message(header, data) for route, header, data in ranks]
    route, header, _ = ranks[VICTIM]
    label = f"{name} {settings['values']}{kind}"
    if name == "gather":
        yield Target(label, torch.stack(messages), lambda rows: _read(route, rows, header))
    else:
        parts = [torch.stack([message.view(WORLD, -1)[rank] for message in messages]) for rank in range(WORLD)]
        answers = [r.exchange(m, Scripted(p), h)[0] for (r, h, _), m, p in zip(ranks, messages, parts, strict=True)]
        mine, peer = messages[VICTIM], (*ranks[CULPRIT][:2], answers[CULPRIT])
        yield Target(f"{label} part", parts[VICTIM], lambda rows: _answer(route, rows, header, mine, peer))
        yield Target(f"{label} answer", torch.cat(answers), lambda rows: _read(route, rows, header))


def _rank(name: str, rank: int, settings: dict[str, object]) -> tuple[Route, Header, list[Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    group = DeMo(parameters, lr=0.1, chunk=8, top_k=12, relay_top_k=20, route="gather", **settings).param_groups[0]  # type: ignore[arg-type]
    chunk_groups: list[ChunkGroup] = build([group])
    route = ROUTES[name](chunk_groups, rank, WORLD, Workspace())
    data = [compress(chunk_group, 1.0, route.workspace).data for chunk_group in chunk_groups]
    return route, Header(step=3, rank=rank, world_size=WORLD, layout=route.layout.digest, settings=7), data


def _read(route: Route, rows: Tensor, header: Header) -> str:
    headers, decoded = route.check(rows, header)
    if any(head.flags & frame.NONFINITE for head in headers):
        return "skipped"
    route.apply(decoded)
    parameters = [parameter.detach() for chunk_group in route.chunk_groups for parameter, _ in chunk_group.members]
    if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
        raise WrongError("a parameter is not finite")
    return "valid"


def _answer(route: Route, rows: Tensor, header: Header, message: Tensor, peer: tuple[Route, Header, Tensor]) -> str:
    """Has an owner answer the parts, and the other rank read its answer."""
    answer, kept = route.exchange(message, Scripted(rows), header)
    other, head, its_answer = peer
    says = _read(other, torch.cat((answer, its_answer)), head)
    if says == "valid":
        route.finish(kept)
        for _, entries in route.state():
            if not bool(torch.isfinite(entries["relay"]).all()):
                raise WrongError("what relay keeps back is not finite")
            entries["relay"].zero_()
    return says


def fuzz(numbers: range) -> tuple[collections.Counter[tuple[str, str]], list[str]]:
    """Returns the verdicts by target, and the failures, of the frames of these numbers."""
    torch.set_num_threads(1)
    everything, counts, wrong = targets(), collections.Counter[tuple[str, str]](), []
    for number in numbers:
        generator = random.Random(number)
        target = everything[number % len(everything)]
        try:
            says = verdict(target, mutated(target.rows, generator))
        except WrongError as error:
            says = "wrong"
            wrong.append(f"frame {number}, {target.name}: {error}\n{''.join(traceback.format_exception(error)[-4:])}")
        counts[target.name, says] += 1
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="how many are mutated")
    parser.add_argument("--first", type=int, default=0, help="number of the first frame")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count(), help="that share the work")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no more frames are begun")
    parser.add_argument("--results", type=Path, help="a JSON file for the counts")
    given = parser.parse_args()
    started, size = time.monotonic(), 5000
    last = given.first + given.frames
    runs = [range(first, min(first + size, last)) for first in range(given.first, last, size)]
    counts, wrong = collections.Counter[tuple[str, str]](), list[str]()
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for counted, found in pool.imap_unordered(fuzz, runs):
            counts += counted
            wrong += found
            if given.results is not None:  # after every run, so that nothing is lost if this is stopped
                fuzz_results.write(given.results, "frames", counts, wrong, time.monotonic() - started)
            if time.monotonic() - started > 60 * given.minutes:
                break
    return fuzz_results.tell("frames", counts, wrong, time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())

"""A run's checkpoints: the weights after some rounds, as objects in its folder, and the moments beside them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from demopt.errors import DemoptError, ExchangeError, MessageError
from demopt.exchange.dtensor import to_local
from demopt.replicator.replicator import Replicator
from demopt.replicator.rounds import Moments
from demopt.runs import log
from demopt.runs.failures import DeniedError
from demopt.runs.key import ForeignError
from demopt.runs.log import Manifest
from demopt.runs.open_round import ForkedError, bytes_of, tensor_of

if TYPE_CHECKING:
    from demopt.runs.exchange import FolderExchange

MOST_HEAD = 1 << 22  # bytes of a checkpoint before its tensors
_MOST_MOMENTS = 4  # an inner optimizer's state, at most: bytes per byte of the weights


@dataclass(frozen=True)
class Checkpoint:
    """A run's weights after `number` rounds, checked; `decided`: the manifest of the last of these rounds."""

    number: int
    decided: Manifest | None
    tensors: list[Tensor]


def save_checkpoint(run: FolderExchange, replicator: Replicator, moments: Moments) -> None:
    """Writes a checkpoint of the weights as they are now, in the background, and deletes what is old."""
    number = int(replicator.round_number)
    data = checkpoint_of(replicator, run.record.identity, log.digest_of(run.decided))
    here = (to_local(tensor).cpu() for tensor in moments.values())  # an accelerator may have no memory for a copy
    rounded = [each.bfloat16() if each.dim() and each.is_floating_point() else each for each in here]
    lent = _to_bytes({"run": run.record.identity, "round": number, "names": [*moments]}, rounded)

    def write() -> None:
        name = log.checkpoint_name(run.record, number)
        there = data if run.store.put_if_absent(name, data) else run.store.get(name, len(data))
        if there not in (data, None):  # None: it was deleted since, because there are newer ones
            raise MessageError(f"{name} is another one than follows from the messages; nothing is deleted")
        if moments and there:
            run.store.put_if_absent(log.moments_name(number), lent)
        if number % run.record.checkpoint_every == 0:
            _delete_old(run, number)
        with suppress(DemoptError):  # last, and optional: not every worker is allowed to write it
            if log.read_record(run.store) is None:  # somebody has deleted it: without it no worker can join
                log.put_record(run.unrepeated, run.record)

    run.later(write)


def _delete_old(run: FolderExchange, number: int) -> None:
    """Deletes objects that the regular checkpoint before the new one covers: a slow worker may still read later ones.

    In a run that keeps its log, deletes only moments. The next save begins at round `run.cleared`, which only this
    function sets: earlier objects stay, if they may not be deleted or if a stranger has put them there since.
    """
    older = [each for each in log.checkpoints(run.store) if 0 < each < number]
    # Those written in turn: others are by workers that left or, in a run with a key, by a stranger.
    regular = [each for each in older if each % run.record.checkpoint_every == 0]
    if not regular:
        return
    last = regular[-1]
    old = [each for each in older if run.cleared <= each < last]
    gone = [log.moments_name(each) for each in old]
    try:
        if not run.record.keep_log:
            # Whoever deleted the checkpoint before the first one there deleted its rounds, too.
            first = regular[0] if last > regular[0] > run.record.checkpoint_every else 0  # the first that may be there
            gone += log.pieces(run.store, range(max(run.cleared, first), last))
            gone += [log.checkpoint_name(run.record, each) for each in old]
        run.store.delete(gone)
    except ExchangeError as error:
        run.say_once(f"what is old was not deleted, training goes on: {str(error).partition(' (')[0]}")
        if not isinstance(error, DeniedError):  # it passes: the next save tries again
            return
    run.cleared = last


def read_checkpoint(run: FolderExchange, tensors: Sequence[Tensor], number: int) -> Checkpoint | None:
    """Returns the weights after `number` rounds, in the form of `tensors`; None if they are not there."""
    name, most = log.checkpoint_name(run.record, number), sum(tensor.nbytes for tensor in tensors) + MOST_HEAD
    data, read = run.store.get(name, most), partial(_from_bytes, name)
    try:  # as `log.read`, which in a run with a key would also read all strangers' objects again
        found = None if data is None else read(data)
    except MessageError:
        found = run.store.read(name, most, read)
    if found is None:
        return None
    head, values = found
    identity = run.record.identity if number else ""
    if (head.get("run"), head.get("round"), head["tensors"]) != (identity, number, packed_shapes(tensors)):
        raise MessageError(f"{name} is damaged, or of another run or model")
    before = run.known_manifest(number - 1) if number else None
    if head.get("before") != log.digest_of(before):
        raise ForkedError(f"{name} follows another manifest than {log.manifest_name(number - 1)}")
    return Checkpoint(number, before, values)


def newest_checkpoint(run: FolderExchange, tensors: Sequence[Tensor], least: int) -> Checkpoint:
    """Reads the newest checkpoint after `least` rounds or more; if it is damaged, the one before. Reads may lag."""
    what = f"checkpoint after round {least}" if least else f"object {log.checkpoint_name(run.record, 0)}"
    forked = set[int]()

    def read() -> Checkpoint | None:
        there = [each for each in log.reached(run.store, run.manifest) if each >= least and each not in forked]
        for number in reversed(there):
            try:
                return read_checkpoint(run, tensors, number)  # None: deleted since, because there are newer ones
            except ForeignError:  # it is not this run's
                continue
            except ForkedError as error:
                forked.add(number)
                run.say_once(f"{error}; taking the one before it")
            except MessageError as error:
                if number == there[0]:
                    raise
                run.say_once(f"{error}; taking the one before it")
        return None

    return run.wait_for(read, f"{run.store.address} has no {what}, and its messages are gone")


def read_moments(run: FolderExchange, tensors: Sequence[Tensor], rounds: int) -> Moments:
    """Returns the moments beside the newest checkpoint after `rounds` or fewer; MessageError if they are damaged.

    With empty moments, a worker's first steps would be noise for as long as the moments remember: measured, .05 nats.
    """
    size = sum(tensor.nbytes for tensor in tensors)
    for number in reversed([each for each in log.numbered(run.store, "moments") if each <= rounds]):
        name = log.moments_name(number)
        try:
            if (data := run.store.get(name, _MOST_MOMENTS * size + MOST_HEAD)) is None:  # deleted since
                continue
            head, found = _from_bytes(name, data)
            names = head.get("names")
            if (head.get("run"), head.get("round")) != (run.record.identity, number) or not isinstance(names, list):
                raise MessageError(f"{name} is damaged, or of another run")
            if len(names) != len(found) or not all(bool(tensor.isfinite().all()) for tensor in found):
                raise MessageError(f"{name} is damaged, or not finite")
            return dict(zip(map(str, names), found, strict=True))
        except ForeignError:  # it is not this run's
            continue
    return {}


def checkpoint_of(replicator: Replicator, run: str = "", before: str = "") -> bytes:
    """Returns a checkpoint: a line of JSON, then the bytes of all tensors that workers share.

    `before`: the digest of the last manifest that it covers. The first checkpoint, older than the run, has neither.
    """
    head = {"run": run, "round": int(replicator.round_number), "before": before}
    return _to_bytes(head, replicator.wiring().replicated_tensors())


def _to_bytes(head: dict[str, Any], tensors: list[Tensor]) -> bytes:
    """Returns a line of JSON, then the bytes of tensors."""
    body = b"".join(bytes_of(to_local(tensor)) for tensor in tensors)
    line = json.dumps({**head, "tensors": packed_shapes(tensors), "digest": log.digest(body)}).encode()
    return line + b"\n" + body


def _from_bytes(name: str, data: bytes) -> tuple[dict[str, Any], list[Tensor]]:
    """Reverses `_to_bytes`; MessageError if the bytes are damaged."""
    line, _, body = data.partition(b"\n")
    found, at, head = [], 0, log.json_of(name, line)
    shapes = log.shapes_of(name, head.get("tensors"))
    size = sum(math.prod(shape) * log.DTYPES[dtype] for shape, dtype in shapes)
    if size != len(body) or head.get("digest", known := log.digest(body)) != known:  # early 0.3.0 wrote none
        raise MessageError(f"{name} is damaged, or of another run or model")
    for shape, dtype in shapes:
        size = math.prod(shape) * log.DTYPES[dtype]
        found.append(tensor_of(body[at : at + size]).view(getattr(torch, dtype)).view(shape))
        at += size
    return head, found


def weights_digest(replicator: Replicator) -> str:
    """Returns the SHA-256 of the weights, in hexadecimal: the same for all workers and for the replay."""
    digest = hashlib.sha256()
    for tensor in replicator.parameters:
        digest.update(bytes_of(to_local(tensor)))
    return digest.hexdigest()


def packed_shapes(tensors: Sequence[Tensor]) -> list[list[Any]]:
    return [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]

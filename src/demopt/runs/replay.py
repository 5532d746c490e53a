"""The replay: a run's weights, computed again from its log."""

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch.nn import Parameter

from demopt.core.chunking import chunking
from demopt.errors import ExchangeError, MessageError, first_line
from demopt.replicator.replicator import Replicator
from demopt.replicator.wiring import Options
from demopt.runs import log
from demopt.runs.checkpoints import MOST_HEAD, checkpoint_of, read_checkpoint, weights_digest
from demopt.runs.exchange import FolderExchange
from demopt.runs.key import ForeignError
from demopt.runs.log import Manifest
from demopt.runs.open_round import CoveredError, ForkedError
from demopt.runs.store import RECORD, Store
from demopt.runs.weights import FolderRounds
from demopt.validation import check_count

_MOST_BASES = 1 << 28  # elements of all transforms: with a large chunk a short record would fill the memory
_MOST_CHUNK = 1 << 20  # whose divisors are tried


def replay(address: str | Store, key: bytes | None = None) -> Iterator[tuple[Manifest, str]]:
    """Computes a run's weights again, from the first ones and all messages; yields each manifest with their SHA-256.

    MessageError if an object is damaged or a checkpoint differs; CoveredError if the log was not kept.
    """
    run = FolderExchange(address, key=key)  # reads as a worker does, and joins nothing
    record = run.find_run()
    replicator = replicator_of(record, run)
    rounds, saved = FolderRounds(replicator, run), set(log.checkpoints(run.store))
    first = read_checkpoint(run, replicator.wiring().replicated_tensors(), 0)
    if first is None:
        raise CoveredError(f"{run.store.address} has no object {log.checkpoint_name(record, 0)}")
    rounds.take(first)
    while (manifest := rounds.next_manifest()) is not None:
        if manifest.before != log.digest_of(run.decided):
            raise MessageError(f"{log.manifest_name(manifest.round)} follows another manifest than the one before it")
        rounds.apply_manifest(manifest)
        if manifest.round + 1 in saved:
            name = log.checkpoint_name(record, manifest.round + 1)
            data = checkpoint_of(replicator, record.identity, manifest.digest)
            try:
                if run.store.get(name, len(data)) != data:
                    read_checkpoint(run, replicator.wiring().replicated_tensors(), manifest.round + 1)
                    raise MessageError(f"{name} does not follow from the messages before it")
            except ForeignError:  # it is not this run's
                pass
            except ForkedError as error:
                run.say(f"{error}: it is of a fork that the run has left")
        yield manifest, weights_digest(replicator)
    most = sum(tensor.nbytes for tensor in replicator.wiring().replicated_tensors()) + MOST_HEAD
    for name in (log.checkpoint_name(record, number) for number in sorted(saved) if number > replicator.round_number):
        with suppress(MessageError):  # a stranger's
            if run.store.get(name, most):
                raise ExchangeError(f"{name} is there, and {log.manifest_name(int(replicator.round_number))} is gone")


def replicator_of(record: log.Record, run: FolderExchange) -> Replicator:
    """Returns a replicator with the run's settings and shapes, over zeros."""
    groups, sides = [], set[int]()
    try:
        for group in record.groups:
            settings = {name: value for name, value in group.items() if name != "parameters"}
            shapes = log.shapes_of(RECORD, group.get("parameters"))
            chunk = check_count("chunk", settings["chunk"], high=_MOST_CHUNK)
            for shape, _ in shapes:
                sides.update(chunking(tuple(shape), chunk, settings["chunking"]).chunk_shape)
            zeros = [torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu") for shape, dtype in shapes]
            groups.append({**settings, "params": [*map(Parameter, zeros)]})
        if sum(side * side for side in sides) > _MOST_BASES:
            raise ValueError(f"its chunks have {len(sides):,} different sides, of up to {max(sides):,}")
        facts = tuple((name, text) for name, text in record.config_facts)
        return Replicator(groups, {}, Options(config_facts=lambda: facts), run)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, MemoryError) as error:
        told = f"{RECORD} is damaged, or of a model that this machine cannot hold: {first_line(error)}"
        raise MessageError(told) from error

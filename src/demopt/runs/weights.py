"""The weights of a run: checkpoints, how a worker joins or catches up, and the replay of a whole run.

All of a run's weights follow from the first ones, the manifests and the messages that they name, bit for bit: decoding
is exact, and everybody applies the same list in the same order.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from demopt.errors import ExchangeError, MessageError
from demopt.exchange import SingleRank
from demopt.exchange.dtensor import to_local
from demopt.replicator.plan import Options
from demopt.replicator.replicator import Replicator
from demopt.runs import log
from demopt.runs.exchange import CoveredError, FolderExchange, bytes_of
from demopt.runs.store import Store

_MOST_HEAD = 1 << 22  # bytes of a checkpoint before its tensors


def join(replicator: Replicator, run: FolderExchange) -> bool:
    """Starts the run with this worker's weights, or takes those of the run; returns whether they are the run's.

    A replicator with a state of its own, from an earlier time in the run, goes on from there.
    """
    plan = replicator.plan()
    groups = [
        {**{name: value for name, value in group.items() if name != "params"}, "parameters": _shapes(group["params"])}
        for group in replicator.groups
    ]
    started = run.meet(plan.facts(), plan.options.config_facts, groups, packed(replicator, ""))
    if not started:
        if not int(replicator.rounds):
            load_newest(replicator, run, least=0)
        catch_up(replicator, run)
        run.stopping = False  # in the rounds before
    run.hello(int(replicator.rounds))
    run.joined = True
    return not started


def catch_up(replicator: Replicator, run: FolderExchange) -> None:
    """Applies all rounds that were decided without this worker, or takes the newest checkpoint where they are gone."""
    like = torch.empty(0, dtype=torch.uint8, device=replicator.plan().route.device)
    while (manifest := log.read_manifest(run.store, run.run.run, int(replicator.rounds))) is not None:
        try:
            replicator.apply(run.rows(manifest, replicator.message_bytes, like))
        except CoveredError:
            load_newest(replicator, run, least=manifest.round + 1)
        else:
            run.decided, run.stopping = manifest, run.stopping or manifest.stop


def rejoin(replicator: Replicator, run: FolderExchange) -> None:
    """After rounds without this worker: catches up, and, unless it leaves, asks to be waited for again."""
    catch_up(replicator, run)
    if not (run.leaving or run.stopping):
        run.hello(int(replicator.rounds))


# Checkpoints


def packed(replicator: Replicator, run: str) -> bytes:
    """Returns a checkpoint: a line of JSON, then the bytes of all tensors that workers share."""
    tensors = replicator.plan().shared_tensors()
    head = {"run": run, "round": int(replicator.rounds), "tensors": _shapes(tensors)}
    return json.dumps(head).encode() + b"\n" + b"".join(bytes_of(to_local(tensor)) for tensor in tensors)


def weights_digest(replicator: Replicator) -> str:
    """Returns the SHA-256 of the weights, in hexadecimal: the same for all workers and for the replay."""
    digest = hashlib.sha256()
    for tensor in replicator.parameters:
        digest.update(bytes_of(to_local(tensor)))
    return digest.hexdigest()


def load_newest(replicator: Replicator, run: FolderExchange, least: int) -> None:
    """Takes the newest checkpoint after at least `least` rounds; if it is damaged, the one before."""
    found = [number for number in log.checkpoints(run.store) if number >= least]
    for number in reversed(found):
        try:
            return load(replicator, run, number)
        except CoveredError:  # deleted since it was listed, because there are newer ones
            if log.checkpoints(run.store)[-1] <= number:
                raise
            return load_newest(replicator, run, number + 1)
        except MessageError as error:
            if number == found[0]:
                raise
            run.say(f"{error}; taking the one before it")
    raise ExchangeError(f"messages of round {least - 1} are gone, and {run.store.address} has no checkpoint after it")


@torch.no_grad()
def load(replicator: Replicator, run: FolderExchange, number: int) -> None:
    """Takes the weights after `number` rounds; all of a checkpoint is checked before any is taken."""
    name, tensors = log.checkpoint_name(run.run, number), replicator.plan().shared_tensors()
    size = sum(tensor.nbytes for tensor in tensors)
    data = run.store.get(name, size + _MOST_HEAD)
    if data is None:
        raise CoveredError(f"{run.store.address} has no object {name}")
    run.received_bytes += len(data)
    head, _, body = data.partition(b"\n")
    try:
        found = json.loads(head)
        fits = (found["run"], found["round"]) == (run.run.run if number else "", number)
        fits = fits and found["tensors"] == _shapes(tensors) and len(body) == size
    except (ValueError, TypeError, KeyError, RecursionError):
        fits = False
    if not fits:
        raise MessageError(f"{name} is damaged, or of another run or model")
    at = 0
    for tensor in tensors:
        part = bytearray(body[at : at + tensor.nbytes])
        at += tensor.nbytes
        if part:
            tensor.copy_(torch.frombuffer(part, dtype=tensor.dtype).view(tensor.shape))
    replicator.rounds.fill_(number)
    run.decided = log.read_manifest(run.store, run.run.run, number - 1) if number else None


def save_if_due(replicator: Replicator, run: FolderExchange) -> Callable[[], None] | None:
    """Returns the call that writes a checkpoint and clears old rounds, if it is this worker's turn.

    The senders of a round take turns. All have the same bits, so if one dies in it, the next checkpoint covers more.
    """
    number, every = int(replicator.rounds), run.run.checkpoint_every
    if run.row is None or run.decided is None or number % every:
        return None
    if run.row != number // every % len(run.decided.senders):
        return None
    return saver(replicator, run)


def saver(replicator: Replicator, run: FolderExchange) -> Callable[[], None]:
    """Returns the call that writes a checkpoint of the weights as they are now, unless there is one."""
    number, data = int(replicator.rounds), packed(replicator, run.run.run)

    def save() -> None:
        before = [each for each in log.checkpoints(run.store) if each < number]
        if number and run.store.put_if_absent(log.checkpoint_name(run.run, number), data):
            run.sent_bytes += len(data)
        if not run.run.keep_log and len(before) > 1:  # a slow worker may still read the rounds since the one before
            log.clear(run.store, range(before[len(before) > 2], before[-1]))
            run.store.delete(log.checkpoint_name(run.run, each) for each in before[:-1] if each)

    return save


# Replay


def replay(store: Store, key: bytes | None = None) -> Iterator[tuple[log.Manifest, str]]:
    """Computes a run's weights again, from the first ones and every message; yields each round with their SHA-256.

    MessageError if an object is damaged or a checkpoint differs; CoveredError if the log was not kept.
    """
    run = FolderExchange(store, key=key)
    record = log.read_record(run.store)
    if record is None:
        raise ExchangeError(f"{store.address} holds no run")
    run.record = record
    replicator = replicator_of(record, run)
    load(replicator, run, 0)
    like, saved = torch.empty(0, dtype=torch.uint8), set(log.checkpoints(run.store))
    while (manifest := log.read_manifest(run.store, record.run, int(replicator.rounds))) is not None:
        replicator.apply(run.rows(manifest, replicator.message_bytes, like))
        number = int(replicator.rounds)
        if number in saved:
            name, data = log.checkpoint_name(record, number), packed(replicator, record.run)
            if run.store.get(name, len(data)) != data:
                raise MessageError(f"{name} does not follow from the messages before it")
        yield manifest, weights_digest(replicator)


def replicator_of(record: log.Record, process_group: Any = None) -> Replicator:
    """Returns a replicator with the run's settings and shapes, over zeros."""
    groups = []
    for group in record.groups:
        parameters = [
            Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))) for shape, dtype in group["parameters"]
        ]
        groups.append({**group, "params": parameters})
        del groups[-1]["parameters"]
    facts = tuple((name, text) for name, text in record.config_facts)
    return Replicator(groups, {}, Options(config_facts=facts), process_group or SingleRank())


def _shapes(tensors: list[Tensor]) -> list[list[Any]]:
    return [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]

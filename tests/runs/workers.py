"""Workers of a run for tests: with a small model, or with steps that can be counted; in turn or side by side."""

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import stores
import torch
from torch import Tensor

from demopt import FolderExchange, LocalDeMo
from demopt.errors import ExchangeError
from demopt.runs import log
from demopt.runs.checkpoints import weights_digest
from demopt.runs.replay import replay
from demopt.runs.store import ObjectStore, StoreError

SETTINGS: dict[str, Any] = {"sync_every": 2, "top_k": 12, "chunk": 8, "reduction": "mean"}
EXACTLY: dict[str, Any] = {"transform": "identity", "chunk": 64, "top_k": 4096, "values": "float64", "error_decay": 0.0}


class Member:
    """The common part of both kinds of worker."""

    run: FolderExchange
    optimizer: LocalDeMo

    def join(self) -> Any:
        self.optimizer.join()
        return self

    def state(self) -> Any:
        return copy.deepcopy(self.optimizer.own_state_dict())

    @property
    def digest(self) -> str:
        return weights_digest(self.optimizer.replicator)


class Worker(Member):
    """A worker with a small model and gradients of its own."""

    def __init__(self, store: Any, seed: int, late: float = 0.0, group: Any = None, state: Any = None, **settings: Any):
        torch.manual_seed(settings.pop("weights", seed))
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 12), torch.nn.Linear(12, 3))
        options = {name: settings.pop(name) for name in ("keep_log", "checkpoint_every", "key") if name in settings}
        self.run = group or FolderExchange(store, late=late, patience=0.0, **options)
        self.said: list[str] = []
        self.run.worker, self.run.say = f"w{seed}", self.said.append
        inner = settings.pop("inner", lambda parameters: torch.optim.SGD(parameters, lr=0.1))(self.model.parameters())
        self.optimizer = LocalDeMo(inner, process_group=self.run, **{**SETTINGS, **settings})
        self.draw = torch.Generator().manual_seed(seed)
        if state:
            self.optimizer.load_state_dict(state)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 16, generator=self.draw)).square().mean().backward()
        self.optimizer.step()

    def round(self, times: int = 1) -> Any:
        """Trains one or more rounds, each with its checkpoint; returns the worker."""
        self.join()
        for _ in range(times):
            before = self.rounds
            while self.rounds == before:
                self.step()
            self.run.wait_for_uploads()
        return self

    @property
    def rounds(self) -> int:
        return int(self.optimizer.replicator.round_number)

    @property
    def senders(self) -> list[str]:
        """The senders of the last round that it knows."""
        return [sender.worker for sender in self.run.decided.senders]


def steps(*workers: Any) -> None:
    """A step of each of these, one after the other."""
    for worker in workers:
        worker.step()


def rounds(*workers: Worker) -> None:
    """A round of each of these, one after the other."""
    for worker in workers:
        worker.round()


def together(workers: list[Worker], rounds: int) -> None:
    """All workers train side by side, up to a round; each waits for the others."""
    for worker in workers:
        worker.run.late = 60.0
        worker.join()  # all have said hello before the first round

    def train(worker: Worker) -> None:
        while worker.rounds < rounds:
            worker.step()
        worker.run.wait_for_uploads()

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(train, workers))


@contextlib.contextmanager
def waiting(train: Callable[[], None], store: Any, number: int = 0) -> Iterator[None]:
    """A worker trains in a thread. In the block its message of the round is there, and it waits for the others."""
    thread = threading.Thread(target=train)
    thread.start()
    while not log.look(store, number).messages:
        time.sleep(0.005)
    yield
    thread.join()


def joined(store: Any, **settings: Any) -> tuple[Worker, Worker]:
    """Two workers of a run, before its first round."""
    return Worker(store, 0, **settings).join(), Worker(store, 1, **settings).join()


def at_first(other: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that is `other` the first time, and `call` from then on."""
    first = iter([other])
    return lambda *given: next(first, call)(*given)


def replayed(store: Any, **how: Any) -> list[str]:
    """The digests of the weights after each round."""
    return [digest for _, digest in replay(store, **how)]


class AtOnce:
    """Stands in for a pool and the background thread: makes each call when it is submitted, in this thread."""

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(call())
        except ExchangeError as error:
            done.set_exception(error)
        return done


class Counter(Member):
    """A worker each of whose local steps has a gradient of 1 at an element of its own. It has no threads.

    It joins at once, except from `state`, after `taken` steps.
    """

    def __init__(self, store: Any, number: int, delay: int = 0, state: Any = None, taken: int = 0) -> None:
        self.failing = 0  # requests until the store fails, if positive

        def fail(call: str) -> None:
            self.failing -= 1
            if self.failing == 0:
                raise StoreError("away")

        self.parameter = torch.nn.Parameter(torch.zeros(512, dtype=torch.float64))
        self.run = FolderExchange(stores.Through(store, fail), late=0.0, patience=0.0, keep_log=True)
        self.run.worker = f"w{number}"
        inner = torch.optim.SGD([self.parameter], lr=1.0)
        self.optimizer = LocalDeMo(inner, delay=delay, process_group=self.run, **{**SETTINGS, **EXACTLY})
        self.run._pool = self.run._uploads = self.optimizer.replicator.session._background = AtOnce()
        self.number, self.taken = number, taken
        self.optimizer.load_state_dict(state) if state else self.join()

    def step(self) -> None:
        self.taken += 1
        self.optimizer.zero_grad()
        self.parameter.grad = torch.zeros_like(self.parameter)
        self.parameter.grad[self.number * 128 + self.taken - 1] = 1.0
        self.run.sequences.in_steps += 1
        self.optimizer.step()

    def ended(self) -> None:
        """Sends all that is left, as a leaving worker does."""
        self.failing, self.run.late, self.run.leaving = 0, 0.0, True
        sent = False
        while not sent:
            with contextlib.suppress(ExchangeError):  # of the round in flight
                self.optimizer.finish_round(last=True)
                sent = self.run.row is not None


def counters(count: int = 2, delay: int = 0) -> tuple[ObjectStore, list[Counter]]:
    """A store in memory, and workers of its run."""
    store = ObjectStore()
    return store, [Counter(store, number, delay) for number in range(count)]


def applied(store: Any, layout: Any) -> Tensor:
    """The sum of all messages that manifests name, undivided."""
    total, number = torch.zeros(512, dtype=torch.float64), 0
    record = log.read_record(store)
    while (manifest := log.read_manifest(store, record.identity, number)) is not None:
        for sender in manifest.senders:
            data = store.get(log.message_name(number, sender.worker), 1 << 20)
            body = torch.frombuffer(bytearray(data.partition(b"\n")[2][64:]), dtype=torch.uint8).unsqueeze(0)
            (section,), (part,) = layout.sections, layout.bodies(body)
            decoded = section.checked(part)
            chunks = torch.zeros(section.chunks, section.length, dtype=torch.float64)
            chunks.scatter_add_(1, decoded.positions[0].to(torch.int64), decoded.values[0].to(torch.float64))
            total += chunks.flatten()
        number += 1
    return total


def times_applied(store: Any, workers: list[Counter]) -> list[list[float]]:
    """All workers leave, with the same weights; returns how often the manifests have each step of each worker."""
    for worker in workers:
        worker.ended()
    for worker in workers:
        worker.optimizer.resync()
    assert len({worker.digest for worker in workers}) == 1
    times = applied(store, workers[0].optimizer.replicator.wiring().route.layout).view(-1, 128)
    return [times[worker.number, : worker.taken].tolist() for worker in workers]

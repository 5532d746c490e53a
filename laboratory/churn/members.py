"""The workers that churn kills: demopt under torchft, torchft's DDP, and a run that restarts as a whole.

All train the same small model on the same text. Each reports its rounds, dies by SIGKILL at the instant of its order,
and reports its held-out loss at the end.
"""

import logging
import os
import queue
import signal
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

import demopt

INSTANTS = ("backward", "extract", "exchange", "check", "apply", "save")
CONTEXT, BATCH, STEP_SECONDS = 8, 32, 0.03
SAVE_EVERY = 10  # rounds; a run that restarts loses half of it at a kill, on average
PATIENCE = timedelta(seconds=15)


def text() -> torch.Tensor:
    """The bytes of a few files of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    names = ("argparse", "ast", "calendar", "copy", "csv", "datetime", "difflib", "inspect", "json/decoder", "shlex")
    return torch.frombuffer(
        bytearray(b"".join((library / f"{name}.py").read_bytes() for name in names)), dtype=torch.uint8
    )


def small_model() -> nn.Module:
    """Predicts a byte from the eight before it."""
    torch.manual_seed(0)
    layers = nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 256)
    return nn.Sequential(*layers)


def windows(data: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Contexts [n, 8] and the bytes after them [n]."""
    rows = data[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, -1]


@dataclass
class Member:
    """One process of a run: its place, its orders, and the queue of its reports."""

    number: int
    life: int  # how often its place was filled before; below 0: dies while it takes others' weights
    kind: str  # demo, local, ddp or restarting
    steps: int
    address: str  # of the lighthouse, or the port of a restarting run's store
    members: int
    folder: str
    start_seconds: float  # of the imports of a new process; the fork server hides them
    reports: Any
    orders: Any
    armed: str = field(default="", init=False)

    def instant(self, name: str) -> None:
        """Dies here if that is its order."""
        if name == self.armed:
            self.reports.put(("died", self.number, time.time(), name))
            time.sleep(0.02)  # for the message to leave
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, owner: object, *names: str, instant: str = "") -> None:
        """Makes the start of each named method an instant at which this worker can die."""
        for name in names:
            setattr(owner, name, self._watched(getattr(owner, name), instant or name))

    def _watched(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            self.instant(name)
            return method(*args, **keywords)

        return call

    def loss(self, model: nn.Module, data: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        """The loss of a batch, before its backward."""
        with suppress(queue.Empty):
            self.armed = self.orders.get_nowait()
        starts = torch.randint(int(0.9 * len(data)) - CONTEXT - 1, (BATCH,), generator=draw)
        tokens, targets = windows(data, starts)
        loss = nn.functional.cross_entropy(model(tokens), targets)
        self.instant("backward")
        return loss

    def report_round(self, number: int, members: int, loss: float) -> None:
        """Reports that a round was applied."""
        self.reports.put(("round", self.number, time.time(), (number, members, loss)))

    def save(self, state: dict[str, Any], step: int) -> None:
        """Writes a state as a whole or not at all; the one before it stays."""
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            torch.save(state, file)
        self.instant("save")
        os.replace(file.name, self.saved(step))
        self.saved(step - 2 * SAVE_EVERY).unlink(missing_ok=True)

    def saved(self, step: int) -> Path:
        """Returns the path of the state after a step."""
        return Path(self.folder, f"{self.number}-{step}.pt")

    def end(self, model: nn.Module, data: torch.Tensor, fingerprint: int, retries: int) -> None:
        """Reports the held-out loss, and ends the process."""
        cut = int(0.9 * len(data))
        with torch.no_grad():
            tokens, targets = windows(data, torch.linspace(cut, len(data) - CONTEXT - 2, 4000).long())
            held_out = float(nn.functional.cross_entropy(model(tokens), targets))
        self.reports.put(("end", self.number, time.time(), (held_out, fingerprint, retries)))
        self.reports.close()
        self.reports.join_thread()
        os._exit(0)


def serve_lighthouse(port: int) -> None:
    """Serves as lighthouse until it is killed."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind=f"[::]:{port}", min_replicas=1, join_timeout_ms=3000, heartbeat_timeout_ms=1000)
    while server:
        time.sleep(100)


def train(member: Member) -> None:
    """Trains as the member's kind says until the run has its steps."""
    torch.set_num_threads(1)
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    if member.life:
        time.sleep(member.start_seconds)
    kinds = {"demo": voting, "local": voting, "ddp": torchft_ddp, "restarting": restarting}
    kinds[member.kind](member, small_model(), text())


def _manager(member: Member, **states: Any) -> Any:
    import torchft

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=PATIENCE), min_replica_size=1, timeout=PATIENCE, quorum_timeout=PATIENCE,
        quorum_retries=30,  # where the lighthouse is lost
        rank=0, world_size=1, store_addr="localhost", store_port=store.port, lighthouse_addr=member.address,
        replica_id=f"{member.number}", hostname="localhost", **states,
    )  # fmt: skip
    manager.kept_store = store  # lives as long as the manager
    return manager


def _draw(member: Member, restarts: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * member.number + max(member.life, 0) + 100 * restarts)


def voting(member: Member, model: nn.Module, data: torch.Tensor) -> None:
    """DeMo or LocalDeMo, with a vote on each round."""
    from demopt.integrations.torchft import Optimizer

    inner: Any
    if member.kind == "local":
        inner = demopt.LocalDeMo(torch.optim.AdamW(model.parameters(), lr=3e-3), sync_every=5)
    else:
        inner = demopt.DeMo(model.parameters(), lr=3e-3)
    manager = _manager(member, load_state_dict=None, state_dict=None)
    optimizer = Optimizer(manager, inner)
    member.watch(inner, "extract", "exchange", "apply", "resync")
    member.watch(inner.replicator, "check")
    if member.life < 0:
        member.armed = "resync"
    draw, every = _draw(member), inner.sync_every if member.kind == "local" else 1
    while True:
        optimizer.zero_grad()
        rounds = manager.current_step()
        if rounds * every >= member.steps:
            break
        loss = member.loss(model, data, draw)
        loss.backward()
        time.sleep(STEP_SECONDS)  # a step of a larger model
        optimizer.step()
        if manager.current_step() > rounds:
            member.report_round(manager.current_step(), optimizer.workers, loss.item())
            if manager.current_step() % SAVE_EVERY == 0:
                member.save(optimizer.state_dict(), manager.current_step())
    member.end(model, data, inner.fingerprint(), optimizer.churn.retries)


def torchft_ddp(member: Member, model: nn.Module, data: torch.Tensor) -> None:
    """torchft's DistributedDataParallel and OptimizerWrapper around AdamW, as its documentation has them."""
    import torchft

    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": adamw.state_dict()}

    manager = _manager(member, load_state_dict=load, state_dict=state)
    wrapped = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, adamw)
    member.watch(manager, "allreduce", instant="exchange")
    member.watch(manager, "should_commit", instant="check")
    member.watch(adamw, "step", instant="apply")
    draw, retries = _draw(member), 0
    while manager.current_step() < member.steps:
        optimizer.zero_grad()
        rounds = manager.current_step()
        loss = member.loss(wrapped, data, draw)
        loss.backward()
        time.sleep(STEP_SECONDS)
        optimizer.step()
        if manager.current_step() > rounds:
            member.report_round(manager.current_step(), manager.num_participants(), loss.item())
            if manager.current_step() % SAVE_EVERY == 0:
                member.save(state(), manager.current_step())
        else:
            retries += 1
    member.end(model, data, _fingerprint(model), retries)


def restarting(member: Member, model: nn.Module, data: torch.Tensor) -> None:
    """DeMo without torchft: a lost worker ends the run, and all start again from the last checkpoint."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://localhost:{member.address}", rank=member.number, world_size=member.members,
        timeout=PATIENCE,
    )  # fmt: skip
    optimizer = demopt.DeMo(model.parameters(), lr=3e-3)
    member.watch(optimizer, "extract", "exchange", "apply")
    member.watch(optimizer.replicator, "check")
    mine = {int(path.stem.partition("-")[2]) for path in Path(member.folder).glob(f"{member.number}-*.pt")}
    everyones: list[Any] = [None] * member.members
    torch.distributed.all_gather_object(everyones, mine)
    done = max(set.intersection(*everyones), default=0)  # a kill in a save leaves some workers one save behind
    if done:
        state = torch.load(member.saved(done), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    draw = _draw(member, restarts=member.life)
    while done < member.steps:
        optimizer.zero_grad()
        loss = member.loss(model, data, draw)
        loss.backward()
        time.sleep(STEP_SECONDS)
        optimizer.apply(optimizer.exchange(optimizer.extract()))
        done += 1
        member.report_round(done, member.members, loss.item())
        if done % SAVE_EVERY == 0:
            member.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, done)
    member.end(model, data, optimizer.fingerprint(), 0)


def _fingerprint(model: nn.Module) -> int:
    return hash(tuple(float(p.detach().double().sum()) for p in model.parameters()))

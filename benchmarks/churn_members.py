"""The members that churn.py kills: demopt under torchft, torchft's own DDP, and a run that restarts all of itself.

All train the same small model on the same text. Each tells its rounds, dies by SIGKILL at the instant it is ordered to,
and tells its held-out loss at the end.
"""

from __future__ import annotations

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
from torch._C._distributed_c10d import TCPStore

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
    """One process of a run: who it is, what it is told, and what it tells."""

    number: int
    life: int  # how often its place was filled before; below 0: dies while it takes others' weights
    kind: str  # demo, local, ddp or restarting
    steps: int
    address: str  # of the lighthouse, or the port of a restarting run's store
    members: int
    folder: str
    start_seconds: float  # what a new process takes to import all; the fork server hides it
    told: Any
    orders: Any
    armed: str = field(default="", init=False)

    def instant(self, name: str) -> None:
        """Dies here if it was ordered to."""
        if name == self.armed:
            self.told.put(("died", self.number, time.time(), name))
            time.sleep(0.02)  # for the message to leave
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, owner: object, *names: str, instant: str = "") -> None:
        """Makes the start of each named method an instant."""
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

    def tell_round(self, number: int, members: int, loss: float) -> None:
        """Tells that a round was applied."""
        self.told.put(("round", self.number, time.time(), (number, members, loss)))

    def save(self, state: dict[str, Any], step: int) -> None:
        """Writes a state whole or not at all; the one before it stays."""
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            torch.save(state, file)
        self.instant("save")
        os.replace(file.name, self.saved(step))
        self.saved(step - 2 * SAVE_EVERY).unlink(missing_ok=True)

    def saved(self, step: int) -> Path:
        """Where the state after a step lies."""
        return Path(self.folder, f"{self.number}-{step}.pt")

    def end(self, model: nn.Module, data: torch.Tensor, fingerprint: int, retries: int) -> None:
        """Tells the held-out loss, and leaves."""
        cut = int(0.9 * len(data))
        with torch.no_grad():
            tokens, targets = windows(data, torch.linspace(cut, len(data) - CONTEXT - 2, 4000).long())
            held_out = float(nn.functional.cross_entropy(model(tokens), targets))
        self.told.put(("end", self.number, time.time(), (held_out, fingerprint, retries)))
        self.told.close()
        self.told.join_thread()
        os._exit(0)


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

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
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
    """DeMo or LocalDeMo, whose rounds are voted on."""
    from demopt.integrations.torchft import Optimizer

    inner: Any
    if member.kind == "local":
        inner = demopt.LocalDeMo(torch.optim.AdamW(model.parameters(), lr=3e-3), sync_every=5)
    else:
        inner = demopt.DeMo(model.parameters(), lr=3e-3)
    manager = _manager(member, load_state_dict=None, state_dict=None)
    optimizer = Optimizer(manager, inner)
    member.watch(inner, "extract", "exchange", "check", "apply", "resync")
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
            member.tell_round(manager.current_step(), optimizer.members, loss.item())
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
            member.tell_round(manager.current_step(), manager.num_participants(), loss.item())
            if manager.current_step() % SAVE_EVERY == 0:
                member.save(state(), manager.current_step())
        else:
            retries += 1
    member.end(model, data, _fingerprint(model), retries)


def restarting(member: Member, model: nn.Module, data: torch.Tensor) -> None:
    """DeMo without torchft: whoever is lost ends the run, and all start again from the last checkpoint."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://localhost:{member.address}", rank=member.number, world_size=member.members,
        timeout=PATIENCE,
    )  # fmt: skip
    optimizer = demopt.DeMo(model.parameters(), lr=3e-3)
    member.watch(optimizer, "extract", "exchange", "check", "apply")
    mine = {int(path.stem.partition("-")[2]) for path in Path(member.folder).glob(f"{member.number}-*.pt")}
    everyones: list[Any] = [None] * member.members
    torch.distributed.all_gather_object(everyones, mine)
    done = max(set.intersection(*everyones), default=0)  # a kill in a save leaves some one save behind
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
        received = optimizer.exchange(optimizer.extract())
        optimizer.check(received)
        optimizer.apply(received)
        done += 1
        member.tell_round(done, member.members, loss.item())
        if done % SAVE_EVERY == 0:
            member.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, done)
    member.end(model, data, optimizer.fingerprint(), 0)


def _fingerprint(model: nn.Module) -> int:
    return hash(tuple(float(p.detach().double().sum()) for p in model.parameters()))

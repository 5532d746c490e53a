"""One replica of a run whose workers come and go: it joins, trains along, and saves what is its own.

Started as `python -m demopt.train.elastic.replica CONFIG.json LAUNCHER_PID SLOT LIGHTHOUSE`. Its place among the
replicas of this machine, the slot, names its files and its stream of data.
"""

from __future__ import annotations

import hashlib
import math
import os
import socket
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._distributed_c10d import TCPStore

from demopt.errors import DemoptError, SettingsError
from demopt.exchange import SingleRank
from demopt.optim.local_demo import LocalDeMo
from demopt.train.config import InputError, TrainConfig, config_of, read_file
from demopt.train.data import Corpus, batch, load_corpus, validation_windows
from demopt.train.elastic import checkpoint, lighthouse
from demopt.train.elastic.writer import Writer
from demopt.train.folder import RunFolder
from demopt.train.loop import PATIENCE, learning_rate, validation_loss
from demopt.train.method import Method, make_method
from demopt.train.model import backward, build
from demopt.train.report import Report, finish
from demopt.train.team import Team, cores, pick_device
from demopt.train.worker import end_with

FAILED = 1  # exit code of a replica that is started again
MISTAKE = 2  # exit code of a replica that nobody needs to start again
STOPPED = 3  # exit code of a replica after a wish to stop, of this machine or of another
UNWRITTEN = 4  # exit code of a replica that did all steps and could not write what they led to


class UnwrittenError(DemoptError):
    """All steps are done, but what a run leaves could not be written."""


class Replica:
    """A replica, from joining to the last file."""

    def __init__(self, config: TrainConfig, slot: int, address: str) -> None:
        from demopt.integrations.torchft import Optimizer

        self.config, self.address = config, address
        self.folder = RunFolder(Path(config.out))
        self.name = f"{socket.gethostname()}-{slot}"
        device = pick_device(config.device, slot, config.workers)
        torch.set_num_threads(config.threads or max(1, cores() // config.workers))
        self.team = Team(0, 1, device, SingleRank())  # what ranks of a fixed team compute together, it does alone
        self.corpus: Corpus = load_corpus(config, self.folder.tokens)
        self.model = build(config).to(device)
        self.method: Method = make_method(config, self.model, self.team)
        self.drawn = 0  # batches of its stream
        self.stream = int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=4).digest(), "little")
        self.writer = Writer(self.folder)
        self.report: Report | None = None
        self._told = 0  # members, when they were last told about
        self._twins_told = False
        found = checkpoint.load(self.folder.checkpoints, self.name, self.model, self.method.optimizer)
        self.store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        self.manager = self._manager()
        if found is not None:
            self.drawn = found.drawn
            self.manager.load_state_dict({"step": found.round, "batches_committed": found.messages})
        optimizer: Any = self.method.optimizer
        self.optimizer = Optimizer(self.manager, optimizer, patience=config.timeout, start_seconds=config.timeout)

    def train(self) -> bool:
        """Take the run's steps; return whether they are all done, not stopped before."""
        self.optimizer.join()
        with ExitStack() as self.open:
            done = self._steps()
        if done and self.writer.asks():
            try:
                with self.folder.writing(), self.method.shared():
                    finish(self.config, self.folder, self.model, self.corpus)
            except DemoptError as error:
                raise UnwrittenError(str(error)) from error
        return done

    def _steps(self) -> bool:
        """Take the steps; return whether they are all done, not stopped before."""
        bad = 0
        while self.done < self.config.steps:
            began = time.perf_counter()
            loss = self._gradient()
            step, rounds = self.done + 1, self.manager.current_step()
            self.optimizer.note = [loss, float(self.folder.stop.exists()), float(self.stream)]
            self.optimizer.step()
            if self.local and step == self.config.steps and self.method.optimizer.local_steps:  # type: ignore[attr-defined]
                self.optimizer.finish_round()
            went_on = self.manager.current_step() > rounds  # not between rounds, nor after one that failed
            told = self.optimizer.notes if went_on else []
            self._look_for_twins(told)
            losses = [each[0] for each in told] or [loss]
            mean = sum(losses) / len(losses)
            self._publish()
            self._write_step(step, mean, time.perf_counter() - began)
            bad = 0 if math.isfinite(mean) else bad + 1
            if bad == PATIENCE:
                raise DemoptError(f"the loss has been {mean} for {bad} steps; try a lower --lr")
            stop = any(each[1] for each in told)
            due = went_on and is_due(self.done, self.config.save_every, self.steps_a_round)
            if stop or due or self.done >= self.config.steps:
                self._save()
            if stop:
                return False
        return True

    def _look_for_twins(self, told: list[list[float]]) -> None:
        """Say once that two members have one name, on two machines of one host name for example."""
        if self.report is not None and not self._twins_told and twins(told):
            self._twins_told = True
            print(
                f"two workers have one name (this one is {self.name}) and draw the same text: give each machine a host "
                "name of its own; on one machine start them together, with --workers 2",
                file=sys.stderr,
                flush=True,
            )

    @property
    def local(self) -> bool:
        """Whether the steps between rounds are local."""
        return isinstance(self.method.optimizer, LocalDeMo)

    @property
    def steps_a_round(self) -> int:
        """The steps from one round to the next."""
        return self.method.optimizer.sync_every if isinstance(self.method.optimizer, LocalDeMo) else 1

    @property
    def done(self) -> int:
        """The steps that are done: rounds are counted, which all members share, and local steps since."""
        optimizer: Any = self.method.optimizer
        rounds: int = self.manager.current_step()
        return min(self.config.steps, rounds * self.steps_a_round + optimizer.local_steps) if self.local else rounds

    @property
    def tokens(self) -> int:
        """The tokens whose gradients are in the weights."""
        messages: int = self.manager.batches_committed()
        return messages * self.steps_a_round * self.config.tokens_per_step // self.config.workers

    def _gradient(self) -> float:
        config = self.config
        self.method.set_lr(learning_rate(config, self.done + 1))
        self.optimizer.zero_grad()
        loss = 0.0
        for _ in range(config.accumulate):
            loss += backward(self.method.forward, self._batch(), config, self.team.device)
        if config.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        return loss

    def _batch(self) -> NDArray[np.int64]:
        self.drawn += 1
        return batch(self.corpus.train, self.config, self.drawn, self.stream)

    def _write_step(self, step: int, loss: float, seconds: float) -> None:
        if not self.writer.asks():
            return
        config, stats, churn = self.config, self.optimizer.stats, self.optimizer.churn
        if self.report is None:
            self.report = self.open.enter_context(Report(self.folder, config, step - 1, True))
        exchange = stats.seconds.get("exchange", 0.0)
        row = {"step": step, "loss": loss, "lr": learning_rate(config, step)}
        row |= {"payload_bytes": stats.payload_bytes, "sent_bytes": stats.sent_bytes}
        row |= {"received_bytes": stats.received_bytes}
        row |= {"optimizer_seconds": sum(stats.seconds.values()) - exchange, "exchange_seconds": exchange}
        row |= {"tokens": self.tokens}
        row |= {"step_seconds": seconds, "members": self.optimizer.members, "retries": churn.retries}
        row |= {"lost_seconds": churn.seconds}
        if step % config.eval_every == 0 or step == config.steps:
            windows = validation_windows(self.corpus.val, config, 0, 1)
            with self.method.shared():
                row["val_loss"] = validation_loss(self.model, windows, config, self.team)
        try:
            self.report.step(row)
        except OSError as error:
            print(f"step {step} is not in {self.folder.metrics}: {error.strerror}", file=sys.stderr, flush=True)

    def _publish(self) -> None:
        """After a change of members: tell machines that may join what the settings are."""
        if self.optimizer.members != self._told and self.optimizer.leads:
            lighthouse.publish(self.address, self.config.record())
        if self.report is not None and self.optimizer.members != self._told:
            self.report.say(f"members: {self.optimizer.members}")
        self._told = self.optimizer.members

    def _save(self) -> None:
        saved = checkpoint.Own(self.manager.current_step(), self.manager.batches_committed(), self.drawn)
        if self.local and self.method.optimizer.local_steps:  # type: ignore[attr-defined]
            return  # between rounds, each has weights of its own
        try:
            with self.folder.writing():
                checkpoint.save(
                    self.folder.checkpoints, self.done, self.name, self.writer.asks(),
                    self.model, self.method.optimizer, saved, self.config, self.corpus.fingerprint, self.tokens,
                )  # fmt: skip
        except DemoptError as error:
            print(f"step {self.done} is not saved, training goes on: {error}", file=sys.stderr, flush=True)

    def _manager(self) -> Any:
        import torchft

        host = lighthouse.own_address(self.address)
        step = timedelta(seconds=self.config.join_timeout)
        with lighthouse.told(self.address, self.config.timeout):
            return torchft.Manager(
                pg=torchft.ProcessGroupGloo(timeout=step),
                min_replica_size=max(1, self.config.min_workers),
                load_state_dict=None,
                state_dict=None,
                timeout=step,
                quorum_timeout=timedelta(seconds=self.config.timeout),
                # Twice a second: else a call to a lighthouse that died ends at quorum_timeout, though a new one is up.
                quorum_retries=int(2 * self.config.timeout),
                connect_timeout=timedelta(seconds=self.config.timeout),
                rank=0,
                world_size=1,
                store_addr=host,
                store_port=self.store.port,
                lighthouse_addr=f"http://{self.address}",
                replica_id=self.name,
                hostname=host,
            )


def is_due(done: int, every: int, steps_a_round: int) -> bool:
    """Return whether to save after a round that ends with step `done`: the first at or after a multiple of `every`.

    Examples:
        >>> [done for done in range(5, 51, 5) if is_due(done, 12, 5)]
        [15, 25, 40, 50]
    """
    return done % every < steps_a_round


def twins(told: list[list[float]]) -> bool:
    """Return whether two members draw from one stream; `told`: each one's loss, wish to stop, and stream.

    Examples:
        >>> twins([[2.5, 0.0, 17.0], [2.5, 0.0, 18.0]]), twins([[2.5, 0.0, 17.0], [2.4, 0.0, 17.0]])
        (False, True)
    """
    streams = [each[2] for each in told if len(each) > 2]
    return len(set(streams)) < len(streams)


def main() -> NoReturn:
    """Run as a replica started by `demopt train`: exit 2 on a user's mistake, 1 on another error."""
    import logging
    import traceback

    place, launcher, slot, address = sys.argv[1:]
    end_with(int(launcher))
    code = FAILED
    try:
        lighthouse.need_torchft()
        logging.getLogger("torchft").setLevel(logging.CRITICAL)
        code = 0 if Replica(config_of(read_file(Path(place))), int(slot), address).train() else STOPPED
    except (InputError, DemoptError) as error:
        print(f"demopt: {error}", file=sys.stderr)
        if isinstance(error, (InputError, SettingsError)):
            code = MISTAKE
        elif isinstance(error, UnwrittenError):
            code = UNWRITTEN
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

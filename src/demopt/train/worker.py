"""A worker of `demopt train`, from joining the others to the last file.

demopt's launcher starts it as `python -m demopt.train.worker SETTINGS.json`, torchrun as `python -m demopt.cli train`.
"""

import ctypes
import dataclasses
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import NoReturn

from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from demopt.exchange.interface import all_reduce_bytes, gather_values
from demopt.optim.demo import DeMo
from demopt.optim.local_demo import LocalDeMo
from demopt.output import open_outlets, tell
from demopt.replicator.replicator import Stats
from demopt.train import checkpoint
from demopt.train.config import InputError, SharedInputError, TrainConfig, check_same_run, config_of, read_file, resolve
from demopt.train.data import Corpus, batch, load_corpus, numbered, sequences
from demopt.train.loop import Training, Windows, length, passes, train_steps
from demopt.train.method import FLOAT32_BYTES, check_settings, cost_of, make_optimizer, refuse_if_too_large
from demopt.train.model import begin, count_parameters
from demopt.train.out import OutFolder, Row
from demopt.train.report import Report, finish
from demopt.train.team import Team, join, signals_to_stop, stop_on_signals

#: Files beside SETTINGS.json: the launcher asks the run to stop; the run has ended by itself; `OutFolder.old_stop`.
STOP, ENDED, OLD_STOP = "stop", "ended", "old_stop"
REPORT_BYTES = 1 << 16  # room for the error, which torch then writes there
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


@dataclasses.dataclass(eq=False)
class Connected(Training):
    """One of several connected ranks, which take equally many steps; `resumed`: the checkpoint that they go on from.

    With --epochs each step takes the next sequences of the epoch, and each rank a consecutive part of them. So the
    tokens so far give the place in the epoch, whatever the number of workers has been.
    """

    stop_requested: Callable[[], bool]
    resumed: checkpoint.CheckpointRecord | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._dense_bytes = FLOAT32_BYTES * count_parameters(self.model)  # of all gradients
        if self.resumed:
            self.number, self.tokens = self.resumed.step, self.resumed.tokens
        self._total = sequences(self.corpus.train, self.config) * (self.config.epochs or 0)
        self._sequences, self._stopped, self._said_route = 0, False, self.team.world_size == 1
        self.share_out({str(rank): 0.0 for rank in range(self.team.world_size)})

    @property
    def ended(self) -> bool:
        return self.part == 1 if self._total else self.number == self.config.steps

    @property
    def part(self) -> float | None:
        return self.tokens // (self.config.sequence or 1) / self._total if self._total else None

    @property
    def stream(self) -> int:
        return self.team.rank

    def draw(self) -> Windows:
        if self._stopped or self.ended:
            return []
        config, team, train = self.config, self.team, self.corpus.train
        ends = [0, *accumulate(self.batch_of(str(each)) for each in range(team.world_size))]
        rank, tokens = team.rank, config.sequence or 0
        self.number += 1
        if self._total:
            read = self.tokens // tokens
            taken = min(ends[-1], self._total - read)  # the last step may have fewer, of which each rank gets a part
            first, last = (read + taken * end // ends[-1] for end in ends[rank : rank + 2])
            self._sequences, self.tokens = last - first, self.tokens + taken * tokens
            return numbered(train, config, range(first, last))
        self._sequences, self.tokens = ends[rank + 1] - ends[rank], self.tokens + ends[-1] * tokens
        return [batch(train, config, self.number, rank, *each) for each in enumerate(passes(config, self._sequences))]

    def take_step(self, rows: list[Row], seconds: float, pause: bool) -> bool:
        """Takes the optimizer's step; local steps between two rounds do not wait for the network."""
        config, optimizer = self.config, self.optimizer
        pause = pause or self.number % config.save_every == 0
        self.measured(self._sequences, seconds)
        if isinstance(optimizer, LocalDeMo) and (config.global_batch or self._total) and not config.top_k:
            since_round = self.batch_of(str(self.team.rank)) * optimizer.local_steps
            optimizer.samples = max(1, since_round + self._sequences)
        rows[-1] |= {"batch": self._sequences, **self._step(pause)}
        if not (self._has_exchanged or pause):
            return False
        self._reduce(rows)
        if not self._said_route and isinstance(optimizer, DeMo | LocalDeMo) and optimizer.stats.route:  # after a round
            self._said_route = True
            self.report.say(f"route {optimizer.stats.route.partition(';')[0]}")  # without the reason
        return True

    def after_report(self, row: Row) -> None:
        """Saves if a checkpoint is due, where `train_steps` has paused, or if the run is over or was stopped."""
        optimizer = self.optimizer
        if not (self._stopped or self.ended or row["step"] % self.config.save_every == 0):
            return
        if isinstance(optimizer, LocalDeMo):
            optimizer.flush()  # after a requested stop, so that no round stays in flight
        saved = checkpoint.CheckpointRecord(self.number, self.corpus.fingerprint, self.config.record(), self.tokens)
        with self.out.writing(), self.shared(), self.team.waiting():
            self.report.sync()
            checkpoint.save(self.out.checkpoints, saved, self.model, optimizer, self.team)

    @property
    def _has_exchanged(self) -> bool:
        """Whether the ranks exchanged anything in the last step; local steps between two rounds do not."""
        return not (isinstance(self.optimizer, LocalDeMo) and self.optimizer.local_steps)

    def _step(self, pause: bool) -> Row:
        """Takes the optimizer's step; returns its cost for this rank, or, with delay, the cost of the applied round.

        `pause`: no round may stay in flight. After the last step, local steps go into one more round.
        """
        optimizer, began = self.optimizer, time.perf_counter()
        optimizer.step()
        if not isinstance(optimizer, DeMo | LocalDeMo):
            traffic = all_reduce_bytes(self._dense_bytes, self.team.world_size)
            stats = Stats(payload_bytes=self._dense_bytes, sent_bytes=traffic, received_bytes=traffic)
            return {**cost_of(stats, time.perf_counter() - began), "exchange_seconds": None}  # DDP's is in backward
        stats = optimizer.stats
        if isinstance(optimizer, LocalDeMo):
            if pause and optimizer.replicator.in_flight:
                optimizer.flush()
                stats = optimizer.stats.plus(stats)
            if self.ended and optimizer.local_steps:
                optimizer.finish_round(last=True)
                stats = optimizer.stats.plus(stats)
        return cost_of(stats, time.perf_counter() - began)

    def _reduce(self, rows: list[Row]) -> None:
        """One all-reduce for the losses' means, weighted by sequences, the shares of the batch, and stop requests."""
        team = self.team
        weighed, batches = [row["loss"] * row["batch"] for row in rows], [float(row["batch"]) for row in rows]
        speeds = [self.speed if rank == team.rank else 0.0 for rank in range(team.world_size)]
        sums = team.total([*weighed, *batches, *speeds, float(self.stop_requested())])
        for row, total, size in zip(rows, sums, sums[len(rows) :], strict=False):
            row["loss"] = total / size
        if self._has_exchanged:  # not within a round
            self.share_out({str(rank): speed for rank, speed in enumerate(sums[2 * len(rows) : -1])})
        self._stopped = sums[-1] > 0


def work(config: TrainConfig, out: OutFolder, stopping: Callable[[], bool]) -> bool:
    """Trains as one worker; returns whether the run has ended. `stopping`: whether to save and stop after this step."""
    team = join(config)
    config = resolve(dataclasses.replace(config, workers=team.world_size))
    corpus, (config, model) = team.agree(lambda: _prepare(config, team))
    mine = config.record(), corpus.fingerprint, config.resume
    settings, fingerprint, resume = gather_values(team.exchange, mine)[0]
    same = "start all workers with the same settings"

    def check_same() -> None:
        check_same_run(config, corpus.fingerprint, settings, fingerprint, "rank 0", same)
        if config.resume != resume:
            raise InputError(f"--resume is {config.resume}, and rank 0 has {resume}; {same}")

    team.agree(check_same)
    path, resumed = None, None
    if config.resume:
        path, resumed = team.agree(lambda: checkpoint.find(out.checkpoints, config, corpus.fingerprint))
        newest = gather_values(team.exchange, path.name)[0]

        def check_newest() -> None:  # a machine may list a shared folder late
            if path.name != newest:
                told = f"--resume: the newest checkpoint here is {path.name}, that of rank 0 is {newest}"
                raise InputError(f"{told}; start again once {config.out} shows the same on all machines")

        team.agree(check_newest)
    with ExitStack() as held:
        team.agree(lambda: held.enter_context(out.claimed(config)) if team.first else None)
        team.agree(out.require_shared)
        optimizer, is_asked = make_optimizer(config, model.to(team.device)), lambda: stopping() or out.asks_to_stop
        training = Connected(config, out, team, corpus, model, optimizer, is_asked, resumed)
        if path:
            with team.waiting():
                team.agree(lambda: checkpoint.load(path, model, optimizer))
        with out.writing():
            training.report = report = Report(out, config, resumed.step if resumed else 0, team.first)
        _introduce(training)
        with report:
            train_steps(training)
        if team.first and training.ended:
            with out.writing(), training.shared():
                finish(config, out, model, corpus)
        elif team.first:
            again = f"demopt train --resume --out {shlex.quote(config.out)}"
            if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < team.world_size:  # a launcher per machine
                again = "the same commands on all machines, and --resume"
            print(f"stopped after {config.of_steps(training.number)}, saved; go on with: {again}", file=sys.stderr)
        team.barrier()
    return training.ended


def _prepare(config: TrainConfig, team: Team) -> tuple[Corpus, tuple[TrainConfig, nn.Module]]:
    check_settings(config)
    refuse_if_too_large(config, team.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    corpus = load_corpus(config)
    return corpus, begin(dataclasses.replace(config, vocab_size=config.vocab_size or corpus.vocab_size))


def _introduce(training: Connected) -> None:
    """Says what trains on which data, and how this start differs from the one before."""
    config, corpus, team, model = training.config, training.corpus, training.team, training.model
    size, report, resumed = team.world_size, training.report, training.resumed
    report.say(corpus.about)
    name, count = config.model or config.preset, count_parameters(model)
    trains = f"{name}: {count:,} parameters train; {size} x {team.device.type}"
    report.say(f"{trains}; {f'going on after step {resumed.step}' if resumed else length(config, corpus)}")
    report.say_memory(model, training.optimizer, team.device)
    if size == 1:
        report.say("1 worker: nothing is exchanged; for more, --workers 2, or --run ADDRESS on several machines")
    if resumed and (old_size := resumed.settings["workers"]) != size:
        tokens, before = config.tokens_per_step, config_of(resumed.settings, elsewhere=True).tokens_per_step
        told = f"; a step takes {tokens:,} tokens instead of {before:,}, at the same learning rate"
        report.say(f"workers: {old_size} until now, {size} from here{told if tokens != before else ''}")


def under_torchrun(config: TrainConfig, out: OutFolder) -> int:
    """Runs `demopt train` in a process that torchrun started; returns the exit code."""
    if config.run:
        raise SharedInputError("--run needs no torchrun: run demopt train on one machine, demopt join on the others")
    with stop_on_signals() as received:
        ended = record(work)(config, out, lambda: bool(received))
    return 0 if ended else 128 + (received[0] if received else signal.SIGINT)


def made(place: Path) -> Path:
    """Returns a path in the launcher's folder, made again if it is gone: systems clean such folders after days."""
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def main() -> NoReturn:
    """Runs as a worker of demopt's launcher; torch's error file carries an error to the launcher."""
    settings, launcher = Path(sys.argv[1]), int(sys.argv[2])
    open_outlets()
    if sys.platform == "linux":  # it then ends this worker with its launcher, even a killed one
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # the launcher was gone already
            os._exit(1)
    code, stop = 1, settings.with_name(STOP)
    for each in signals_to_stop():  # a service manager sends its SIGTERM to the workers, too
        signal.signal(each, lambda *_: made(stop).touch())

    def work_or_tell(config: TrainConfig, out: OutFolder, stopping: Callable[[], bool]) -> bool:
        try:
            return work(config, out, stopping)
        except Exception as error:
            place = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
            try:
                made(place).write_text(" " * REPORT_BYTES)
            except OSError:  # a full disk: torch's launcher would fail over a cut report; without one it names the rank
                place.unlink(missing_ok=True)
                tell(f"rank {os.environ['RANK']}: {error}")
                raise SystemExit(1) from None
            raise

    try:
        config, old_stop = config_of(read_file(settings)), int(settings.with_name(OLD_STOP).read_text())
        if record(work_or_tell)(config, OutFolder(Path(config.out), old_stop), stop.exists):
            made(settings.with_name(ENDED)).touch()
        code = 0
    finally:
        os._exit(code)  # see `join`; the launcher reports the error


if __name__ == "__main__":
    main()

"""Starts the replicas of this machine for a run whose workers come and go, and starts again those that died."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from demopt.train.checkpoint import check_same_run, read
from demopt.train.config import SETTINGS, InputError, TrainConfig, config_of, holds_checkpoint, resolve
from demopt.train.data import load_corpus, save_corpus, with_vocabulary
from demopt.train.elastic import checkpoint, lighthouse
from demopt.train.elastic.key import read_key
from demopt.train.elastic.replica import MISTAKE, STOPPED, UNWRITTEN
from demopt.train.elastic.writer import Writer
from demopt.train.folder import RunFolder
from demopt.train.launch import RunError, stop_on_signals
from demopt.train.method import check_settings
from demopt.train.report import refuse_missing

QUICK_SECONDS = 10.0  # a replica that dies sooner than this ...
QUICK_DEATHS = 5  # ... so many times in a row is not started again


def train_elastic(config: TrainConfig) -> int:
    """Run `demopt train --workers MIN:MAX`, or with --lighthouse; return the exit code."""
    lighthouse.need_torchft()
    config = resolve(config)
    _check(config)
    check_settings(config)
    folder = RunFolder(Path(config.out))
    folder.refuse_if_taken(config)
    corpus = load_corpus(config)
    config = with_vocabulary(config, corpus)
    refuse_missing(config.tracker)
    found = checkpoint.newest(folder.checkpoints)
    if config.resume and found is not None:
        check_same_run(read(found), config.record(), corpus.fingerprint)
    with folder.held():
        folder.claim(config)
        with stop_on_signals(folder) as received:
            save_corpus(corpus, folder.tokens)
            del corpus
            stopped = _work(config, folder)
    last = checkpoint.newest(folder.checkpoints)
    done = read(last).step if last else 0
    if received:
        print(f"stopped after step {done} of {config.steps}, saved; go on by adding --resume auto", file=sys.stderr)
        return 128 + received[0]
    if stopped:
        print(
            f"another machine stopped the run after step {done} of {config.steps}, saved; go on with --resume auto",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT
    return 0


def _work(config: TrainConfig, folder: RunFolder) -> bool:
    """Keep this machine's replicas running, with a lighthouse of their own if none is named; return as `Crew.work`."""
    if config.lighthouse:
        lighthouse.tell_if_silent(config.lighthouse, config.timeout)
        return Crew(config, folder, config.lighthouse).work()
    mine = lighthouse.Lighthouse(0, config.min_workers, config.join_timeout, config.heartbeat_timeout)
    try:
        return Crew(config, folder, f"localhost:{mine.port}").work()
    finally:
        mine.close()


def join(address: str, given: dict[str, object]) -> int:
    """Run `demopt join`: take the settings of the run at `address`, and train along."""
    lighthouse.need_torchft()
    settings = {**lighthouse.settings_of(address), **{k: v for k, v in given.items() if v is not None}}
    if strange := sorted(set(settings) - set(SETTINGS)):
        raise InputError(f"the run has the setting {strange[0]!r}, which this version of demopt does not know")
    config = config_of({**settings, "tracker": None, "lighthouse": address})  # a tracker is of the machine that asked
    again = holds_checkpoint(Path(config.out))
    return train_elastic(dataclasses.replace(config, resume=again, overwrite=not again))


class Crew:
    """The replica processes of this machine."""

    def __init__(self, config: TrainConfig, folder: RunFolder, address: str) -> None:
        self._config, self._folder, self._address = config, folder, address
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._born: dict[int, float] = {}
        self._over, self._stopped, self._writer = False, False, Writer(folder)
        self._quick: dict[int, int] = dict.fromkeys(range(config.workers), 0)

    def work(self) -> bool:
        """Keep all replicas running until they have finished; return whether they were stopped before the last step."""
        for slot in range(self._config.workers):
            self._start(slot)
        try:
            while self._running and not (self._over and self._writer.asks()):  # nobody is left who writes
                time.sleep(0.05)
                for slot, process in list(self._running.items()):
                    if process.poll() is not None:
                        self._ended(slot, process.returncode)
            for slot, process in list(self._running.items()):  # the writer may have ended just now
                with suppress(subprocess.TimeoutExpired):
                    self._ended(slot, process.wait(1))
        finally:
            for process in self._running.values():
                process.kill()
                process.wait()
        return self._stopped

    def _start(self, slot: int) -> None:
        command = [sys.executable, "-m", "demopt.train.elastic.replica", str(self._folder.config), str(os.getpid())]
        self._running[slot] = subprocess.Popen([*command, str(slot), self._address], start_new_session=True)
        self._born[slot] = time.monotonic()

    def _ended(self, slot: int, code: int) -> None:
        del self._running[slot]
        if code == MISTAKE:
            raise RunError(f"worker {slot} was refused, see above", MISTAKE)
        if code == UNWRITTEN:
            raise RunError(
                "all steps are done, but not all of it is written, see above; go on by adding --resume auto", 1
            )
        if code == STOPPED:
            self._stopped, code = True, 0
        if code == 0:  # the run is over; one that has just been started again would find nobody
            self._over = True
        if self._over or self._folder.stop.exists():
            return
        quick = time.monotonic() - self._born[slot] < QUICK_SECONDS
        self._quick[slot] = self._quick[slot] + 1 if quick else 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if self._quick[slot] >= QUICK_DEATHS:
            print(
                f"worker {slot} ended by {how} {QUICK_DEATHS} times at once; it stays away", file=sys.stderr, flush=True
            )
            if not self._running:
                raise RunError("no worker is left", 1)
            return
        print(f"worker {slot} was lost ({how}) and is started again", file=sys.stderr, flush=True)
        self._start(slot)


def _check(config: TrainConfig) -> None:
    """Raise InputError for what cannot be had together with workers that come and go."""
    if config.optimizer not in ("demo", "local"):
        raise InputError(f"--optimizer {config.optimizer} needs all its workers; with MIN:MAX take demo or local")
    if read_key(config.key_file) is not None:
        raise InputError("elastic training does not use a key yet; leave out --key-file and DEMOPT_KEY")
    if config.delay:
        raise InputError("--delay 1: a round in the background cannot be voted on; leave it out with MIN:MAX")
    if config.lighthouse:
        lighthouse.split(config.lighthouse)

"""One worker of a run in a folder: it joins, takes part, and leaves with its own state saved."""

import dataclasses
import math
import os
import shlex
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from demopt.errors import DemoptError, DriftError, ExchangeError, first_line, printable
from demopt.exchange import SingleRank
from demopt.optim.local_demo import LocalDeMo
from demopt.output import tell
from demopt.replicator.replicator import Stats
from demopt.runs import log
from demopt.runs.checkpoints import weights_digest
from demopt.runs.exchange import FolderExchange
from demopt.runs.open_round import FolderOutcome
from demopt.runs.reading import MOST_NUMBER
from demopt.runs.store import full
from demopt.state import load_file
from demopt.train.config import (
    SETTINGS,
    Given,
    InputError,
    TrainConfig,
    check_paths,
    check_same_run,
    config_of,
    flag,
    read_run,
    resolve,
)
from demopt.train.data import TOKEN_SUFFIXES, Corpus, batch, load_corpus, numbered, save_tokenizer, sequences
from demopt.train.loop import Training, Windows, length, passes, train_steps
from demopt.train.method import check_settings, cost_of, make_optimizer, refuse_if_too_large
from demopt.train.model import begin, save
from demopt.train.out import OutFolder, Row, write_whole
from demopt.train.report import Report, finish
from demopt.train.runs.command import NoRunError, key_of, open_run, typed
from demopt.train.runs.status import numbers_of, sequences_so_far
from demopt.train.team import Team, cores, pick_device, stop_on_signals

#: The settings that a machine takes from a run: those that must be equal, and where its text, model and tokenizer are.
FROM_RUN = {"data", "model", "tokenizer", *(name for name, about in SETTINGS.items() if not about["free"])}
TEXT = "text"  # in the run's settings: the fingerprint of the text
LONG = 2.0  # seconds of waiting for others that are worth a message


def train_in_folder(config: TrainConfig, run: FolderExchange | None = None, out: OutFolder | None = None) -> int:
    """Runs `demopt train --run ADDRESS`: starts the run, or joins it if it exists; returns the exit code.

    If a run is known, `run` or the one that --out belongs to, no other one is started.
    """
    config = resolve(config)
    device = _check(config)
    out = out or OutFolder(Path(config.out))
    if not (config.overwrite or config.resume) and _is_of(out, config.run):  # the same command again, after an error
        begun = any(place.exists() for place in out.old if place != out.config)  # False: killed before it had a run
        config = dataclasses.replace(config, resume=begun, overwrite=not begun)
    out.refuse_if_taken(config)
    key = key_of(config.key_file) if run is None else None
    if config.resume:
        run = run or open_run(config.run, key, config.timeout, " --overwrite")
        known = out.identity.read_text(encoding="utf-8", errors="replace") if out.identity.exists() else None
        if known != run.record.identity and (known or not _is_of(out, config.run)):  # a run that has moved is the same
            raise InputError(f"--out {config.out} holds another run than {config.run}; give another --out")
    elif run is None:
        with suppress(NoRunError):  # then it starts one. A wish to stop from now on is meant for this worker, too
            run = open_run(config.run, key, config.timeout)
    refuse_if_too_large(config, device, 1)
    corpus = load_corpus(config)
    with _fitting():
        config, model = begin(dataclasses.replace(config, vocab_size=config.vocab_size or corpus.vocab_size))
    if run is None:
        shared = {name: value for name, value in config.record().items() if name in FROM_RUN}
        shared |= {"tokenizer": None if config.tokenizer == config.model else config.tokenizer}
        try:
            run = FolderExchange(
                config.run, patience=config.timeout, key=key, checkpoint_every=config.checkpoint_every,
                keep_log=config.keep_log, settings={**shared, TEXT: corpus.fingerprint},
            )  # fmt: skip
        except ValueError as error:
            raise InputError(f"--run: {error}") from None
    run.late, found = config.late, log.read_record(run.store)
    if found is not None:
        _check_record(found, config, corpus)
    fresh = config.overwrite or not out.config.exists()
    with out.claimed(config), stop_on_signals(after="one more round") as received:
        run.asked_to_stop = lambda: bool(received) or out.asks_to_stop
        try:
            if config.threads or "OMP_NUM_THREADS" not in os.environ:  # torch has read that
                torch.set_num_threads(config.threads or cores())
            with _fitting():
                team, model = Team(0, 1, device, SingleRank()), model.to(device)
                optimizer = make_optimizer(config, model, run)
            assert isinstance(optimizer, LocalDeMo)
            worker = Worker(config, out, team, corpus, model, optimizer, run)
            worker.train()
        except DemoptError as error:
            if not received:
                raise
            return tell(str(error), 128 + received[0])
        finally:
            run.close()
            if fresh and not run.joined:
                out.config.unlink(missing_ok=True)  # nothing happened here: the same command may come again
    if not worker.ended:
        cause = "demopt stop ended the run" if run.stopping else "this machine left"
        again = _to_go_on(config, found.settings if found else config.record())
        print(f"{cause} after {config.of_steps(worker.steps_done)}, saved; go on with: {again}", file=sys.stderr)
        return 128 + (received[0] if received else signal.SIGINT)
    return 0


@contextmanager
def _fitting() -> Iterator[None]:
    """Turns an error of a model that is too large, as a stranger's run may ask for, into InputError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise InputError(f"the model does not fit into this machine's memory: {first_line(error)}") from None


def _to_go_on(config: TrainConfig, theirs: Given) -> str:
    """Returns the command that makes this worker go on. `theirs`: the run's settings, which the command omits."""
    if any(getattr(config, name) != getattr(TrainConfig, name) for name in ("merge", "tracker", "compile", "timeout")):
        key = f" --key-file {typed(config.key_file)}" if config.key_file else ""
        return f"demopt train --config {typed(str(OutFolder(Path(config.out)).config))}{key}"  # join has no such flags
    usual = {name: getattr(TrainConfig, name) for name in ("key_file", "device", "threads", "late")}
    usual |= {name: theirs[name] for name in ("data", "batch", "model")}
    usual["tokenizer"] = theirs.get("tokenizer") or config.model or "bytes"
    more = ["--out", config.out]
    for name, value in usual.items():
        if (own := getattr(config, name)) != value:
            more += [word for each in (own if isinstance(own, list) else [own]) for word in (flag(name), str(each))]
    return f"demopt join {typed(config.run)} {shlex.join(more)}"


def _check_record(found: log.Record, config: TrainConfig, corpus: Corpus) -> None:
    """Raises InputError if the run that was found has other settings or another text."""
    if TEXT not in found.settings:
        raise InputError(f"the run in {config.run} was not started by demopt train; join it with its script")
    before = {name: value for name, value in found.settings.items() if name in FROM_RUN}
    again = f"demopt join {typed(config.run)} takes all settings from it"
    check_same_run(config, corpus.fingerprint, before, str(found.settings[TEXT]), f"the run in {config.run}", again)


def _check(config: TrainConfig) -> torch.device:
    """Returns the device; InputError for settings that do not go with a folder."""
    if config.optimizer != "local":
        raise InputError(f"--run takes --optimizer local, which exchanges every few steps; it is {config.optimizer}")
    if config.workers > 1:
        raise InputError(
            f"--run takes one worker per command, and --workers is {config.workers}; for each further one start "
            f"demopt join {typed(config.run)} with another --out, on a machine with GPUs also with CUDA_VISIBLE_DEVICES"
        )
    check_settings(config)
    return pick_device(config.device, 0, 1)


@dataclasses.dataclass(eq=False)
class Worker(Training):
    """A worker, from joining to the last file; its steps end in rounds of the run in the folder.

    With --epochs, the run's manifests hand out the sequences, and the run ends when they have handed out all.
    """

    optimizer: LocalDeMo
    run: FolderExchange

    def __post_init__(self) -> None:
        super().__post_init__()
        config, run, corpus = self.config, self.run, self.corpus
        run.sequences.total = sequences(corpus.train, config) * (config.epochs or 0)
        run.rounds = math.ceil(config.steps / config.sync_every) if config.steps else None
        run.note = self._note
        run.sequences.weigh = config.top_k is None  # by samples: a small machine counts for less
        self._loss = math.nan  # of the step that ends the round
        self.drawn = 0  # windows of this worker's stream
        self._step_sequences = 0  # of the step that was drawn last
        self._sequences = 0  # of all workers, in the rounds that the weights include
        self._members: set[str] = set()
        self._validated: Row = {}  # the last validation loss, for the others
        self._heard: Row = {}  # of rounds since the last step
        self._speeds: dict[str, float] = {}
        self._last: FolderOutcome | None = None  # the last one that was heard

    @property
    def steps_done(self) -> int:
        """The run's steps: those of its rounds, whoever took them, and this worker's local ones since."""
        rounds = int(self.optimizer.replicator.round_number) + self.optimizer.replicator.in_flight
        steps = rounds * self.config.sync_every + self.optimizer.local_steps
        return min(self.config.steps, steps) if self.config.steps else steps

    @property
    def ended(self) -> bool:
        """Whether the run has all its rounds, or this worker has its last step."""
        return self.run.is_complete or self._is_at_last_step or self.steps_done == self.config.steps

    @property
    def _is_at_last_step(self) -> bool:
        """Whether the step whose batch was drawn last is the run's last."""
        return self.number == self.config.steps

    @property
    def part(self) -> float | None:
        """With --epochs, the part of the run's sequences that its manifests have."""
        reading = self.run.decided.reading if self.run.decided else None
        return reading.position / reading.total if reading and self.run.sequences.total else None

    @property
    def stream(self) -> int:
        return zlib.crc32(self.run.worker.encode())

    def train(self) -> None:
        """Joins, takes the run's steps, and writes the files of a finished run."""
        config, out, run = self.config, self.out, self.run
        own = ", with the state that it left" if self._resume() else ""
        run.say = lambda text: print(printable(text), flush=True)
        self._want()
        self.optimizer.join()
        try:
            _check_record(run.record, config, self.corpus)  # another machine may have started it since the first look
        except InputError:
            run.take_back_hellos(0)
            raise
        with out.writing():
            write_whole(out.identity, lambda aside: aside.write_text(run.record.identity, encoding="utf-8"))
        begun = self.number = self.steps_done
        with ExitStack() as held:
            with out.writing():
                self.report = report = held.enter_context(Report(out, config, begun, True))
            report.say(self.corpus.about)
            report.say(
                f"run {run.record.identity} in {config.run}, as {run.worker}: "
                + (f"joined after step {begun}{own}" if begun else length(config, self.corpus))
            )
            report.say_memory(self.model, self.optimizer, self.team.device)
            if not begun:
                key = f" --key-file {typed(config.key_file)}" if config.key_file else ""
                report.say(f"others: demopt join {typed(config.run)}{key} --out runs/joined")
            self._count()
            self._hear()  # of a round that an error had left open
            self._heard = {}
            out.state.unlink(missing_ok=True)  # it is used once: its content is sent from now on
            try:
                train_steps(self)
            except DemoptError as error:
                try:
                    if isinstance(error, DriftError):
                        run.leaving = True  # so it asks nobody to wait for it
                        self.optimizer.resync()  # a saved state must not go on from weights that differ
                        told = f"{error.reason}; it has taken the run's newest weights: the same command goes on"
                        error = DemoptError(told)
                    run.close()
                    with suppress(DemoptError):  # the store may be away
                        self._hear()
                    self._save()
                    print(f"saved: {printable(str(out.state))}", flush=True)
                except DemoptError as lost:
                    print(f"not saved: {printable(str(lost))}", flush=True)
                raise error
        if not self.ended:
            self._save()
        try:
            if self.ended:  # first: an upload may take long
                with out.writing(), self.shared():
                    finish(config, out, self.model, self.corpus, self.number > begun)
        finally:
            run.wait_for_uploads()
        replicator = self.optimizer.replicator
        print(f"weights after {replicator.round_number} rounds: sha256 {weights_digest(replicator)}", flush=True)

    # Its steps

    def draw(self) -> Windows:
        """Returns the windows of the next step; none if the run is over. If it holds none, a round asks for some."""
        config, run, train = self.config, self.run, self.corpus.train
        while not (self.ended or run.stopping or run.leaving):
            size, self.number = self.batch_of(run.worker), self.steps_done + 1
            if not run.sequences.total:
                self._step_sequences = size
                parts = enumerate(passes(config, size), self.drawn + 1)
                drawn = [batch(train, config, part, self.stream, size=each) for part, each in parts]
                self.drawn += len(drawn)
                return drawn
            self._want()
            numbers = run.sequences.take(size)
            self._step_sequences = len(numbers)
            if numbers:
                return numbered(train, config, numbers)
            if self.optimizer.replicator.in_flight:
                self.optimizer.flush()
                self._hear()
            else:
                run.leaving = run.asked_to_stop()
                self._finish_round(math.nan)
        if run.sequences.total:
            self.number = self.steps_done  # rounds may have come since the last step
        return []

    def take_step(self, rows: list[Row], seconds: float, pause: bool) -> bool:
        """Takes a local step, and finishes a round if due or all is read. Returns whether `rows` may be reported."""
        run, row = self.run, rows[-1]
        run.sequences.in_steps += self._step_sequences
        run.leaving = run.asked_to_stop() or self._is_at_last_step
        began = time.perf_counter()
        self.optimizer.local_step()
        local = time.perf_counter() - began
        self.measured(self._step_sequences, seconds)
        # All that it was given; later rounds may give more.
        has_read_all = bool(run.sequences.total) and not run.sequences.left
        stats = self.optimizer.stats
        if run.leaving or has_read_all or self.optimizer.due:
            stats = self._finish_round(row["loss"])
            self.number = max(self.number, self.steps_done)  # the run's step, even if a round ended early
        senders = run.decided.senders if run.decided else ()
        row |= {"batch": self._step_sequences, "workers": max(1, len(senders)), **self._heard}
        row |= cost_of(stats, local + sum(stats.seconds.values()))
        self._heard = {}
        # With all read, only the next round tells whether this step was the last: it may give no more. Its row waits.
        return pause or self.ended or not has_read_all

    def after_report(self, row: Row) -> None:
        """Keeps the validation loss for the next messages."""
        if "val_loss" in row:
            self._validated = {"val_loss": row["val_loss"]} if math.isfinite(row["val_loss"]) else {}

    def _want(self) -> None:
        """Says how many sequences this worker wants to hold: those of a round; with delay, of two."""
        ahead = 2 if self.optimizer.replicator.options.background else 1
        self.run.sequences.wanted = min(self.batch_of(self.run.worker) * self.config.sync_every * ahead, MOST_NUMBER)

    def _finish_round(self, loss: float) -> Stats:
        """Finishes the round; returns its cost. `loss`: of the step."""
        self._loss, stats = loss, Stats()
        if self.optimizer.replicator.in_flight:  # first: it may end the run, and then no other round follows
            self.optimizer.flush()
            stats = self.optimizer.stats
            self._hear(loss)
            # Others may have completed the run while this worker was left out. A stop ends all workers after that round
            # except one that has taken the run's last steps: with them it completes the run.
            if self.run.is_complete or (self.run.stopping and not self._is_at_last_step):
                return stats
        self.optimizer.finish_round(last=self.run.leaving)
        self._hear(loss)
        return self.optimizer.stats.plus(stats)

    def _note(self) -> Row:
        """Returns this worker's numbers, for a message that is made now."""
        self._hear()  # of a round that left this worker out, if it sends again at once
        self._count()
        loss = self._loss if math.isfinite(self._loss) else None
        counts = {"sequences": self.run.sequences.unsent, "before": self._sequences}
        return {"loss": loss, **counts, **self._validated, "speed": self.speed}

    def _count(self) -> None:
        """Counts the sequences of all rounds that the weights include, and their tokens."""
        self._sequences = sequences_so_far(self.run.store, self.run.record.identity, self.run.decided)
        self.tokens = self._sequences * (self.config.sequence or 0)

    def _hear(self, loss: float = math.nan) -> None:
        """Notes a new outcome for the next row; reports workers that came, left, or were waited for."""
        run, last, report = self.run, self.run.last, self.report
        if last is None or last is self._last:
            return
        self._last, manifest = last, last.manifest
        self._count()
        notes = [numbers_of(sender.note) for sender in manifest.senders]
        if last.slept > LONG:
            report.say(f"round {manifest.round + 1}: this worker itself slept for {last.slept:.1f} s")
        if last.waited > LONG:
            whom = ", ".join(last.waited_for) or "the store, unless this worker slept"
            report.say(f"round {manifest.round + 1}: waited {last.waited:.1f} s for {whom}")
        decided = run.decided or manifest  # a later one, if this worker has caught up since
        members = set(decided.members)
        came, gone = members - self._members, self._members - members
        left = gone & {sender.worker for each in (manifest, decided) for sender in each.senders}  # their last message
        words = (("joined" if self._members else "workers", came), ("left", left), ("no longer expected", gone - left))
        for word, names in words:
            if names and not (run.leaving or run.stopping):
                report.say(f"round {decided.round + 1}: {word}: {', '.join(sorted(names))}")
        self._members = members
        told = ((sender.worker, numbers_of(sender.note)) for each in (manifest, decided) for sender in each.senders)
        self._speeds |= {worker: note["speed"] for worker, note in told if note.get("speed")}
        if not run.leaving:
            self.share_out({each: self._speeds.get(each, 0.0) for each in {*members, run.worker}})
        known = [note["loss"] for note in notes if "loss" in note]
        found: Row = {"round": manifest.round + 1, "waited_seconds": last.waited}
        if known and math.isfinite(loss):
            found["loss"] = sum(known) / len(known)
        self._heard |= found

    # Leaving, and coming back

    def _save(self) -> None:
        """Saves this worker's state, with the message whose round an error left open: it may be in the store."""
        # Not `state_dict`, which warns of local steps: here they are meant.
        state = {"drawn": self.drawn, "optimizer": self.optimizer.own_state_dict()}
        with self.out.writing():
            write_whole(self.out.state, lambda aside: torch.save(state, aside))

    def _resume(self) -> bool:
        """Takes back the state that this worker left with, if there is one."""
        place = self.out.state
        if not (self.config.resume and place.exists()):
            return False
        try:
            with place.open("rb") as file:
                state = load_file(file)
            self.drawn = int(state["drawn"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (MemoryError, torch.OutOfMemoryError):  # the state is sound
            raise
        except Exception as error:  # of the file or the optimizer: it may hold anything
            told = f"{place} cannot be read: {first_line(error)}; delete it, and this worker joins anew"
            raise InputError(told) from None
        return True


def settings_to_join(address: str, key_file: str | None, given: Given) -> tuple[TrainConfig, FolderExchange]:
    """Returns the settings with which a machine joins a run (the run's and its own), and the run."""
    config, run = settings_of_run(address, key_file, given, TrainConfig.timeout)
    usual = run.record.settings.get("batch")
    if config.batch != usual and not config.global_batch and TEXT in run.record.settings:
        raise InputError(f"--batch is {config.batch}, and the run has {usual}; it may differ only with --global-batch")
    absent = [name for name in config.data if not os.path.exists(name)]  # or it may not be looked up
    if absent and not given.get("data"):
        raise InputError(f"the run's text is {absent[0]}, which is not here: give a copy of it by --data")
    sources = [*config.data, config.model, config.tokenizer] if config.data else ["the text of the standard library"]
    print(f"reading {printable(', '.join(filter(None, sources)))} ...", flush=True)
    again = OutFolder(Path(config.out)).config.exists()
    return dataclasses.replace(config, keep_log=run.record.keep_log, resume=again), run


def settings_of_run(
    address: str, key_file: str | None, given: Given, patience: float = 30.0
) -> tuple[TrainConfig, FolderExchange]:
    """Returns the settings of a run, replaced by those of `given` that are not None, and the run."""
    own = {name: value for name, value in given.items() if value is not None}
    run = open_run(address, key_of(key_file), patience)
    known = {name: value for name, value in run.record.settings.items() if name in FROM_RUN}  # it decides nothing else
    check_paths(own)
    config = config_of({**known, **own, "run": address, "key_file": key_file}, elsewhere=True)
    if "model" in own and TEXT in run.record.settings and not known.get("model"):
        raise InputError(f"the run in {address} began with a fresh model; leave out --model")
    for name, path in (("model", config.model), ("tokenizer", config.tokenizer)):
        if path and path != "bytes" and name not in own and not os.path.exists(path):
            raise InputError(f"the run's {name} is {path}, which is not here: give a copy of it by --{name}")
    return config, run


def _is_of(out: OutFolder, address: str) -> bool:
    """Whether a worker of the run at `address` has written to the folder."""
    with suppress(ValueError):  # the record is of a run without a folder, or damaged
        place = full(address) if out.config.exists() else ""
        with suppress(ExchangeError):  # the record's run is on a share that is away, and this one is not
            return bool(place) and full(str(read_run(out.root).get("run"))) == place
    return False


def export_model(address: str, key_file: str | None, given: Given) -> int:
    """Writes the newest weights that all workers have, and the tokenizer, to --out; returns the number of rounds."""
    config, run = settings_of_run(address, key_file, given)
    if "steps" not in run.record.settings:
        raise InputError(f"the run in {address} was not started by demopt train; see LocalDeMo.observe for its script")
    out = OutFolder(Path(config.out))
    out.refuse_sources(config, ())
    if out.metrics.exists() or out.identity.exists():
        raise InputError(f"--out {config.out} holds a run; give another --out")
    if there := sorted(
        each.name for kind in ("*.safetensors", "*config.json", "tokenizer*") for each in out.root.glob(kind)
    ):
        raise InputError(f"--out {config.out} already holds {there[0]}; delete the model there, or give another --out")
    with _fitting():
        config, model = begin(resolve(config))
        optimizer = make_optimizer(config, model, run)
        assert isinstance(optimizer, LocalDeMo)
        rounds = optimizer.observe()
        text = not any(name.endswith(TOKEN_SUFFIXES) for name in config.data)
        with out.writing(), optimizer.shared():
            save(config, model, out.root, config.merge)
            save_tokenizer(config, out.root, text)
    return rounds

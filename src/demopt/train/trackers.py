"""Experiment trackers: each a few lines over its library, which is imported only if --tracker names it.

They write below --out; with --online, wandb sends as it goes. What a library reads from the environment
(WANDB_MODE, WANDB_PROJECT, MLFLOW_TRACKING_URI, TRACKIO_DIR, ...) comes first.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout

from demopt.errors import kind_and_line
from demopt.train.config import InputError, TrainConfig
from demopt.train.folder import RunFolder
from demopt.train.progress import Row

PROJECT = "demopt"
# These libraries count their users over the network; without --online they shall not.
UNCOUNTED = {
    "DO_NOT_TRACK": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}


def refuse_missing(names: Iterable[str]) -> None:
    """Raise InputError if the library of a tracker is not installed.

    Examples:
        >>> refuse_missing([])
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without origin: a folder of that name, such as wandb's own
            raise InputError(f"--tracker {name}: {name} is missing; install it with: pip install {name}")


class Tracker(ABC):
    """Where the figures of a run go. It is made with (config, folder, steps done before)."""

    @abstractmethod
    def __init__(self, config: TrainConfig, folder: RunFolder, done: int) -> None: ...

    @abstractmethod
    def log(self, step: int, figures: dict[str, float]) -> None:
        """Take in the figures of one step."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Write what is left, and say how the run ended."""


class TensorBoard(Tracker):
    """Event files; those of steps that a resumed run repeats are hidden."""

    def __init__(self, config: TrainConfig, folder: RunFolder, done: int) -> None:
        del config
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder.tracked("tensorboard")), purge_step=done + 1)

    def log(self, step: int, figures: dict[str, float]) -> None:
        """As `Tracker`."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        """As `Tracker`."""
        del failed
        self._writer.close()


class WandB(Tracker):
    """Weights & Biases: a run in the folder, to be sent by `wandb sync`, or with --online a run on the server."""

    def __init__(self, config: TrainConfig, folder: RunFolder, done: int) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", folder.root.name),
            dir=os.environ.get("WANDB_DIR", str(folder.root)),
            mode=None if "WANDB_MODE" in os.environ else "online" if config.online else "offline",
            config={**config.record(), "done_before": done},
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, figures: dict[str, float]) -> None:
        """As `Tracker`."""
        self._run.log(figures, step=step)

    def close(self, failed: bool) -> None:
        """As `Tracker`."""
        self._run.finish(exit_code=int(failed))


class MLflow(Tracker):
    """MLflow: a database in the folder, or the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, config: TrainConfig, folder: RunFolder, done: int) -> None:
        import mlflow

        self._mlflow = mlflow
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of every table that it makes
        if "MLFLOW_TRACKING_URI" not in os.environ:
            place = folder.tracked("mlflow")
            place.mkdir(exist_ok=True)
            mlflow.set_tracking_uri(f"sqlite:///{place.resolve() / 'mlflow.db'}")
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        mlflow.start_run(run_name=folder.root.name)
        mlflow.log_params({**config.record(), "done_before": done})

    def log(self, step: int, figures: dict[str, float]) -> None:
        """As `Tracker`."""
        self._mlflow.log_metrics(figures, step=step, synchronous=False)

    def close(self, failed: bool) -> None:
        """As `Tracker`."""
        self._mlflow.flush_async_logging()
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class Trackio(Tracker):
    """trackio: a database in the folder, which `trackio show` draws."""

    def __init__(self, config: TrainConfig, folder: RunFolder, done: int) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder.tracked("trackio").resolve()))  # read when it is imported
        import trackio

        self._trackio = trackio
        settings = {**config.record(), "done_before": done}
        trackio.init(project=PROJECT, name=folder.root.name, config=settings, resume="allow", embed=False)

    def log(self, step: int, figures: dict[str, float]) -> None:
        """As `Tracker`."""
        self._trackio.log(figures, step=step)

    def close(self, failed: bool) -> None:
        """As `Tracker`."""
        del failed
        self._trackio.finish()


KINDS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio}


class Trackers:
    """The trackers of a run. One that fails while the run trains is left out from then on: training goes on."""

    def __init__(self, config: TrainConfig, folder: RunFolder, done: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._open: dict[str, Tracker] = {}
        refuse_missing(config.tracker)
        if config.tracker and not config.online:
            for name, value in UNCOUNTED.items():
                os.environ.setdefault(name, value)
        for name in dict.fromkeys(config.tracker):
            try:
                with _silently():
                    self._open[name] = KINDS[name](config, folder, done)
            except Exception as error:  # no login, no server, another version: each library has errors of its own
                raise InputError(f"--tracker {name}: {kind_and_line(error)}") from None

    def log(self, row: Row) -> None:
        """Pass on all figures of a step that are numbers."""
        figures = {name: float(value) for name, value in row.items() if name != "step" and value is not None}
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(row["step"], figures)
            except Exception as error:
                del self._open[name]
                self._say(f"--tracker {name} failed, training goes on without it: {kind_and_line(error)}")

    def close(self, failed: bool) -> None:
        """Close all of them."""
        for name, tracker in self._open.items():
            try:
                with _silently():
                    tracker.close(failed)
            except Exception as error:
                self._say(f"--tracker {name} could not be closed: {kind_and_line(error)}")
        self._open.clear()


@contextmanager
def _silently() -> Iterator[None]:
    """Let a library print nothing among the run's lines, and ask nothing: a worker has no terminal of its own."""
    before = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing, redirect_stdout(io.StringIO()):
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before

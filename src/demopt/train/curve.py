"""The losses of a run with what they belong to, to be drawn beside those of another run: OUT/curve.json."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demopt.errors import one_line
from demopt.train.config import Given, InputError, TrainConfig, flag
from demopt.train.progress import Row, workers
from demopt.train.versions import versions

POINTS = 1000  # training losses in a curve, at most
STORED = Path(__file__).with_name("baselines")  # curves of AdamW with DDP that come with the package
# Of the settings that all optimizers know, those that two need not share for their losses to be compared.
OWN = {"optimizer", "lr", "weight_decay", "beta1", "beta2", "eps", "eval_every", "device", "compile"}
NAMES = {"demo": "DeMo", "local": "local steps", "muon": "Muon with DDP", "adamw": "AdamW with DDP"}


@dataclass(frozen=True)
class Curve:
    """Losses by step; where there are more steps than `POINTS`, each training loss is a mean over several."""

    settings: Given  # those of `identity`
    fingerprint: str  # of the data
    made_with: dict[str, str]
    unit: str
    step: list[int]
    loss: list[float | None]
    val_step: list[int]
    val_loss: list[float | None]
    sent_bytes: float  # by one worker, mean of a step
    step_seconds: float | None  # mean; None in stored curves, which are of another machine

    @property
    def label(self) -> str:
        """What trained."""
        return NAMES.get(str(self.settings.get("optimizer")), "?")

    @property
    def final(self) -> float:
        """The last validation loss; NaN if it was not finite."""
        return _number(self.val_loss[-1] if self.val_loss else None)


def curve_of(rows: list[Row], config: TrainConfig, fingerprint: str, bytes_per_token: float | None) -> Curve:
    """Return the curve of a run's rows."""
    each = math.ceil(len(rows) / POINTS)
    parts = [rows[at : at + each] for at in range(0, len(rows), each)]
    measured = [row for row in rows if "val_loss" in row]
    return Curve(
        identity(config) | {"workers": workers(config, rows)},
        fingerprint,
        versions(),
        "nats a byte" if bytes_per_token == 1 else "nats a token",
        [part[-1]["step"] for part in parts],
        [_mean([row["loss"] for row in part]) for part in parts],
        [row["step"] for row in measured],
        [row["val_loss"] for row in measured],
        sum(row["sent_bytes"] for row in rows) / len(rows),
        sum(row["step_seconds"] for row in rows) / len(rows),
    )


def identity(config: TrainConfig) -> Given:
    """Return the settings that decide what a run computes.

    Examples:
        >>> "steps" in identity(TrainConfig()), "out" in identity(TrainConfig())
        (True, False)
    """
    strict = [item.name for item in dataclasses.fields(config) if not item.metadata["free"]]
    return {name: getattr(config, name) for name in [*strict, "workers"]}


def unlike(one: Given, other: Given) -> str | None:
    """Return a setting, other than the optimizer's own, that two runs do not share; None if they can be compared.

    Examples:
        >>> one, other = TrainConfig(optimizer="adamw", lr=0.1), TrainConfig(optimizer="local", steps=3)
        >>> unlike(identity(one), identity(other))
        'steps'
        >>> unlike(identity(one), identity(TrainConfig(optimizer="local", top_k=7))) is None
        True
    """
    mine = [item.name for item in dataclasses.fields(TrainConfig) if item.metadata["fits"] is None]
    shared = [name for name in mine if name in one.keys() | other.keys() and name not in OWN]
    return next((name for name in shared if one.get(name) != other.get(name)), None)


def write_curve(curve: Curve, path: Path) -> None:
    """Write the curve as JSON."""
    path.write_text(json.dumps(dataclasses.asdict(curve), allow_nan=False) + "\n", encoding="utf-8")


def read_curve(path: Path) -> Curve:
    """Read a curve that `write_curve` wrote; ValueError if it is none."""
    found: Any = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.keys() != {item.name for item in dataclasses.fields(Curve)}:
        raise ValueError("not a curve of this version of demopt")
    curve = Curve(**found)
    numbers = (curve.step, curve.loss, curve.val_step, curve.val_loss, [curve.sent_bytes, curve.step_seconds])
    if not isinstance(curve.settings, dict) or not all(map(_is_row, numbers)):
        raise ValueError("damaged: a value is not of its kind")
    if len(curve.step) != len(curve.loss) or len(curve.val_step) != len(curve.val_loss):
        raise ValueError("damaged: steps and losses are not as many")
    return curve


def _is_row(values: Any) -> bool:
    return isinstance(values, list) and all(value is None or isinstance(value, int | float) for value in values)


def baseline(config: TrainConfig, fingerprint: str) -> Curve | None:
    """Return the curve to draw beside a run: that of --baseline, or a stored one of the same settings and data.

    InputError if --baseline names a run that differs in more than the optimizer.
    """
    if config.baseline:
        return _named(config, fingerprint)
    if config.elastic or config.optimizer == "adamw":
        return None
    for path in sorted(STORED.glob("*.json")):
        curve = read_curve(path)
        if curve.fingerprint == fingerprint and unlike(curve.settings, identity(config)) is None:
            return dataclasses.replace(curve, step_seconds=None)
    return None


def _named(config: TrainConfig, fingerprint: str) -> Curve:
    path = Path(config.baseline) / "curve.json"
    if Path(config.baseline).resolve() == Path(config.out).resolve():
        raise InputError(f"--baseline {config.baseline} is this run's own --out; name the folder of another run")
    try:
        curve = read_curve(path)
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise InputError(f"--baseline {config.baseline}: wanted the folder of a finished run; {path}: {why}") from None
    mine = identity(config)
    if (name := unlike(curve.settings, mine)) is not None:
        raise InputError(
            f"--baseline {config.baseline}: {flag(name)} was {curve.settings.get(name)} there and is {mine.get(name)} "
            "here; a baseline differs in the optimizer alone"
        )
    if curve.fingerprint != fingerprint:
        raise InputError(f"--baseline {config.baseline}: was trained on other text or tokens than this run")
    return curve


def _mean(losses: list[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return round(sum(known) / len(known), 5) if known else None


def _number(value: float | None) -> float:
    return float("nan") if value is None else value

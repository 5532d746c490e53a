"""Where settings come from: flags, a config file, the recorded run, the preset; merged into one TrainConfig."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from demopt.core.names import suggestion
from demopt.errors import one_line
from demopt.train.config import Given, InputError, TrainConfig, flag
from demopt.train.published import PUBLISHED, SCHEDULE


def read_file(path: Path) -> Given:
    """Read settings from a .toml or .json file and check their names."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            import tomllib

            found = tomllib.loads(text)
        else:
            found = json.loads(text)
    except ModuleNotFoundError:
        raise InputError(f"{path}: TOML needs Python 3.11 or newer; write the config file as .json") from None
    except OSError as error:
        raise InputError(f"config file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"config file {path}: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise InputError(f"config file {path}: wanted settings by name, got {type(found).__name__}")
    known = [f.name for f in dataclasses.fields(TrainConfig)]
    for name in found:
        if name not in known:
            raise InputError(f"config file {path}: unknown setting {name!r}{suggestion(name, known)}")
    return found


def assemble(given: Given, file: Path | None = None) -> TrainConfig:
    """Merge settings, highest priority first: flags, config file, recorded run (--resume), preset, defaults.

    Examples:
        >>> assemble({"lr": 0.1, "steps": None}).lr
        0.1
    """
    settings = read_file(file) if file else {}
    told = {name: value for name, value in given.items() if value is not None}
    settings.update(told)
    settings.update(_workers(settings.get("workers")))
    if settings.get("resume_auto"):
        out = Path(settings.get("out", TrainConfig.out))
        settings["resume" if holds_checkpoint(out) else "overwrite"] = True
    if settings.get("resume"):
        recorded = Path(settings.get("out", TrainConfig.out)) / "config.json"
        if not recorded.exists():
            raise InputError(f"--resume: {recorded.parent} holds no run; start one without --resume")
        settings = {**read_file(recorded), **settings}
    published = PUBLISHED.get(str(settings.get("preset")), {})
    optimizer = settings.get("optimizer", published.get("optimizer", TrainConfig.optimizer))
    if optimizer in ("local", "muon"):  # the published rate and DeMo settings are not theirs
        published = {name: value for name, value in published.items() if name in SCHEDULE and name != "lr"}
    config = TrainConfig(**{**published, **settings})
    _check_fit(config, told)
    return config


def holds_checkpoint(out: Path) -> bool:
    """Return whether a run in this folder can go on.

    Examples:
        >>> holds_checkpoint(Path("nothing here"))
        False
    """
    return any((out / "checkpoints").glob("step-????????"))  # as `records.complete` finds them, without its imports


def _workers(given: Any) -> Given:
    """Return what `--workers 4` or `--workers 2:4` sets."""
    if not isinstance(given, str):
        return {}
    least, colon, most = given.rpartition(":")
    if not most.isdecimal() or (colon and not least.isdecimal()):
        raise InputError(f"--workers is {given!r}, wanted a number, or MIN:MAX such as 2:4")
    if not colon:
        return {"workers": int(most)}
    if not 1 <= int(least) <= int(most):
        raise InputError(f"--workers is {given!r}, wanted MIN:MAX with 1 <= MIN <= MAX")
    return {"workers": int(most), "min_workers": int(least)}


def _check_fit(config: TrainConfig, told: Given) -> None:
    """Raise InputError for a flag that the optimizer does not know; config files may hold those of others."""
    for item in dataclasses.fields(config):
        fits = item.metadata["fits"]
        if fits is not None and item.name in told and config.optimizer not in fits:
            raise InputError(
                f"{flag(item.name)} is for --optimizer {' or '.join(fits)}, and the optimizer is {config.optimizer}"
            )

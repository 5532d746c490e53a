"""Tasks of lm-eval (EleutherAI's evaluation harness) on a model."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demopt.core.names import suggestion
from demopt.errors import DemoptError, one_line
from demopt.eval.loaded import Loaded
from demopt.train.config import InputError

SPREAD = "_stderr"  # lm-eval's name for the standard error of a metric


class MissingDataError(DemoptError):
    """A task whose data cannot be had."""


@dataclass(frozen=True)
class Score:
    """One metric of a task over its documents; `spread` is its standard error, None if there is none."""

    task: str
    metric: str
    value: float
    spread: float | None
    documents: int


def find(names: Sequence[str], include_path: Path | None) -> Any:
    """Return lm-eval's index of tasks; InputError if lm-eval is missing or a name is in none of its lists."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("tasks need lm-eval: pip install '.[eval]' in demopt's clone; --data TEXT alone does without")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.tasks import TaskManager

    index = TaskManager(include_path=None if include_path is None else str(include_path))
    check_names(names, index.all_tasks)
    return index


def check_names(names: Sequence[str], known: Collection[str]) -> None:
    """Raise InputError for a name that is not known.

    Examples:
        >>> check_names(["arc_esay"], ["arc_easy", "piqa"])
        Traceback (most recent call last):
        demopt.train.config.InputError: --tasks: lm-eval has no 'arc_esay'; did you mean 'arc_easy'?
    """
    for name in names:
        if name not in known:
            raise InputError(f"--tasks: lm-eval has no {name!r}{suggestion(name, known)}")


def score(name: str, index: Any, loaded: Loaded, limit: int | None, batch: int) -> list[Score]:
    """Return the metrics of a task, or of the tasks of a group; MissingDataError if its data is not here."""
    from lm_eval import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import get_task_dict

    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):  # progress bars
        try:
            found = get_task_dict([name], index)
        except Exception as error:  # datasets has no common base class for what is missing
            raise MissingDataError(_missing(name, error)) from None
        model = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch)
        return scores(evaluate(lm=model, task_dict=found, limit=limit, log_samples=False))


def scores(results: dict[str, Any]) -> list[Score]:
    """Return the metrics in lm-eval's results, without those that are no numbers.

    Examples:
        >>> told = {"alias": "mine", "acc,none": 0.5, "acc_stderr,none": 0.1}
        >>> scores({"results": {"mine": told}, "n-samples": {"mine": {"effective": 26}}})
        [Score(task='mine', metric='acc', value=0.5, spread=0.1, documents=26)]
    """
    found = []
    for task, told in results["results"].items():
        documents = results["n-samples"].get(task, {}).get("effective", 0)
        for key, value in told.items():
            metric, _, how = key.partition(",")
            if not how or metric.endswith(SPREAD) or not isinstance(value, float | int):
                continue
            spread = told.get(f"{metric}{SPREAD},{how}")
            name = metric if how == "none" else f"{metric} ({how})"
            found.append(Score(task, name, float(value), spread if isinstance(spread, float) else None, documents))
    return found


def _missing(name: str, error: Exception) -> str:
    why = one_line(error)
    why = f"{type(error).__name__}: {why[:160]}" if why else type(error).__name__
    offline = os.environ.get("HF_HUB_OFFLINE") == "1"
    return f"{name}: its data is not on this machine{'; fetch it once with --online' if offline else ''} ({why})"

"""The flags of `demopt eval`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from demopt.train.config import InputError, TrainConfig
from demopt.train.options import option

DEFAULT_TASKS = "hellaswag,arc_easy,piqa"
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")  # the libraries read them when they are imported
TASKS, TEXT, MACHINE = "Tasks (lm-eval)", "Text", "Machine"


def evaluate(
    model: Annotated[Path, typer.Argument(help="The --out of a finished run, or a folder with a transformers model.")],
    tasks: Annotated[str | None, option(f"Names with commas between. Without --data: {DEFAULT_TASKS}.", TASKS)] = None,
    include_path: Annotated[Path | None, option("Folder with tasks of your own: YAML files of lm-eval.", TASKS)] = None,
    limit: Annotated[int | None, option("Documents of each task. Default: all.", TASKS)] = None,
    data: Annotated[
        list[str] | None, option("Text, as for demopt train: its loss and bits a byte. Repeatable.", TEXT)
    ] = None,
    online: Annotated[bool, option("Allow data to be fetched from the Hugging Face hub.", MACHINE, "--online")] = False,
    batch: Annotated[int, option("Sequences in one forward pass.", MACHINE)] = 8,
    device: Annotated[str, option("auto, cpu or cuda.", MACHINE)] = "auto",
    out: Annotated[Path | None, option("JSON file for the results.", MACHINE)] = None,
) -> int:
    """Evaluate a trained model: on tasks of lm-eval, on a text, or on both."""
    names = _names(DEFAULT_TASKS if tasks is None and not data else tasks)
    for name, value in (("limit", limit), ("batch", batch)):
        if value is not None and value < 1:
            raise InputError(f"--{name} is {value}, wanted at least 1")
    if include_path is not None and not include_path.is_dir():
        raise InputError(f"--include-path {include_path}: no such folder")
    if out is not None and out.is_dir():
        raise InputError(f"--out {out} is a folder, wanted a file")
    text = TrainConfig(data=tuple(data or ()), device=device, online=online)
    if not online:
        os.environ.update(dict.fromkeys(OFFLINE, "1"))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return _run(model, names, include_path, limit, text, batch, out)


def _run(
    model: Path,
    names: tuple[str, ...],
    include_path: Path | None,
    limit: int | None,
    text: TrainConfig,
    batch: int,
    out: Path | None,
) -> int:
    from demopt.eval import report
    from demopt.eval.loaded import load, model_folder
    from demopt.eval.tasks import MissingDataError, find, score
    from demopt.eval.text import text_loss

    folder = model_folder(model)
    index = find(names, include_path) if names else None
    loaded = load(folder, text.device)
    loss = text_loss(loaded, text, batch) if text.data else None
    scores, missing = [], {}
    for name in names:
        try:
            scores += score(name, index, loaded, limit, batch)
        except MissingDataError as error:
            missing[name] = str(error)
            print(f"demopt: {error}", file=sys.stderr, flush=True)
    report.show(scores, loss)
    if out is not None:
        report.save(out, model, scores, loss, missing)
    return 1 if missing else 0


def _names(text: str | None) -> tuple[str, ...]:
    """Return the names in a list with commas between, each once."""
    names = tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
    if text is not None and not names:
        raise InputError(f"--tasks is {text!r}, wanted names with commas between, such as {DEFAULT_TASKS}")
    return names

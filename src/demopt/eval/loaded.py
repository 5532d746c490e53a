"""The model in a folder: the one that a run has left, or any that transformers loads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from demopt.errors import one_line
from demopt.train.config import InputError
from demopt.train.folder import RunFolder
from demopt.train.team import pick_device

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Loaded:
    """A model on its device, and its tokenizer; `sequence` is the most tokens that it was trained to see."""

    model: Any
    tokenizer: Any
    sequence: int
    device: torch.device


def model_folder(path: Path) -> Path:
    """Return the folder of the model: `path` itself, or where the run in `path` has left it.

    Examples:
        >>> model_folder(Path("nowhere"))
        Traceback (most recent call last):
        demopt.train.config.InputError: nowhere: no such folder
    """
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    run = RunFolder(path)
    if (run.model / "config.json").is_file():
        return run.model
    if "model_type" in _settings(run.config):
        return path
    if run.metrics.exists() or run.checkpoints.exists():
        raise InputError(f"{path}: the run has no model yet, which it writes at its end; go on with --resume")
    raise InputError(f"{path}: no model in it; wanted the --out of a finished run, or a folder that transformers loads")


def load(folder: Path, device: str) -> Loaded:
    """Load model and tokenizer, from the folder alone."""
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise InputError(f"{folder}: no tokenizer in it (the run had token files); put its tokenizer.json there")
    where = pick_device(device, 0, 1)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).to(where).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # for damaged files the libraries below raise anything
        raise InputError(f"{folder}: cannot be loaded: {one_line(error)}") from None
    return Loaded(model, tokenizer, model.config.max_position_embeddings, where)


def _settings(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

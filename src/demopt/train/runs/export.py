"""The weights of a run as a model of transformers, at any moment, without joining the run."""

from __future__ import annotations

from pathlib import Path

from demopt.optim.local_demo import LocalDeMo
from demopt.runs.exchange import FolderExchange
from demopt.train.config import Given, InputError, resolve
from demopt.train.data import TOKEN_SUFFIXES, save_tokenizer
from demopt.train.folder import RunFolder
from demopt.train.method import make_optimizer
from demopt.train.model import begin, save
from demopt.train.runs.command import key_of
from demopt.train.runs.worker import settings_in


def export_model(address: str, out: str, key_file: str | None, given: Given) -> int:
    """Writes the newest weights that all workers have, and the tokenizer; returns the number of rounds."""
    config, record = settings_in(address, key_file, given)
    if "steps" not in record.settings:
        raise InputError(f"the run in {address} was not started by demopt train; see LocalDeMo.observe for its script")
    config, model = begin(resolve(config))
    optimizer = make_optimizer(config, model, FolderExchange(address, patience=30.0, key=key_of(key_file)))
    assert isinstance(optimizer, LocalDeMo)
    rounds = optimizer.observe()
    text = not any(name.endswith(TOKEN_SUFFIXES) for name in config.data)
    with RunFolder(Path(out)).writing(), optimizer.shared():
        save(config, model, Path(out), config.merge)
        save_tokenizer(config, Path(out), text)
    return rounds

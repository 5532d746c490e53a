"""The model card: README.md in the model's folder, which the hub shows. It names no path and no host."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

from demopt.train.assemble import assemble
from demopt.train.config import Given, TrainConfig, flag
from demopt.train.curve import Curve
from demopt.train.data import BYTE_VOCABULARY
from demopt.train.model import resolve
from demopt.train.progress import Row, workers
from demopt.train.summary import final_train_loss, final_val_loss, is_counted

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [demopt, pretraining]
---

# {name}

A decoder of {parameters:,} parameters, trained from nothing on the text below by
demopt {demopt} ({label}, {workers} workers). It was not tuned to follow instructions, and not evaluated beyond the
losses on this page.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}")
```

| | |
|---|---|
| steps | {steps:,} |
| tokens, of all workers | {tokens:,} |
| final training loss, {unit} | {train_loss:.4f} |
| final validation loss, {unit} | {val_loss:.4f} |
| uploaded by one worker, {how} | {sent:,} bytes, {sent_a_step:,} a step |
| received by one worker, {how} | {received:,} bytes, {received_a_step:,} a step |
| data | {data} |
| fingerprint of its tokens | `{fingerprint}` |
| demopt, Python, torch | {demopt}, {python}, {torch} |

Command:

    {command}

All settings:

```json
{settings}
```
"""
# Settings that may change when a run resumes, and that another run needs to repeat this one all the same.
REPEATED = ("workers", "text_field")


def model_card(config: TrainConfig, rows: list[Row], curve: Curve, parameters: int) -> str:
    """Return the card of a finished run."""
    sent, received = (sum(row[name] for row in rows) for name in ("sent_bytes", "received_bytes"))
    return CARD.format(
        name=config.push_to_hub or Path(config.out).resolve().name,
        parameters=parameters,
        label=curve.label,
        workers=workers(config, rows),
        steps=len(rows),
        tokens=rows[-1]["tokens"],
        unit=curve.unit,
        train_loss=final_train_loss(rows),
        val_loss=final_val_loss(rows),
        how="counted" if is_counted(config) else "computed",
        sent=sent,
        sent_a_step=round(sent / len(rows)),
        received=received,
        received_a_step=round(received / len(rows)),
        data=", ".join(f"`{name}`" for name in _data(config)) or "the text of Python's standard library",
        fingerprint=curve.fingerprint,
        command=command(config),
        settings=json.dumps(curve.settings, indent=1),
        **curve.made_with,
    )


def command(config: TrainConfig) -> str:
    """Return the command that repeats a run, where its data is; from resolved settings.

    Examples:
        >>> command(resolve(TrainConfig(lr=0.1, data=("/home/me/text",), steps=9)))
        'demopt train --data text --steps 9 --lr 0.1'
    """
    chosen, usual = _usual(config)
    words = ["demopt", "train"]
    for name in _data(config):
        words += ["--data", name]
    if config.tokenizer != "bytes":
        words += ["--tokenizer", _bare(config.tokenizer)]
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        here = item.metadata["free"] and item.name not in REPEATED  # where and how it went on
        if here or (item.name == "vocab_size" and _is_bytes(config)):
            continue
        if item.name in chosen or value != getattr(usual, item.name):
            words += _words(item.name, value)
    return shlex.join(words)


def _usual(config: TrainConfig) -> tuple[set[str], TrainConfig]:
    """Return the settings on which defaults depend, if they are not the default, and what is then the default."""
    given: Given = {"preset": config.preset, "optimizer": config.optimizer}
    if config.optimizer == "demo":
        given |= {"route": config.route, "update": config.update}
        if resolve(assemble({**given, "update": None})).update == config.update:
            given["update"] = None
    chosen = {name for name, value in given.items() if value not in (None, getattr(TrainConfig, name))}
    return chosen, resolve(assemble(given))


def _is_bytes(config: TrainConfig) -> bool:
    return config.tokenizer == "bytes" and config.vocab_size in (None, BYTE_VOCABULARY)


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else flag(f"no_{name}")]
    return [] if value is None else [flag(name), str(value)]


def _data(config: TrainConfig) -> list[str]:
    return [_bare(name) for name in config.data]


def _bare(name: str) -> str:
    """Return the last part of a path, which may say whose machine it is on; names on the hub as they are."""
    path = Path(name)
    return path.resolve().name if path.exists() or path.is_absolute() else name

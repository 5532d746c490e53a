"""The results of `demopt eval` as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from demopt.eval.tasks import Score
from demopt.eval.text import TextLoss
from demopt.train.config import InputError


def show(scores: Sequence[Score], loss: TextLoss | None) -> None:
    """Print what was measured."""
    console = Console()
    if scores:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in ("task", "metric", "score", "± stderr", "documents"):
            table.add_column(heading, justify="left" if heading in ("task", "metric") else "right")
        for each in scores:
            spread = "" if each.spread is None else f"{each.spread:.4f}"
            table.add_row(each.task, each.metric, f"{each.value:.4f}", spread, f"{each.documents:,}")
        console.print(table)
    if loss is not None:
        console.print(
            f"text: {loss.bits_per_byte:.4f} bits a byte, {loss.nats_per_token:.4f} nats a token "
            f"({loss.tokens:,} tokens of {loss.bytes:,} bytes)",
            highlight=False,
        )


def save(path: Path, model: Path, scores: Sequence[Score], loss: TextLoss | None, missing: Mapping[str, str]) -> None:
    """Write everything to a JSON file."""
    text = None
    if loss is not None:
        text = {**asdict(loss), "nats_per_token": loss.nats_per_token, "bits_per_byte": loss.bits_per_byte}
    told = {"model": str(model), "scores": [asdict(each) for each in scores], "missing": dict(missing), "text": text}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {path}: cannot be written: {error.strerror}") from None

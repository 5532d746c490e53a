"""The command: python -m laboratory.compare."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from laboratory.compare import report
from laboratory.compare.figures import collect
from laboratory.compare.jobs import Machine, carry_out_all, read_text
from laboratory.compare.run import QUICK, Scale, Source
from laboratory.compare.studies import STUDIES, chosen
from laboratory.compare.tuning import MOST_RATES, Plan


def _size(name: str, help: str) -> Any:
    return typer.Option(help=f"{help} ({getattr(Scale, name)})", show_default=False)


def compare(
    study: Annotated[str, typer.Option(help=f"One of {', '.join(STUDIES)}.")] = "one-bit",
    only: Annotated[list[str] | None, typer.Option(help="An entry of the study. Repeatable.")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between.")] = "0,1,2",
    out: Annotated[Path, typer.Option(help="Folder for runs.jsonl and tables.")] = Path("runs/compare"),
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model and fewer steps.")] = False,
    rates: Annotated[int, typer.Option(help="Learning rates tried at first, a factor 2 apart.")] = 3,
    lr: Annotated[float | None, typer.Option(help="This learning rate for all; nothing is tuned.")] = None,
    steps: Annotated[int | None, _size("steps", "Optimizer steps.")] = None,
    workers: Annotated[int | None, _size("workers", "W.")] = None,
    batch: Annotated[int | None, _size("batch", "Sequences per worker and step.")] = None,
    layers: Annotated[int | None, _size("layers", "Decoder layers.")] = None,
    width: Annotated[int | None, _size("width", "Width of the residual stream.")] = None,
    sequence: Annotated[int | None, _size("sequence", "Bytes per sequence.")] = None,
    warmup: Annotated[int | None, _size("warmup", "Steps of linear warm-up.")] = None,
    clip: Annotated[float | None, _size("clip", "Limit of the gradient norm.")] = None,
    eval_sequences: Annotated[int | None, _size("eval_sequences", "Sequences per evaluation.")] = None,
    val_fraction: Annotated[float | None, _size("val_fraction", "Fraction of the text for validation.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Text, as for demopt train. Repeatable.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once, each in a process.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads per run.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Low-communication methods side by side, each tuned alike. The same command goes on where it stopped."""
    sizes: dict[str, Any] = {"steps": steps, "workers": workers, "batch": batch, "layers": layers, "width": width}
    sizes |= {"sequence": sequence, "warmup": warmup, "clip": clip, "eval_sequences": eval_sequences}
    sizes |= {"val_fraction": val_fraction}
    given = {name: value for name, value in sizes.items() if value is not None}
    paths = tuple(data or ())
    try:
        if not 1 <= rates <= MOST_RATES:
            raise ValueError(f"--rates is {rates}; give 1 to {MOST_RATES}")
        if lr is not None and not 0 <= lr < math.inf:
            raise ValueError(f"--lr is {lr}; give a finite number that is not negative")
        scale = replace(QUICK if quick else Scale(), **given)
        picked, numbers = chosen(study, only or []), _seeds(seeds)
        corpus = read_text(paths, scale)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    plan = Plan(picked, scale, Source(corpus.fingerprint, paths), numbers, rates, lr)
    rows = carry_out_all(plan, corpus, out / "runs.jsonl", Machine(jobs, threads, device))
    figures = collect(plan, rows)
    text = report.text(plan, figures, [row for row in rows.values() if row["data"] == corpus.fingerprint])
    (out / f"{study}.md").write_text(text + "\n", encoding="utf-8")
    typer.echo(report.table(figures))
    typer.echo(f"{out / study}.md, and runs.jsonl beside it")


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0:
        raise ValueError(f"--seeds is {text!r}; give numbers with commas between, such as 0,1")
    return seeds


if __name__ == "__main__":
    typer.run(compare)

"""The flags of `demopt compare`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from demopt.compare.scale import Scale, scale_of
from demopt.train.config import MOST_SEED, InputError
from demopt.train.options import option

SEEDS, QUICK_SEEDS = "0,1,2", "0,1"
RATES, QUICK_RATES = 5, 3
WHAT, TUNING, SCALE, MACHINE = "What", "Tuning", "Scale (the same for all)", "Machine"


def _size(name: str, help: str) -> Any:
    return option(f"{help} ({getattr(Scale, name)})", SCALE)


def compare(
    study: Annotated[
        str, option("methods, movement, update, transform, top-k, chunk, alpha, momentum, ...", WHAT)
    ] = "methods",
    only: Annotated[list[str] | None, option("An entry of the study. Repeatable.", WHAT)] = None,
    seeds: Annotated[str | None, option("Seeds, with commas between (0,1,2).", WHAT)] = None,
    out: Annotated[Path, option("Folder for runs.jsonl, results and page.", WHAT)] = Path("runs/compare"),
    quick: Annotated[
        bool, option("Everything small: a smaller model, few steps, two seeds, three rates.", WHAT, "--quick")
    ] = False,
    rates: Annotated[int | None, option("Learning rates tried at first, a factor 2 apart (5).", TUNING)] = None,
    lr: Annotated[float | None, option("This learning rate for all, nothing is tuned.", TUNING)] = None,
    sweep_steps: Annotated[int, option("Steps of a tuning run; 0: as many as count.", TUNING)] = 0,
    steps: Annotated[int | None, _size("steps", "Optimizer steps.")] = None,
    workers: Annotated[int | None, _size("workers", "W.")] = None,
    batch: Annotated[int | None, _size("batch", "Sequences of a worker in a step.")] = None,
    layers: Annotated[int | None, _size("layers", "Decoder layers.")] = None,
    width: Annotated[int | None, _size("width", "Width of the residual stream.")] = None,
    sequence: Annotated[int | None, _size("sequence", "Bytes in a sequence.")] = None,
    warmup: Annotated[int | None, _size("warmup", "Steps of linear warm-up.")] = None,
    clip: Annotated[float | None, _size("clip", "Limit of the gradient norm.")] = None,
    eval_sequences: Annotated[int | None, _size("eval_sequences", "Sequences in an evaluation.")] = None,
    data: Annotated[
        list[str] | None, option("Text, as for demopt train. Default: the standard library.", SCALE)
    ] = None,
    jobs: Annotated[int, option("Runs at once, each in a process.", MACHINE)] = 1,
    threads: Annotated[int, option("Threads of each.", MACHINE)] = 1,
    device: Annotated[str, option("auto, cpu or cuda.", MACHINE)] = "auto",
) -> int:
    """Low-communication methods side by side, each tuned alike: verdict, table and page. Goes on where it stopped."""
    from demopt.compare.run import Source
    from demopt.compare.studies import chosen
    from demopt.compare.sweep import MOST_RATES, Plan
    from demopt.train.folder import RunFolder

    rates = (QUICK_RATES if quick else RATES) if rates is None else rates
    for name, value, least in (("rates", rates, 1), ("jobs", jobs, 1), ("threads", threads, 1)):
        _at_least(name, value, least)
    _at_least("sweep-steps", sweep_steps, 0)
    if rates > MOST_RATES:
        raise InputError(f"--rates is {rates}, wanted at most {MOST_RATES}: a thousandfold between the ends")
    if lr is not None and not 0 <= lr < float("inf"):
        raise InputError(f"--lr is {lr}, wanted a finite number, at least 0")
    sizes: dict[str, Any] = {"steps": steps, "workers": workers, "batch": batch, "layers": layers, "width": width}
    sizes |= {"sequence": sequence, "warmup": warmup, "clip": clip, "eval_sequences": eval_sequences}
    scale = scale_of(quick, sizes)
    numbers = _seeds(seeds or (QUICK_SEEDS if quick else SEEDS))
    picked = chosen(study, only or [])
    names = tuple(data or ())
    corpus = _read(names, scale, out)
    # Names without folders: the fingerprint identifies the text, and folders are private.
    source = Source(corpus.fingerprint, tuple(Path(name).name for name in names))
    plan = Plan(picked, scale, source, numbers, rates, lr, sweep_steps)
    with RunFolder(out).held():  # another text's tokens would replace those that runs are reading
        _write_tokens(corpus, out / "tokens")
        return _carry_out(plan, out, jobs, device, threads)


def _carry_out(plan: Any, out: Path, jobs: int, device: str, threads: int) -> int:
    from rich.console import Console

    from demopt.compare import schedule
    from demopt.compare.table import show
    from demopt.compare.verdict import sentences

    console = Console()
    bench = schedule.Bench(out / "runs.jsonl", out / "tokens", jobs, device, threads)
    try:
        rows = bench.work_off(plan, console)
    except KeyboardInterrupt:
        console.print(f"stopped; what is done is in {bench.runs}, the same command goes on", highlight=False)
        return 130
    results = write(plan, rows, out / plan.study.name)
    show(results, f"{plan.study.name}: {plan.study.question}", console)
    console.print(*sentences(results), sep="\n", highlight=False)
    console.print(f"page and results are in {out / plan.study.name}", highlight=False)
    return 0


def write(plan: Any, rows: dict[str, Any], folder: Path) -> list[Any]:
    """Writes results.json and the page of a study; returns its results."""
    from demopt.compare import page
    from demopt.compare.results import collect
    from demopt.compare.sweep import behind
    from demopt.compare.verdict import sentences

    results = collect(plan, rows)
    folder.mkdir(parents=True, exist_ok=True)
    shown = {"verdict": sentences(results), "results": [result.record() for result in results]}
    told = {"study": plan.study.name, "scale": asdict(plan.scale), "seeds": plan.seeds, "data": asdict(plan.source)}
    text = json.dumps({**told, **shown}, indent=1, allow_nan=False)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    html = page.render(plan, results, page.facts_of(plan, behind(plan, rows)))
    (folder / "index.html").write_text(html, encoding="utf-8")
    return results


def _read(names: tuple[str, ...], scale: Scale, out: Path) -> Any:
    """Encodes the text, once for all processes."""
    from demopt.train.config import TrainConfig
    from demopt.train.data import load_corpus
    from demopt.train.sources import token_files

    config = TrainConfig(data=names, sequence=scale.sequence, out=str(out))
    if files := token_files(config):
        raise InputError(f"--data {files[0]} holds tokens; compare reads text, as bytes")
    return load_corpus(config)


def _write_tokens(corpus: Any, tokens: Path) -> None:
    from demopt.train.data import save_corpus

    try:
        save_corpus(corpus, tokens)
    except OSError as error:
        raise InputError(f"--out {tokens.parent}: cannot be written: {error.strerror}") from None


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        seeds = ()
    if not seeds or min(seeds) < 0 or max(seeds) > MOST_SEED:
        raise InputError(f"--seeds is {text!r}, wanted numbers from 0 to {MOST_SEED} with commas between, such as 0,1")
    return seeds


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"--{name} is {value}, wanted at least {least}")

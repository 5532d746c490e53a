"""The flags of `demopt bench`."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

from demopt.bench.config import BenchConfig
from demopt.core.names import wanted
from demopt.plan.network import bandwidth as bits_of
from demopt.train.config import DEVICES, InputError
from demopt.train.options import option

WHAT, METHODS, MACHINE = "What is measured", "Methods", "Machine"
QUICK: dict[str, Any] = {"studies": ("step", "train"), "shapes": "quick", "preset": "tiny", "rounds": 3}
QUICK["data"] = (textwrap.__file__,)  # any text; the whole standard library takes seconds to read


def bench(
    study: Annotated[list[str] | None, option("step (default) or train. Repeatable.", WHAT)] = None,
    shapes: Annotated[
        str | None, option("step: gpt2 (default), demo-300m, demo-1b, or a file: JSON, safetensors.", WHAT)
    ] = None,
    preset: Annotated[str | None, option("train: a preset of demopt train. Default: small.", WHAT)] = None,
    batch: Annotated[int | None, option("train: sequences of a worker in a step. Default: 4.", WHAT)] = None,
    data: Annotated[list[str] | None, option("train: text, as for demopt train. Repeatable.", WHAT)] = None,
    rounds: Annotated[int | None, option("Timed rounds; each method takes a step in each. Default: 7.", WHAT)] = None,
    warmup: Annotated[int | None, option("Rounds before, which are not counted. Default: 1.", WHAT)] = None,
    quick: Annotated[
        bool, option("Both studies, tiny and short: seconds, to see that it runs.", WHAT, "--quick")
    ] = False,
    demo: Annotated[
        list[str] | None,
        option("Settings of a DeMo: values=float32,top_k=8. Repeatable. Default: values=sign.", METHODS),
    ] = None,
    foreach: Annotated[bool, option("Measure torch's foreach AdamW too.", METHODS)] = True,
    muon: Annotated[bool, option("step: Muon too, and LocalDeMo around it, with and without a round.", METHODS)] = True,
    local: Annotated[str | None, option("Settings of LocalDeMo: top_k=80,values=2-bit.", METHODS)] = None,
    against: Annotated[str | None, option("FILE:CLASS, any optimizer, made as CLASS(params, lr=...).", METHODS)] = None,
    against_args: Annotated[str | None, option("NAME=VALUE,... for its constructor.", METHODS)] = None,
    powersgd_rank: Annotated[int | None, option("train: rank of PowerSGD's matrices. Default: 1.", METHODS)] = None,
    workers: Annotated[list[int] | None, option("Processes on this machine. Repeatable. Default: 1.", MACHINE)] = None,
    device: Annotated[str | None, option("auto, cpu or cuda.", MACHINE)] = None,
    threads: Annotated[int | None, option("Threads per worker; 0 shares the cores.", MACHINE)] = None,
    timeout: Annotated[float | None, option("Seconds to wait for a silent worker.", MACHINE)] = None,
    bandwidth: Annotated[str | None, option("100Mbit, 1Gbit: adds the network's floor.", MACHINE)] = None,
    out: Annotated[Path | None, option("JSON file for the result. Default: a new one in runs/bench.", MACHINE)] = None,
) -> int:
    """Time, memory and bytes of optimizer steps, DeMo beside others, in turn within the same run."""
    given = {name: value for name, value in locals().items() if name in BenchConfig.__dataclass_fields__}
    given["studies"] = study
    config = BenchConfig(**(QUICK if quick else {}) | {k: v for k, v in given.items() if v not in (None, [])})
    bits = bits_of(bandwidth) if bandwidth else None
    if config.device not in DEVICES:
        raise InputError(f"--device is {wanted(config.device, DEVICES)}")
    return _run(config, bits, out)


def _run(config: BenchConfig, bits: float | None, out: Path | None) -> int:
    from rich.console import Console

    from demopt.bench import launch, machine, report, table

    if out is not None and out.is_dir():
        raise InputError(f"--out {out} is a folder, wanted a file")

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        found = launch.measure(config, say)
    except KeyboardInterrupt:
        say("demopt: stopped; nothing was written")
        return 130
    data = report.as_data(config, found, machine.shown_command(sys.argv[1:]), bits)
    path = out or report.default_path()
    report.save(data, path)
    table.show(data, Console())
    print(f"\nEvery sample is in {path}")
    return 0

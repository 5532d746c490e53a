"""`demopt lighthouse` and `demopt join`."""

from __future__ import annotations

from typing import Annotated

import typer

PORT = 29510


def lighthouse(
    port: Annotated[int, typer.Option(help="Port; the one after it is used too.", min=1, max=65534)] = PORT,
    min_workers: Annotated[int, typer.Option(help="Workers without which no round takes place.", min=1)] = 1,
    join_timeout: Annotated[float, typer.Option(help="Seconds that a round waits for a late worker.", min=0.1)] = 60.0,
    heartbeat_timeout: Annotated[
        float, typer.Option(help="Seconds without a heartbeat after which a worker is lost.", min=0.5)
    ] = 5.0,
) -> int:
    """Run the lighthouse, through which the machines of a run find each other, until Ctrl-C."""
    from demopt.train.elastic.lighthouse import lighthouse as run

    return run(port, min_workers, join_timeout, heartbeat_timeout)


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The run's lighthouse.")],
    data: Annotated[list[str] | None, typer.Option(help="As of train. Default: as the run names it.")] = None,
    out: Annotated[str, typer.Option(help="This machine's own folder.")] = "runs/joined",
    workers: Annotated[int, typer.Option(help="Workers on this machine.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int, typer.Option(help="Threads per worker; 0 shares the cores.", min=0)] = 0,
) -> int:
    """Join a run on this machine: settings and weights come from the run."""
    from demopt.train.elastic.crew import join as run

    mine: dict[str, object] = {"out": out, "workers": workers, "device": device, "threads": threads}
    return run(address, {**mine, "data": data or None})

"""The flags of `demopt doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from demopt.doctor.machine import Finding, after_pause, examine
from demopt.doctor.peers import Pair, Round
from demopt.plan.command import check_preset, plan
from demopt.train.config import InputError

CLOCK_SECONDS = 1.0  # apart: logs are then hard to compare, nothing worse


def doctor(
    peers: Annotated[
        list[str] | None,
        typer.Option(help="Address of a machine, this one too; repeat for each, in one order on all machines."),
    ] = None,
    port: Annotated[int, typer.Option(help="Port that the run will meet at (--master-port).")] = 29500,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the other machines.")] = 120.0,
    preset: Annotated[str, typer.Option(help="Model of the run to come, as in demopt plan.")] = "gpt2",
) -> int:
    """Look for what will be in the way of a run between machines. Start it on all of them, with the same --peers."""
    if not 1 <= port <= 65535:
        raise InputError(f"--port is {port}, wanted 1 to 65535")
    check_preset(preset)  # now, and not after minutes of measuring
    first = peers[0] if peers else "198.51.100.1"  # RFC 5737: stands for any machine elsewhere
    findings = examine(first, port, alone=bool(peers) and len(peers or []) == 1)
    _show(findings)
    faults = sum(not finding.well for finding in findings)
    if peers and len(peers) > 1:
        pairs = Round(peers, port, wait).run()
        _show_pairs(pairs)
        faults += sum(bool(pair.fault or pair.unlike) for pair in pairs)
        reached = [pair for pair in pairs if not pair.fault]
        if reached:
            pause = after_pause(max(pair.rtt_ms for pair in reached))
            _show([pause])
            faults += not pause.well
        if reached and len(reached) == len(peers) * (len(peers) - 1):
            _cost(reached, len(peers), preset)
    print(f"{faults} to mend" if faults else "nothing to mend")
    return 1 if faults else 0


def _show(findings: list[Finding]) -> None:
    for finding in findings:
        print(f"{'ok  ' if finding.well else 'MEND'} {finding.what}: {finding.found}")
        if not finding.well:
            print(f"     -> {finding.cure}")


def _show_pairs(pairs: list[Pair]) -> None:
    for pair in pairs:
        way = f"{pair.source} -> {pair.target}" + (f" by {pair.interface}" if pair.interface else "")
        if pair.fault:
            print(f"MEND {way}: {pair.fault}")
            continue
        clock = f", clock {pair.clock_seconds:+.1f} s" if abs(pair.clock_seconds) >= CLOCK_SECONDS else ""
        said = f"{pair.host}, round trip {pair.rtt_ms:.1f} ms, {pair.bits_per_second / 1e6:.0f} Mbit/s{clock}"
        print(f"{'MEND' if pair.unlike else 'ok  '} {way}: {said}")
        if pair.unlike:
            print(f"     -> it has {pair.unlike}: install the same there")


def _cost(pairs: list[Pair], workers: int, preset: str) -> None:
    rate = min(pair.bits_per_second for pair in pairs)
    trip = max(pair.rtt_ms for pair in pairs)
    print(f"A step over the slowest pair ({rate / 1e6:.0f} Mbit/s, {trip:.1f} ms), model {preset}:", flush=True)
    plan(preset=preset, workers=[workers], bandwidth=f"{rate / 1e3:.0f}kbit", latency=round(trip, 2))

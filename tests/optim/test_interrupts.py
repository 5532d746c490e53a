"""Ctrl-C at any line of a step: the step is done as a whole or not at all, and the next one goes on from there."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import demopt
import problems
from demopt import ExchangeError
from demopt.exchange import SingleRank
from demopt.optim.interrupts import allowed, deferred
from demopt.optim.round import Round

SOURCE = str(Path(demopt.__file__).parent)
SHAPES = [(8, 4), (6,)]
EVERY = 17  # lines between those that are tried; with 1, it takes minutes


class Interrupt:
    """Traces demopt's own lines, and sends SIGINT at one of them."""

    def __init__(self, line: int) -> None:
        self.line, self.seen = line, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE) or frame.f_code.co_filename.endswith("interrupts.py"):
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.line:
                signal.raise_signal(signal.SIGINT)
        return self


def demo(**settings: Any) -> Any:
    parameters = problems.parameters(SHAPES, torch.float64)
    codec = {"chunk": 4, "top_k": 5, "values": "float64", "momentum": 0.5, "update": "adamw", "lr": 0.1}
    return demopt.DeMo(parameters, process_group=SingleRank(), **codec, **settings)


def local(**settings: Any) -> Any:
    inner = torch.optim.SGD(problems.parameters(SHAPES, torch.float64), lr=0.1, momentum=0.9)
    return demopt.LocalDeMo(inner, 2, chunk=4, top_k=5, values="float32", process_group=SingleRank(), **settings)


def run(optimizer: Any, steps: list[int], interrupt: Interrupt | None = None) -> None:
    """Steps; the last one is interrupted."""
    for step in steps:
        problems.set_gradients(problems.all_parameters(optimizer), step)
        traced = interrupt is not None and step == steps[-1]
        sys.settrace(interrupt if traced else None)
        try:
            optimizer.step()
        finally:
            sys.settrace(None)


def state(optimizer: Any) -> dict[str, Any]:
    """Everything that another step depends on, by name."""
    saved = optimizer.state_dict(in_flight=True)
    found = {f"{number}.{name}": value for number, entry in saved["state"].items() for name, value in entry.items()}
    found |= {f"parameter {n}": p.detach().clone() for n, p in enumerate(problems.all_parameters(optimizer))}
    found |= {f"in flight {name}": value for name, value in saved.get("in_flight", {}).items()}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in found.items()}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        for name, value in one.items()
    )


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (demo, [0, 1]),
        (lambda: demo(delay=1), [0, 1, 2]),
        (local, [0, 1]),
        (lambda: local(delay=1), [0, 1, 2, 3]),
    ],
    ids=["DeMo", "DeMo delay", "LocalDeMo", "LocalDeMo delay"],
)
@pytest.mark.filterwarnings("ignore:the state was saved")
def test_interrupt_at_any_line_leaves_a_whole_step_or_none(make: Callable[[], Any], steps: list[int]) -> None:
    before, failed, after = make(), make(), make()
    run(before, steps[:-1])
    run(after, steps)
    run(failed, steps[:-1])
    with mock.patch.object(Round, "exchange", side_effect=ExchangeError("gone")), pytest.raises(ExchangeError):
        run(failed, steps[-1:])
    whole = [state(before), state(failed), state(after)]
    line, outcomes = 1, set()
    while True:
        optimizer, interrupt = make(), Interrupt(line)
        try:
            run(optimizer, steps, interrupt)
        except KeyboardInterrupt:
            found = state(optimizer)
            matching = [number for number, expected in enumerate(whole) if equal(found, expected)]
            assert matching, f"interrupted at line {line} of the step"
            outcomes |= set(matching)
        if interrupt.seen < line:
            break
        line += EVERY
    assert outcomes >= {1, 2}  # those that come before the wait for other ranks, and those that come after it


def test_deferred_runs_the_outer_handler_once_and_restores_it() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: calls.append(number))
    try:
        with deferred():
            with deferred():
                signal.raise_signal(signal.SIGTERM)
            assert calls == []
            with allowed():
                assert calls == [signal.SIGTERM]
                signal.raise_signal(signal.SIGTERM)
                assert len(calls) == 2
            signal.raise_signal(signal.SIGTERM)
            assert len(calls) == 2
        assert len(calls) == 3
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_closure_can_be_interrupted() -> None:
    optimizer = demo()
    reached: list[str] = []

    def closure() -> float:
        signal.raise_signal(signal.SIGINT)
        reached.append("the end of the closure")
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert reached == []

"""A step stays short to read: ceilings on the files of demopt that one step passes."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import demopt
import problems
import ranks
from demopt.exchange import Exchange
from demopt.kernels import loader

PACKAGE = Path(demopt.__file__).parent
#: A change that makes a step pass more files raises its row, and says why in the commit.
MOST = {"DeMo": 22, "gather": 25, "owner": 26}


def _passed(exchange: Exchange, kind: str) -> set[Path]:
    """The files that the fourth step calls into."""
    params, files = problems.parameters([(128, 128), (128,)]), set[Path]()
    optimizer: Any = demopt.DeMo(params, process_group=exchange)
    if kind != "DeMo":
        inner = torch.optim.AdamW(params)
        optimizer = demopt.LocalDeMo(inner, sync_every=1, route=kind, process_group=exchange)
    for step in range(4):
        problems.set_gradients(params, step, exchange.rank)
        if step == 3:
            sys.setprofile(lambda frame, *_: files.add(Path(frame.f_code.co_filename)))
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
    return {file for file in files if file.is_relative_to(PACKAGE) and file.name != "threads.py"}


@pytest.mark.skipif(loader.library() is None, reason="without kernels steps take another path")
@pytest.mark.parametrize("kind", MOST)
def test_step_passes_few_files(kind: str) -> None:
    passed = ranks.threads(_passed, 4, kind)[0]
    assert PACKAGE / "replicator/replicator.py" in passed
    assert len(passed) <= MOST[kind], sorted(passed)

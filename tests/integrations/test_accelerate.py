"""demopt.integrations.accelerate: save_state and load_state, by one file or by one per rank."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import demopt
import problems
import ranks

pytest.importorskip("accelerate", reason="needs accelerate: make test-integrations")


def _resumed(rank: int, world_size: int, folder: str, file_per_rank: bool, save: bool) -> tuple[int, int, list[str]]:
    """The fingerprint after five steps, of two optimizers; the bytes that a save in their midst sent; and its files."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    from demopt.integrations.accelerate import register

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    names |= {"OMP_NUM_THREADS": 1}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}):
        accelerator = Accelerator(cpu=True)  # in the process group of this test
        try:
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
            local: Any = demopt.LocalDeMo(torch.optim.AdamW(model[0].parameters(), lr=0.1), sync_every=2)
            demo: Any = demopt.DeMo(model[1].parameters(), lr=0.1)
            model, local, demo = accelerator.prepare(model, local, demo)
            demopt.unsync(model)
            for optimizer in (local, demo):
                register(accelerator, optimizer, file_per_rank=file_per_rank)
            sent = 0
            if save:
                _train(model, [local, demo], range(2), rank)
                accelerator.save_state(folder)
                sent = local.optimizer.stats.consolidated_bytes
            else:
                accelerator.load_state(folder)
            _train(model, [local, demo], range(2, 5), rank)
            marks = [optimizer.optimizer.fingerprint() for optimizer in (local, demo)]
            return marks[0] ^ marks[1], sent, sorted(path.name for path in Path(folder).iterdir())
        finally:
            AcceleratorState._reset_state()
            PartialState._reset_state()


def _train(model: nn.Module, optimizers: list[Any], steps: range, rank: int) -> None:
    for step in steps:
        problems.set_gradients(model.parameters(), step, rank)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("file_per_rank", [False, True])
def test_load_state_restores_every_rank(file_per_rank: bool, tmp_path: Path) -> None:
    whole = ranks.run(_resumed, 2, str(tmp_path), file_per_rank, True)
    resumed = ranks.run(_resumed, 2, str(tmp_path), file_per_rank, False)
    assert len({mark for mark, *_ in whole + resumed}) == 1
    for _, sent, files in whole:
        assert (sent == 0) == file_per_rank
        assert ("demopt0_rank1_of_2.pt" in files) == file_per_rank


@pytest.mark.filterwarnings("ignore:rank 0 received")
def test_files_of_an_earlier_checkpoint_do_not_count(tmp_path: Path) -> None:
    for file_per_rank in (True, False):
        ((_, _, files),) = ranks.run(_resumed, 1, str(tmp_path), file_per_rank, True)
        assert ("demopt0_rank0_of_1.pt" in files) == file_per_rank


def test_more_or_fewer_ranks_take_their_shares_and_a_missing_file_is_named(tmp_path: Path) -> None:
    ranks.run(_resumed, 2, str(tmp_path), True, True)
    assert len({mark for mark, *_ in ranks.run(_resumed, 3, str(tmp_path), True, False)}) == 1
    (tmp_path / "demopt0_rank1_of_2.pt").unlink()
    with pytest.raises(ValueError, match=r"lacks demopt0_rank1_of_2\.pt: each rank wrote its own state"):
        ranks.run(_resumed, 1, str(tmp_path), True, False)

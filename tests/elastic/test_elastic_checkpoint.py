"""Checkpoints of a run whose workers come and go, where the disk is full."""

import resource
import signal

import pytest
import torch

import demopt
from demopt.errors import DemoptError
from demopt.train.config import TrainConfig
from demopt.train.elastic import checkpoint as elastic_checkpoint
from demopt.train.folder import RunFolder


def save(folder, step, model, optimizer):
    own = elastic_checkpoint.Own(round=step, messages=step, drawn=step)
    with folder.writing():
        elastic_checkpoint.save(
            folder.checkpoints, step, "here-0", True, model, optimizer, own, TrainConfig(), "text", 9
        )


@pytest.fixture
def no_room():
    """Files beyond 4 kB cannot be written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # otherwise it ends the process
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_save_that_finds_no_room_says_so_and_leaves_the_one_before(tmp_path, no_room):
    folder, model = RunFolder(tmp_path), torch.nn.Linear(64, 64)
    optimizer = demopt.DeMo(model.parameters())
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    save(folder, 20, model, optimizer)
    before = elastic_checkpoint.newest(folder.checkpoints)
    (folder.checkpoints / "step-00000030").mkdir()  # of a save in which this worker got no further than its own part
    (folder.checkpoints / "step-00000030" / "here-0.pt").write_bytes(b"own part")
    no_room()
    with pytest.raises(DemoptError, match="cannot be written: File too large"):
        save(folder, 40, model, optimizer)
    assert elastic_checkpoint.newest(folder.checkpoints) == before
    assert not (folder.checkpoints / "step-00000030").exists()
    assert not list(folder.checkpoints.glob("*/*.partial"))
    again = demopt.DeMo(model.parameters())
    assert elastic_checkpoint.load(folder.checkpoints, "here-0", model, again).round == 20

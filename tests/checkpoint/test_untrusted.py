"""Checkpoint files of earlier commits, and of strangers: the earlier ones load, and none runs code."""

import dataclasses
import hashlib
import inspect
import os
import pickle
import re
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import demopt
from demopt.checkpoint import LoadPlanner, OptimizerState, Reader
from demopt.exchange import SingleRank
from demopt.train import checkpoint
from demopt.train.config import InputError, config_of, resolve
from demopt.train.method import make_optimizer
from demopt.train.model import build
from problems import by_file, saved

pytestmark = pytest.mark.filterwarnings("ignore:.*single process")

OLD = Path(__file__).with_name("old")  # written by commit 4f4135a
STEP = "checkpoints/step-00000006"
# By optimizer: truncated SHA-256 of the weights and of the optimizer's state, as 4f4135a itself read the checkpoint.
READ = {
    "local": ("a9502a0ff4b2d407fcf9232fb4a09a52", "939c008466dc3bc8736d087203872997"),
    "demo": ("21c27ee9252f0063e47930909640f2b2", "46967500171e0e2dc5e203cbe3b692ac"),
    "adamw": ("5f42890c2db0dfbd172fe59dbe189b58", "b416d4480c538f0c7d63b87d81e75126"),
}


def _digest(value, to=None):
    own = to or hashlib.sha256()
    if isinstance(value, dict):
        for name in sorted(value, key=str):
            own.update(str(name).encode())
            _digest(value[name], own)
    else:
        own.update(f"{value.dtype}{list(value.shape)}".encode())
        own.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return own.hexdigest()[:32]


def _old(kind, folder):
    """Unpacks the checkpoint of two workers; returns its folder."""
    with zipfile.ZipFile(OLD / f"{kind}.zip") as packed:
        packed.extractall(folder)
    return folder / STEP


def _load(path, kind):
    config = resolve(config_of(checkpoint.read(path).settings))
    model = build(config)
    optimizer = make_optimizer(config, model, None if kind == "adamw" else SingleRank())
    checkpoint.load(path, model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("kind", READ)
def test_checkpoint_of_an_earlier_commit_loads_with_the_bits_that_it_had_then(kind, tmp_path):
    model, optimizer = _load(_old(kind, tmp_path), kind)
    assert (_digest(dict(model.state_dict())), _digest(optimizer.state_dict()["state"])) == READ[kind]


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])  # the latter is Python 3.13's
def test_checkpoint_of_another_python_loads(module, tmp_path):
    path = _old("demo", tmp_path)
    known = pickle.dumps(pickle.loads((path / ".metadata").read_bytes()), protocol=2)
    named = re.sub(rb"cpathlib[._a-z]*\nPosixPath\n", f"c{module}\nPosixPath\n".encode(), known)
    assert f"c{module}\n".encode() in named
    (path / ".metadata").write_bytes(named)
    model, _ = _load(path, "demo")
    assert _digest(dict(model.state_dict())) == READ["demo"][0]


@pytest.mark.filterwarnings("ignore:the state was saved 1 step")
@pytest.mark.parametrize("kind", ["demo", "local"])
def test_state_of_an_earlier_commit_loads_and_goes_on(kind):
    """The file holds the state after five steps, beside the model."""
    saved = torch.load(OLD / f"{kind}.pt", weights_only=True)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    if kind == "demo":
        optimizer = demopt.DeMo(model.parameters(), lr=0.01, top_k=4, process_group=SingleRank())
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = demopt.LocalDeMo(inner, sync_every=2, process_group=SingleRank())
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert _digest(optimizer.state_dict()["state"]) == _digest(saved["optimizer"]["state"])
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    assert int(optimizer.replicator.round_number) == (6 if kind == "demo" else 3)


@dataclasses.dataclass
class _Runs:
    """Makes a folder when it is unpickled."""

    proof: Path

    def __reduce__(self):
        return os.mkdir, (str(self.proof),)


def _change_metadata(path, key, **changed):
    """Changes the recorded place of the checkpoint's object `key`; returns the file in which it was."""
    found = pickle.loads((path / ".metadata").read_bytes())
    index, info = next((index, info) for index, info in found.storage_data.items() if index.fqn == key)
    found.storage_data[index] = dataclasses.replace(info, **changed)
    (path / ".metadata").write_bytes(pickle.dumps(found))
    return path / info.relative_path


def _replace_object(path, key, data):
    file = _change_metadata(path, key)
    _change_metadata(path, key, offset=file.stat().st_size, length=len(data))
    with file.open("ab") as end:
        end.write(data)


@pytest.mark.parametrize("place", ["metadata", "number", "entry", "inside an entry", "legacy", "outside"])
def test_security_resuming_runs_no_code_of_a_checkpoint(place, tmp_path):
    path, proof = _old("demo", tmp_path), tmp_path / "proof"
    evil = _Runs(proof)
    if place == "metadata":
        (path / ".metadata").write_bytes(pickle.dumps(evil))
    elif place == "outside":
        _change_metadata(path, "optimizer.world_size", relative_path="../../text.distcp")
    elif place == "legacy":
        _replace_object(path, "optimizer.world_size", pickle.dumps(evil, protocol=2))
    else:
        key = "optimizer.world_size" if place == "number" else "optimizer.rank0.shard0.0"
        _replace_object(path, key, saved({"values": {"momentum": evil}} if place.startswith("inside") else evil))
    with pytest.raises(InputError, match=r"step-00000006 cannot be read: .*(nothing was run|\.distcp file)") as told:
        _load(path, "demo")
    assert "\n" not in str(told.value)
    assert "weights_only" not in str(told.value), "torch's advice to read it all the same"
    assert not proof.exists()
    pickle.loads(pickle.dumps(evil))
    assert proof.exists(), "or it could not have run"


WRONG = [("world_size", each) for each in (0, -1, 1 << 40, 1.5, "x", None)]
WRONG += [("rank0.shard0.0", each) for each in (5, {}, {"values": {"momentum": 1}, "sharded": ()}, {"values": "x"})]
WRONG += [("param_groups.0.lr", "x"), ("param_groups.0.params", 3)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("key", "value"), WRONG)
def test_checkpoint_with_wrong_content_cannot_be_read(key, value, tmp_path):
    path = _old("demo", tmp_path)
    _replace_object(path, f"optimizer.{key}", saved(value))
    with pytest.raises(InputError, match="step-00000006 cannot be read: ") as told:
        _load(path, "demo")
    assert "\n" not in str(told.value)


def test_torch_runs_code_of_other_ranks_and_of_files(tmp_path):
    """SECURITY.md warns of both; `Reader` with `LoadPlanner` runs no code."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Runs(tmp_path / "file")))
    with pytest.raises(AttributeError):  # what was unpickled is no metadata
        FileSystemReader(tmp_path).read_metadata()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_gather_object([None], _Runs(tmp_path / "rank"))
    finally:
        dist.destroy_process_group()
    assert {path.name for path in tmp_path.iterdir()} == {".metadata", "file", "rank"}
    assert "pickle.loads(" in inspect.getsource(dynamic_rendezvous)


def test_entries_in_dcp_are_tensors_numbers_and_text(tmp_path):
    """The files that `dcp.save` writes for an `OptimizerState` name no class of demopt, so classes may be renamed."""
    optimizer = demopt.LocalDeMo(torch.optim.AdamW([nn.Parameter(torch.ones(4, 4))]), process_group=SingleRank())
    entry = OptimizerState(optimizer).state_dict()["rank0.shard0.0"]
    assert sorted(by_file(entry)) == ["sharded", "values"]
    dcp.save({"optimizer": OptimizerState(optimizer)}, checkpoint_id=tmp_path)
    assert b"demopt" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())
    dcp.load({"optimizer": OptimizerState(optimizer)}, storage_reader=Reader(tmp_path), planner=LoadPlanner())

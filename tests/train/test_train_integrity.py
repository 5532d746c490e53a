"""Damaged files, full disks, and processes killed while they write: nothing is lost, and one line says why."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_runs
from train_runs import metrics, timeless, weights

from demopt.errors import DemoptError
from demopt.train import records
from demopt.train.config import InputError
from demopt.train.folder import RunFolder
from demopt.train.integrity import CHECKSUMS
from demopt.train.team import Team

CRASHES = Path(__file__).parents[2] / "benchmarks" / "crash_points.py"
ALONE = Team(0, 1, torch.device("cpu"))


def damage(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture
def folder(tmp_path, finished):
    """The two checkpoints of a finished run."""
    return shutil.copytree(finished[0] / "checkpoints", tmp_path / "checkpoints")


def test_checkpoint_bytes_are_as_written(folder):
    for path in records.complete(folder):
        records.check_bytes(path, ALONE)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "run.json"])
def test_one_changed_bit_in_a_checkpoint_is_named_and_the_older_offered(folder, name):
    newest = records.newest(folder)
    damage(newest / name)
    with pytest.raises(InputError) as told:
        records.check_bytes(newest, ALONE)
    assert str(newest / name) in str(told.value)
    assert f"step-00000009 is whole: remove {newest} to go on from that" in str(told.value)


def test_damaged_checksums_are_refused(folder):
    newest = records.newest(folder)
    for broken in ("", "{}", "[]", "\xff", '{"run.json": 3}'):
        (newest / CHECKSUMS).write_text(broken, encoding="latin-1")
        with pytest.raises(InputError, match="step-00000009 is whole"):
            records.check_bytes(newest, ALONE)


def test_missing_file_of_a_checkpoint_is_named(folder):
    newest = records.newest(folder)
    (newest / "__1_0.distcp").unlink()
    with pytest.raises(InputError, match=r"__1_0.distcp is missing.*step-00000009 is whole"):
        records.check_bytes(newest, ALONE)


def test_two_damaged_checkpoints_leave_nothing_to_offer(folder):
    for path in records.complete(folder):
        damage(path / "__0_0.distcp")
    with pytest.raises(InputError, match="no older one is whole"):
        records.check_bytes(records.newest(folder), ALONE)


def test_checkpoints_from_before_checksums_are_taken(folder):
    newest = records.newest(folder)
    (newest / CHECKSUMS).unlink()
    records.check_bytes(newest, ALONE)


def test_broken_record_of_a_checkpoint_is_refused_in_one_line(folder):
    newest = records.newest(folder)
    (newest / CHECKSUMS).unlink()
    for broken in ("{", "[1]", '{"step": 3}', "\xff"):
        (newest / "run.json").write_text(broken, encoding="latin-1")
        with pytest.raises(InputError, match=r"run.json cannot be read") as told:
            records.read(newest)
        assert "\n" not in str(told.value)


def test_resume_from_a_damaged_checkpoint_tells_and_the_older_one_goes_on(tmp_path, finished):
    out = shutil.copytree(finished[0], tmp_path / "run")
    newest = records.newest(out / "checkpoints")
    damage(newest / "__1_0.distcp")
    refused = train_runs.resume(out)
    assert refused.returncode == 2
    assert "__1_0.distcp is damaged" in refused.stderr
    assert "Traceback" not in refused.stderr
    shutil.rmtree(newest)
    done = train_runs.resume(out)
    assert "going on after step 9" in done.stdout
    assert timeless(metrics(out)) == timeless(metrics(finished[0]))
    assert weights(out) == weights(finished[0])


def test_full_disk_is_the_cause_that_is_told(tmp_path):
    """/dev/full takes no bytes, as a full disk."""
    with (
        pytest.raises(DemoptError, match=r"--out .*: cannot be written: No space left on device"),
        RunFolder(tmp_path).writing(),
        open("/dev/full", "w") as file,
    ):
        file.write("a line")


def test_metrics_keep_what_is_whole_around_a_damaged_line(tmp_path, finished):
    run = RunFolder(tmp_path)
    lines = (finished[0] / "metrics.jsonl").read_bytes().splitlines()
    bad = [b"\xff\xfe", b'{"step": 4', b"[1]", b'{"step": "five"}', b"", b"null"]
    run.metrics.write_bytes(b"\n".join([*lines[:6], *bad, *lines[6:]]))
    assert run.read_metrics() == metrics(finished[0])
    run.rewind_metrics(8)
    assert metrics(tmp_path) == metrics(finished[0])[:8]


def test_killed_at_calls_that_write_nothing_is_lost():
    """The short form of benchmarks/crash_points.py."""
    command = [sys.executable, str(CRASHES), "--every", "11"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=train_runs.LIMIT)
    if done.returncode == 77:
        pytest.skip("there is no C compiler to count calls with")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 wrong") == 4

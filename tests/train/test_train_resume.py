"""Runs that are interrupted, killed and continued end where the uninterrupted one does, bit for bit."""

import signal

import pytest
import train_runs
from train_runs import as_killed, metrics, steps_done, timeless, weights

from demopt.train import records
from demopt.train.config import InputError, TrainConfig
from demopt.train.folder import RunFolder


def resume_as(reference, out):
    """Resume to the end: the run is then the reference, bit for bit."""
    done = train_runs.resume(out)
    assert done.returncode == 0, done.stderr
    assert "going on after step" in done.stdout
    assert timeless(metrics(out)) == timeless(metrics(reference))
    assert weights(out) == weights(reference)


def test_resume_after_ctrl_c_reproduces_the_run(tmp_path, text, finished):
    out = tmp_path / "run"
    process = train_runs.start_held(out, text, number=5)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=train_runs.LIMIT)
    assert process.returncode == 130
    assert f"demopt train --resume --out {out}" in told
    assert "Traceback" not in told
    stopped = records.read(records.newest(RunFolder(out).checkpoints)).step
    assert stopped == 5
    assert steps_done(out) == stopped
    resume_as(finished[0], out)


def test_resume_of_adamw_is_bit_for_bit(tmp_path, finished_adamw):
    resume_as(finished_adamw[0], as_killed(finished_adamw[0], tmp_path / "run"))


def test_resume_after_kills_during_saves(tmp_path, text, finished):
    """Twice SIGKILL when all files of a checkpoint are written and it still has another name; each from the one before.

    benchmarks/crash_points.py kills at every other place.
    """
    out = tmp_path / "run"
    folder = RunFolder(out).checkpoints
    for step in (6, 9):
        more = ["--resume"] if step > 6 else []
        process = train_runs.start_held(out, text, *more, at="save", number=step)
        train_runs.kill_all(process)
        assert records.newest(folder).name == f"step-{step - 3:08d}"
    resume_as(finished[0], out)
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("leftover", ["step-00000099.partial", "step-9"])
def test_newest_skips_partial_checkpoints(tmp_path, leftover):
    (tmp_path / leftover).mkdir()
    assert records.newest(tmp_path) is None
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000012").mkdir()
    assert records.newest(tmp_path).name == "step-00000012"


def test_check_same_run_gives_old_records_the_defaults():
    record = TrainConfig().record()
    older = records.Saved(3, "text", {name: value for name, value in record.items() if name != "overlap"}, 0)
    records.check_same_run(older, record, "text")
    with pytest.raises(InputError, match="--overlap is 2, but the checkpoint was made with 0"):
        records.check_same_run(older, {**record, "overlap": 2}, "text")


def goes_on_with(workers, out):
    """Resume a run of 2 with another number of workers: it does all steps, and counts the tokens of all."""
    before = records.read(records.newest(RunFolder(out).checkpoints))
    assert (before.workers, before.tokens) == (2, before.step * 2 * 2 * 32)
    done = train_runs.resume(out, "--workers", workers)
    assert done.returncode == 0, done.stderr
    assert f"workers: 2 until now, {workers} from here; what the others had not sent" in done.stdout
    rows = metrics(out)
    assert [row["step"] for row in rows] == list(range(1, train_runs.STEPS + 1))
    each = workers * 2 * 32
    assert [row["tokens"] for row in rows[before.step :]] == [
        before.tokens + (row["step"] - before.step) * each for row in rows[before.step :]
    ]
    assert rows[-1]["loss"] < rows[0]["loss"]
    after = records.read(records.newest(RunFolder(out).checkpoints))
    assert (after.workers, after.tokens) == (workers, rows[-1]["tokens"])


def test_resume_with_one_worker_of_two_goes_on(tmp_path, finished):
    goes_on_with(1, as_killed(finished[0], tmp_path / "run"))

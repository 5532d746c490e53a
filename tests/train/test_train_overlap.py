"""Exchanges that hide behind the computation: --overlap is the same run, --delay resumes bit for bit."""

import signal

import pytest
import train_runs
from test_train_mistakes import refuse
from test_train_resume import resume_as
from train_runs import as_killed, here, metrics, once, timeless, weights

DELAY = ("--delay", "1")
PLAIN = ("--update", "signum", "--clip", "0", "--accumulate", "2", "--route", "owner")


@pytest.fixture(scope="module")
def late(tmp_path_factory, text):
    """A whole run whose updates come a step late."""
    return once(tmp_path_factory, "late", lambda out: here(out, text, *DELAY))[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, text):
    """A whole run that could overlap, and does not."""
    return once(tmp_path_factory, "plain", lambda out: here(out, text, *PLAIN))[0]


def test_train_overlap_equals_plain_run(plain, tmp_path, text):
    overlapped = tmp_path / "overlap"
    result = here(overlapped, text, *PLAIN, "--overlap", "3")
    assert result.returncode == 0, result.stderr
    # each bucket has a header of its own, so messages are a little longer
    without = [{**row, "payload_bytes": 0} for row in timeless(metrics(plain))]
    assert [{**row, "payload_bytes": 0} for row in timeless(metrics(overlapped))] == without
    assert weights(overlapped) == weights(plain)


def test_resume_of_signum_is_bit_for_bit(plain, tmp_path):
    resume_as(plain, as_killed(plain, tmp_path / "run"))


def test_train_delay_is_another_run_with_all_bytes_counted(late, finished):
    assert weights(late) != weights(finished[0])
    traffic = [[row["sent_bytes"] for row in metrics(out)] for out in (late, finished[0])]
    assert traffic[0][0] == 0
    assert sum(traffic[0]) == sum(traffic[1])
    assert traffic[0][3] == 2 * traffic[0][1], "the evaluation at step 4 waited for its update"


def test_train_delay_resumes_bit_for_bit_after_a_stop(late, tmp_path, text):
    out = tmp_path / "run"
    process = train_runs.start_held(out, text, *DELAY, number=6)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=train_runs.LIMIT)
    assert process.returncode == 130
    resume_as(late, out)


def test_train_delay_resumes_bit_for_bit_with_an_update_under_way(late, tmp_path):
    """In step 9, because no evaluation waited for it."""
    resume_as(late, as_killed(late, tmp_path / "run"))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--overlap", "4"], "--overlap 4 sends gradients before --clip 1.0 can limit them; add --clip 0, or use --de"),
        (["--overlap", "-1"], "--overlap is -1, wanted at least 0"),
        (["--delay", "2"], "--delay is 2, wanted at most 1"),
        (["--overlap", "4", "--clip", "0", "--delay", "1"], "overlap and delay cannot be had together"),
    ],
)
def test_train_overlap_and_delay_refuse_bad_flags(monkeypatch, capsys, tmp_path, flags, told):
    assert told in refuse(monkeypatch, capsys, "--optimizer", "demo", "--out", tmp_path / "run", *flags)

"""`--optimizer local`: bytes in metrics and the table."""

import pytest
from rich.filesize import decimal
from train_runs import STEPS, metrics

ROUNDS = {"local": [5, 10, 12], "delay": [3, 6, 9, 12]}  # the steps that make a message; the last round is a short one
ARRIVALS = {"local": [5, 10, 12], "delay": [4, 8, 12]}  # the steps that apply some: with delay before an evaluation


@pytest.mark.parametrize("case", ROUNDS)
def test_bytes_are_counted_in_the_steps_that_apply_a_round(runs, case):
    rows = metrics(runs(case)[0])
    assert [row["step"] for row in rows if row["payload_bytes"]] == ROUNDS[case]
    (message,) = {row["payload_bytes"] for row in rows if row["payload_bytes"]}
    for column in ("sent_bytes", "received_bytes"):
        assert [row["step"] for row in rows if row[column]] == ARRIVALS[case]
        assert sum(row[column] for row in rows) == len(ROUNDS[case]) * message


@pytest.mark.parametrize("case", ROUNDS)
def test_table_and_progress_have_mean_bytes_over_steps(runs, case):
    out, result = runs(case)
    mean = sum(row["sent_bytes"] for row in metrics(out)) / STEPS
    (line,) = [line for line in result.stdout.splitlines() if "uploaded by one worker per step" in line]
    assert line.split("│")[2].strip() == decimal(round(mean))
    (last,) = [line for line in result.stdout.splitlines() if line.startswith(f"step {STEPS}/{STEPS} ")]
    assert f"{decimal(round(mean))} up" in last
    assert "route gather: " in result.stdout
    assert "owner" not in result.stdout


@pytest.mark.parametrize("case", ["local", "delay"])
def test_validation_loss_falls(runs, case):
    rows = metrics(runs(case)[0])
    assert rows[-1]["val_loss"] < rows[3]["val_loss"]
    assert runs(case)[1].stderr == ""

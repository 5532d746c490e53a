"""The sentences on top of a comparison: who wins, ties and loses, at which bytes and time."""

import pytest
from compare_results import result

from demopt.compare.verdict import is_level, sentences

ADAMW = result("adamw", "adamw", [1.98, 2.02], sent=1_250_000, seconds=0.02)  # 0.1 s on the link, 0.12 a step
MUON = result("muon", "muon", [1.79, 1.81], sent=1_250_000, seconds=0.03)


def local(*losses, **more):
    return result("local h5", "local", list(losses), **{"sent": 12_500, "seconds": 0.04, **more})


def test_verdict_says_which_row_has_the_lowest_loss_at_what_bytes_and_time():
    first = sentences([ADAMW, MUON, local(1.89, 1.91)])[0]
    assert first == (
        "Muon-DDP (muon) has the lowest loss, 1.800 ± 0.014 nats a byte; it uploads 1.2 MB a step, and a step takes "
        "130 ms at 100 Mbit/s."
    )


def test_verdict_win_and_loss_against_the_baselines():
    _, against_adamw, against_muon = sentences([ADAMW, MUON, local(1.89, 1.91)])
    assert against_adamw == (
        "Against AdamW-DDP, demopt's local h5 has a lower loss (by 0.100), uploads 100 times fewer bytes and takes "
        "41 ms a step instead of 120 ms at 100 Mbit/s."
    )
    assert against_muon.startswith("Against Muon-DDP, it has a higher loss (by 0.100), uploads 100 times fewer bytes")


def test_verdict_tie_lies_within_the_larger_spread():
    lowest, against_adamw, against_muon = sentences([ADAMW, MUON, local(1.805, 1.815)])
    assert lowest.endswith("Within the spread, demopt's local h5 is level with it.")
    assert against_adamw.startswith("Against AdamW-DDP, demopt's local h5 has a lower loss (by 0.190)")
    assert against_muon.startswith("Against Muon-DDP, it has the same loss within the spread (0.010 apart)")


def test_verdict_when_demopt_wins_names_its_best_row():
    told = sentences([ADAMW, MUON, local(1.5, 1.51), result("demo", "demo", [1.7, 1.71])])
    assert told[0].startswith("demopt's local h5 has the lowest loss, 1.505")
    assert told[2].startswith("Against Muon-DDP, it has a lower loss (by 0.295)")


def test_verdict_takes_the_best_row_of_a_baseline():
    worse = result("muon momentum 0.95", "muon", [1.9, 1.91], sent=1_250_000)
    assert "higher loss (by 0.100)" in sentences([worse, MUON, local(1.89, 1.91)])[1]


def test_verdict_tells_more_bytes_and_more_time_too():
    (_, told) = sentences([ADAMW, local(1.9, 1.91, sent=2_500_000, seconds=0.1)])
    assert "uploads 2 times as many bytes and takes 300 ms a step instead of 120 ms" in told
    (_, told) = sentences([ADAMW, local(1.9, 1.91, sent=1_250_000, seconds=0.02)])
    assert "uploads as many bytes and takes 120 ms a step as well" in told


def test_verdict_of_a_single_seed_says_so():
    told = sentences([result("adamw", "adamw", [2.0]), result("local", "local", [1.9])])
    assert "has a lower loss (by 0.100)" in told[1]
    assert told[-1] == "This is a single seed, so how much of it is chance is not known."


def test_verdict_without_baselines_says_so():
    assert sentences([local(1.9, 1.91)])[-1] == "There is no row of AdamW-DDP or Muon-DDP to compare with."


def test_verdict_without_demopt_compares_the_best_row():
    assert sentences([ADAMW, result("powersgd", "powersgd", [1.5, 1.6])])[1].startswith(
        "Against AdamW-DDP, powersgd has a lower loss"
    )


def test_verdict_names_what_diverged():
    assert sentences([local(None, 1.9)]) == ["No entry ended with a finite loss."]
    assert sentences([ADAMW, MUON, local(None, 1.9)])[1] == "All of demopt's rows diverged."
    assert "AdamW-DDP diverged." in sentences([result("adamw", "adamw", [None, 2.0]), local(1.9, 1.91)])
    assert sentences([]) == ["No entry ended with a finite loss."]


def test_verdict_names_no_more_than_three_level_rows():
    rows = [local(1.0, 1.1), *(result(f"row {number}", "galore", [1.04, 1.08]) for number in range(5))]
    assert sentences(rows)[0].endswith("Within the spread, row 0, row 1, row 2 and 2 more are level with it.")


@pytest.mark.parametrize(("apart", "level"), [(0.0, True), (0.0004, True), (0.001, False)])
def test_is_level_without_a_spread_asks_for_the_same_three_digits(apart, level):
    assert is_level(result("a", "adamw", [1.0]), result("b", "muon", [1.0 + apart])) is level

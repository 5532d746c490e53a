"""The table of attacks in SECURITY.md, by the program that measured it: no attack costs a protected run .1 nats."""

import re
from pathlib import Path

import pytest
import torch

from laboratory.liars import final_loss

PAGE = Path(__file__).parents[2].joinpath("SECURITY.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| .* \| ([\d.]+) \| ([\d.]+)", PAGE, re.MULTILINE)
ATTACKS = ("none", "flip", "samples", "random", "majority", "part", "contested", "two")  # in the order of the page


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("attack", "row"), list(zip(ATTACKS, ROWS, strict=True)), ids=ATTACKS)
def test_attack_costs_what_the_page_says(attack, row):
    torch.set_num_threads(1)
    for clip, told in zip((False, True), map(float, row), strict=True):
        found = final_loss(attack, clip, workers=4, liars=1, rounds=60, seed=0)
        assert found == pytest.approx(told, abs=0.02) or min(found, told) > 100  # a ruined run
        assert not clip or found < float(ROWS[0][1]) + 0.1

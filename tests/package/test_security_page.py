"""Every sentence of SECURITY.md has tests that hold it; the program that measured its table measures it again."""

import re
from pathlib import Path

import pytest
import torch

from laboratory.liars import final_loss

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
BESIDE_A_STRANGER = "runs/test_hostile.py::test_run_with_a_key_goes_on_beside_a_stranger_who_makes_every_name_first"
TABLE = "package/test_security_page.py::test_attack_costs_what_the_page_says"
HELD = {
    "Messages carry no pickle": "package/test_imports.py::test_nothing_that_is_received_is_unpickled",
    "A message is checked as a whole": "wire/test_fuzz.py::test_mutated_message_is_refused_or_makes_sense",
    "A damaged one": "wire/test_fuzz.py::test_mutated_message_is_refused_or_makes_sense",
    "`demopt train --resume`": "checkpoint/test_untrusted.py::test_security_resuming_runs_no_code_of_a_checkpoint",
    "Scripts get the same": "checkpoint/test_untrusted.py::test_entries_in_dcp_are_tensors_numbers_and_text",
    "A joiner takes": "runs/test_strangers.py::test_security_joining_takes_only_shared_settings_of_a_run",
    "It deletes nothing": "runs/test_strangers.py::test_security_joining_deletes_nothing",
    "It names the text": "runs/test_train_run.py::test_joiner_with_other_settings_or_text_is_told_at_once",
    "Names, notes and reasons": "runs/test_strangers.py::"
    "test_security_status_and_replay_of_a_strangers_run_end_in_words",
    "Numbers of others": "runs/test_strangers.py::test_numbers_of_a_note_are_finite_and_in_range_whatever_it_is",
    "With a key": BESIDE_A_STRANGER,
    "Without one": BESIDE_A_STRANGER,
    "In a run of four": "test_clip_to_median.py::test_security_one_of_four_that_lies_is_left_out",
    "This is `clip_to_median`": "test_clip_to_median.py::test_folders_leave_out_liars_by_default",
    "A round that": "runs/test_hostile.py::test_holder_of_the_key_moves_nothing_by_deciding_early_but_forges",
    "Held-out loss": TABLE,
    "| ": TABLE,
    "Anyone who can reach": "checkpoint/test_untrusted.py::test_torch_runs_code_of_other_ranks_and_of_files",
    "A key authenticates": "runs/test_stores.py::"
    "test_keyed_store_refuses_what_was_changed_moved_or_written_without_the_key",
    "torch.distributed.checkpoint's": "checkpoint/test_untrusted.py::test_torch_runs_code_of_other_ranks_and_of_files",
    "Most workers": "test_clip_to_median.py::test_liar_of_two_counts_and_so_does_one_of_four_that_lies_in_a_quarter",
    "A liar": "test_clip_to_median.py::test_liar_of_two_counts_and_so_does_one_of_four_that_lies_in_a_quarter",
    "A worker with the key": "runs/test_hostile.py::test_holder_of_the_key_moves_nothing_by_deciding_early_but_forges",
    "Whoever can delete": "runs/test_restart.py::test_object_that_is_gone_is_named_where_it_is_needed",
}
ADVICE = ("Use a network", "Report a weakness", "Describe the attacker", "You get an answer", "Only the newest")
PLACE = "`tests/package/test_security_page.py` names"


def _sentences():
    """All sentences of the page: its paragraphs, lists and table rows, without titles."""
    text = re.sub(r"^- (\*\*.*?\*\* )?", "\n\n", PAGE, flags=re.MULTILINE)
    parts = [part for part in re.split(r"\n\n+|\n(?=\|)", text) if part.strip() and not part.startswith(("#", "|---"))]
    found = [re.split(r"(?<=\.) (?=[A-Z`])", " ".join(part.split())) for part in parts]
    return [sentence for part in found for sentence in part if not sentence.startswith("| attack")]


def test_every_sentence_has_a_test_and_every_test_a_sentence():
    known = (*HELD, *ADVICE, PLACE)
    found = [[start for start in known if sentence.startswith(start)] for sentence in _sentences()]
    assert [sentence for sentence, starts in zip(_sentences(), found, strict=True) if len(starts) != 1] == []
    assert {start for starts in found for start in starts} == {*known}


@pytest.mark.parametrize("place", sorted(set(HELD.values())))
def test_the_test_that_holds_a_promise_is_there(place):
    file, name = place.split("::")
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE)


ROWS = re.findall(r"^\| .* \| ([\d.]+) \| ([\d.]+)", PAGE, re.MULTILINE)
ATTACKS = ("none", "flip", "samples", "random", "majority", "part", "contested", "two")  # in the order of the page


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("attack", "row"), list(zip(ATTACKS, ROWS, strict=True)), ids=ATTACKS)
def test_attack_costs_what_the_page_says(attack, row):
    """And no attack costs a protected run .1 nats."""
    torch.set_num_threads(1)
    for clip, told in zip((False, True), map(float, row), strict=True):
        found = final_loss(attack, clip, workers=4, liars=1, rounds=60, seed=0)
        assert found == pytest.approx(told, abs=0.02) or min(found, told) > 100  # a ruined run
        assert not clip or found < float(ROWS[0][1]) + 0.1

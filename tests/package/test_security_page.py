"""Every sentence of SECURITY.md's promises, and the tests that hold it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
HELD = {
    "Messages carry no pickle": "package/test_imports.py::test_nothing_that_is_received_is_unpickled",
    "A message is checked as a whole": "wire/test_fuzz.py::test_mutated_message_is_refused_or_makes_sense",
    "A damaged one": "wire/test_fuzz.py::test_mutated_message_is_refused_or_makes_sense",
    "`demopt train --resume`": "checkpoint/test_untrusted.py::test_security_resuming_runs_no_code_of_a_checkpoint",
    "Scripts get the same": "checkpoint/test_untrusted.py::test_entries_in_dcp_are_tensors_numbers_and_text",
    "A joiner takes": "runs/test_strangers.py::test_security_joining_takes_only_shared_settings_of_a_run",
    "It deletes nothing": "runs/test_strangers.py::test_security_joining_deletes_nothing",
    "It names the text": "runs/test_strangers.py::test_joiner_hears_which_text_it_reads",
    "Names, notes and reasons": "runs/test_strangers.py::"
    "test_security_status_and_replay_of_a_strangers_run_end_in_words",
    "Numbers of others": "runs/test_strangers.py::test_numbers_of_a_note_are_finite_and_in_range_whatever_it_is",
    "With a key": "runs/test_folder_exchange.py::test_stranger_without_the_key_changes_nothing",
    "Without one": "runs/test_folder_exchange.py::test_stranger_without_the_key_changes_nothing",
    "In a run of four": "test_clip_to_median.py::test_security_one_of_four_that_lies_is_left_out",
    "This is `clip_to_median`": "test_clip_to_median.py::test_folders_leave_out_liars_by_default",
}


def _promises() -> list[str]:
    part = PAGE.partition("## Promised")[2].partition("\n## ")[0]
    items = [" ".join(item.split()) for item in re.split(r"^- ", part, flags=re.MULTILINE)[1:]]
    return [sentence for item in items for sentence in re.split(r"(?<=\.) (?=[A-Z`])", item)]


def test_every_promise_has_a_test_and_every_test_a_promise() -> None:
    found = [[start for start in HELD if sentence.startswith(start)] for sentence in _promises()]
    assert [sentence for sentence, starts in zip(_promises(), found, strict=True) if len(starts) != 1] == []
    assert sorted(start for starts in found for start in starts) == sorted(HELD)


@pytest.mark.parametrize("place", sorted(set(HELD.values())))
def test_the_test_that_holds_a_promise_is_there(place: str) -> None:
    file, name = place.split("::")
    assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.MULTILINE)

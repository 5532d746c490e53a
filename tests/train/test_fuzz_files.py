"""Damaged files: a short run of benchmarks/fuzz_files.py; by hand it mutates 200,000."""

import fuzz_files


def test_fuzz_of_480_files_finds_nothing_wrong():
    counts, wrong = fuzz_files.fuzz(range(480))
    assert not wrong, wrong[0]
    for target in fuzz_files.targets():
        assert sum(counts[target.name, says] for says in ("refused", "read")) > 30
        if target.name.startswith("checkpoint "):
            assert counts[target.name, "read"] == 0
    assert sum(count for (_, says), count in counts.items() if says == "read") > 60

"""`python -m laboratory.bench`: every method is measured, in turn, on one process and on two."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from laboratory import bench


@pytest.mark.nightly
def test_bench_measures_every_method_with_one_process_and_with_two(tmp_path: Path) -> None:
    (tmp_path / "shapes.json").write_text("[[64, 64], [256, 8], [64]]")
    words = ["--shapes", str(tmp_path / "shapes.json"), "--rounds", "2", "--warmup", "0"]
    command = [sys.executable, "-m", "laboratory.bench", *words, "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    assert "Warning" not in done.stderr
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["parameters"] == 64 * 64 + 256 * 8 + 64
    assert [run["workers"] for run in told["runs"]] == [1, 2]
    for run in told["runs"]:
        rows = {row["name"]: row for row in run["methods"]}
        assert list(rows) == list(bench.METHODS)
        assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows.values())
        assert rows[bench.BASE]["ratio"] == 1.0
        assert rows["LocalDeMo, no round"]["payload_bytes"] == 0 < rows["LocalDeMo, round"]["payload_bytes"]
        assert rows["DeMo"]["sent_bytes"] == (run["workers"] - 1) * rows["DeMo"]["payload_bytes"]
        moments = 2 * 4 * told["parameters"]
        assert moments <= rows[bench.BASE]["held_bytes"] <= 1.2 * moments + 1000
        assert len(rows["DeMo"]["stages"]) == 2

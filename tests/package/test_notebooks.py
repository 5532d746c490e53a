"""The notebooks run from top to bottom, in short."""

import json
from pathlib import Path
from typing import Any

import pytest

import forked

ROOT = Path(__file__).parents[2]
SHORT = ["--preset", "tiny", "--eval-sequences", "8", "--threads", "1"]


def run_notebook(path: Path, **settings: object) -> dict[str, Any]:
    """Runs the cells; `settings` replace what a cell sets, "!" lines run as `demopt`, in short; pip is left out."""
    names: dict[str, Any] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        for line in [line for line in cell["source"] if line.startswith("!") and "pip" not in line]:
            program, *words = line[1:].format(**names).split()
            assert program == "demopt"
            done = forked.demopt(*words, *SHORT)
            assert done.returncode == 0, done.stderr
        exec("".join(line for line in cell["source"] if not line.startswith("!")), names)
        names.update({name: value for name, value in settings.items() if name in names})
    return names


def test_first_run_notebook_shows_fewer_bytes(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    names = run_notebook(ROOT / "notebooks/first_run.ipynb", STEPS=10)
    sent = {name: sum(row["sent_bytes"] for row in rows) for name, rows in names["runs"].items()}
    assert sent["adamw"] > 100 * sent["demopt"] > 0
    assert capsys.readouterr().out.count("validation loss") == 2

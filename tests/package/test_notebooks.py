"""The notebooks run from top to bottom, in short."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run_notebook(path: Path, **settings: object) -> dict[str, Any]:
    """Runs the cells; `settings` replace what a cell sets, "!" lines run in a shell, pip is left out."""
    names: dict[str, Any] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        for line in [line for line in cell["source"] if line.startswith("!") and "pip" not in line]:
            command = line[1:].strip().format(**names).replace("demopt ", f"{sys.executable} -m demopt.cli ", 1)
            done = subprocess.run(command.split(), capture_output=True, text=True, timeout=200)
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

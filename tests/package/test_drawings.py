"""The drawings of the documents are those of their script."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_drawings_are_what_the_script_draws() -> None:
    spec = importlib.util.spec_from_file_location("drawings", DOCS / "drawings.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    drawn = {f"{name}.svg": draw().text() for name, draw in script.DRAWINGS.items()}
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "drawings").iterdir()}

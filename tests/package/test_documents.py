"""Every command that the documents show is one that demopt takes, every Python block parses, every link leads on."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from demopt.cli import build_app
from laboratory.compare.__main__ import compare
from laboratory.compare.studies import chosen

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_compare = typer.Typer()
_compare.command()(compare)
COMPARE: Any = typer.main.get_command(_compare)
STARTS = re.compile(r"(?:^|\s)(?:\.venv/bin/)?(?:demopt|(?:-m )demopt\.cli) (?=[a-z]+( |$)|--)")


def commands(text: str) -> list[list[str]]:
    """Arguments of all commands of demopt in a document's indented or fenced blocks; "..." stands for anything."""
    found = []
    joined = text.replace("\\\n", " ")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", joined, re.DOTALL | re.MULTILINE)
    blocks = [*(block for language, block in fenced if language in ("", "sh", "bash", "console", "text")), joined]
    for block in blocks:
        for line in block.splitlines():
            if block is joined and not line.startswith("    "):
                continue
            start = STARTS.search(line)
            if start and "..." not in line:
                command = re.split(r"[|;&>]", line[start.end() :])[0]
                found.append(shlex.split(command.replace("[", "").replace("]", ""), comments=True))
    return [arguments for arguments in found if arguments]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_documented_commands_and_python_parse_and_links_exist(document: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    app: Any = typer.main.get_command(build_app())
    assert commands(text) or str(document) != "README.md"
    for name, *arguments in commands(text):
        if not name.startswith("--"):
            assert name in app.commands, name
            parent = app.context_class(app, info_name="demopt")
            app.commands[name].make_context(name, arguments, parent=parent)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        ast.parse(block)
    for module, words in re.findall(r"python -m (laboratory[.\w]*)([^`#\n]*)", text.replace("\\\n", " ")):
        assert importlib.util.find_spec(module), module
        if module == "laboratory.compare":
            parsed = COMPARE.make_context("compare", shlex.split(words)).params
            if parsed["study"] != "SETTING":
                chosen(parsed["study"], parsed["only"] or ())
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
        assert (ROOT / document.parent / target).exists(), target


def test_navigation_has_every_page_once() -> None:
    shown = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2])
    assert sorted(shown) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


def test_documents_stay_short() -> None:
    counted = [path for path in DOCUMENTS if path.name != "CODE_OF_CONDUCT.md"]
    words = sum(len((ROOT / path).read_text(encoding="utf-8").split()) for path in counted)
    assert (len(counted) <= 20, words <= 20_000) == (True, True), (len(counted), words)

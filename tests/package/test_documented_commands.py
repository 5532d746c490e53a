"""Every command line of demopt that the documents show is one that demopt takes, and every Python block parses."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from demopt.cli import build_app, joined_flags
from laboratory.compare.__main__ import compare
from laboratory.compare.studies import chosen

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
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
def test_documented_commands_parse(document: Path) -> None:
    app: Any = typer.main.get_command(build_app())
    for name, *arguments in commands((ROOT / document).read_text(encoding="utf-8")):
        if name.startswith("--"):
            continue
        assert name in app.commands, name
        app.commands[name].make_context(
            name, joined_flags(arguments), parent=app.context_class(app, info_name="demopt")
        )


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_documented_python_parses(document: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL):
        ast.parse(block)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_documented_programs_of_the_laboratory_exist(document: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
    for module, words in re.findall(r"python -m (laboratory[.\w]*)([^`#\n]*)", text):
        assert importlib.util.find_spec(module), module
        if module == "laboratory.compare":
            app = typer.Typer()
            app.command()(compare)
            given: Any = typer.main.get_command(app)
            parsed = given.make_context("compare", shlex.split(words)).params
            if parsed["study"] != "SETTING":
                chosen(parsed["study"], parsed["only"] or ())


def test_documents_show_commands() -> None:
    shown = sum(len(commands((ROOT / document).read_text(encoding="utf-8"))) for document in DOCUMENTS)
    assert shown > 15

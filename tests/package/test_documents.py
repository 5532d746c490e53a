"""Every command that the documents show is one that demopt takes, every Python block parses, every link leads on.

Every public name says what it is, with an example (which the doctests run). Errors are quoted as the code words them.
"""

import ast
import importlib.util
import re
import runpy
import shlex
from pathlib import Path

import pytest
import typer

import demopt
import demopt.checkpoint
import demopt.exchange
import demopt.integrations.torchft
from demopt.cli import build_app
from laboratory.compare.__main__ import compare
from laboratory.compare.studies import chosen

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_compare = typer.Typer()
_compare.command()(compare)
COMPARE = typer.main.get_command(_compare)
STARTS = re.compile(r"(?:^|\s)(?:\.venv/bin/)?(?:demopt|(?:-m )demopt\.cli) (?=[a-z]+( |$)|--)")
MODULES = (demopt, demopt.exchange, demopt.checkpoint, demopt.integrations.torchft)
PUBLIC = [(module, name) for module in MODULES for name in module.__all__]
PRESETS = {"V1", "V2"}  # plain dicts have no docstring; DeMo's example and a comment beside them serve


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
def test_documented_commands_and_python_parse_and_links_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    app = build_app()
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


def test_navigation_has_every_page_once():
    shown = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2])
    assert sorted(shown) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


def test_documents_stay_short():
    counted = [path for path in DOCUMENTS if path.name not in ("CODE_OF_CONDUCT.md", "CHANGELOG.md")]
    words = sum(len((ROOT / path).read_text(encoding="utf-8").split()) for path in counted)
    assert (len(counted) <= 20, words <= 20_000) == (True, True), (len(counted), words)


def test_drawings_are_what_their_script_draws():
    drawings = runpy.run_path(str(ROOT / "docs" / "drawings.py"))["DRAWINGS"]
    drawn = {f"{name}.svg": draw().text() for name, draw in drawings.items()}
    assert drawn == {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "drawings").iterdir()}


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=[name for _, name in PUBLIC])
def test_public_names_have_a_docstring_with_an_example(module, name):
    thing = getattr(module, name)
    if name in PRESETS:
        assert isinstance(thing, dict)
        return
    assert thing.__doc__, name
    assert ">>> " in thing.__doc__, f"{name} has no example"
    assert thing.__module__.startswith("demopt."), name


def test_version_is_the_same_everywhere():
    places = {"pyproject.toml": 'version = "{}"', "CITATION.cff": "version: {}", "CHANGELOG.md": "## {} - "}
    for name, text in places.items():
        assert text.format(demopt.__version__) in (ROOT / name).read_text(encoding="utf-8"), name


ERRORS = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
OF_TORCH = ("environment variable RANK", "TCP client failed", "Failed to recv", "EADDRINUSE", "Address already in use")


def _literals() -> str:
    """All texts of the code; what an f-string fills in is a gap."""
    found = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


FILLED = re.compile(
    r"\.{3}|\brank \d \(host \w\)|\brank \d|\d[\d.,]*|'[^']*'|\ba LocalDeMo\b|AdamW|with DeMoCallback"
    r"|if the run|\w+\(\), and"
)
LITERALS = _literals().replace("`", "")
ROWS = re.findall(r"^\| (.*?) \|", ERRORS, re.MULTILINE)
QUOTED = [quote for row in ROWS for quote in re.findall(r"`([^`]+)`", row) if not quote.startswith(OF_TORCH)]


@pytest.mark.parametrize("quote", [each for each in QUOTED if " " in each])
def test_error_is_worded_as_on_its_page(quote):
    """Word by word, between the parts that a run fills in: numbers, names, hosts."""
    words = re.sub(r"^\w*(Error|Warning): (run is)?|`", "", quote)
    known = [piece.strip(" :(),;") for piece in FILLED.split(words)]
    assert any(known)
    for piece in known:
        assert piece in LITERALS, piece

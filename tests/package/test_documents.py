"""The documents' commands, code, links, scripts, drawings, errors and notebook agree with the code."""

import ast
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import demopt
import demopt.checkpoint
import demopt.exchange
import demopt.integrations.torchft
import forked
import problems
from demopt.cli import build_app
from demopt.train.out import OutFolder
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


def commands(text):
    """Arguments of all commands of demopt in a document's indented or fenced blocks; "..." stands for anything."""
    found, joined = [], text.replace("\\\n", " ")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", joined, re.DOTALL | re.MULTILINE)
    lines = [line for line in joined.splitlines() if line.startswith("    ")]
    for language, block in fenced:
        lines += block.splitlines() if language in ("", "sh", "bash", "console", "text") else []
    for line in lines:
        start = STARTS.search(line)
        if start and "..." not in line:
            command = re.split(r"[|;&>]", line[start.end() :])[0]
            found.append(shlex.split(command.replace("[", "").replace("]", ""), comments=True))
    return [arguments for arguments in found if arguments]


def sections(text):
    """The anchors of a document's headings."""
    headings = re.findall(r"^#+ (.+)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_documented_commands_and_python_parse_and_links_exist(document):
    text, app = (ROOT / document).read_text(encoding="utf-8"), build_app()
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
    for target, section in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        path = (ROOT / document.parent / target).resolve() if target else ROOT / document
        assert path.exists(), target
        assert document.parts[0] != "docs" or path.is_relative_to(ROOT / "docs"), f"{target} is not on the site"
        assert not section or section in sections(path.read_text(encoding="utf-8")), f"{target}#{section}"


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "docs/design-notes.md"])
def test_names_in_the_documents_of_maintainers_are_in_the_code(document):
    files = [path for folder in ("src", "tests", "laboratory") for path in (ROOT / folder).rglob("*.*")]
    code = " ".join(f"{path.name} {path.read_text()}" for path in files if path.suffix in {".py", ".h", ".c", ".json"})
    words = {*re.findall(r"\w+", f"{code} {(ROOT / 'pyproject.toml').read_text()}")}
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL))
    assert not {word for span in spans for word in re.findall(r"[A-Za-z_]\w+", span)} - words


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


def test_files_that_a_run_writes_are_in_the_documents():
    text, written = (ROOT / "docs" / "train.md").read_text(encoding="utf-8"), OutFolder(ROOT).written
    assert not {place.name for place in written if f"`{place.name}`" not in text} - {"tensorboard", "wandb"}  # trackers


def test_words_fit_into_the_boxes_of_the_drawings():
    drawings, boxes = runpy.run_path(str(ROOT / "docs" / "drawings.py")), []
    box = drawings["Drawing"].box
    drawings["Drawing"].box = lambda *given: boxes.append(given[3:]) or box(*given)
    for draw in drawings["DRAWINGS"].values():
        draw()
    for width, _, lines, *_ in boxes:
        for size, line in zip((15, 13, 13), lines.split("\n"), strict=False):
            assert 0.55 * size * len(line) + 8 <= width, line  # the width of a letter in a wide font


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


def _literals():
    """All string literals of the code, with a gap for each value in an f-string."""
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


LAUNCH = ROOT / "examples" / "launch"
LAUNCHED = re.compile(r"""demopt\.cli,? train,? (.*?)\]?\n|RUN_FLAGS=["'](.*?)["']""")
SHORT = ["--preset", "tiny", "--eval-sequences", "8", "--threads", "1"]


@pytest.mark.parametrize("file", sorted(path.name for path in LAUNCH.iterdir()))
def test_launch_file_gives_flags_that_train_takes(file):
    command, text = build_app().commands["train"], (LAUNCH / file).read_text(encoding="utf-8")
    found = [shlex.split(" ".join(flags).replace(",", " ")) for flags in LAUNCHED.findall(text)]
    assert any(found)
    for words in found:
        command.make_context("train", [word for word in words if word != "${flags[@]}"])


def _snippets(document):
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)


def _printed(document, folder, ranks):
    """The output of a document's script."""
    (script,) = _snippets(document)
    (folder / "script.py").write_text(script)
    return forked.torchrun(folder / "script.py", ranks=ranks, cwd=folder).stdout


def test_readme_script_prints_what_the_readme_says(tmp_path):
    printed = _printed("README.md", tmp_path, 4)
    told = re.findall(r"rank (\d): (loss [\d.]+), ([\d,]+ bytes per step), weights ([0-9a-f]+)", printed)
    assert sorted(rank for rank, *_ in told) == ["0", "1", "2", "3"]
    assert len({fingerprint for *_, fingerprint in told}) == 1
    assert f"`{told[0][1]}, {told[0][2]}`" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_migrate_script_resumes_bit_for_bit(tmp_path):
    printed = [_printed("docs/migrate.md", tmp_path, 2) for _ in range(2)]
    assert [re.findall(r"steps (\d+) to", text) for text in printed] == [["0", "0"], ["100", "100"]]
    whole, resumed = (re.findall(r"loss ([\d.]+), fingerprint ([0-9a-f]+)", text) for text in printed)
    assert len(whole) == 2
    assert sorted(whole) == sorted(resumed)
    assert len({fingerprint for _, fingerprint in whole}) == 1
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["checkpoint-rank0.pt", "checkpoint-rank1.pt"]


def test_checkpoint_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second, third, fourth = _snippets("docs/checkpoints.md")
    model = torch.nn.Linear(4, 4)
    optimizer = demopt.LocalDeMo(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), sync_every=2)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    place = {"model": model, "optimizer": optimizer, "rank": 0, "torch": torch, "demopt": demopt}
    before = model.weight.detach().clone()
    for snippet in (first, second, third):
        problems.warned(lambda text=snippet: exec(text, place))  # between rounds; no process group
        assert torch.equal(model.weight, before)
    torch.save(torch.load("rank0.pt"), "rank1.pt")
    with pytest.raises(ValueError, match="rank"):  # two copies of rank 0's state
        exec(fourth, place)


def test_folder_snippet_runs(tmp_path):
    (snippet,) = _snippets("docs/folder.md")
    model = torch.nn.Linear(4, 4)
    place = {"demopt": demopt, "inner": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(snippet.replace("s3://bucket/mine", str(tmp_path / "run")).replace("late=10", "late=0"), place)
    optimizer = place["optimizer"]
    for _ in range(5):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert int(optimizer.replicator.round_number) == 1
    place["run"].leaving = True
    optimizer.finish_round()


def run_notebook(path, **settings):
    """Runs the cells; `settings` replace a cell's values, "!" lines run as short `demopt` runs; pip is left out."""
    names = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        for line in [line for line in cell["source"] if line.startswith("!")]:
            *program, words = line[1:].format(**names).split(maxsplit=3)
            assert program == [sys.executable, "-m", "demopt.cli"], "of the kernel's environment"
            forked.demopt(*words.split(), *SHORT)
        exec("".join(line for line in cell["source"] if line[0] not in "!%"), names)
        names.update({name: value for name, value in settings.items() if name in names})
    return names


def test_notebook_installs_what_it_imports():
    cells = json.loads((ROOT / "notebooks/first_run.ipynb").read_text(encoding="utf-8"))["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
    (install,) = [line for line in lines if line.startswith("%pip install")]
    imported = {name for line in lines for name in re.findall(r"^(?:import|from) (\w+)", line)}
    assert imported - set(sys.stdlib_module_names) <= set(install.split()), install
    assert "..[train]" in install


def test_first_run_notebook_shows_fewer_bytes(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    names = run_notebook(ROOT / "notebooks/first_run.ipynb", STEPS=10)
    sent = {name: sum(row["sent_bytes"] for row in rows) for name, rows in names["runs"].items()}
    assert sent["adamw"] > 100 * sent["demopt"] > 0
    assert capsys.readouterr().out.count("validation loss") == 2


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (("slurm.sbatch",), "--nnodes 2 .* --rdzv-endpoint node-a:29500 -m demopt.cli train --out /s/run"),
        (("torchrun.sh", "1"), "--nnodes 2 --node-rank 1 .*--master-addr node-a .* -m demopt.cli train --out /s/run"),
    ],
)
def test_scripts_meet_at_the_first_machine(tmp_path, script, told):
    """srun runs its command, scontrol knows two nodes, and torchrun prints its arguments."""
    programs = {
        "torchrun": '#!/bin/bash\necho "$@"\n',
        "srun": '#!/bin/bash\nexec "$@"\n',
        "scontrol": "#!/bin/bash\necho node-a\necho node-b\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_SUBMIT_DIR": "/s"}
    ours = {"MACHINES": "node-a node-b", "RUN_FLAGS": "--out /s/run", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(LAUNCH / script[0]), *script[1:]]
    done = subprocess.run(command, env=os.environ | slurm | ours, check=True, capture_output=True, text=True)
    assert re.match(told, done.stdout)

"""`import demopt` needs torch and nothing else, and does no work."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run(program):
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def newcomers(program, known="import sys"):
    """The modules outside the standard library that a program loads after another."""
    done = run(f"import sys; {known}\nbefore = {{*sys.modules}}; {program}\nprint(*({{*sys.modules}} - before))")
    assert (done.returncode, done.stderr) == (0, "")
    return {name for name in done.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names}


def test_import_demopt_loads_two_modules_until_a_name_is_used_and_torch_alone_then():
    assert newcomers("import demopt") == {"demopt", "demopt.version"}
    used = "import demopt; [getattr(demopt, name) for name in demopt.__all__]"
    found = newcomers(used, known="import torch, torch.distributed, torch.optim")
    assert {name.partition(".")[0] for name in found} <= {"torch", "demopt"}


def test_import_demopt_has_no_side_effects():
    """No process group, no change of torch's or Python's settings, no output."""
    done = run("""
import logging, random, warnings, torch, torch.distributed as dist
def settings():
    return (torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed(), torch.is_grad_enabled(),
            list(warnings.filters), list(logging.root.handlers), random.getstate(), dist.is_initialized(),
            torch.get_rng_state().tolist(), torch.are_deterministic_algorithms_enabled())
before = settings()
import demopt
demopt.DeMo, demopt.LocalDeMo, demopt.unsync
assert settings() == before
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["plan", "--help"], []], ids=str)
def test_help_and_version_do_not_import_torch(arguments):
    pytest.importorskip("typer")
    done = run(f"""
import sys
import demopt.cli
sys.argv = ["demopt", *{arguments}]
try:
    demopt.cli.main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
""")
    assert done.stderr.splitlines()[-1] == "False"
    assert "demopt" in done.stdout


def test_public_names_are_imported_when_they_are_used_and_listed_before():
    import demopt

    assert set(demopt.__all__) <= set(dir(demopt))
    assert {demopt.DeMo.__name__, demopt.exchange.SingleRank.__name__} == {"DeMo", "SingleRank"}
    with pytest.raises(AttributeError, match="no attribute 'Demo'"):
        demopt.Demo  # noqa: B018


def test_nothing_that_is_received_is_unpickled():
    """The one unpickler, in `checkpoint.py`, knows only DCP's records; and `torch.load` reads weights only."""
    for file in (Path(__file__).parents[2] / "src").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call):
                name, given = ast.unparse(call.func), [ast.unparse(keyword) for keyword in call.keywords]
                assert not re.match(r"(pickle|marshal|dill)\.loads?$|pickle\.Unpickler$", name), file
                assert name != "torch.load" or "weights_only=True" in given, file

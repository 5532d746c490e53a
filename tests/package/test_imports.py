"""`import demopt` needs torch and nothing else, and does no work."""

import subprocess
import sys

import pytest

ALLOWED = {"torch", "demopt"}  # beside the standard library and what torch itself imports

PROBE = """
import sys
import torch, torch.distributed, torch.optim
before = set(sys.modules)
{statement}
foreign = sorted({{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names))
print(*foreign)
"""


def newcomers(statement: str) -> set[str]:
    """Top-level packages outside the standard library that a statement imports, beyond what torch imports."""
    probe = PROBE.format(statement=statement)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", probe], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_import_demopt_loads_torch_alone() -> None:
    assert newcomers("import demopt; [getattr(demopt, name) for name in demopt.__all__]") <= ALLOWED


def test_import_demopt_loads_two_modules_until_a_name_is_used() -> None:
    """demopt and demopt.version: neither torch nor anything else outside the standard library."""
    probe = "import sys; before = {*sys.modules}; import demopt; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    foreign = [name for name in done.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names]
    assert foreign == ["demopt", "demopt.version"], done.stderr


@pytest.mark.parametrize("module", ["rich", "hypothesis"])
def test_import_probe_notices_other_modules(module: str) -> None:
    assert module in newcomers(f"import demopt, {module}")


BLOCKED = """
import sys
sys.modules.update(dict.fromkeys({names!r}))  # importing a module that is None fails as a missing one does
import torch
import demopt
parameter = torch.nn.Parameter(torch.ones(3, 4))
optimizer = demopt.DeMo([parameter], lr=0.1)
parameter.square().sum().backward()
optimizer.step()
torch.save(optimizer.state_dict(), "/dev/null")
print(optimizer.stats.kept)
"""


def test_demo_steps_without_the_extras() -> None:
    names = ["numpy", "transformers", "typer", "rich", "matplotlib", "safetensors", "tokenizers"]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(names=names)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1


def test_import_demopt_has_no_side_effects() -> None:
    """No process group, no change of torch's or Python's settings, no output."""
    probe = """
import logging, random, warnings, torch, torch.distributed as dist
def settings():
    return (torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed(), torch.is_grad_enabled(),
            list(warnings.filters), list(logging.root.handlers), random.getstate(), dist.is_initialized(),
            torch.get_rng_state().tolist(), torch.are_deterministic_algorithms_enabled())
before = settings()
import demopt
demopt.DeMo, demopt.LocalDeMo, demopt.unsync
assert settings() == before
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


HELP = """
import sys
import demopt.cli
sys.argv = ["demopt", *{arguments}]
try:
    demopt.cli.main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["plan", "--help"], []], ids=str)
def test_help_and_version_do_not_import_torch(arguments: list[str]) -> None:
    pytest.importorskip("typer")
    done = subprocess.run(
        [sys.executable, "-c", HELP.format(arguments=arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.stderr.splitlines()[-1] == "False"
    assert "demopt" in done.stdout


def test_public_names_are_imported_when_they_are_used_and_listed_before() -> None:
    import demopt

    assert set(demopt.__all__) <= set(dir(demopt))
    assert {demopt.DeMo.__name__, demopt.exchange.SingleRank.__name__} == {"DeMo", "SingleRank"}
    with pytest.raises(AttributeError, match="no attribute 'Demo'"):
        demopt.Demo  # noqa: B018
    assert {name for names in demopt._HOMES.values() for name in names} == set(demopt.__all__)

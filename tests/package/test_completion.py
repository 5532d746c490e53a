"""Shell completion knows commands and options; the shell asks through the environment."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("typer")


@pytest.mark.parametrize(("typed", "found"), [("demopt tra", "train"), ("demopt train --opti", "--optimizer")])
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_finds_commands_and_options(shell: str, typed: str, found: str) -> None:
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_TYPER_COMPLETE_ARGS": typed}
    done = subprocess.run(
        [sys.executable, "-m", "demopt.cli"],
        env=os.environ | asked | {"_DEMOPT_COMPLETE": f"complete_{shell}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert found in done.stdout

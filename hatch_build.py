"""Compiles src/demopt/kernels/*.c into the wheel where there is a C compiler; without one demopt is pure Python.

DEMOPT_KERNELS=0 builds without kernels; CC names another compiler. step.c is built once per instruction set and linked
into one library, which picks a build by processor, so that a wheel runs on any machine of its architecture.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("src/demopt/kernels")
FLAGS = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-fPIC"]
# The features that demopt_level in bits.c checks a processor for, and no more: -march=x86-64-v3 would let the compiler
# use unchecked instructions, and compilers before GCC 11, as in manylinux2014, do not know it.
_AVX2 = ["-mavx2", "-mfma", "-mbmi2"]
_AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl")]
LEVELS = {"v1": ["-march=x86-64"], "v3": ["-march=x86-64", *_AVX2], "v4": ["-march=x86-64", *_AVX2, *_AVX512]}


class CompileKernels(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by Hatchling before it puts together a wheel or an editable install."""
        if self.target_name != "wheel":
            return
        folder = Path(self.root, FOLDER)
        self._built = Path(tempfile.mkdtemp(), "cpu.so.1")
        if why_not := compile_kernels(folder, self._built):
            if version == "editable":
                (folder / "cpu.so.1").unlink(missing_ok=True)  # from an earlier install
            self.app.display_warning(
                f"demopt is built without its CPU kernels, so its steps are slower: {why_not}; all else works, and "
                "installing it again with a C compiler adds them"
            )
        elif version == "editable":
            _replace(folder / "cpu.so.1", self._built)
        else:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["force_include"][str(self._built)] = "demopt/kernels/cpu.so.1"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by Hatchling when all is put together."""
        del version, build_data, artifact_path
        if self.target_name == "wheel":
            shutil.rmtree(self._built.parent)


def compile_kernels(folder: Path, library: Path) -> str | None:
    """Builds the library; returns the reason if it cannot."""
    if os.environ.get("DEMOPT_KERNELS") == "0":
        return "DEMOPT_KERNELS is 0"
    named = os.environ.get("CC", "").strip() or "cc"
    compiler = [named] if shutil.which(named) else named.split()  # maybe with arguments, as "ccache gcc"
    if shutil.which(compiler[0]) is None:
        return "no C compiler found (CC, or cc)"
    levels = LEVELS if platform.machine() in ("x86_64", "AMD64") else {"v1": []}
    texts = b"".join(path.read_bytes() for path in sorted(folder.glob("*.[ch]")))
    digest = hashlib.blake2b(texts, digest_size=8).hexdigest()
    with tempfile.TemporaryDirectory() as temporary:
        builds = {"bits": [str(folder / "bits.c"), f'-DCHOOSES="{digest}"']}
        for level, machine in levels.items():
            builds[f"step_{level}"] = [str(folder / "step.c"), *machine, f"-DLEVEL={level}"]
        objects = [str(Path(temporary, f"{name}.o")) for name in builds]
        for build, built in zip(builds.values(), objects, strict=True):
            if error := _run([*compiler, *FLAGS, *build, "-c", "-o", built]):
                return error
        together = Path(temporary, library.name)
        if error := _run([*compiler, "-shared", *objects, "-lm", "-o", str(together)]):
            return error
        _replace(library, together)
    return None


def _replace(library: Path, built: Path) -> None:
    """Replaces a library that processes may be using by a new file: writing into theirs would crash them."""
    fresh = library.with_name(f"{library.name}.{os.getpid()}")
    shutil.copy(built, fresh)
    fresh.replace(library)


def _run(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"{command[0]} failed: {done.stderr.strip()[-500:]}"

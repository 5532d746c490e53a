"""Runs a part of the suite in fresh environments: which versions of Python and torch does demopt work with?

    python benchmarks/versions.py 3.10:2.6.0 3.13:2.13.0 --results benchmarks/results/versions.json

A pair is a version of Python, whose interpreter is on the PATH or among pyenv's, and one of torch. One environment at a
time, in a temporary folder, with a wheel of demopt built for it and the newest of everything else; it is deleted before
the next one is made. Prints a row for each pair; exits with 1 if a test failed.

torch comes without NVIDIA's libraries, which are several times its size and of which a CPU runs nothing: --stubs puts
empty ones in their place (it needs a C compiler and ldd), so that a build for CUDA can be imported. Without --stubs pip
installs all that torch asks for.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAIRS = ("3.10:2.6.0", "3.11:2.13.0", "3.12:2.13.0", "3.13:2.13.0")
TESTS = (
    "tests/wire", "tests/golden", "tests/local", "tests/kernels/test_cpu.py", "tests/package/test_imports.py",
    *(f"tests/optim/test_{name}.py" for name in ("reference", "delay", "overlap", "regroup", "bfloat16", "groups")),
)  # fmt: skip
NEEDED = ("pytest", "pytest-timeout", "hypothesis", "numpy", "rich", "typer", "transformers")
HEAVY = re.compile(r"(nvidia|cuda|triton|pytorch-triton)\b")
CUDA = re.compile(r"\b(?:cublas|cudnn|cufft|cufile|curand|cusolver|cusparse|nccl|nvJitLink|nvrtc|nvshmem|nvtx)\w*")


@dataclass(frozen=True)
class Outcome:
    """What a pair's tests came to; `failed` names those that failed, or what kept them from running."""

    python: str
    torch: str
    day: str
    passed: int
    skipped: int
    failed: list[str]
    kernels: bool
    seconds: int

    @property
    def row(self) -> str:
        """A line of a Markdown table."""
        verdict = "passed" if not self.failed else f"{len(self.failed)} failed"
        how = "compiled" if self.kernels else "torch"
        return f"| {self.python} | {self.torch} | {verdict} | {self.passed} | {self.skipped} | {how} | {self.day} |"


class StepError(Exception):
    """A command that had to succeed failed; its last lines say why."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", default=PAIRS, help=f"PYTHON:TORCH (default: {' '.join(PAIRS)})")
    parser.add_argument("--stubs", action="store_true", help="empty libraries for those of NVIDIA")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files and folders of tests")
    parser.add_argument("--results", type=Path, help="a JSON file, whose rows of other pairs stay")
    given = parser.parse_args()
    failed = False
    for pair in given.pairs:
        version, _, torch = pair.partition(":")
        with tempfile.TemporaryDirectory(prefix="demopt-versions-") as folder:
            outcome = tried(version, torch, Path(folder), given.tests, given.stubs)
        print(outcome.row, *outcome.failed, sep="\n", flush=True)
        failed |= bool(outcome.failed)
        if given.results is not None:
            keep(outcome, given.results)
    return int(failed)


def tried(version: str, torch: str, folder: Path, tests: list[str], stubs: bool) -> Outcome:
    """Makes the environment, runs the tests in it, and says what came of them."""
    began = time.monotonic()
    found = Outcome(version, torch, str(date.today()), 0, 0, [], False, 0)
    try:
        python = environment(interpreter(version), folder / "environment", torch, stubs)
        about = "import platform, torch; from demopt.kernels.compiled import compiled; "
        about += "print(platform.python_version(), torch.__version__, compiled() is not None)"
        known, built, compiled = run([python, "-I", "-c", about]).split()
        passed, skipped, failed = tested(python, folder / "tests.xml", tests)
    except StepError as error:
        return Outcome(**{**asdict(found), "failed": [str(error)], "seconds": round(time.monotonic() - began)})
    seconds = round(time.monotonic() - began)
    return Outcome(known, built, found.day, passed, skipped, failed, compiled == "True", seconds)


def interpreter(version: str) -> str:
    """Returns the path of an interpreter of this version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    known = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for path in filter(None, known):
        if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:  # pyenv's shims may not run
            return str(path)
    raise StepError(f"there is no Python {version} on the PATH, and none among pyenv's")


def environment(python: str, folder: Path, torch: str, stubs: bool) -> Path:
    """Makes a virtual environment with torch, the tests' needs and demopt; returns its interpreter."""
    run([python, "-m", "venv", folder])
    inside = folder / "bin" / "python"
    if stubs:
        pip(inside, "--no-deps", f"torch=={torch}")
        asked = run([inside, "-I", "-c", "import importlib.metadata as m; print(*m.requires('torch'), sep='\\n')"])
        requirements = asked.strip().splitlines()
        pip(inside, *NEEDED, *(line for line in requirements if not HEAVY.match(line)))
        put_stubs(inside, requirements)
    else:
        pip(inside, f"torch=={torch}", *NEEDED)
    pip(inside, "--no-deps", "--no-cache-dir", str(ROOT))  # torch may be older than demopt asks for
    return inside


def put_stubs(python: Path, requirements: list[str]) -> None:
    """Puts what torch calls when it is imported, and functions that do nothing for the rest, beside its libraries."""
    libraries = Path(run([python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    libraries /= "torch/lib"
    with tempfile.TemporaryDirectory() as folder:
        if called := cuda_requirements(requirements):
            pip(python, "--no-deps", "--target", folder, *called)
        for name in ("libcudart.so*", "libcupti.so*"):
            for library in Path(folder).rglob(name):
                shutil.copy(library, libraries)
        symbols = [run(["nm", "-D", "--undefined-only", library]) for library in libraries.glob("lib*.so")]
        source = Path(folder, "stubs.c")
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in sorted(set(CUDA.findall("".join(symbols))))))
        run(["cc", "-w", "-shared", "-fPIC", source, "-o", libraries / "libstubs.so"])
        linked = [f"-L{libraries}", "-Wl,--no-as-needed", "-lstubs", "-Wl,-rpath,$ORIGIN"]
        for name in sorted(missing(libraries)):
            run(["cc", "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{name}", *linked, "-o", libraries / name])


def cuda_requirements(requirements: list[str]) -> list[str]:
    """Returns the requirements of CUDA's runtime and of its profiler among torch's own; none if it is for CPUs."""
    found = []
    for line in requirements:
        if match := re.match(r"(nvidia-cuda-(?:runtime|cupti)[\w-]*) *\(?([=<>~!.,\d*]*)", line):
            found.append(match[1] + match[2])
        elif match := re.match(r"cuda-toolkit\[.*\] *== *(\d+\.\d+)", line):
            found += [f"nvidia-cuda-{part}=={match[1]}.*" for part in ("runtime", "cupti")]
    return found


def missing(folder: Path) -> set[str]:
    """Returns the names of the shared libraries that those in the folder need and the loader does not find."""
    found: set[str] = set()
    for library in folder.glob("*.so*"):
        done = subprocess.run(["ldd", library], capture_output=True, text=True)
        found |= set(re.findall(r"(\S+) => not found", done.stdout))
    return found


def tested(python: Path, report: Path, tests: list[str]) -> tuple[int, int, list[str]]:
    """Runs the tests; returns how many passed and were skipped, and the names of those that failed."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    if not report.exists():
        raise StepError(tail(done.stdout + done.stderr))
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        results = {part.tag for part in case}
        if results & {"failure", "error"}:
            why = next(part.get("message", "") for part in case if part.tag in ("failure", "error"))
            failed.append(f"{case.get('classname')}::{case.get('name')}: {why[:300]}")
        elif "skipped" in results:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, failed


def keep(outcome: Outcome, file: Path) -> None:
    """Writes the outcome to the file, in place of an earlier one of the same versions."""
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    rows = [row for row in rows if (row["python"], row["torch"]) != (outcome.python, outcome.torch)]
    rows = sorted([*rows, asdict(outcome)], key=lambda row: (row["python"], row["torch"]))
    file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def pip(python: Path, *arguments: str) -> None:
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def run(command: list[str | Path]) -> str:
    """Runs a command that has to succeed; returns what it prints."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StepError(f"{' '.join(map(str, command[:6]))}: {tail(done.stderr or done.stdout)}")
    return done.stdout


def tail(text: str) -> str:
    return " / ".join(text.strip().splitlines()[-5:])[-900:]


if __name__ == "__main__":
    sys.exit(main())

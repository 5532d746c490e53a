"""Changes one operator or number of the library at a time, and runs the tests of its folder: which changes survive?

    python benchmarks/mutants.py --count 300 --results benchmarks/results/mutants.json
    python benchmarks/mutants.py --part 1/2 --results mutants-1.json    # and 2/2 beside it, on the other core

A random sample, the same for the same seed, of core/, wire/ and the control plane of optim/. A changed copy of the
sources stands in a folder of its own, so the processes of ranks see it too. torch is imported once, and every mutant is
a fork of that process; that is why this is not mutmut or cosmic-ray, whose new interpreter for each mutant would spend
most of its time importing torch. A mutant whose tests do not end in time counts as killed. Survivors are printed; read
them: some change nothing that matters.
"""

import argparse
import ast
import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTROL = ("plan", "round", "session", "demo", "compress", "decompress", "overlap", "checkpoint", "handshake")
AREAS = {
    "wire": (["src/demopt/wire"], ["tests/wire"]),
    "core": (
        ["src/demopt/core"],
        [
            "tests/test_exact.py",
            "tests/test_clip_to_median.py",
            "tests/optim/test_reference.py",
            "tests/optim/test_bfloat16.py",
            "tests/promises",
        ],
    ),
    "control plane": (
        [f"src/demopt/optim/{name}.py" for name in CONTROL],
        [
            "tests/promises",
            "tests/optim/test_delay.py",
            "tests/optim/test_overlap.py",
            "tests/optim/test_regroup.py",
            "tests/optim/test_set_aside.py",
            "tests/optim/test_layout_alone.py",
            "tests/local",
            "tests/parallel/test_muon_on_shards.py",
        ],
    ),
}
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATIONS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A change of one node of a file; `number` counts the nodes that can be changed."""

    area: str
    file: str
    number: int
    line: int
    change: str


class Changer(ast.NodeTransformer):
    """Visits what can be changed, in order; changes number `wanted`, or only lists all if that is None."""

    def __init__(self, wanted: int | None) -> None:
        self.wanted, self.found = wanted, list[tuple[int, str]]()

    def due(self, node: ast.AST, change: str) -> bool:
        self.found.append((node.lineno, change))  # type: ignore[attr-defined]
        return len(self.found) - 1 == self.wanted

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        other = COMPARISONS.get(type(node.ops[0]))
        if other and self.due(node, f"{ast.unparse(node)}: {other.__name__}"):
            node.ops[0] = other()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        other = OPERATIONS.get(type(node.op))
        words = any(
            isinstance(side, ast.Constant | ast.JoinedStr) and not number(side) for side in (node.left, node.right)
        )
        if other and not words and self.due(node, f"{ast.unparse(node)}: {other.__name__}"):
            node.op = other()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        if self.due(node, f"{ast.unparse(node)}: {other.__name__}"):
            node.op = other()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return node.operand if self.due(node, f"{ast.unparse(node)}: without the sign") else node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            return ast.Constant(not node.value) if self.due(node, f"{node.value}: {not node.value}") else node
        if number(node) and self.due(node, f"{node.value}: {node.value + 1}"):  # type: ignore[operator]
            return ast.Constant(node.value + 1)  # type: ignore[operator]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = [self.visit(statement) for statement in node.body]
        return node


def number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool)


def mutants() -> Iterator[Mutant]:
    """Yields all of them."""
    for area, (places, _) in AREAS.items():
        for place in places:
            files = sorted((ROOT / place).glob("*.py")) if (ROOT / place).is_dir() else [ROOT / place]
            for file in files:
                changer = Changer(None)
                changer.visit(ast.parse(file.read_text()))
                for at, (line, change) in enumerate(changer.found):
                    yield Mutant(area, file.relative_to(ROOT).as_posix(), at, line, change[:150])


def verdict(mutant: Mutant, copy: Path, seconds: int) -> str:
    """Returns "killed", "survived" or "too slow": killed as well."""
    file = copy / mutant.file
    before = file.read_text()
    if mutant.number >= 0:
        file.write_text(ast.unparse(ast.fix_missing_locations(Changer(mutant.number).visit(ast.parse(before)))))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()  # the processes of ranks end with it
            code = run_tests(mutant, copy)
        finally:
            os._exit(code)
    try:
        return ended(child, time.monotonic() + seconds)
    finally:
        file.write_text(before)


def ended(child: int, deadline: float) -> str:
    """Waits for the tests; ends them after the deadline."""
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # ranks that hang
            return "survived" if status == 0 else "killed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "too slow"


def run_tests(mutant: Mutant, copy: Path) -> int:
    """Returns the exit code of the file's examples and the area's tests."""
    import pytest

    os.chdir(copy)
    sys.modules["triton"] = None  # type: ignore[assignment] - not of these areas, and slow to import
    sys.path[:0] = [str(copy / "src"), str(copy / "tests")]
    os.environ["PYTHONPATH"] = str(copy / "src")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", mutant.file, *AREAS[mutant.area][1]]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=300, help="for the tests of one mutant")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no more are begun")
    parser.add_argument("--only", choices=list(AREAS))
    parser.add_argument("--part", default="1/1", help="of the sample: 2/3 is every third, from the second on")
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    import numpy  # noqa: F401 - and nothing that pytest rewrites, or that imports demopt
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint

    torch.set_num_threads(1)
    known = [mutant for mutant in mutants() if given.only in (None, mutant.area)]
    part, parts = map(int, given.part.split("/"))
    chosen = random.Random(given.seed).sample(known, min(given.count, len(known)))[part - 1 :: parts]
    began, told = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("src", "tests", "benchmarks", "docs"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "results"))
        for part in ("pyproject.toml", "conftest.py", "README.md"):
            shutil.copy(ROOT / part, copy / part)
        for area in {mutant.area for mutant in chosen}:
            if verdict(Mutant(area, "src/demopt/__init__.py", -1, 0, ""), copy, 600) != "survived":
                print(f"the tests of {area} fail without any change", file=sys.stderr)
                return 2
        for mutant in chosen:
            if time.monotonic() - began > 60 * given.minutes:
                break
            says = verdict(mutant, copy, given.seconds)
            told.append({**asdict(mutant), "verdict": says})
            print(f"{says:9} {mutant.file}:{mutant.line}  {mutant.change}", flush=True)
            if given.results is not None:
                given.results.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    survived = [one for one in told if one["verdict"] == "survived"]
    print(f"{len(told)} of {len(known)} mutants, {len(survived)} survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())

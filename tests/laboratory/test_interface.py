"""The laboratory uses public names of demopt alone, and demopt does not know of the laboratory."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import demopt
from demopt.replicator.replicator import Replicator

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "laboratory").rglob("*.py"))
PUBLIC = ("demopt.exchange", "demopt.checkpoint")  # beside demopt itself; their __all__
#: The names of `demopt train` that laboratory/training.py takes (laboratory/README.md).
TRAINING = {
    "demopt.train.config": {"TrainConfig", "resolve"},
    "demopt.train.data": {"Corpus", "batch", "load_corpus", "validation_windows"},
    "demopt.train.loop": {"learning_rate"},
    "demopt.train.model": {"build"},
}


def offences(tree: ast.AST, is_training: bool = False) -> Iterator[str]:
    """What a program uses of demopt beyond its public names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "demopt"]
            yield from (f"import {name}" for name in names if name not in ("demopt", *PUBLIC))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "demopt":
            known = names_of(node.module or "", is_training)
            yield from (f"from {node.module} import {a.name}" for a in node.names if a.name not in known)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in ("demopt", *PUBLIC) and node.attr not in names_of(owner, False):
                yield f"{owner}.{node.attr}"
            if owner.rpartition(".")[2] == "replicator" and not hasattr(Replicator, node.attr):
                yield f"{owner}.{node.attr}"
            if node.attr.startswith("_") and not node.attr.endswith("__") and owner not in ("self", "os"):
                yield f"{owner}.{node.attr}"


def names_of(module: str, is_training: bool) -> set[str]:
    """The public names of a module of demopt; none if the module is not public."""
    if module == "demopt":
        return {*demopt.__all__, "__version__", "__file__", "exchange", "checkpoint", "integrations"}
    if module in PUBLIC:
        return set(importlib.import_module(module).__all__)
    if module.startswith("demopt.integrations."):
        found = (ROOT / "src" / Path(*module.split("."))).with_suffix(".py")
        source = found if found.exists() else found.with_suffix("") / "__init__.py"
        tree = ast.parse(source.read_text(encoding="utf-8"))
        names = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
        names |= {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        return {name for name in names if not name.startswith("_")}
    return TRAINING.get(module, set()) if is_training else set()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_program_uses_public_names_of_demopt_alone(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert list(offences(tree, is_training=path.name == "training.py")) == []


@pytest.mark.parametrize(
    "line",
    [
        "import demopt.optim.demo",
        "from demopt.exchange.threads import Threads",
        "from demopt.exchange import Wrapper",
        "from demopt.train.loop import learning_rate",
        "from demopt import Muonish",
        "demopt.optim",
        "optimizer._weights.adopt()",
        "optimizer.replicator._plan",
        "optimizer.replicator.session",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert list(offences(ast.parse(line)))


def test_training_takes_no_more_than_its_names() -> None:
    tree = ast.parse((ROOT / "laboratory" / "training.py").read_text(encoding="utf-8"))
    taken = {
        (node.module, alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert {(module, name) for module, names in TRAINING.items() for name in names} <= taken


def test_demopt_does_not_know_of_the_laboratory() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = (
                [module or ""] + [alias.name for alias in node.names]
                if isinstance(node, ast.Import | ast.ImportFrom)
                else []
            )
            assert not any(name.split(".")[0] == "laboratory" for name in names), path

"""Every public name says what it is, with an example (which the doctests run)."""

import types
from pathlib import Path
from typing import Any

import pytest

import demopt
import demopt.checkpoint
import demopt.exchange
import demopt.integrations.torchft

MODULES = (demopt, demopt.exchange, demopt.checkpoint, demopt.integrations.torchft)
PUBLIC = [(module, name) for module in MODULES for name in module.__all__]
PRESETS = {"V1", "V2"}  # plain dicts have no docstring; DeMo's example and a comment beside them serve


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=[name for _, name in PUBLIC])
def test_public_names_have_a_docstring_with_an_example(module: types.ModuleType, name: str) -> None:
    thing: Any = getattr(module, name)
    if name in PRESETS:
        assert isinstance(thing, dict)
        return
    assert thing.__doc__, name
    assert ">>> " in thing.__doc__, f"{name} has no example"
    assert thing.__module__.startswith("demopt."), name


def test_version_is_the_same_everywhere() -> None:
    root = Path(__file__).parents[2]
    places = {"pyproject.toml": 'version = "{}"', "CITATION.cff": "version: {}", "CHANGELOG.md": "## {} - "}
    for name, text in places.items():
        assert text.format(demopt.__version__) in (root / name).read_text(encoding="utf-8"), name

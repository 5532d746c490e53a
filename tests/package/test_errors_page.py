"""docs/errors.md quotes errors as the code words them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
OF_TORCH = ("environment variable RANK", "TCP client failed", "Failed to recv", "EADDRINUSE", "Address already in use")


def _literals() -> str:
    """All texts of the code; what an f-string fills in is a gap."""
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
ROWS = re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE)
QUOTED = [quote for row in ROWS for quote in re.findall(r"`([^`]+)`", row) if not quote.startswith(OF_TORCH)]


@pytest.mark.parametrize("quote", [each for each in QUOTED if " " in each])
def test_error_is_worded_as_on_its_page(quote):
    """Word by word, between the parts that a run fills in: numbers, names, hosts."""
    words = re.sub(r"^\w*(Error|Warning): (run is)?|`", "", quote)
    known = [piece.strip(" :(),;") for piece in FILLED.split(words)]
    assert any(known)
    for piece in known:
        assert piece in LITERALS, piece

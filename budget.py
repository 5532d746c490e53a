"""Prints the number of lines per folder, and fails if one is above its limit in budget.json.

python budget.py
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

SUFFIXES = {".py", ".c", ".h", ".cpp", ".md"}


def main() -> int:
    """Counts the lines of tracked files; returns the exit code."""
    budget: dict[str, int] = json.loads(Path("budget.json").read_text())
    lines: Counter[str] = Counter()
    for name in subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.splitlines():
        path = Path(name)
        if path.suffix in SUFFIXES and path.parts[0] in budget and path.exists():
            below = path.parts[: 3 if path.parts[0] == "src" else 2]  # src/demopt/FOLDER, tests/FOLDER
            for place in {path.parts[0], "/".join(below)} if below != path.parts else {path.parts[0]}:
                lines[place] += len(path.read_bytes().splitlines())
    over = 0
    for name in sorted(lines):
        if name in budget:
            over += lines[name] > budget[name]
            print(f"{lines[name]:7,} of {budget[name]:,}  {name}")
        else:
            print(f"{lines[name]:7,}  {name}")
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())

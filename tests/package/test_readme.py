"""What the README shows runs, and what the documents link to exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def _printed(folder: Path, name: str) -> str:
    """What two ranks print that run a script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _told(printed: str) -> list[tuple[str, str]]:
    """The loss and fingerprint that each of two ranks printed last."""
    told: list[tuple[str, str]] = re.findall(r"loss ([\d.]+), fingerprint ([0-9a-f]+)", printed)
    assert len(told) == 2
    return told


def test_readme_scripts_end_with_equal_replicas(tmp_path: Path) -> None:
    script, muon, local = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (line,) = re.findall(r"^optimizer = .*$", script, re.MULTILINE)
    (tmp_path / "signs.py").write_text(script)
    (tmp_path / "muon.py").write_text(script.replace(line, muon.strip()))
    (tmp_path / "local.py").write_text(script.replace(line, local.strip()))
    for name in ("signs.py", "muon.py", "local.py"):
        told = _told(_printed(tmp_path, name))
        assert told[0][1] == told[1][1]
        assert max(float(loss) for loss, _ in told) < 1  # the variance of what is to be learnt is 64


def test_migrate_script_resumes_bit_for_bit(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/migrate.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    printed = [_printed(tmp_path, "script.py") for _ in range(2)]
    assert [re.findall(r"steps (\d+) to", text) for text in printed] == [["0", "0"], ["100", "100"]]
    whole, resumed = (_told(text) for text in printed)
    assert sorted(whole) == sorted(resumed)
    assert len({fingerprint for _, fingerprint in whole}) == 1
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["checkpoint-rank0.pt", "checkpoint-rank1.pt"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_document_links_exist(document: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
        assert (ROOT / document.parent / target).exists(), target

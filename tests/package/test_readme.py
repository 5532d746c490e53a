"""The scripts and snippets that README and documents show run; the notebooks, in short; and examples/launch."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import demopt
import forked
import problems

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
SHORT = ["--preset", "tiny", "--eval-sequences", "8", "--threads", "1"]


def _snippets(document: str) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)


def test_readme_script_prints_what_the_readme_says(tmp_path):
    (script,) = _snippets("README.md")
    (tmp_path / "script.py").write_text(script)
    printed = forked.torchrun(tmp_path / "script.py", ranks=4, cwd=tmp_path).stdout
    told = re.findall(r"rank (\d): (loss [\d.]+), ([\d,]+ bytes per step), weights ([0-9a-f]+)", printed)
    assert sorted(rank for rank, *_ in told) == ["0", "1", "2", "3"]
    assert len({fingerprint for *_, fingerprint in told}) == 1
    assert f"`{told[0][1]}, {told[0][2]}`" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_migrate_script_resumes_bit_for_bit(tmp_path):
    (script,) = _snippets("docs/migrate.md")
    (tmp_path / "script.py").write_text(script)
    printed = [forked.torchrun(tmp_path / "script.py", ranks=2, cwd=tmp_path).stdout for _ in range(2)]
    assert [re.findall(r"steps (\d+) to", text) for text in printed] == [["0", "0"], ["100", "100"]]
    whole, resumed = (re.findall(r"loss ([\d.]+), fingerprint ([0-9a-f]+)", text) for text in printed)
    assert len(whole) == 2
    assert sorted(whole) == sorted(resumed)
    assert len({fingerprint for _, fingerprint in whole}) == 1
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["checkpoint-rank0.pt", "checkpoint-rank1.pt"]


def test_checkpoint_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second, third, fourth = _snippets("docs/checkpoints.md")
    model = torch.nn.Linear(4, 4)
    optimizer = demopt.LocalDeMo(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), sync_every=2)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    place = {"model": model, "optimizer": optimizer, "rank": 0, "torch": torch, "demopt": demopt}
    before = model.weight.detach().clone()
    for snippet in (first, second, third):
        problems.warned(lambda text=snippet: exec(text, place))  # between rounds; no process group
        assert torch.equal(model.weight, before)
    torch.save(torch.load("rank0.pt"), "rank1.pt")
    with pytest.raises(ValueError, match="rank"):  # two copies of rank 0's state
        exec(fourth, place)


def test_folder_snippet_runs(tmp_path):
    (snippet,) = _snippets("docs/folder.md")
    model = torch.nn.Linear(4, 4)
    place: dict[str, Any] = {"demopt": demopt, "inner": torch.optim.SGD(model.parameters(), lr=0.1)}
    exec(snippet.replace("s3://bucket/mine", str(tmp_path / "run")).replace("late=10", "late=0"), place)
    optimizer = place["optimizer"]
    for _ in range(5):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert int(optimizer.replicator.round_number) == 1
    place["run"].leaving = True
    optimizer.finish_round()


def run_notebook(path: Path, **settings: object) -> dict[str, Any]:
    """Runs the cells; `settings` replace what a cell sets, "!" lines run as `demopt`, in short; pip is left out."""
    names: dict[str, Any] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        for line in [line for line in cell["source"] if line.startswith("!")]:
            *program, words = line[1:].format(**names).split(maxsplit=3)
            assert program == [sys.executable, "-m", "demopt.cli"], "of the kernel's environment"
            forked.demopt(*words.split(), *SHORT)
        exec("".join(line for line in cell["source"] if line[0] not in "!%"), names)
        names.update({name: value for name, value in settings.items() if name in names})
    return names


def test_notebook_installs_what_it_imports():
    cells = json.loads((ROOT / "notebooks/first_run.ipynb").read_text(encoding="utf-8"))["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
    (install,) = [line for line in lines if line.startswith("%pip install")]
    imported = {name for line in lines for name in re.findall(r"^(?:import|from) (\w+)", line)}
    assert imported - set(sys.stdlib_module_names) <= set(install.split()), install
    assert "..[train]" in install


def test_first_run_notebook_shows_fewer_bytes(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    names = run_notebook(ROOT / "notebooks/first_run.ipynb", STEPS=10)
    sent = {name: sum(row["sent_bytes"] for row in rows) for name, rows in names["runs"].items()}
    assert sent["adamw"] > 100 * sent["demopt"] > 0
    assert capsys.readouterr().out.count("validation loss") == 2


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (("slurm.sbatch",), "--nnodes 2 .* --rdzv-endpoint node-a:29500 -m demopt.cli train --out /s/run"),
        (("torchrun.sh", "1"), "--nnodes 2 --node-rank 1 .*--master-addr node-a .* -m demopt.cli train --out /s/run"),
    ],
)
def test_scripts_meet_at_the_first_machine(tmp_path, script, told):
    """srun runs its command, scontrol knows two nodes, and torchrun says what it was given."""
    programs = {
        "torchrun": '#!/bin/bash\necho "$@"\n',
        "srun": '#!/bin/bash\nexec "$@"\n',
        "scontrol": "#!/bin/bash\necho node-a\necho node-b\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_SUBMIT_DIR": "/s"}
    ours = {"MACHINES": "node-a node-b", "RUN_FLAGS": "--out /s/run", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(LAUNCH / script[0]), *script[1:]]
    done = subprocess.run(command, env=os.environ | slurm | ours, check=True, capture_output=True, text=True)
    assert re.match(told, done.stdout)

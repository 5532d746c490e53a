"""The files of examples/launch: the scripts start torchrun so that all machines meet at the first one."""

import os
import re
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (("slurm.sbatch",), "--nnodes 2 .* --rdzv-endpoint node-a:29500 -m demopt.cli train --out /s/run"),
        (("torchrun.sh", "1"), "--nnodes 2 --node-rank 1 .*--master-addr node-a .* -m demopt.cli train --out /s/run"),
    ],
)
def test_scripts_meet_at_the_first_machine(tmp_path: Path, script: tuple[str, ...], told: str) -> None:
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
    done = subprocess.run(
        command, env=os.environ | slurm | ours, check=True, timeout=60, capture_output=True, text=True
    )
    assert re.match(told, done.stdout)

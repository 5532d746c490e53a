"""The files of examples/launch: those that can run here run; the others are at least what they claim to be."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"


def test_slurm_script_meets_at_the_first_node(tmp_path: Path) -> None:
    """srun runs its command, scontrol knows two nodes, and torchrun says what it was given."""
    programs = {
        "torchrun": '#!/bin/bash\necho "$@"\n',
        "srun": '#!/bin/bash\nexec "$@"\n',
        "scontrol": "#!/bin/bash\necho node-a\necho node-b\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    told = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_SUBMIT_DIR": "/s"}
    env = os.environ | told | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", str(LAUNCH / "slurm.sbatch")]
    given = subprocess.run(script, env=env, check=True, timeout=60, capture_output=True, text=True).stdout
    assert "--rdzv-endpoint node-a:29500 -m demopt.cli train --out /s/run" in given


def test_torchrun_script_runs_two_machines(tmp_path: Path) -> None:
    """Two torchruns, as on two machines, here on one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "torchrun").write_text(f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 400)
    flags = (
        f"--out {tmp_path}/run --data {text} --preset tiny --layers 1 --sequence 32 --batch 2 --steps 3 "
        "--threads 1 --timeout 60"
    )
    env = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "MACHINES": "127.0.0.1 127.0.0.1",
        "PORT": str(port),
        "RUN_FLAGS": flags,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    both = [
        subprocess.Popen(["bash", str(LAUNCH / "torchrun.sh"), str(rank)], env=env, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    told = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is missing")
def test_systemd_unit_is_valid(tmp_path: Path) -> None:
    unit = tmp_path / "demopt.service"
    text = (LAUNCH / "demopt.service").read_text()
    unit.write_text(re.sub(r"^(User|ExecStart|WorkingDirectory)=.*$", r"", text, flags=re.MULTILINE) + "\n")
    unit.write_text(unit.read_text().replace("[Service]", "[Service]\nExecStart=/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

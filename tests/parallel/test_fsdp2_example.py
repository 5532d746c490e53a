"""examples/fsdp2.py, as its first lines say to run it."""

import re
from pathlib import Path

import forked

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2.py"


def test_example_of_fsdp2_trains_on_two_nodes_of_two_ranks() -> None:
    done = forked.torchrun(EXAMPLE, "--nodes", "2", "--steps", "20", ranks=4, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall(r"loss ([0-9.]+), ([0-9,]+) bytes sent; the gradient of a shard has ([0-9,]+)", done.stdout)
    assert len(lines) == 2, done.stdout
    losses = [float(loss) for loss, _, _ in lines]
    assert losses[1] < losses[0]
    sent, gradient = (int(number.replace(",", "")) for number in lines[1][1:])
    assert 0 < 20 * sent < gradient

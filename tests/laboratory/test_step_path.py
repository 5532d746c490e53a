"""A step stays short: ceilings on the calls, functions, files and classes that one step runs, and on its depth."""

import sys

import pytest

from demopt.kernels import loader
from laboratory import step_path

#: A change that makes a step longer raises its row, and says why in the commit.
CEILINGS = {
    step_path.demo: {"calls": 470, "functions": 95, "files": 22, "classes": 18, "depth": 15},
    step_path.local_demo: {"calls": 580, "functions": 123, "files": 27, "classes": 22, "depth": 15},
    step_path.two_way: {"calls": 920, "functions": 134, "files": 28, "classes": 25, "depth": 17},
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
@pytest.mark.parametrize("make", CEILINGS, ids=lambda make: make.__name__)
def test_a_step_stays_below_its_ceilings(make: step_path.Make) -> None:
    if loader.library() is None:
        pytest.skip("demopt was installed without a C compiler, so steps take another path")
    path = step_path.walk(make)
    counts = path.counts()
    assert {name: count for name, count in counts.items() if count > CEILINGS[make][name]} == {}
    assert counts["calls"] > 100  # or the step was not seen
    assert any(file == "replicator/replicator.py" for file, _ in path.calls)

"""Which of several failures is told, and how."""

import json
import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from demopt.train.folder import RunFolder
from demopt.train.launch import explain


@pytest.fixture
def failure(tmp_path):
    def make(rank, exitcode=1, error=None, timestamp=100):
        file = tmp_path / f"{rank}.json"
        if error:
            details = {"py_callstack": f"Traceback of rank {rank}", "timestamp": str(timestamp)}
            file.write_text(json.dumps({"message": {"message": error, "extraInfo": details}}))
        return ProcessFailure(local_rank=rank, pid=1000 + rank, exitcode=exitcode, error_file=str(file))

    return make


def test_explain_tells_a_signal_or_an_error_before_its_echoes(tmp_path, failure):
    echo = failure(0, error="RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer", timestamp=1)
    told = explain({0: echo, 1: failure(1, -signal.SIGKILL)}, RunFolder(tmp_path))
    assert (str(told), told.code) == ("rank 1 was ended by SIGKILL (pid 1001); the run is over.", 1)
    failures = {
        0: failure(0, error="DistBackendError: NCCL communicator was aborted", timestamp=1),
        1: failure(1, -signal.SIGTERM),
        2: failure(2, error="KeyError: 'x'", timestamp=5),
    }
    told = explain(failures, RunFolder(tmp_path))
    assert str(told).startswith("rank 2 failed (pid 1002)")
    assert str(told).endswith("Traceback of rank 2")


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        ("InputError: --data: nothing there", "--data: nothing there", 2),
        ("DemoptError: the loss has been nan", "rank 3: the loss has been nan.", 1),
    ],
)
def test_explain_tells_mistakes_and_errors_between_ranks_in_one_line(tmp_path, failure, error, said, code):
    told = explain({3: failure(3, error=error)}, RunFolder(tmp_path))
    assert (str(told), told.code) == (said, code)


def test_explain_tells_how_to_resume_from_a_checkpoint(tmp_path, failure):
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    told = explain({1: failure(1, -signal.SIGKILL)}, RunFolder(tmp_path))
    assert f"demopt train --resume --out {tmp_path}" in str(told)

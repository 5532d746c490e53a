"""Sparse gradients are refused before anything is sent."""

import pytest
import torch
from torch.nn import Parameter

import problems
from demopt import DeMo


@pytest.mark.parametrize("done", [0, 2])
def test_sparse_gradients_are_refused_before_sending(done: int) -> None:
    recorder = problems.Recorder()
    layer = torch.nn.Embedding(11, 4, sparse=True)
    optimizer = DeMo([Parameter(torch.zeros(3)), layer.weight], **problems.SMALL, process_group=recorder)
    problems.train(optimizer, range(done))
    optimizer.zero_grad()
    layer(torch.tensor([1, 2])).sum().backward()
    before = optimizer.fingerprint(), problems.momenta(optimizer), len(recorder.lengths)
    with pytest.raises(TypeError, match="sparse") as caught:
        optimizer.step()
    assert "the gradient of parameter 1, shape [11, 4]" in str(caught.value)
    assert (optimizer.fingerprint(), len(recorder.lengths)) == (before[0], before[2]), "nothing was sent"
    assert problems.same(problems.momenta(optimizer), before[1])
    optimizer.zero_grad()
    problems.train(optimizer, range(5, 6))

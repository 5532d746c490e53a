"""A gradient that one rank lacks counts as zero there; collectives never depend on data; sparse ones are refused."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

import problems
import ranks
from demopt import DeMo
from demopt.exchange import Collective
from demopt.wire.message import HEADER_BYTES

#: (rank, step) -> the parameters without a gradient there
PATTERNS: dict[str, dict[tuple[int, int], set[int]]] = {
    "one parameter on one rank": {(1, 1): {1}},
    "at the first step": {(0, 0): {0}, (1, 0): {2}},
    "different ones on each rank": {(0, 1): {0, 3}, (1, 1): {1}, (1, 2): {2}},
    "all parameters on one rank": {(1, 1): {0, 1, 2, 3}},
    "all parameters everywhere": {(0, 1): {0, 1, 2, 3}, (1, 1): {0, 1, 2, 3}},
    "nothing at all, from the first step": {(r, s): {0, 1, 2, 3} for r in (0, 1) for s in range(4)},
}


def _train(rank: int, world_size: int, pattern: str, as_zeros: bool) -> tuple[problems.History, list[int]]:
    recorder = problems.Recorder(Collective(dist.group.WORLD))
    parameters = problems.parameters(problems.FEW)
    optimizer = DeMo(parameters, update="sgd", process_group=recorder, **problems.SMALL)

    def drop(step: int) -> None:
        for number in PATTERNS[pattern].get((rank, step), ()):
            parameters[number].grad = torch.zeros_like(parameters[number]) if as_zeros else None

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no parameter of this optimizer has had a gradient")
        return problems.train(optimizer, range(4), rank, before_step=drop), recorder.lengths


def test_missing_gradient_counts_as_zero_and_changes_no_collective() -> None:
    """Until some rank has a gradient, each step also compares fingerprints of gradients, for double synchronisation."""
    usual: list[int] = []
    for pattern in PATTERNS:
        missing, zeros = (ranks.run(_train, 2, pattern, as_zeros) for as_zeros in (False, True))
        problems.assert_replicas([history for history, _ in missing])
        for (got, lengths), (want, of_zeros) in zip(missing, zeros, strict=True):
            assert problems.same_history(got, want), pattern
            assert len(lengths) == len(of_zeros)
            assert lengths == missing[0][1]
            usual = usual or lengths
            assert len(lengths) == len(usual) + 2 * 3 * (pattern == "nothing at all, from the first step")
            messages = [length for length in lengths if length >= HEADER_BYTES]
            assert messages == 4 * [usual[-1]], "one message per step"


@pytest.mark.parametrize("done", [0, 2])
def test_sparse_gradients_are_refused_before_sending(done: int) -> None:
    recorder = problems.Recorder()
    layer = torch.nn.Embedding(11, 4, sparse=True)
    optimizer = DeMo([Parameter(torch.zeros(3)), layer.weight], process_group=recorder, **problems.SMALL)
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

"""Promise 3: a parameter without a gradient on one rank counts as zero there; collectives never depend on data.

Forbidden: skipping such a parameter, so that one rank makes fewer collectives, or shorter messages, than the others.
"""

import pytest
import torch
import torch.distributed as dist

import problems
import ranks
from demopt import DeMo
from demopt.exchange import Collective

#: rank -> step -> the parameters that have no gradient there
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
    optimizer = DeMo(parameters, **problems.SMALL, update="sgd", process_group=recorder)

    def drop(step: int) -> None:
        for number in PATTERNS[pattern].get((rank, step), ()):
            parameters[number].grad = torch.zeros_like(parameters[number]) if as_zeros else None

    return problems.train(optimizer, range(4), rank, before_step=drop), recorder.lengths


@pytest.mark.parametrize("pattern", PATTERNS)
def test_missing_gradient_counts_as_zero(pattern: str) -> None:
    missing = ranks.run(_train, 2, pattern, False)
    zeros = ranks.run(_train, 2, pattern, True)
    problems.assert_replicas([history for history, _ in missing])
    for (got, got_lengths), (want, want_lengths) in zip(missing, zeros, strict=True):
        assert problems.same_history(got, want)
        assert got_lengths == want_lengths


def test_collective_lengths_ignore_missing_gradients() -> None:
    lengths = {pattern: ranks.run(_train, 2, pattern, False)[0][1] for pattern in PATTERNS}
    # while nobody has a gradient, all ranks look in each step, in two words, whether something synchronises gradients
    nothing = lengths["nothing at all, from the first step"]
    looks = 4 * [16]
    assert len(nothing) == len(lengths["one parameter on one rank"]) + len(looks)
    lengths["nothing at all, from the first step"] = [*nothing[: -2 * len(looks)], *nothing[-2 * len(looks) :: 2]]
    assert nothing[1 - 2 * len(looks) :: 2] == looks
    assert len({tuple(of_pattern) for of_pattern in lengths.values()}) == 1
    handshake = len(next(iter(lengths.values()))) - 4
    messages = next(iter(lengths.values()))[handshake:]
    assert len(set(messages)) == 1, "after the handshake each step is one collective of one length"


def test_missing_gradient_counts_as_zero_on_one_rank() -> None:
    """The momentum still decays, and what it holds is still sent."""
    ends = []
    for as_zeros in (False, True):
        parameters = problems.parameters(problems.FEW)
        optimizer = DeMo(parameters, **problems.SMALL)
        problems.train(optimizer, range(2))
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if as_zeros else None
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer.step()
        assert not any(torch.equal(p, was) for p, was in zip(parameters[:3], before[:3], strict=True))
        ends.append([*problems.momenta(optimizer), *(p.detach() for p in parameters)])
    assert problems.same(*ends)

"""A parameter without a gradient on one rank counts as zero there; collectives never depend on data."""

import torch
import torch.distributed as dist

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
    optimizer = DeMo(parameters, **problems.SMALL, update="sgd", process_group=recorder)

    def drop(step: int) -> None:
        for number in PATTERNS[pattern].get((rank, step), ()):
            parameters[number].grad = torch.zeros_like(parameters[number]) if as_zeros else None

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

"""The first exchange of a new quorum: the step and the weights of each worker, and which one to follow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from demopt.validation import first_difference

#: Settings that a schedule may change: a worker that is behind takes them over with the weights.
SCHEDULED = ("lr", "weight_decay", "momentum_decay", "momentum")


@dataclass(frozen=True)
class Worker:
    """One worker, as it describes itself. `has_message`: it is in a step; otherwise it has just joined."""

    name: int
    step: int
    weights: int  # fingerprint
    settings: int  # digest of the facts that must be equal
    has_message: bool


def fixed(facts: dict[str, str]) -> dict[str, str]:
    """Returns the facts that no schedule changes.

    Examples:
        >>> fixed({"param_groups[0]['lr']": "0.1", "param_groups[0]['top_k']": "32.0"})
        {"param_groups[0]['top_k']": '32.0'}
    """
    return {name: text for name, text in facts.items() if not any(f"[{each!r}]" in name for each in SCHEDULED)}


def leader(workers: list[Worker]) -> int:
    """Returns the rank whose weights count: of the newest ones, the first with the most common weights.

    A worker in a step comes before one that has just joined, because a new one may lack its learning rate.

    Examples:
        >>> ahead, other, behind = Worker(1, 7, 10, 0, True), Worker(2, 7, 11, 0, True), Worker(3, 6, 10, 0, True)
        >>> leader([behind, other, ahead, ahead])
        2
    """
    last = max(worker.step for worker in workers)
    ahead = [rank for rank, worker in enumerate(workers) if worker.step == last]
    votes = Counter(workers[rank].weights for rank in ahead)
    most = max(votes.values())
    chosen = next(workers[rank].weights for rank in ahead if votes[workers[rank].weights] == most)
    alike = [rank for rank in ahead if workers[rank].weights == chosen]
    return next((rank for rank in alike if workers[rank].has_message), alike[0])


def followers(workers: list[Worker], source: int) -> list[int]:
    """Returns the ranks that have other weights than `source`, or are at another step.

    Examples:
        >>> followers([Worker(1, 7, 10, 0, True), Worker(2, 0, 99, 0, False)], 0)
        [1]
    """
    here = (workers[source].step, workers[source].weights)
    return [rank for rank, worker in enumerate(workers) if (worker.step, worker.weights) != here]


def difference(mine: dict[str, str], theirs: dict[str, str]) -> str:
    """Names a fact in which two workers differ."""
    differing = first_difference(theirs, mine)
    return "{0} = {2} here, and {1} in the run".format(*differing) if differing else "nothing"

"""The ranks whose messages a round trusts: their signs agree with the others', counted in whole numbers.

Gradients of one model at one point have something in common, so an honest message agrees with the other honest ones
more often than not, however noisy it is. A message made to do harm, whatever it looks like, points the other way: harm
is disagreement. It is counted over whole messages, because a single chunk tells too little.
"""

import torch
from torch import Tensor

FULL = 16  # the weight of a chunk that counts as much as the median's
_SURE = 8  # standard deviations of chance that the usual agreement must exceed


def trusted(agreement_2WW: Tensor) -> list[int]:
    """Returns the ranks whose messages agree with the others' at least half as much as is usual, ascending.

    `agreement_2WW` [0, w, v] (int64) is the number of coefficients in which w and v have equal signs, minus the number
    in which they do not, each times the weight of w's coefficient, up to `FULL`; [1, w, v] is the number that both
    have. All ranks are trusted if there are fewer than three, or if the usual agreement may be chance.

    There are two scores: the W // 2-th best of a rank's agreements, which no minority can lift by agreeing with itself;
    then their sum over the ranks left, which is the harm itself: a rank cannot please two and fight the rest.
    """
    table, ranks = agreement_2WW[0].tolist(), list(range(agreement_2WW.shape[1]))
    if len(ranks) < 3:
        return ranks
    pairs = [(w, v) for w in ranks for v in ranks if v != w]
    compared = sorted(int(agreement_2WW[1, w, v]) for w, v in pairs)[len(pairs) // 2]
    friends = {w: sorted((table[w][v] for v in ranks if v != w), reverse=True) for w in ranks}
    ranks = _usual({w: friends[w][len(ranks) // 2 - 1] for w in ranks}, compared)
    if len(ranks) < 3:
        return ranks
    return _usual({w: sum(table[w][v] for v in ranks if v != w) for w in ranks}, compared * (len(ranks) - 1))


def _usual(scores: dict[int, int], compared: int) -> list[int]:
    """Returns the ranks whose score is at least half of the usual one; all, if that may be chance."""
    usual = sorted(scores.values())[len(scores) // 2]  # at least one honest rank's, if most are honest
    if usual <= 0 or usual**2 < (_SURE * FULL) ** 2 * compared:
        return list(scores)
    return [rank for rank, score in scores.items() if 2 * score >= usual]


def differing_bits(one_CB: Tensor, other_CB: Tensor) -> Tensor:
    """Returns the number of bits in which bytes differ, int64 [C]."""
    bits = one_CB ^ other_CB  # counted in pairs of bits, in fours, in bytes
    bits = bits - ((bits >> 1) & 0x55)
    bits = (bits & 0x33) + ((bits >> 2) & 0x33)
    return ((bits + (bits >> 4)) & 0x0F).sum(1, dtype=torch.int64)

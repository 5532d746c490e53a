"""Selects the strongest coefficients of each chunk."""

import torch
from torch import Tensor

from demopt.core.constants import places

_LANES = 16  # elements per group: balances the first search (N / 16 maxima) against the second (16 K candidates)


def strongest(coefficients_CN: Tensor, keep: int, spare_CN: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns positions [C, K] (int64, ascending) and values [C, K] of the K largest magnitudes of each chunk.

    Long chunks take two small top-k searches instead of a large one. This is exact: the K strongest elements lie in
    the K groups with the strongest maxima. Ties are broken arbitrarily. `spare_CN`, of the shape and dtype of the
    coefficients, is overwritten and saves an allocation.
    """
    count, length = coefficients_CN.shape
    if keep == length:
        positions = torch.arange(length, device=coefficients_CN.device).repeat(count, 1)
        return positions, coefficients_CN.clone()
    if keep == 1 and not coefficients_CN.is_cpu:
        positions = coefficients_CN.abs().max(dim=1, keepdim=True).indices
        return positions, coefficients_CN.gather(1, positions)
    magnitudes = torch.abs(coefficients_CN, out=spare_CN)
    if length % _LANES == 0 and 2 * keep * _LANES <= length:
        groups = length // _LANES  # g has elements g, g + N/16, ...: maxima over a strided dimension are fastest
        maxima = magnitudes.view(count, _LANES, groups).amax(dim=1)
        strongest_groups = maxima.topk(keep, dim=1, sorted=False).indices
        lanes = places(_LANES, torch.int64, magnitudes.device, groups).view(1, _LANES, 1)  # each lane's first element
        candidates = (strongest_groups.unsqueeze(1) + lanes).view(count, _LANES * keep)
        among = magnitudes.gather(1, candidates).topk(keep, dim=1, sorted=False).indices
        positions = candidates.gather(1, among)
    else:
        positions = magnitudes.topk(keep, dim=1, sorted=False).indices
    positions = positions.sort(dim=1).values
    return positions, coefficients_CN.gather(1, positions)

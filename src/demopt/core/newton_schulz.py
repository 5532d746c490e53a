"""Approximates the nearest matrix with orthonormal rows (or columns) by matrix products alone.

Shapes: R rows, S columns.
"""

import torch
from torch import Tensor

#: (a, b, c) of x -> a x + b x^3 + c x^5. Five iterations take every singular value in (0.01, 1] to between 0.7 and
#: 1.2: not to 1, but fast. Source: Keller Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon/, 2024.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def newton_schulz(matrices_RS: Tensor) -> Tensor:
    """Returns U V^T of the singular value decomposition U S V^T, with singular values between 0.7 and 1.2 instead of 1.

    Newton-Schulz iteration of a matrix, or of a batch [B, R, S], in its dtype. The scale of a matrix does not matter;
    zeros stay zeros.

    Examples:
        >>> values = torch.linalg.svdvals(newton_schulz(torch.randn(20, 50)))
        >>> bool((values > 0.6).all() and (values < 1.3).all())
        True
    """
    if not matrices_RS.numel():
        return matrices_RS.clone()
    is_tall, sides = matrices_RS.shape[-2] > matrices_RS.shape[-1], (-2, -1)
    wide = matrices_RS.mT if is_tall else matrices_RS  # for the smaller Gram matrix
    largest = wide.abs().amax(sides, keepdim=True)
    x = wide / largest.clamp_(min=torch.finfo(wide.dtype).tiny)  # first, so that squares do not underflow
    x.div_(torch.linalg.vector_norm(x, dim=sides, keepdim=True).clamp_(min=1.0))
    plus_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    a, b, c = _QUINTIC
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = plus_product(x, plus_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if is_tall else x

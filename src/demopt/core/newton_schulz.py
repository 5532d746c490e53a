"""Approximates the nearest matrix with orthonormal rows (or columns) by matrix products alone.

Shapes: R rows, S columns.
"""

import torch
from torch import Tensor

#: (a, b, c) of x -> a x + b x^3 + c x^5. Five iterations take every singular value in (0.01, 1] to between 0.7 and
#: 1.2: not to 1, but fast. Source: Keller Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon/, 2024.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def newton_schulz(matrix_RS: Tensor) -> Tensor:
    """Returns U V^T of the singular value decomposition U S V^T, with singular values between 0.7 and 1.2 instead of 1.

    Newton-Schulz iteration, in the matrix's dtype. The scale of the matrix does not matter; zeros stay zeros.

    Examples:
        >>> values = torch.linalg.svdvals(newton_schulz(torch.randn(20, 50)))
        >>> bool((values > 0.6).all() and (values < 1.3).all())
        True
    """
    if not matrix_RS.numel():
        return matrix_RS.clone()
    wide = matrix_RS.T if matrix_RS.shape[0] > matrix_RS.shape[1] else matrix_RS  # for the smaller Gram matrix
    x = wide / wide.abs().amax().clamp(min=torch.finfo(wide.dtype).tiny)  # first, so that squares do not underflow
    x = x / x.norm().clamp(min=1.0)
    a, b, c = _QUINTIC
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T.contiguous() if wide is not matrix_RS else x

"""From the decoded update U to the direction that is applied, phi(U) (arXiv 2411.19870 v2, section 3).

Shapes: C tiles of r rows and c columns.
"""

import torch
from torch import Tensor

UPDATES = ("sgd", "signum")


def sign(update_Crc: Tensor, sent_C: Tensor | None = None) -> Tensor:
    """The sign of U, in place.

    Zero has no sign, as in the published code. Where `sent_C` (bool) is given, zero is a tie that integers do reach,
    and counts as +1, except in chunks to which nothing was sent, which stay zero: so one bit says all.

    Example:
        >>> sign(torch.tensor([[[0.5, 0.0, -2.0]]])), sign(torch.tensor([[[0.5, 0.0, -2.0]]]), torch.tensor([True]))
        (tensor([[[ 1.,  0., -1.]]]), tensor([[[ 1.,  1., -1.]]]))
    """
    if sent_C is None:
        return update_Crc.sign_()
    # adding +0 first, because -0 would keep its sign
    torch.copysign(update_Crc.new_ones(()), update_Crc.add_(0.0), out=update_Crc)
    return update_Crc.mul_(sent_C.view(-1, 1, 1))

"""From the decoded update U to the direction that is applied, phi(U) (arXiv 2411.19870 v2, section 3)."""

from collections.abc import Callable

from torch import Tensor


def _sgd(update: Tensor) -> Tensor:
    return update


def _signum(update: Tensor) -> Tensor:
    return update.sign_()


#: name -> phi, which may work in place and returns the direction.
UPDATES: dict[str, Callable[[Tensor], Tensor]] = {"sgd": _sgd, "signum": _signum}

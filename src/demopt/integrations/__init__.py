"""demopt in other frameworks: a module each, which imports its framework alone. Recipes: docs/integrations.md."""

from typing import Any

from demopt.optim.demo import DeMo
from demopt.optim.local_demo import LocalDeMo


def require_demo(optimizer: Any, where: str, remedy: str) -> Any:
    """Returns the DeMo or LocalDeMo inside a framework's wrapper; TypeError, if it is another optimizer."""
    plain = optimizer
    while not isinstance(plain, DeMo | LocalDeMo):
        inside = getattr(plain, "optimizer", None)
        if inside is None:
            raise TypeError(
                f"the optimizer is {type(plain).__name__}, and {where} only DeMo and LocalDeMo synchronize the ranks, "
                f"which would drift apart; {remedy}"
            )
        plain = inside
    return plain

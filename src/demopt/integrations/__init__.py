"""demopt in other frameworks: one module each, which imports only its framework. Recipes: docs/integrations.md."""

from typing import Any

from demopt.optim.demo import DeMo
from demopt.optim.local_demo import LocalDeMo


def require_demo(optimizer: Any, where: str, remedy: str) -> Any:
    """Returns the DeMo or LocalDeMo inside a framework's wrapper; TypeError, if it is another optimizer."""
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, DeMo | LocalDeMo):
        others = f"{where} only DeMo and LocalDeMo synchronize the ranks, which would drift apart"
        raise TypeError(f"the optimizer is {type(optimizer).__name__}, and {others}; {remedy}")
    return optimizer


def unwrapped(optimizer: Any) -> Any:
    """Returns the DeMo or LocalDeMo inside a framework's wrapper, or else the innermost optimizer."""
    while not isinstance(optimizer, DeMo | LocalDeMo) and getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    return optimizer

"""demopt under torchft: workers come and go, and no gradient is lost. See docs/integrations.md."""

from demopt.integrations.torchft.optimizer import Optimizer

__all__ = ["Optimizer"]

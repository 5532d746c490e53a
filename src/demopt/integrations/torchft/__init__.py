"""demopt under torchft: members come and go, and no step is lost. See docs/integrations.md."""

from demopt.integrations.torchft.optimizer import Churn, Optimizer, TornError

__all__ = ["Churn", "Optimizer", "TornError"]

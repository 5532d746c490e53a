"""Decoupled Momentum Optimization (DeMo): data-parallel training over slow networks."""

from demopt.errors import DemoptError, DriftError, ExchangeError, MessageError, SettingsError
from demopt.optim.demo import DeMo
from demopt.optim.groups import muon_groups
from demopt.optim.presets import V1, V2
from demopt.optim.stats import Stats

__all__ = [
    "V1",
    "V2",
    "DeMo",
    "DemoptError",
    "DriftError",
    "ExchangeError",
    "MessageError",
    "SettingsError",
    "Stats",
    "muon_groups",
]
__version__ = "0.1.0"

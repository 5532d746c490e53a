"""Decoupled Momentum Optimization (DeMo): data-parallel training over slow networks."""

from demopt.core.update import SGD, AdamW, Lion, Muon, Nesterov, Signum
from demopt.errors import DemoptError, DriftError, ExchangeError, MessageError, SettingsError
from demopt.optim.demo import DeMo
from demopt.optim.groups import muon_groups
from demopt.optim.local import LocalDeMo
from demopt.optim.presets import V1, V2
from demopt.optim.stats import Stats

__all__ = [
    "SGD",
    "V1",
    "V2",
    "AdamW",
    "DeMo",
    "DemoptError",
    "DriftError",
    "ExchangeError",
    "Lion",
    "LocalDeMo",
    "MessageError",
    "Muon",
    "Nesterov",
    "SettingsError",
    "Signum",
    "Stats",
    "muon_groups",
]
__version__ = "0.1.0"

"""Data-parallel training over slow networks: Decoupled Momentum Optimization (DeMo) around PyTorch.

Names are imported when they are first used, so that `demopt --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from demopt.version import __version__ as __version__

if TYPE_CHECKING:
    from demopt.codec.hyperparameters import Codec
    from demopt.core.rules import SGD, AdamW, Lion, Muon, Nesterov, Signum
    from demopt.errors import DemoptError, DriftError, ExchangeError, MessageError, SettingsError
    from demopt.optim.demo import V1, V2, DeMo
    from demopt.optim.local_demo import LocalDeMo
    from demopt.optim.muon import muon_adamw, muon_groups
    from demopt.parallel import broadcast_buffers, unsync
    from demopt.replicator.replicator import Stats
    from demopt.runs.exchange import FolderExchange
    from demopt.runs.sampler import RunSampler
    from demopt.state import reshard
    from demopt.unequal import fit_batches

__all__ = [
    "SGD",
    "V1",
    "V2",
    "AdamW",
    "Codec",
    "DeMo",
    "DemoptError",
    "DriftError",
    "ExchangeError",
    "FolderExchange",
    "Lion",
    "LocalDeMo",
    "MessageError",
    "Muon",
    "Nesterov",
    "RunSampler",
    "SettingsError",
    "Signum",
    "Stats",
    "broadcast_buffers",
    "fit_batches",
    "muon_adamw",
    "muon_groups",
    "reshard",
    "unsync",
]

_HOMES = {  # where each name is defined
    "codec.hyperparameters": ("Codec",),
    "core.rules": ("SGD", "AdamW", "Lion", "Muon", "Nesterov", "Signum"),
    "errors": ("DemoptError", "DriftError", "ExchangeError", "MessageError", "SettingsError"),
    "optim.demo": ("V1", "V2", "DeMo"),
    "optim.local_demo": ("LocalDeMo",),
    "optim.muon": ("muon_adamw", "muon_groups"),
    "parallel": ("broadcast_buffers", "unsync"),
    "replicator.replicator": ("Stats",),
    "runs.exchange": ("FolderExchange",),
    "runs.sampler": ("RunSampler",),
    "state": ("reshard",),
    "unequal": ("fit_batches",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("checkpoint", "exchange", "integrations")  # public too, as demopt.exchange.SingleRank


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"demopt.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'demopt' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"demopt.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_MODULES])

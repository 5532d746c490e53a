"""Data-parallel training over slow networks: Decoupled Momentum Optimization (DeMo) around PyTorch.

Names are imported when they are first used, so that `demopt --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from demopt.version import __version__ as __version__

if TYPE_CHECKING:
    from demopt.codec.hyperparameters import Codec as Codec
    from demopt.core.rules import SGD as SGD
    from demopt.core.rules import AdamW as AdamW
    from demopt.core.rules import Lion as Lion
    from demopt.core.rules import Muon as Muon
    from demopt.core.rules import Nesterov as Nesterov
    from demopt.core.rules import Signum as Signum
    from demopt.errors import DemoptError as DemoptError
    from demopt.errors import DriftError as DriftError
    from demopt.errors import ExchangeError as ExchangeError
    from demopt.errors import MessageError as MessageError
    from demopt.errors import SettingsError as SettingsError
    from demopt.optim.demo import V1 as V1
    from demopt.optim.demo import V2 as V2
    from demopt.optim.demo import DeMo as DeMo
    from demopt.optim.local_demo import LocalDeMo as LocalDeMo
    from demopt.optim.muon import muon_adamw as muon_adamw
    from demopt.optim.muon import muon_groups as muon_groups
    from demopt.parallel import broadcast_buffers as broadcast_buffers
    from demopt.parallel import unsync as unsync
    from demopt.replicator.replicator import Stats as Stats
    from demopt.runs.exchange import FolderExchange as FolderExchange
    from demopt.runs.sampler import RunSampler as RunSampler
    from demopt.state import reshard as reshard
    from demopt.unequal import fit_batches as fit_batches

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
__all__ = sorted(_HOME)
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

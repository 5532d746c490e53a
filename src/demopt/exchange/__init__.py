"""Exchanges: how messages move between ranks."""

from demopt.exchange.background import Background
from demopt.exchange.collective import Collective
from demopt.exchange.hierarchical import Hierarchical
from demopt.exchange.interface import Exchange
from demopt.exchange.sealed import Sealed, seal
from demopt.exchange.single_rank import SingleRank
from demopt.exchange.threads import thread_exchanges
from demopt.exchange.wrappers import Delay, Faulty, Meter

__all__ = [
    "Background",
    "Collective",
    "Delay",
    "Exchange",
    "Faulty",
    "Hierarchical",
    "Meter",
    "Sealed",
    "SingleRank",
    "seal",
    "thread_exchanges",
]

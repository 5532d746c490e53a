"""Exchanges: how messages move between ranks."""

from demopt.exchange.background import Background
from demopt.exchange.hierarchical import Hierarchical
from demopt.exchange.interface import Exchange, SingleRank
from demopt.exchange.process_group import Collective
from demopt.exchange.threads import Threads, thread_exchanges
from demopt.exchange.wrappers import Delay, Faulty, Meter

__all__ = [
    "Background",
    "Collective",
    "Delay",
    "Exchange",
    "Faulty",
    "Hierarchical",
    "Meter",
    "SingleRank",
    "Threads",
    "thread_exchanges",
]

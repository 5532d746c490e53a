"""Exchanges: how messages move between ranks."""

from demopt.exchange.hierarchical import Hierarchical
from demopt.exchange.interface import Exchange, Meter, SingleRank
from demopt.exchange.process_group import Collective
from demopt.exchange.threads import Threads

__all__ = ["Collective", "Exchange", "Hierarchical", "Meter", "SingleRank", "Threads"]

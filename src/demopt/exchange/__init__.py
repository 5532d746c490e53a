"""Exchanges: how messages move between ranks."""

from demopt.exchange.alone import Alone
from demopt.exchange.background import Background
from demopt.exchange.collective import Collective
from demopt.exchange.interface import Exchange
from demopt.exchange.nodes import Nodes
from demopt.exchange.threads import thread_exchanges
from demopt.exchange.wrappers import Delay, Faulty, Meter

__all__ = ["Alone", "Background", "Collective", "Delay", "Exchange", "Faulty", "Meter", "Nodes", "thread_exchanges"]

"""The exchange between this rank and the others, and the handshake that precedes messages of a new layout."""

from dataclasses import replace
from typing import Any

import torch

from demopt.exchange import Exchange, Meter
from demopt.exchange.collective import forgotten_world_size, resolve
from demopt.optim import handshake
from demopt.optim._warnings import warn
from demopt.optim.chunk_group import local
from demopt.optim.gradients import usable_gradients
from demopt.optim.routes.interface import Route, Team
from demopt.optim.terms import Terms
from demopt.wire import frame
from demopt.wire.frame import Header

_LOST = "a process group that was not saved"


class Meeting:
    """The user's process group, the exchange over it, and the routes that the ranks have agreed on.

    Example:
        >>> Meeting(None).team
        Team(rank=0, world_size=1)
    """

    def __init__(self, process_group: Any, team: Team | None = None, apart: bool = False) -> None:
        self.process_group = process_group
        self._team = team  # as it was when the optimizer was pickled
        self._apart = apart  # background exchanges need a group apart from the user's own collectives
        self._meter: Meter | None = None
        self._agreed: list[Route] | None = None  # the routes that settings were last compared for

    @property
    def meter(self) -> Meter:
        """The exchange, metered. Also finds a default process group that was created after the optimizer."""
        if self._meter is None or (self.process_group is None and self._meter.world_size == 1):
            exchange = resolve(found(self.process_group))
            if self._meter is None or exchange.world_size > 1:
                self._meter = Meter(exchange)
                self._agreed = None  # this rank was alone until now
        return self._meter

    @property
    def team(self) -> Team:
        """This rank and the number of ranks; for an unpickled optimizer without its process group, as when pickled."""
        if self._team is not None and self.process_group == _LOST:
            return self._team
        return Team(self.meter.rank, self.meter.world_size)

    @property
    def met(self) -> bool:
        """Whether there are other ranks and the first handshake is done."""
        return self._agreed is not None and self.meter.world_size > 1

    def agreed(self, routes: list[Route]) -> bool:
        """Whether the ranks have compared settings for exactly these routes."""
        return self._agreed == routes

    def agree(self, routes: list[Route], header: Header, terms: Terms) -> None:
        """Runs the handshake if the routes are new.

        After the first one, the other ranks may not expect a new layout: messages of the agreed lengths announce it.
        """
        if self.agreed(routes):
            return
        self._warn_if_alone()
        for route in self._agreed or []:
            head = replace(header, flags=frame.NEW_LAYOUT | frame.NONFINITE, layout=route.layout.digest)
            route.exchange(route.message(head, []), self.meter, head)
        self.handshake(terms)
        if self._apart and self._agreed is None:
            self.meter.duplicate()
        self._agreed = routes

    def handshake(self, terms: Terms) -> None:
        """Compares facts, the first time also weights and gradients. Raises SettingsError if facts differ."""
        parameters = terms.parameters
        device = local(parameters[0]).device if parameters else torch.device("cpu")
        for exchange in (self.meter.intra_node, self.meter):
            if exchange is None:
                continue
            handshake.check_settings(exchange, terms.facts(), device)
            if self._agreed is None:
                handshake.check_sharding(exchange.global_ranks, parameters)
                handshake.check_weights(exchange, [*map(local, parameters), *terms.replicated()], device)
        if self._agreed is None:
            handshake.warn_if_synchronized(self.meter, usable_gradients(terms.groups), device)

    def _warn_if_alone(self) -> None:
        started = forgotten_world_size()
        if self.meter.world_size == 1 and self.process_group is None and started > 1:
            warn(
                f"WORLD_SIZE is {started} but torch.distributed is not initialised, so this rank trains alone; "
                "call torch.distributed.init_process_group before the first step"
            )


def lost(process_group: Any) -> Any:
    """Returns what replaces a process group in a pickle: groups and exchanges belong to their process.

    Example:
        >>> lost(None) is None
        True
    """
    return None if process_group is None else _LOST


def found(process_group: Any) -> Exchange | Any:
    """Returns the process group; ValueError if pickling lost it.

    Example:
        >>> found(None) is None
        True
    """
    if isinstance(process_group, str) and process_group == _LOST:
        raise ValueError(
            "this optimizer was unpickled without its process_group; build DeMo(..., process_group=...) anew and give "
            "it the old one's state_dict"
        )
    return process_group

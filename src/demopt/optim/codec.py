"""The codec of LocalDeMo: a DeMo over the shared weights, whose gradients are movements (decision 18)."""

from dataclasses import replace
from typing import Any

import torch

from demopt.exchange import Exchange
from demopt.optim.demo import DeMo
from demopt.optim.plan import Options


class Codec(DeMo):
    """DeMo over the shared weights, whose gradients are movements; `also`: what ranks must have in common besides."""

    def __init__(self, groups: Any, also: tuple[tuple[str, str], ...], **settings: Any) -> None:
        self._also = also
        super().__init__(groups, **settings)

    def _begin(self, process_group: Any, options: Options) -> None:
        also = getattr(self, "_also", options.also)
        # an undone round leaves no movement in the error: the rank's own weights still have it
        super()._begin(process_group, replace(options, keeps_gradients=False, also=also))

    def also(self, facts: tuple[tuple[str, str], ...]) -> None:
        """Replaces what ranks must have in common besides; the next round compares it."""
        self._options = replace(self._options, also=facts)

    @property
    def exchange_between_ranks(self) -> Exchange:
        """The exchange, for what is averaged inside a node."""
        return self._session.exchange

    @property
    def device(self) -> torch.device:
        """Where the bytes of consolidated states are."""
        return self._current_plan().device

    @property
    def in_flight(self) -> bool:
        """Whether a round is sent, but not applied."""
        return bool(self._in_flight)

    @property
    def agreed(self) -> bool:
        """Whether the ranks have compared settings for the plan as it is now."""
        return self._session.agreed(self._current_plan())

    def agree(self) -> None:
        """Runs the handshake now."""
        try:
            self._current_round().agree()
        finally:
            self._round = None

    @property
    def looked(self) -> bool:
        """Whether ranks have compared gradients that are not zero."""
        return self._session.looked

    def look(self) -> None:
        """Compares gradients now."""
        self._session.look(self._current_plan())

    def _look(self) -> None:
        """Not after an exchange: what is there then are movements."""

    @property
    def speaks(self) -> bool:
        """Whether this process is the one that says what is the same on all ranks."""
        return self._session.speaks

    def require_settled(self, wanted: str) -> None:
        """Raises RuntimeError between extract and apply."""
        self._require_settled(wanted)

"""The session of an optimizer: who trains together, over which exchange, and what they have agreed on."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from demopt.exchange import Background, Exchange, Meter
from demopt.exchange.collective import forgotten_world_size, resolve
from demopt.optim import copies, handshake
from demopt.optim._warnings import speaks, warn
from demopt.optim.gradients import gradients_of
from demopt.optim.plan import Bucket, Plan
from demopt.wire import frame
from demopt.wire.frame import Header

T = TypeVar("T")
STEP = "step (a rank that is behind takes the others' by resync)"


@dataclass(frozen=True)
class LostGroup:
    """Stands for a process group in a pickle: groups and exchanges belong to their process."""

    rank: int
    world_size: int


class Session:
    """This rank among the others: the exchange, its background thread, and the buckets that all have agreed on.

    Members that change, or an exchange that failed, take a new session; nothing of the optimizer's state is in it.

    Examples:
        >>> Session(None, in_background=False).members
        (0, 1)
    """

    def __init__(self, process_group: Any, in_background: bool) -> None:
        self.process_group = process_group
        self._in_background = in_background  # exchanges then need a group apart from the user's own collectives
        self._exchange: Meter | None = None
        self._background = Background()
        self._agreed: tuple[Bucket, ...] | None = None  # those that settings were last compared for
        self._compared = 0  # parameters whose weights were compared
        self.looked = False  # whether gradients that are not zero were compared

    @property
    def exchange(self) -> Meter:
        """The exchange, metered. Also finds a default process group that was created after the optimizer."""
        if self._exchange is None or (self.process_group is None and self._exchange.world_size == 1):
            exchange = resolve(_found(self.process_group))
            if self._in_background and exchange.intra_node is not None:
                raise ValueError("nodes cannot exchange in the background yet; use overlap=0 and delay=0")
            if self._exchange is None or exchange.world_size > 1:
                self._exchange = Meter(exchange)
                self._agreed = None  # this rank was alone until now
        return self._exchange

    @property
    def members(self) -> tuple[int, int]:
        """This rank and the number of ranks; for an unpickled optimizer without its process group, as when pickled."""
        if isinstance(self.process_group, LostGroup):
            return self.process_group.rank, self.process_group.world_size
        exchange = self.exchange
        return exchange.rank, exchange.world_size

    @property
    def node(self) -> Exchange | None:
        """The exchange among the processes that count as this rank, if there are several."""
        return None if isinstance(self.process_group, LostGroup) else self.exchange.intra_node

    @property
    def met(self) -> bool:
        """Whether there are other ranks and the first handshake is done."""
        return self._agreed is not None and self.exchange.world_size > 1

    @property
    def speaks(self) -> bool:
        """Whether this process is the one that says what is the same on all ranks."""
        lost = isinstance(self.process_group, LostGroup)
        return self.process_group.rank == 0 if lost else speaks(self.exchange)

    def agreed(self, plan: Plan) -> bool:
        """Whether the ranks have compared settings for exactly these buckets."""
        return self._agreed is plan.buckets

    def agree(self, plan: Plan, header: Header) -> None:
        """Runs the handshake if the plan's buckets are new.

        After the first one, the other ranks may not expect a new layout: messages of the agreed lengths announce it.
        """
        self._warn_if_alone()
        for bucket in self._agreed or ():
            head = replace(header, flags=frame.NEW_LAYOUT | frame.NONFINITE, layout=bucket.route.layout.digest)
            bucket.route.exchange(bucket.route.message(head, []), self.exchange, head)
        self.handshake(plan, header.step)
        if self._in_background and self._agreed is None:
            self.exchange.duplicate(plan.device)
        self._agreed = plan.buckets

    def handshake(self, plan: Plan, step: int) -> None:
        """Compares facts, the first time also weights and gradients. Raises SettingsError if facts differ."""
        parameters, device = plan.parameters, plan.device
        everyone = self.exchange.global_ranks
        handshake.check_sharding(everyone, [p for group in plan.groups for p in group["params"]])
        inside = copies.copies(plan, self.exchange)
        alike = [(held.exchange, copies.tensors(plan, held, momenta=False)) for held in inside]
        for exchange, tensors in (*alike, (self.exchange, [*parameters, *replicated(plan)])):
            handshake.check_settings(exchange, {**plan.facts(), STEP: str(step)}, device)
            if self._agreed is None or len(parameters) != self._compared:
                handshake.check_weights(exchange, tensors, device)
        self._compared = len(parameters)
        self.look(plan)

    def look(self, plan: Plan) -> None:
        """Warns if all ranks have the same gradients; looks again, until some rank has one that is not zero.

        All ranks call it together, with no exchange in the background; what they saw decides for all alike.
        """
        if not self.looked and self.exchange.world_size > 1:
            gradients = [gradient for bucket in plan.buckets for gradient in gradients_of(bucket.parameters)]
            self.looked = handshake.warn_if_synchronized(self.exchange, gradients, plan.device)

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Runs a call in the background; calls run in the order of submission."""
        return self._background.submit(call)

    def lost(self) -> LostGroup | None:
        """Returns what replaces the process group in a pickle."""
        return None if self.process_group is None else LostGroup(*self.members)

    def _warn_if_alone(self) -> None:
        started = forgotten_world_size()
        if self.exchange.world_size == 1 and self.process_group is None and started > 1:
            warn(
                f"WORLD_SIZE is {started} but torch.distributed is not initialised, so this rank trains alone; "
                "call torch.distributed.init_process_group before the first step"
            )


def replicated(plan: Plan) -> list[torch.Tensor]:
    """Returns the update rules' state of all parameters, which must be the same on all ranks."""
    return [tensor for group in plan.chunk_groups for tensor in group.rule_state.values()]


def _found(process_group: Any) -> Exchange | Any:
    if isinstance(process_group, LostGroup):
        raise ValueError(
            "this optimizer was unpickled without its process_group; build DeMo(..., process_group=...) anew and give "
            "it the old one's state_dict"
        )
    return process_group

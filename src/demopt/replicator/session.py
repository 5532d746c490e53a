"""The session of a replicator: the ranks that train together, the exchange between them, and their agreement."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from demopt.exchange import Meter
from demopt.exchange.background import Background, SideStream
from demopt.exchange.process_group import forgotten_world_size, resolve
from demopt.replicator import copies, handshake
from demopt.replicator.order import names_of
from demopt.replicator.route import Route
from demopt.replicator.varying import VaryingExchange
from demopt.replicator.wiring import Wiring
from demopt.validation import warn
from demopt.wire import message as wire
from demopt.wire.message import Header

T = TypeVar("T")
STEP = "step (a rank that is behind takes the others' by resync)"


class Session:
    """This rank among the others: the exchange, its background thread, and the route that all have agreed on.

    `regroup` takes a new one; it holds nothing of the optimizer's state.
    """

    def __init__(self, process_group: Any, background: bool) -> None:
        self.process_group = process_group
        self.varying = process_group if isinstance(process_group, VaryingExchange) else None
        self._background = Background() if background else None  # exchanges then need a group of their own
        self._side: SideStream | None = None  # of an accelerator, for that thread
        self._exchange: Meter | None = None
        self.agreed: Route | None = None  # that ranks have compared settings for; None: the first handshake is to come
        self._compared = 0  # parameters whose weights were compared
        self.compares_gradients = False  # whether ranks have yet to compare gradients of which some are not zero
        self._gradients = [0, 0]  # the `gradient_fingerprint` of this rank's last ones, while that is so

    @property
    def exchange(self) -> Meter:
        """The exchange, metered. Also finds a default process group that was created after the optimizer."""
        if self._exchange is None or (self.process_group is None and self._exchange.world_size == 1):
            exchange = resolve(self.process_group)
            if self._background is not None and exchange.intra_node is not None:
                raise ValueError("nodes cannot exchange in the background yet; use delay=0")
            if self._exchange is None or exchange.world_size > 1:
                self._exchange = exchange if isinstance(exchange, Meter) else Meter(exchange)
                self.agreed = None  # this rank was alone until now
                self.compares_gradients = exchange.world_size > 1
        return self._exchange

    def agree(self, wiring: Wiring, header: Header) -> None:
        """Runs the handshake for a new wiring; its traffic is not metered.

        After the first one, the other ranks may not expect a new layout: a message of the agreed length announces it.
        """
        started = forgotten_world_size()
        if self.exchange.world_size == 1 and self.process_group is None and started > 1:
            warn(
                f"WORLD_SIZE is {started} but torch.distributed is not initialised, so this rank trains alone; "
                "call torch.distributed.init_process_group before the first step"
            )
        with self.exchange.paused():
            if self.agreed is not None:
                old = self.agreed
                head = replace(header, flags=wire.NEW_LAYOUT | wire.NONFINITE, layout=old.layout.digest)
                old.exchange(old.message(head, []), self.exchange, head)
            self.handshake(wiring, header.round_number)
            if self._background is not None and self.agreed is None:
                self.exchange.inner = self.exchange.inner.duplicate()
        self.agreed = wiring.route

    def handshake(self, wiring: Wiring, round_number: int) -> None:
        """Compares facts, the first time also weights. Raises SettingsError if facts differ."""
        parameters, device = wiring.parameters, wiring.device
        handshake.check_sharding(self.exchange.global_ranks, parameters)
        inside = copies.copies_of(wiring, self.exchange)
        alike = [(held.exchange, copies.tensors(wiring, held, momenta=False)) for held in inside]
        for exchange, tensors in (*alike, (self.exchange, wiring.replicated_tensors())):
            handshake.check_settings(exchange, {**wiring.facts(), STEP: str(round_number)}, device)
            if self.agreed is None or len(parameters) != self._compared:
                handshake.check_names(exchange, names_of(wiring.groups), device)
                handshake.equalize_weights(exchange, tensors, device)
        self._compared = len(parameters)

    def note_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Remembers a fingerprint of this step's gradients, while the session `compares_gradients`."""
        self._gradients = handshake.gradient_fingerprint(gradients)

    def compare_gradients(self, wiring: Wiring) -> None:
        """Warns if all ranks have the same gradients. All call it together, with no exchange in the background."""
        with self.exchange.paused():
            self.compares_gradients = not handshake.warn_if_synchronized(self.exchange, self._gradients, wiring.device)

    def submit(self, call: Callable[[], T], message: Tensor | None) -> "Future[T]":
        """Runs a call that sends the message in the background; calls run in the order of submission."""
        assert self._background is not None
        if message is not None and not message.is_cpu:
            self._side = self._side or SideStream(message.device)
            call = self._side.behind(call, message)
        return self._background.submit(call)

    def land(self, tensors: Iterable[Tensor]) -> None:
        """Lets this thread's operations read the tensors that a call in the background has made."""
        if self._side is not None:
            self._side.land(tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Session":
        return Session(self.process_group, self._background is not None)  # with the same ranks; groups have no copies

    def __reduce__(self) -> tuple[Any, ...]:
        if self.process_group is not None:  # groups and exchanges belong to their process
            raise ValueError(
                "an optimizer with a process_group cannot be pickled; save its state_dict, and load that into a new one"
            )
        return Session, (None, self._background is not None)

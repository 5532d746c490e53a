"""The session of a replicator: the ranks that train together, the exchange between them, and what they compare.

The handshake compares settings, the order of parameters, initial weights and sharding; it runs again for a new layout.
Rounds know a parameter by its place: if one rank had another order, as from a set, layers would be swapped.

Inside a node, ranks may hold copies of a parameter: one that tensor parallelism replicates, or any on a two-level mesh.
Messages travel between replicas, not between these ranks, but their copies must stay equal all the same.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from demopt.codec.gradients import all_usable
from demopt.errors import SettingsError
from demopt.exchange import Collective, Exchange, Meter
from demopt.exchange.background import Background, SideStream
from demopt.exchange.dtensor import groups_of_copies, parts_of, sharded_over, to_local, true_in_all
from demopt.exchange.interface import gather_values
from demopt.exchange.process_group import forgotten_world_size, resolve
from demopt.replicator.route import Route
from demopt.replicator.wiring import Wiring, fact_told
from demopt.validation import first_difference, warn
from demopt.wire.checksum import byte_view, fingerprint
from demopt.wire.layout import digest
from demopt.wire.message import NEW_LAYOUT, NONFINITE, OPTIMIZER, Header

T = TypeVar("T")
_STEP = "step (a rank that is behind takes the others' by resync)"
_numbers = itertools.count()  # of this process's sessions
_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class Session:
    """This rank among the others: the exchange, its background thread, and the route that all have agreed on.

    `regroup` makes a new one: a session holds none of the optimizer's state. In a folder its handshake is with itself:
    a worker compares its settings with the record of the run (`FolderExchange.attachment`).
    """

    def __init__(self, process_group: Any, background: bool) -> None:
        self.process_group = process_group
        self._background = Background() if background else None  # exchanges then need a group of their own
        self._side: SideStream | None = None  # of an accelerator, for that thread
        self._exchange: Meter | None = None
        self._agreed: Route | None = None  # the route that ranks compared settings for; None: no handshake yet
        self._order: list[int] = []  # of the parameters, by id, when their names and weights were compared
        self.compares_gradients = False  # whether ranks have yet to compare gradients that show anything
        self._gradients = [0, 0]  # of this rank's last ones: a hash, and whether they show anything
        self._owes_comparison = False  # see `leave`
        self._number = 1 + next(_numbers) % OPTIMIZER
        #: Rank 0's number, from the first handshake on; 0 before. It is in messages, so that two optimizers of one
        #: layout, such as those of twin networks, are not averaged with each other.
        self.optimizer_number = 0

    @property
    def exchange(self) -> Meter:
        """The exchange, metered. Also finds a default process group that was created after the optimizer."""
        if self._exchange is None or (self.process_group is None and self._exchange.world_size == 1):
            exchange = resolve(self.process_group)
            if self._background is not None and exchange.intra_node is not None:
                raise ValueError("nodes cannot exchange in the background yet; use delay=0")
            if self._exchange is None or exchange.world_size > 1:
                self._exchange = exchange if isinstance(exchange, Meter) else Meter(exchange)
                self._agreed, self.optimizer_number = None, 0  # this rank was alone until now
                self.compares_gradients = exchange.world_size > 1
        return self._exchange

    @property
    def has_met(self) -> bool:
        """Whether there was a handshake with these ranks."""
        return self._agreed is not None

    def has_agreed(self, wiring: Wiring) -> bool:
        """Whether the ranks have compared settings for this wiring's layout."""
        return self._agreed is wiring.route

    def agree(self, wiring: Wiring, header_of: Callable[[Wiring], Header]) -> None:
        """Runs the handshake, unmetered, if the wiring's layout is new; a single rank, as in a folder, with itself."""
        self.compare_as_owed(wiring)
        if self.has_agreed(wiring):
            return
        header = header_of(wiring)
        started = forgotten_world_size()
        if self.exchange.world_size == 1 and self.process_group is None and started > 1:
            warn(
                f"WORLD_SIZE is {started} but torch.distributed is not initialised, so this rank trains alone; "
                "call torch.distributed.init_process_group before the first step"
            )
        with self.exchange.paused():
            if self._agreed is not None:
                # The others may still be at the old layout, in a collective of its length. So a message of that length
                # announces the new one; it is flagged as not finite, so that those who receive it apply nothing.
                old = self._agreed
                head = replace(header, flags=NEW_LAYOUT | NONFINITE, layout=old.layout.digest)
                old.exchange(old.message(head, []), self.exchange, head)
            else:
                self.exchange.await_all("step() for the first time, or after regroup()")
            self.compare(wiring, header.round_number)
            if self._background is not None and self._agreed is None:
                self.exchange.inner = self.exchange.inner.duplicate()
        self._agreed = wiring.route

    def compare(self, wiring: Wiring, round_number: int) -> None:
        """The handshake: compares facts, the first time also weights. Raises SettingsError if facts differ."""
        parameters, device = wiring.parameters, wiring.device
        _check_sharding(self.exchange.global_ranks, parameters)
        alike = [(held, tensors_at(places, wiring, momenta=False)) for held, places in copies_of(wiring, self.exchange)]
        facts = {**wiring.facts(), _STEP: str(round_number)}
        order = [*map(id, parameters)]
        is_new = self._agreed is None or order != self._order
        for exchange, tensors in (*alike, (self.exchange, wiring.replicated_tensors())):
            told = check_alike(exchange, facts, device, [int(is_new), self.optimizer_number, self._number])
            if exchange is self.exchange:
                self._take_number(told)
            if any(new for new, _, _ in told):
                named = gather_values(exchange, names_of(wiring.groups), device)
                for rank, names in enumerate(named):
                    check_order(f"rank {rank} has", "rank 0", named[0], names)
                equalize_weights(exchange, tensors, fingerprint(tensors), device)
        self._order = order

    def _take_number(self, told: list[list[int]]) -> None:
        """Takes the optimizer's number from a handshake. SettingsError if the ranks are at different optimizers."""
        known = [number for _, number, _ in told if number]
        if len({*known}) > 1:
            raise SettingsError(
                f"the ranks are at rounds of {len({*known})} optimizers: some rank has left out a step. Call step() of "
                "each optimizer equally often on all ranks, also where a loss or a gradient of one rank is not finite"
            )
        if self.exchange.world_size > 1:  # a folder's workers have none in common
            self.optimizer_number = known[0] if known else told[0][2]

    def note_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Remembers a hash of this step's gradients, and whether they show anything, while `compares_gradients`.

        They show nothing if all are zero, or if one is not finite: NaNs from different data have the same bits.
        """
        present = [gradient for gradient in gradients if gradient is not None]
        shows = any(bool(gradient.any()) for gradient in present) and all_usable(present)
        self._gradients = [fingerprint(present), int(shows)]

    def compare_gradients(self, wiring: Wiring) -> None:
        """Rank 0 warns if all ranks have bit-identical gradients: something else already synchronizes them.

        Comparisons go on until some rank's gradients show anything. All ranks call this together, with no exchange in
        the background.
        """
        with self.exchange.paused():
            found = gather_values(self.exchange, self._gradients, wiring.device)
            self.compares_gradients = not any(shows for _, shows in found)
            if found[0][1] and all(theirs == found[0] for theirs in found):
                warn_of_all(
                    self.exchange,
                    f"all {self.exchange.world_size} ranks have bit-identical gradients, so something already "
                    "synchronizes them (DistributedDataParallel, FSDP2 over the same ranks) or every rank reads the "
                    "same data. Call demopt.unsync(model), which stops that; or give the optimizer the plain model; "
                    "or give it, as process_group, the ranks between which gradients are not yet averaged.",
                    wiring.device,
                )

    def leave(self) -> None:
        """Notes that this rank undoes a round after which the others compare gradients with it: `compare_as_owed`."""
        self._owes_comparison = self.compares_gradients

    def compare_as_owed(self, wiring: Wiring) -> None:
        """Before another collective: takes this rank's part in the comparison after a round that it has left."""
        if self._owes_comparison:
            self._owes_comparison = False
            self.compare_gradients(wiring)

    def submit(self, call: Callable[[], T], message: Tensor | None) -> "Future[T]":
        """Runs a call that sends the message in the background; calls run in the order of submission."""
        assert self._background is not None
        if message is not None and not message.is_cpu:
            self._side = self._side or SideStream(message.device)
            call = self._side.behind(call, message)
        return self._background.submit(call)

    def receive(self, tensors: Iterable[Tensor]) -> None:
        """Lets this thread's operations read the tensors that a call in the background has made."""
        if self._side is not None:
            self._side.receive(tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Session":
        return Session(self.process_group, self._background is not None)  # with the same ranks; groups have no copies

    def __reduce__(self) -> tuple[Any, ...]:
        if self.process_group is not None:  # groups and exchanges belong to their process
            raise ValueError(
                "an optimizer with a process_group cannot be pickled; save its state_dict, and load that into a new one"
            )
        return Session, (None, self._background is not None)


def check_alike(exchange: Exchange, facts: dict[str, str], device: torch.device | None, value: Any = None) -> list[Any]:
    """Returns each rank's value. SettingsError, which names a rank and the first fact that differs, if some do."""
    told = gather_values(exchange, [digest(repr(facts)), value], device)
    if any(theirs != told[0][0] for theirs, _ in told):
        first, *others = gather_values(exchange, facts, device)
        for rank, other in enumerate(others, start=1):
            if (differing := first_difference(first, other)) is not None:
                name, there, here = differing
                raise SettingsError(f"rank {rank} has {fact_told(name, first)} = {here} where rank 0 has {there}")
    return [theirs for _, theirs in told]


# The order of parameters


def names_of(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of all parameters, without the parts of wrappers; nothing unless all groups have names."""
    found = [_WRAPPERS.sub("", str(name)) for group in groups for name in group.get("param_names") or ()]
    return found if len(found) == sum(len(group["params"]) for group in groups) else []


def marks_of(tensors: Sequence[Tensor]) -> list[int]:
    """Returns a fingerprint of each tensor, negative if its elements are all equal: several tensors may begin so."""
    return [fingerprint([tensor]) if varies(tensor) else ~fingerprint([tensor]) for tensor in tensors]


def check_order(who: str, there: str, theirs: Sequence[Any], mine: Sequence[Any]) -> None:
    """Raises SettingsError if a name or mark in `mine` is at another place in `theirs`, and that place differs, too.

    A negative mark counts only if all that differ are those of `theirs` in another order.

    `who` says who has `mine`, and `there` who has `theirs`.
    """
    differing = [place for place, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b]
    place_of = {theirs[place]: place for place in differing}
    permuted = Counter(theirs[place] for place in differing) == Counter(mine[place] for place in differing)
    for place in differing:
        if mine[place] in place_of and (permuted or isinstance(mine[place], str) or mine[place] >= 0):
            name = f" {mine[place]!r}" if isinstance(mine[place], str) else ""
            raise SettingsError(
                f"{who} parameter {place}{name} where {there} has it at place {place_of[mine[place]]}: give the "
                "parameters in the same order everywhere, such as that of model.named_parameters(), not of a set"
            )


def varies(tensor: Tensor) -> bool:
    """Whether a tensor has unequal elements."""
    if tensor.numel() < 2:
        return False
    rows = byte_view(to_local(tensor.detach())).view(-1, tensor.itemsize)  # of any dtype
    return bool((rows != rows[:1]).any())


# Weights


def equalize_weights(exchange: Exchange, tensors: list[Tensor], hashed: int, device: torch.device) -> None:
    """If tensors differ between ranks, as their fingerprint `hashed` tells, copies rank 0's to all ranks; rank 0 warns.

    SettingsError if a rank's tensors have other shapes, or are rank 0's in another order.
    """
    # facts of frozen parameters: those that train have been compared
    facts = {f"frozen parameter {n}": f"{each.dtype} {list(each.shape)}" for n, each in enumerate(tensors)}
    fingerprints = check_alike(exchange, facts, device, hashed)
    differing = [rank for rank, theirs in enumerate(fingerprints) if theirs != fingerprints[0]]
    if not differing:
        return
    marks = gather_values(exchange, marks_of(tensors), device)
    for rank in differing:
        check_order(f"rank {rank} has", "rank 0", marks[0], marks[rank])
    copy_tensors(exchange, tensors, src=0)
    warn_of_all(
        exchange,
        f"initial parameters (or the update rules' state) of rank {', '.join(map(str, differing))} differ from "
        "rank 0's; all ranks now use those of rank 0. Seed all ranks alike, or load the same checkpoint, before "
        "the first step.",
        device,
    )


def warn_of_all(exchange: Exchange, text: str, device: torch.device | None) -> None:
    """Rank 0 warns; all ranks call this. Where that is an error, as with `python -W error`, all ranks raise it."""
    error = None
    if exchange.speaks:
        try:
            warn(text)
        except Warning as raised:
            error = raised
    if any(gather_values(exchange, error is not None, device)):
        raise error or UserWarning(text)


@torch.no_grad()
def copy_tensors(exchange: Exchange, tensors: list[Tensor], src: int) -> None:
    """Overwrites the tensors of all ranks with those of rank `src`."""
    for tensor in tensors:
        if tensor.numel():
            data = byte_view(tensor).clone()
            exchange.broadcast(data, src)
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def _check_sharding(global_ranks: frozenset[int], parameters: list[Tensor]) -> None:
    """Raises ValueError if a parameter is sharded (FSDP2) over ranks between which the optimizer exchanges messages."""
    for index, parameter in enumerate(parameters):
        both = sorted(sharded_over(parameter) & global_ranks)
        if len(both) > 1:
            raise ValueError(
                f"parameter {index} (shape {list(parameter.shape)}) is sharded over ranks {both} (FSDP2, tensor "
                "parallelism), and process_group spans them too, but DeMo synchronizes replicas. Give it the mesh's "
                'dimension that replicas span: process_group=mesh["replicate"].'
            )


# Copies inside a node


def copies_of(wiring: Wiring, exchange: Exchange) -> list[tuple[Exchange, list[int]]]:
    """Returns exchanges inside this node whose ranks hold copies of parameters, with the places of these parameters.

    They come in the same order on all of these ranks.
    """
    parameters = wiring.parameters
    if exchange.intra_node is not None:
        return [(exchange.intra_node, [*range(len(parameters))])]
    places: dict[Any, list[int]] = {}
    for place, parameter in enumerate(parameters):
        for pg in groups_of_copies(parameter):
            places.setdefault(pg, []).append(place)
    inside = [(Collective(pg), held) for pg, held in places.items()]
    return [(each, held) for each, held in inside if not each.global_ranks <= exchange.global_ranks]


def tensors_at(places: Sequence[int], wiring: Wiring, momenta: bool) -> list[Tensor]:
    """Returns the tensors that must be equal in all copies: parameters, their rules' state, and the momenta."""
    parameters = [wiring.parameters[place] for place in places]
    found, ids = [*parts_of(parameters)], set(map(id, parameters))
    for chunk_group in wiring.chunk_groups:
        for buffer in (*chunk_group.rule_state.values(), *([chunk_group.momentum] if momenta else [])):
            found += [rows for parameter, rows in chunk_group.rows(buffer) if id(parameter) in ids]
    return found


def difference_of_copies(wiring: Wiring, exchange: Exchange) -> str:
    """Names copies that differ in this node; empty on all of its ranks if none do."""
    inside, found = copies_of(wiring, exchange), ""
    for held, places in inside:  # also after a difference: ranks that hold the same copies compare them together
        fingerprints = [fingerprint([*parts_of([wiring.parameters[place]])]) for place in places]
        theirs = gather_values(held, fingerprints, wiring.device)
        for number, place in enumerate(places):
            differing = [rank for rank, row in enumerate(theirs) if row[number] != theirs[0][number]]
            if differing and not found:
                which = f"{wiring.names[place]} (shape {list(wiring.parameters[place].shape)})"
                found = f"{which} differs between ranks 0 and {differing[0]} of those in a node with copies"
    equal = not found
    for held, _ in inside:  # another rank of this node may have found a difference that this one cannot see
        equal = all(gather_values(held, equal, wiring.device))
    if inside:
        equal = true_in_all(wiring.shard_groups, equal)
    return found or ("" if equal else "copies of a parameter differ between other ranks of this node")

"""The weights of LocalDeMo: each rank's local ones, the global ones, and the start of a pseudo-gradient.

A round changes them as follows. D = start - local is the pseudo-gradient, e the replicator's error, T the transform; a
is `alpha`, b is `error_decay`.

| a round that was | global | local | e | D is |
|---|---|---|---|---|
| applied | moved | global | b (e + T(D) - a sent) | in global and e |
| applied, with local steps since it was sent or left open | moved | as before; so is start | as above | as above |
| applied without this rank's message, in a folder | moved | global | e + T(D) | in e: a later round has it |
| covered by a checkpoint, in a folder | the checkpoint's | global | if listed, b (e + T(D) - a sent) | in both |
| drifted, in a folder | `resync` takes the run's | global | if listed, as applied | in the others' and e |
| skipped (few sent), failed, left open | as before | as before; so is start | e + T(D) | in e: a later round has it |
| the same, where D was not finite | as before | global | as before | dropped, by this rank alone |
| sent, with delay=1 | moved by the round before | global - D; so is start | e + T(D) | on its way |
| in flight when it failed, with delay=1 | as before | as before | e + T(D) | in e: a later round has it |
| of others, with local steps in between | moved | global - D | as before | not sent yet |

"So is start": the next pseudo-gradient counts from the local weights of that moment, otherwise from the global ones.
`follow` moves them. It treats rounds that are covered or have drifted as applied, before their weights come. The last
row is `moved_by_others`.

Global weights and start are beside each local weight, or all on the CPU (`state_device`). Then an accelerator runs
nothing but copies of its local weights, to the host and back.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from demopt.exchange.dtensor import forget_gathered, like_on, parts_of, to_local
from demopt.interrupts import uninterrupted
from demopt.optim.staging import Staging
from demopt.replicator.replicator import Round
from demopt.replicator.rounds import Follower, Stage
from demopt.validation import warn
from demopt.wire.checksum import fingerprint

Marks = list[tuple[Tensor, int, int]]  # of each local weight: how often it was written, and where it is in memory
_ENOUGH = 256  # elements, enough to tell weights apart
TO_REPLACE = (
    "To replace the weights of all ranks during training (not in a folder), load them into the model on every rank, "
    "and call optimizer.resync(model=True) on all"
)


class LocalWeights(Follower):
    """The local weights, which are the model's parameters, and the global weights of those that train."""

    def __init__(self, parameters: Sequence[Tensor], state_device: torch.device | None = None) -> None:
        self.parameters = list(parameters)
        self._state_device = state_device  # of global weights and starts; None: that of each parameter
        self._staging = Staging()
        self.global_of: dict[Tensor, torch.nn.Parameter] = {}
        self.start_of: dict[Tensor, Tensor] = {}  # what D counts from; empty: the global weights
        self.sync_every = 1  # H; here, because a wrapper of Lightning would keep its own
        self.steps_since = 0  # local steps in D: those since D last left the local weights
        #: Local weights as this optimizer left them: a mark of each, and the beginning of `_one` if that is here.
        self._left: tuple[Marks, Tensor | None] | None = None
        self._one: Tensor | None = None  # the weight by which they are told from others
        self.untouched = True  # no step was taken, and no state loaded: the weights are those of the model
        self._is_shown = False  # inside `shared`
        self._shown: Marks = []  # marks of the global weights there
        self.aside: dict[Tensor, Tensor] = {}  # local weights, while the model has the global ones: inside `shared`
        self.create()

    def create(self, saved: Collection[Tensor] = ()) -> None:
        """Creates global weights of parameters that train for the first time, or are `saved`.

        They are at least float32, because the update of a round is smaller than bfloat16 resolves.
        """
        self.require_same()
        known = self.global_of
        wanted = [each for each in self.parameters if each.requires_grad or each in known or each in saved]
        if len(wanted) > len(known):
            self.global_of = {local: known[local] if local in known else self._wide(local) for local in wanted}
            sizes = {local: to_local(local.detach()).numel() for local in wanted}
            # a small one, but with enough elements that no other weights have the same values
            self._one = min(sizes, key=lambda local: (sizes[local] < _ENOUGH, abs(sizes[local] - _ENOUGH)))
        for local, global_weight in self.global_of.items():
            global_weight.requires_grad_(local.requires_grad)

    @property
    def unlike(self) -> dict[Tensor, tuple[torch.device, torch.dtype]]:
        """The local weights on another device than their global ones, or wider; with the device and dtype these need.

        As after model.double(), or model.to(device), which a trainer may call after a script has built its optimizer.
        """
        found = {}
        for local, each in self.global_of.items():
            wanted = self._state_device or local.device, torch.promote_types(local.dtype, each.dtype)
            if wanted != (each.device, each.dtype):
                found[local] = wanted
        return found

    @uninterrupted()
    def move(self) -> None:
        """Moves global weights and starts to the local ones, as wide as these: D may be as small as these resolve."""
        for local, (device, dtype) in self.unlike.items():
            if local in self.start_of:  # first: without memory for the rest, this is tried again
                self.start_of[local] = self.start_of[local].to(device)
            weight, moved = self.global_of[local], self.global_of[local].data.to(device, dtype)
            if torch._has_compatible_shallow_copy_type(weight, moved):
                weight.data = moved
            else:  # as between XLA and a CPU
                torch.utils.swap_tensors(weight, torch.nn.Parameter(moved, weight.requires_grad))

    def require_same(self) -> None:
        """Raises an error if a parameter has another shape than its global weights, or one of them has no memory."""
        for local, global_weight in self.global_of.items():
            if local.is_meta != global_weight.is_meta:
                raise RuntimeError(
                    f"a parameter is on {local.device}, its global weights are on {global_weight.device}: build "
                    "LocalDeMo after model.to_empty(device=device)"
                )
            if global_weight.shape != local.shape:
                position = [*map(id, self.parameters)].index(id(local))
                raise ValueError(
                    f"parameter {position} had shape {list(global_weight.shape)} and has {list(local.shape)}: its data "
                    "was replaced; build LocalDeMo anew"
                )

    @property
    def differ(self) -> bool:
        """Whether local weights are not the global ones."""
        return bool(self.steps_since or self.start_of)

    def fingerprint(self, weights: Sequence[Tensor]) -> int:
        """Returns a hash of some local weights, one by one: a frozen base may be larger than the host's memory."""
        return fingerprint(here for part in parts_of(weights) for here in self.here([part.detach()]))

    def _hash_of_global(self) -> int:
        return fingerprint([to_local(each.detach()) for each in self.global_of.values()])

    def here(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors where the state is: themselves, or copies, so that their device need not compute."""
        device = self._state_device or torch.device("cpu")
        found = [each if self._is_here(each) else like_on(each, device) for each in tensors]
        self._staging.copy(pair for pair in zip(tensors, found, strict=True) if pair[0] is not pair[1])
        return found

    def _is_here(self, tensor: Tensor) -> bool:
        return self._state_device in (None, to_local(tensor.detach()).device)

    def notice_loaded(self) -> None:
        """Before the first step: global <- local, because weights may have been loaded into the model."""
        if self.untouched and not self.aside:
            self._copy(self.global_of.items())

    def begin(self) -> None:
        """Before each step and round. From the first on, only rounds move the global weights."""
        self.notice_loaded()
        self.untouched = False

    @uninterrupted()
    def adopt(self) -> None:
        """local <- global, after a round, or when the weights of a peer came; drops local steps since."""
        self.start_of, self.steps_since = {}, 0
        self._copy((global_weight, local) for local, global_weight in self.global_of.items())
        self.note()

    def take(self, weights: Sequence[Tensor]) -> None:
        """global <- weights of the model, one for each parameter."""
        self._copy((w, self.global_of[p]) for p, w in zip(self.parameters, weights, strict=True) if p in self.global_of)

    def forget(self) -> None:
        """Before a local step, which an interrupt may end anywhere: until `note` nothing is known of the weights."""
        self._left = None

    def note(self) -> None:
        """Notes the local weights as this optimizer leaves them, for `are_replaced`."""
        if self._one is not None:
            # A device whose state is elsewhere is spared a copy at each step.
            self._left = self._marks, _beginning(self._one).clone() if self._is_here(self._one) else None

    @property
    def are_replaced(self) -> bool:
        """Whether somebody has written other weights into the model since `note`, as loading does."""
        if self._left is None or self._one is None or self.aside:
            return False
        marks, kept = self._left
        if not self.differ and (kept is None or self._are_moved(marks)):
            return self._are_changed(marks)
        if kept is None or not self._are_written(marks):
            return False
        return not _beginning(self._one).to(kept).allclose(kept, rtol=0.0, atol=0.0, equal_nan=True)

    @property
    def _marks(self) -> Marks:
        return [(local, local._version, _place(local)) for local in self.global_of if not local.is_inference()]

    def _are_written(self, marks: Marks) -> bool:
        """Whether all local weights were written since, as loading does."""
        return all(local._version != version for local, version, _ in marks)

    def _are_moved(self, marks: Marks) -> bool:
        """Whether some have other memory since, as after `torch.nn.utils.prune.remove`, or model.to(device)."""
        return any(_place(local) != place for local, _, place in marks)

    def _are_changed(self, marks: Marks) -> bool:
        """Whether all were written since, or some moved, and they are not the global ones.

        If some moved, as by model.bfloat16(), differences by rounding do not count.
        """
        if not (is_moved := self._are_moved(marks)) and not self._are_written(marks):
            return False
        near = {"rtol": 2.0**-8, "atol": 1e-7} if is_moved else {"rtol": 0.0, "atol": 0.0}
        for local, mine in self._local_ones().items():
            weight = to_local(self.global_of[local].detach())
            rounded = weight.to(mine).to(weight.dtype)  # float8 compares only as another dtype
            if not torch.allclose(mine.to(weight.dtype), rounded, equal_nan=True, **near):
                return True
        return False

    @property
    def are_elsewhere(self) -> bool:
        """Whether all local weights are on another device than the global ones."""
        return not any(map(self._is_here, self.global_of))

    def _local_ones(self) -> dict[Tensor, Tensor]:
        """Returns the local weights that have global ones, where those are; of DTensors this process's part."""
        return dict(zip(self.global_of, self.here([to_local(each.detach()) for each in self.global_of]), strict=True))

    def starts_and_locals(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Returns, for each global weight, start and local weight, whose difference is its pseudo-gradient D.

        None where it does not train. Of DTensors it is this process's part.
        """
        starts = [self._start(*pair) if pair[0].requires_grad else None for pair in self.global_of.items()]
        return starts, [mine if local.requires_grad else None for local, mine in self._local_ones().items()]

    @uninterrupted()
    def follow(self, current: Round, before: Stage) -> None:
        """A round has left "extracted", or a later stage: local weights move by the table.

        Without delay a round is "extracted" while it travels.
        """
        has_left = before != "extracted"  # D has left the weights: local steps since are the next round's
        if current.stage == "applied":
            if not (has_left and self.steps_since):
                self.adopt()
            return
        if has_left:  # in flight when it failed
            self.start_of |= self._kept_starts(current, {})  # of weights that were not extracted
            return
        steps, self.steps_since = self.steps_since, 0  # skipped, failed, left open, or sent: only the error has D now
        try:
            if not current.finite:  # D was dropped
                self.adopt()
            else:
                if current.stage == "sent":
                    assert current.local_weights is not None
                    self._rebase(dict(zip(self.global_of, current.local_weights, strict=True)))
                kept = self._kept_starts(current, {} if current.stage == "sent" else self.start_of)
                self.start_of = {**self._copies(self.global_of.keys()), **kept}
        except BaseException:  # as when out of memory: D is in the error, and so must leave the local weights
            self.adopt()
            raise
        if current.stage == "failed":  # nobody else knows of it, so the next step has a round again
            self.steps_since = steps

    def _kept_starts(self, current: Round, starts: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Returns the starts of weights whose D is not in the error, global where `starts` has none: D comes again."""
        without = {chunked.parameter for each in current.not_extracted for chunked in each.parameters}
        starts = {**self._copies(self.global_of.values()), **starts} if without else {}
        return {local: starts[local] for local, weight in self.global_of.items() if weight in without}

    @contextmanager
    def moved_by_others(self) -> Iterator[None]:
        """The context in which others' rounds, or a checkpoint, move the global weights; local ones follow at the end.

        D counts from the global weights of before, so that even an interrupt finds no others' moves in it.
        """
        before, had_start = self._hash_of_global(), bool(self.start_of)
        self.hold_start()
        try:
            yield
        finally:
            with uninterrupted():
                # Only a hash tells: a handshake moves weights of some ranks, a catch-up may have nothing to apply, and
                # an error may come before all moves or between two.
                has_moved = self._hash_of_global() != before
                if has_moved and self.steps_since:
                    self.land()
                elif has_moved:
                    self.adopt()
                elif not had_start:
                    self.start_of = {}

    def hold_start(self) -> None:
        """start <- global, unless there is one, because a round that is open will move the global weights."""
        self.start_of = self.start_of or self._copies(self.global_of.values())

    @uninterrupted()
    def land(self) -> None:
        """local <- global - D: after others' moves, or in `flush`. Without local steps since a round, D is 0."""
        if self.start_of:
            self._rebase(self._local_ones())
            self.start_of = {}

    def _rebase(self, locals_of: Mapping[Tensor, Tensor | None]) -> None:
        """local <- global - D, or global where it does not train."""
        _forget_copies(self.global_of)
        moved = []
        for local, global_weight in self.global_of.items():
            target, source = to_local(local.detach()), to_local(global_weight.detach())
            if (mine := locals_of[local]) is not None and local.requires_grad:
                source = source - (self._start(local, global_weight) - mine.to(source))  # the model may have moved
            if self._is_here(local):
                target.copy_(source)  # one by one: the differences of all would be a copy of the model
            else:
                moved.append((target, source.to(target.dtype)))
        self._staging.copy((source, target) for target, source in moved)
        self.note()

    # Evaluating and saving

    @contextmanager
    def shared(self) -> Iterator[None]:
        self.take_back(late=True)
        if self.aside or not self.global_of:
            yield
            return
        self.notice_loaded()
        aside = self._copies(self.global_of.keys())
        try:
            with uninterrupted():
                self.aside, self._is_shown = aside, True
                self._copy((global_weight, local) for local, global_weight in self.global_of.items())
                self._shown = self._marks
            yield
            if self._are_changed(self._shown):
                warn(f"the weights were changed inside shared(), which takes its own back. {TO_REPLACE}")
        finally:
            self._is_shown = False
            self.take_back()

    def take_back(self, late: bool = False) -> None:
        """Ends `shared`. `late`: in the next call, because an interrupt kept it open; weights loaded since stay."""
        if self.aside and not self._is_shown:
            with uninterrupted():
                if not (late and self._are_changed(self._shown)):
                    self._copy((kept, local) for local, kept in self.aside.items())
                self.aside = {}
                if self._left is not None:
                    self.note()

    def to_save(self, local: Tensor) -> dict[str, Tensor]:
        """Returns a parameter's weights for a state: the global ones, and those of this rank that differ."""
        kept = {"global": self.global_of[local].detach(), "local_steps": torch.tensor(self.steps_since, device="cpu")}
        if self.differ:
            kept["local"] = self.aside.get(local, local).detach()
        if local in self.start_of:
            kept["start"] = self.start_of[local]
        return kept

    def restore(self, saved: Mapping[Tensor, Mapping[str, Tensor]], may_be_new: bool = True) -> None:
        """Restores the results of `to_save`, by parameter; others, frozen in that state, take the model's weights.

        `may_be_new`: if the state is that of a new optimizer with these weights, this one stays `untouched`: weights
        may still be loaded into the model. Accelerate's `prepare` loads such a state.
        """
        self.notice_loaded()
        before = self._hash_of_global() if self.untouched else None
        self.start_of, self._left = {}, None
        self.steps_since = max((int(each["local_steps"]) for each in saved.values()), default=0)
        for local, global_weight in self.global_of.items():
            entry = saved.get(local, {})
            self._copy([(entry.get("global", local), global_weight)])
            self._copy([(entry.get("local", global_weight), local)])
            if "start" in entry:
                self.start_of[local] = like_on(local, to_local(global_weight).device)
                self._copy([(entry["start"], self.start_of[local])])
        has_trained = self.differ or any(int(each.get("step", 0)) for each in saved.values())  # rounds
        self.untouched = self.untouched and may_be_new and not has_trained and self._hash_of_global() == before

    def _start(self, local: Tensor, global_weight: Tensor) -> Tensor:
        if local not in self.start_of:  # D counts from the global weights, rounded as the local ones are
            return to_local(global_weight.detach().to(local.dtype).to(global_weight.dtype))
        return to_local(self.start_of[local]).to(to_local(global_weight.detach()))

    def _copies(self, weights: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Returns copies of the local or the global weights: in the local ones' dtypes, on the global ones' devices."""
        copies = {local: like_on(local, to_local(weight).device) for local, weight in self.global_of.items()}
        self._copy(zip(weights, copies.values(), strict=True))
        return copies

    def _wide(self, local: Tensor) -> torch.nn.Parameter:
        device = self._state_device or to_local(local).device
        wide = like_on(local, device, torch.promote_types(local.dtype, torch.float32))
        self._copy([(local, wide)])
        return torch.nn.Parameter(wide, requires_grad=local.requires_grad)

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        pairs = [*pairs]
        _forget_copies(target for _, target in pairs)
        self._staging.copy((to_local(source.detach()), to_local(target.detach())) for source, target in pairs)


def _place(weight: Tensor) -> int:
    return to_local(weight).data_ptr()


def _beginning(weight: Tensor) -> Tensor:
    """Returns a view of a weight's beginning, of `_ENOUGH` elements or some more, if it has so many."""
    part = to_local(weight.detach())
    while part.dim() > 1 and part[:1].numel() >= _ENOUGH:
        part = part[0]
    return part[: -(-_ENOUGH // max(1, part[:1].numel()))] if part.dim() else part


def _forget_copies(weights: Iterable[Tensor]) -> None:
    """Clears torch's caches of weights (autocast, parametrize, FSDP2), which do not notice that these change."""
    forget_gathered(weights)
    torch.clear_autocast_cache()
    parametrize._cache.clear()

"""A round: one exchange, from the extraction of messages to their application, or undoing.

Shapes: W ranks, B bytes in a message.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from demopt.errors import ExchangeError, MessageError
from demopt.exchange.collective import true_in_all_shards
from demopt.optim import copies, handshake
from demopt.optim.compress import Selected, Workspace, compress, restore, restore_decayed, settle, withdraw
from demopt.optim.gradients import Scaling, all_usable, fill_gradients, gradients_of, usable_gradients
from demopt.optim.interrupts import allowed
from demopt.optim.plan import Plan
from demopt.optim.session import Session
from demopt.optim.stats import Stats
from demopt.wire import frame
from demopt.wire.frame import Header

GradientVersion = tuple[int, int] | None


@dataclass
class Outgoing:
    """What this rank sends for a bucket: what it took out of the momentum, the message, and its exchange under way."""

    selected: list[Selected]
    message: Tensor
    work: "Future[tuple[Tensor, Any]] | None" = None
    pending: Any = None  # what the route's own state will want when the round is applied


@dataclass(frozen=True)
class Checked:
    """The result of an exchange, decoded; `skipped`: some rank's gradient was not finite."""

    messages: Tensor
    version: int  # of their content
    decoded: list[Any]  # by bucket, what its route applies
    skipped: bool


class Round:
    """Owns all the state of one exchange: `extract`, then `exchange` (or `send`, and `exchange` later), then its end.

    End it with `apply`, `follow` or `undo`. Undoing twice is harmless, because the first empties `outgoing`.
    """

    def __init__(self, plan: Plan, session: Session, headers: list[Header], workspace: Workspace) -> None:
        self.plan = plan
        self.session = session
        self.headers = headers
        self.outgoing: list[Outgoing | None] = [None] * len(plan.buckets)
        self.extracted = False  # all of its messages
        self.sent = False  # in the background, to be applied a step later
        self.unlike_copies = ""  # of a parameter inside this node: which, if fingerprints travel and some differ
        self.decayed = False  # the momenta have decayed since, in a newer round
        self.stats = Stats(kept=sum([route.layout.kept for route in plan.routes]), route=plan.reason)
        self._workspace = workspace
        self._bytes_before = (0, 0)  # sent and received before the round
        self._awaited = [set(map(id, bucket.parameters)) for bucket in plan.buckets]  # without a gradient so far
        self._early: dict[Tensor, GradientVersion] = {}  # gradients that were sent during backward
        self._checked: Checked | None = None

    @staticmethod
    def begin(plan: Plan, session: Session, step: int, fingerprint: int | None, workspace: Workspace) -> "Round":
        """Begins the round of a step; a fingerprint of the parameters travels with it."""
        rank, world_size = session.members
        headers = [Header(step, rank, world_size, route.layout.digest, plan.settings_digest) for route in plan.routes]
        new, exchange = Round(plan, session, headers, workspace), session.exchange
        new._bytes_before = exchange.bytes_so_far
        if exchange.intra_node is not None:  # before gradients are averaged there, where ranks that differ would hang
            new.agree()
        if fingerprint is not None:
            new.unlike_copies = copies.difference(plan, exchange)
            mark = handshake.drifted(fingerprint) if new.unlike_copies else fingerprint
            new.headers = [replace(header, flags=frame.FINGERPRINT, fingerprint=mark) for header in headers]
        return new

    def readdressed(self, plan: Plan, session: Session, step: int, fingerprint: int | None) -> "Round":
        """Returns this extracted round with messages for other ranks, or for a later step; this one is then over."""
        taken, self.outgoing = self.outgoing, [None] * len(self.outgoing)
        new = Round.begin(plan, session, step, fingerprint, self._workspace)
        for number, (route, mine) in enumerate(zip(plan.routes, taken, strict=True)):
            assert mine is not None
            flags = new.headers[number].flags | self.headers[number].flags & frame.NONFINITE
            header = new.headers[number] = replace(new.headers[number], flags=flags)
            message = route.message(header, [selected.data for selected in mine.selected])
            new.outgoing[number] = Outgoing(mine.selected, message)
        new.extracted = True
        new.stats = replace(self.stats, route=plan.reason, payload_bytes=new.message.numel())
        return new

    @property
    def message(self) -> Tensor:
        """All buckets' messages, one after the other, uint8 [B]."""
        messages = [outgoing.message for outgoing in self.outgoing if outgoing is not None]
        return messages[0] if len(messages) == 1 else torch.cat(messages)

    @property
    def took_gradients(self) -> bool:
        """Whether gradients went into the momenta, which then have decayed; not if one was not finite."""
        return any(outgoing is not None and bool(outgoing.selected) for outgoing in self.outgoing)

    def ready(self, number: int, parameter: Tensor) -> None:
        """During backward: notes that a parameter of bucket `number` has its gradient; sends buckets, in order."""
        if self.outgoing[number] is not None:
            raise RuntimeError(
                "backward came to a parameter whose gradient has been sent already; with overlap, all backward passes "
                "of a step but the last belong into `with optimizer.no_sync():`; if a batch is left out after it, "
                "call optimizer.rollback() first"
            )
        self._awaited[number].discard(id(parameter))
        for at, awaited in enumerate(self._awaited):
            if awaited:
                break
            if self.outgoing[at] is None:
                started = time.perf_counter()
                outgoing = self._extract(at, Scaling())
                self._early |= {p: _version(p) for p in self.plan.buckets[at].parameters}
                self.stats = self.stats.timed("extract", started)
                self._send(at, outgoing)

    def extract(self, scaling: Scaling) -> Tensor:
        """Steps 1 to 4, for all buckets that were not ready during backward; returns `message`."""
        started = time.perf_counter()
        self._check_early(scaling)
        for number, outgoing in enumerate(self.outgoing):
            if outgoing is None:
                self._extract(number, scaling)
        self.extracted = True
        message = self.message
        self.stats = replace(self.stats, payload_bytes=message.numel()).timed("extract", started)
        return message

    def send(self) -> None:
        """Step 5, begun: starts the exchange of the messages in the background."""
        self.agree()
        self._bytes_before = self.session.exchange.bytes_so_far
        self.sent = True
        for number, outgoing in enumerate(self.outgoing):
            assert outgoing is not None
            self._send(number, outgoing)

    def exchange(self, message: Tensor | None = None) -> Tensor:
        """Step 5: sends what was not sent, and waits; returns each bucket's result side by side."""
        started = time.perf_counter()
        step = self.headers[0].step
        try:
            if message is not None:
                for outgoing, part in zip(self.outgoing, message.split(self.plan.widths[0]), strict=True):
                    assert outgoing is not None
                    outgoing.message = part
            with allowed():
                self.agree()
                results = self._results()
                if any(frame.announced(result) for result in results):  # another rank has a new layout or settings:
                    self.session.handshake(self.plan, step)  # compare settings, then repeat the round
                    results = self._results()
        except ExchangeError as error:
            raise ExchangeError(f"step {step}: {error}") from error
        now, before = self.session.exchange.bytes_so_far, self._bytes_before
        self.stats = replace(self.stats, sent_bytes=now[0] - before[0], received_bytes=now[1] - before[1])
        self.stats = self.stats.timed("exchange", started)
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def check(self, messages: Tensor) -> "Checked":
        """Decodes and checks everything, once: what was checked is what `apply` applies."""
        version = messages._version
        if self._checked is not None and self._checked.messages is messages and self._checked.version == version:
            return self._checked
        headers: list[Header] = []
        decoded = []
        for route, result, header in zip(self.plan.routes, self._split(messages), self.headers, strict=True):
            theirs, values = route.check(result, header)
            headers += theirs
            decoded.append(values)
        handshake.check_drift(headers[: headers[0].world_size], self.unlike_copies)
        skipped = any(header.flags & frame.NONFINITE for header in headers)
        self._checked = Checked(messages, version, decoded, skipped)
        return self._checked

    def apply(self, messages: Tensor, newer: "Round | None" = None) -> None:
        """Steps 6 to 8: checks everything, then updates the parameters; or, if some rank has to skip, undoes.

        `newer`: as in `undo`.
        """
        started = time.perf_counter()
        checked, self._checked = self.check(messages), None
        skipped, decoded = checked.skipped, checked.decoded
        if skipped:
            self.undo(newer)
        else:
            outgoing, self.outgoing = self.outgoing, [None] * len(self.outgoing)  # now nothing can be undone
            with record_function("demopt.apply"):
                for chunk_group in self.plan.chunk_groups:
                    chunk_group.step = self.headers[0].step
                self.plan.matrices.begin()
                for route, values in zip(self.plan.routes, decoded, strict=True):
                    route.apply(values)
                self.plan.matrices.finish()
            self._finish(outgoing)
        self.stats = replace(self.stats, skipped=skipped).timed("apply", started)

    def follow(self, skipped: bool) -> None:
        """Ends a round that another rank has applied, or skipped, on the same parameters."""
        if skipped:
            self.undo()
        else:
            self._finish(self.outgoing)
        self.stats = replace(self.stats, skipped=skipped)

    def undo(self, newer: "Round | None" = None, wait: bool = True) -> None:
        """Waits for its exchanges, then puts back into the momenta what it took out, as if it had never been taken.

        With delay, `newer` is the next round, if that is extracted already: the momenta have then decayed once since,
        so what comes back has decayed too, and what an undo of `newer` would put back changes with it.
        """
        if wait:
            self.wait()
        outgoing, self.outgoing = self.outgoing, [None] * len(self.outgoing)
        for number, (route, mine) in enumerate(zip(self.plan.routes, outgoing, strict=True)):
            if mine is None:
                continue
            later = newer.outgoing[number] if newer is not None else None
            after = later.selected if later is not None else []
            for at, selected in enumerate(mine.selected):
                chunk_group = route.chunk_groups[at]
                if self.decayed:
                    restore_decayed(chunk_group, selected, after[at] if after else None)
                else:
                    restore(chunk_group, selected)
                    if not self.plan.options.keeps_gradients and not self.sent:
                        withdraw(chunk_group, self._workspace)

    def wait(self) -> None:
        """Waits until none of its exchanges is under way."""
        for outgoing in self.outgoing:
            if outgoing is not None and outgoing.work is not None:
                with allowed():
                    outgoing.work.exception()

    def _extract(self, number: int, scaling: Scaling) -> Outgoing:
        """Turns the gradients of a bucket into its message; they stay out of the momentum if one is not finite."""
        route, header = self.plan.routes[number], self.headers[number]
        with record_function("demopt.extract"):
            unscale, finite = self._gradients(number, scaling)
            outgoing = self.outgoing[number] = Outgoing([], torch.empty(0, dtype=torch.uint8))
            for chunk_group in route.chunk_groups if finite else ():
                outgoing.selected.append(compress(chunk_group, unscale, self._workspace))
            header = self.headers[number] = header if finite else replace(header, flags=header.flags | frame.NONFINITE)
            outgoing.message = route.message(header, [selected.data for selected in outgoing.selected])
        return outgoing

    def _gradients(self, number: int, scaling: Scaling) -> tuple[float, bool]:
        """Averages gradients inside a node; returns the factor that unscales them, and whether all are usable."""
        exchange, bucket, unscale = self.session.exchange, self.plan.buckets[number], scaling.factor
        gradients = usable_gradients(bucket.parameters, self.plan.groups)
        if exchange.intra_node is not None:
            fill_gradients(bucket.parameters)
            gradients = gradients_of(bucket.parameters)
            for gradient in gradients:
                gradient.mul_(unscale)  # ranks of a node may have different scales
            unscale = 1.0
            exchange.average(gradients)
        usable = not scaling.found_infinite and all_usable(gradients)
        return unscale, true_in_all_shards(usable, bucket.parameters)

    def agree(self) -> None:
        """Runs the handshake if the plan is new; its bytes do not count as the round's."""
        if not self.session.agreed(self.plan):
            self.session.agree(self.plan, self.headers[0])
            self._bytes_before = self.session.exchange.bytes_so_far

    def _send(self, number: int, outgoing: Outgoing) -> None:
        outgoing.work = self.session.submit(lambda: self._travel(number, outgoing))

    def _results(self) -> list[Tensor]:
        """Returns the result of each bucket's exchange; waits for those that are under way, does the others here."""
        results = []
        for number, outgoing in enumerate(self.outgoing):
            assert outgoing is not None
            if outgoing.work is None:
                result, outgoing.pending = self._travel(number, outgoing)
            else:
                with record_function("demopt.wait"):
                    result, outgoing.pending = outgoing.work.result()
                outgoing.work = None  # if the round is repeated, the message is sent again
            results.append(result)
        return results

    def _travel(self, number: int, outgoing: Outgoing) -> tuple[Tensor, Any]:
        with record_function("demopt.exchange"):
            return self.plan.routes[number].exchange(outgoing.message, self.session.exchange, self.headers[number])

    def _split(self, messages: Tensor) -> list[Tensor]:
        """Splits results by bucket; leaves a single bucket's unchanged, for its route to check."""
        widths = self.plan.widths[1]
        if len(widths) == 1:
            return [messages]
        if messages.dim() != 2 or messages.shape[1] != sum(widths):
            raise MessageError(f"got {list(messages.shape)} bytes where rows of {sum(widths)} were expected")
        return list(messages.split(widths, dim=1))

    def _finish(self, outgoing: list[Outgoing | None]) -> None:
        for route, mine in zip(self.plan.routes, outgoing, strict=True):
            if mine is not None:
                route.finish(mine.pending)
                for chunk_group in route.chunk_groups:
                    settle(chunk_group)

    def _check_early(self, scaling: Scaling) -> None:
        """Raises RuntimeError if gradients changed after they were sent."""
        if self._early and scaling.grad_scale is not None:
            raise RuntimeError("GradScaler unscales gradients after they have been sent; use overlap=0 with it")
        for parameter, version in self._early.items():
            if _version(parameter) != version:
                raise RuntimeError(
                    f"the gradient of a parameter of shape {list(parameter.shape)} was written after backward had sent "
                    "it: by DistributedDataParallel (demopt.unsync(model) stops it), by clip_grad_norm_ (which writes "
                    "gradients that it does not clip too; transformers' Trainer calls it even with max_grad_norm=0), "
                    "or by something else between backward and step; use overlap=0, or delay=1, which allows it"
                )


def _version(parameter: Tensor) -> GradientVersion:
    """Returns a value that changes whenever the gradient is modified in place or replaced."""
    if parameter.grad is None:
        return None
    (gradient,) = gradients_of([parameter])
    return id(parameter.grad), gradient._version

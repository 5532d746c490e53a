"""The rounds of an optimizer, one per step: what it extracts, sends and applies, and when.

Shapes: W ranks, B bytes in a message.
"""

import time
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from demopt.optim import compress, handshake, late, settings, state
from demopt.optim.bucket import Bucket, Round, Sending, build_buckets, gradient_version, split, undo
from demopt.optim.chunk_group import local
from demopt.optim.courier import Courier
from demopt.optim.gradients import Scaling, all_usable, check_matrices, fill_gradients, usable_gradients
from demopt.optim.meeting import Meeting
from demopt.optim.options import Options
from demopt.optim.overlap import Overlap
from demopt.optim.routes.interface import Route
from demopt.optim.stats import Stats
from demopt.optim.terms import Terms
from demopt.wire import frame
from demopt.wire.checksum import fingerprint


class Rounds:
    """Owns the buckets and their routes, rebuilds them when settings change, and tracks the rounds in flight.

    Example:
        >>> from demopt.optim.options import Options
        >>> rounds = Rounds(Meeting(None), Options("auto", 100, 0, 0))
        >>> rounds.refresh([], {})
        >>> rounds.stats.payload_bytes
        0
    """

    def __init__(self, meeting: Meeting, options: Options) -> None:
        options.check()
        self.meeting = meeting
        self.options = options
        self.stats = Stats()
        self.hooks = Overlap()
        self.buckets: list[Bucket] = []
        self.step = torch.zeros((), dtype=torch.int64)  # on the CPU; all parameters' states share it
        self._why = ""  # reason for the choice of route
        self._terms = Terms(options, [], {})
        self._signature: list[Any] | None = None  # what the buckets were built from
        self._round: Round | None = None  # between extract and apply
        self._late: Round | None = None  # with delay: the previous step's, in flight
        # two, because a background exchange also computes: owners reduce while other buckets are extracted
        self._workspace, self._routes_workspace = compress.Workspace(), compress.Workspace()
        self._courier = Courier(meeting)

    def refresh(
        self, groups: list[dict[str, Any]] | None = None, states: MutableMapping[Tensor, dict[str, Any]] | None = None
    ) -> None:
        """Rebuilds the buckets if groups, ranks, layout settings, dtypes, devices or frozen parameters have changed.

        Invalid settings raise before any state changes.
        """
        if groups is not None and states is not None:
            self._terms = Terms(self.options, groups, states)
        team = self.meeting.team
        signature = state.signature(self._terms.groups, team)
        for group in self._terms.groups:
            settings.check(group)
            check_matrices(group["update"], group["params"])
        if signature == self._signature:
            return
        self.require_settled("a change of groups or settings")
        state.check_fixed(self._signature, signature)
        buckets, chunk_groups, why = build_buckets(self._terms, team, self._routes_workspace)
        self.apply_late()
        self.buckets, self._why = buckets, why
        self.step = state.attach(self._terms.states, chunk_groups)
        self._signature = signature
        if self.options.overlap:
            self.hooks.watch(self.buckets, self._send_early)

    def extract(self, scaling: Scaling) -> Tensor:
        """Extracts the buckets that backward has not extracted; returns all messages, uint8 [B]."""
        if self._round is not None and self._round.handed_out:
            self.require_settled("extract")
        started = time.perf_counter()
        begun = self._begin_round()
        self.hooks.check(begun, scaling)
        for number in range(len(self.buckets)):
            if begun.sendings[number] is None:
                self._extract(begun, number, scaling)
        begun.handed_out = True
        messages = begun.messages
        message = messages[0] if len(messages) == 1 else torch.cat(messages)
        kept = sum(bucket.route.layout.kept for bucket in self.buckets)
        early = {"extract": begun.early_seconds}
        self.stats = Stats(payload_bytes=message.numel(), kept=kept, route=self._why, seconds=early)
        self.stats = self.stats.timed("extract", started)
        return message

    def exchange(self, message: Tensor) -> Tensor:
        """Exchanges the messages; each row of the result holds the buckets one after the other."""
        started = time.perf_counter()
        begun = self._require_round()
        messages = message.split([bucket.route.widths[0] for bucket in self.buckets])
        results = self._courier.results(begun, self._routes(), list(messages), self._terms)
        self._count(begun)
        self.stats = self.stats.timed("exchange", started)
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def apply(self, messages: Tensor) -> None:
        """Applies the update and ends the round. A rank that sends nothing, as in a replay, needs only this call."""
        self.refresh()
        begun = self._begin_round()
        if self._apply(begun, split(messages, [bucket.route.widths[1] for bucket in self.buckets])):
            undo(self.buckets, begun.sendings)
        self._end_round()
        self.step.add_(1)

    def follow(self, leader: "Rounds") -> None:
        """Ends a round whose update `leader` has applied to the same parameters."""
        begun, skipped = self._require_round(), leader.stats.skipped
        if skipped:
            undo(self.buckets, begun.sendings)
        else:
            for route in self._routes():
                route.keep()
        self._end_round()
        self.step.add_(1)
        self.stats = replace(self.stats, skipped=skipped)

    def rollback(self) -> None:
        """Waits for pending exchanges, then restores the momenta."""
        if self._round is not None:
            self._round.settle()
            undo(self.buckets, self._round.sendings)
        self._end_round()

    def start(self) -> None:
        """With delay: starts to send the whole round, which the next step applies."""
        started = time.perf_counter()
        begun = self._require_round()
        self._courier.agree(begun, self._routes(), self._terms)
        begun.started = self.meeting.meter.bytes_so_far  # the last exchange has finished by now
        for number in range(len(self.buckets)):
            self._courier.start(begun, number, self.buckets[number].route)
        self._late, self._round = begun, None
        self.step.add_(1)
        self.stats = self.stats.timed("exchange", started)

    def apply_late(self) -> None:
        """With delay: waits for the previous step's exchange and applies it; the time counts as exchange and apply."""
        begun, self._late = self._late, None
        if begun is None:
            return
        started = time.perf_counter()
        try:
            results = self._courier.results(begun, self._routes(), begun.messages, self._terms)
            self._count(begun)
            self.stats = self.stats.timed("exchange", started)
            skipped = self._apply(begun, results)
        except BaseException:
            begun.settle()
            late.give_back(self.buckets, begun, self._round)
            raise
        if skipped:
            late.give_back(self.buckets, begun, self._round)

    @torch.no_grad()
    def _send_early(self, number: int) -> None:
        """Sends a bucket once backward has all its gradients, if the ranks have already agreed on the routes."""
        self.refresh()  # may rebuild the buckets, whose new routes the ranks have not agreed on
        if self.meeting.agreed(self._routes()):
            started = time.perf_counter()
            begun = self._begin_round()
            self._extract(begun, number, Scaling())
            begun.early_seconds += time.perf_counter() - started
            begun.versions |= {p: gradient_version(p) for p in self.buckets[number].parameters}
            self._courier.start(begun, number, self.buckets[number].route)

    def fingerprint(self) -> int:
        """Returns a 64-bit hash of all parameters."""
        return fingerprint([local(parameter) for parameter in self._terms.parameters])

    def resync(self, src: int) -> None:
        """Copies the parameters, the step and the update rules' state of rank `src` to every rank."""
        self.require_settled("resync")
        self.apply_late()
        self.refresh()
        meter = self.meeting.meter
        if not 0 <= src < meter.world_size:
            raise ValueError(f"src is {src}; there are ranks 0 to {meter.world_size - 1}")
        parameters = [local(parameter) for parameter in self._terms.parameters]
        step = self.step.to(parameters[0].device, copy=True).view(1)
        handshake.copy_parameters(meter, [*parameters, step, *self._terms.replicated()], src)
        self.step.copy_(step[0])

    def renew(self) -> None:
        """Forgets the rounds in flight after groups and states were replaced; `refresh` then rebuilds the buckets."""
        for begun in (self._round, self._late):
            if begun is not None:
                begun.settle()
        self._round = self._late = None
        self._signature = None

    def late_state(self) -> dict[str, Tensor]:
        """With delay: returns the round in flight for a checkpoint; empty if there is none."""
        return late.packed(self._late) if self._late is not None else {}

    def check_late(self, saved: dict[str, Any]) -> None:
        """Raises ValueError if `take_up` could not use the round in a checkpoint."""
        late.check(saved, self.options, self.meeting.team)

    def take_up(self, saved: dict[str, Tensor]) -> None:
        """Resumes the round that was in flight when a checkpoint was written: the next step sends it again.

        Without delay, or if ranks or layout have changed, puts it back into the momenta instead, to be sent later.
        """
        begun = late.unpacked(saved, self.buckets[0])
        if self.options.delay and late.fits(begun, self.buckets[0], self.meeting.team):
            self._late = begun
        else:
            undo(self.buckets, begun.sendings)

    def _begin_round(self) -> Round:
        """Returns the round of this step; begins it unless backward has. Call `refresh` first."""
        if self._round is None:
            meter = self.meeting.meter
            self._round = Round(self._headers(), [None] * len(self.buckets), meter.bytes_so_far)
            if (
                meter.intra_node is not None
            ):  # before averaging gradients, where ranks of a node that differ would deadlock
                self._courier.agree(self._round, self._routes(), self._terms)
        return self._round

    def _end_round(self) -> None:
        self._round = None
        self.hooks.forget()

    def _extract(self, begun: Round, number: int, scaling: Scaling) -> None:
        """Turns the gradients of a bucket into its message."""
        bucket, header = self.buckets[number], begun.headers[number]
        with record_function("demopt.extract"):
            unscale, finite = self._gradients(bucket, scaling)
            bucket.route.begin(header.step)
            sending = begun.sendings[number] = Sending([], torch.empty(0, dtype=torch.uint8))
            for chunk_group in bucket.route.chunk_groups if finite else []:
                sending.extracted.append(compress.extract(chunk_group, unscale, self._workspace, bucket.route.chosen))
            header = begun.headers[number] = replace(header, flags=header.flags | (0 if finite else frame.NONFINITE))
            sending.message = bucket.route.message(header, [extracted.data for extracted in sending.extracted])

    def _apply(self, begun: Round, results: list[Tensor]) -> bool:
        """Checks everything, then updates the parameters; True if all skip, as some rank's gradient was not finite."""
        started = time.perf_counter()
        headers: list[frame.Header] = []
        for route, result, header in zip(self._routes(), results, begun.headers, strict=True):
            route.begin(header.step)
            headers += route.check(result, header)
        handshake.check_drift(headers[: headers[0].world_size])
        skipped = any(header.flags & frame.NONFINITE for header in headers)
        if not skipped:
            begun.sendings = [None] * len(results)  # from here on nothing can be undone
            with record_function("demopt.apply"):
                for route, result in zip(self._routes(), results, strict=True):
                    route.apply(result)
        self.stats = replace(self.stats, skipped=skipped).timed("apply", started)
        return skipped

    def _gradients(self, bucket: Bucket, scaling: Scaling) -> tuple[float, bool]:
        """Averages gradients inside a node; returns the factor that unscales them, and whether all are usable."""
        unscale, meter = scaling.factor, self.meeting.meter
        gradients = usable_gradients(self._terms.groups, bucket.parameters)
        if meter.intra_node is not None:
            gradients = fill_gradients(self._terms.groups)
            for gradient in gradients:
                gradient.mul_(unscale)  # ranks of a node may have different scales
            unscale = 1.0
            meter.average(gradients)
        return unscale, not scaling.found_infinite and all_usable(gradients)

    def _routes(self) -> list[Route]:
        return [bucket.route for bucket in self.buckets]

    def _fingerprint_due(self) -> bool:
        step, every = int(self.step), self.options.fingerprint_every
        return every > 0 and step > 0 and step % every == 0 and self.meeting.met  # until then weights may differ

    def _headers(self) -> list[frame.Header]:
        mark = self.fingerprint() if self._fingerprint_due() else None
        step, meter, flags = int(self.step), self.meeting.meter, 0 if mark is None else frame.FINGERPRINT
        digest = handshake.settings_digest(self._terms.groups)
        return [
            frame.Header(step, meter.rank, meter.world_size, route.layout.digest, digest, flags, fingerprint=mark or 0)
            for route in self._routes()
        ]

    def require_settled(self, wanted: str) -> None:
        if self._round is not None:
            raise RuntimeError(f"{wanted} came between extract and apply; call apply or rollback first")

    def require_flushed(self, wanted: str) -> None:
        self.require_settled(wanted)
        if self._late is not None:
            raise RuntimeError(f"{wanted} came while an exchange is under way; call flush() on all ranks first")

    def _require_round(self) -> Round:
        if self._round is None:
            raise RuntimeError("there is no message under way; call extract first")
        return self._round

    def _count(self, begun: Round) -> None:
        meter, (sent, received) = self.meeting.meter, begun.started
        self.stats = replace(
            self.stats, sent_bytes=meter.sent_bytes - sent, received_bytes=meter.received_bytes - received
        )

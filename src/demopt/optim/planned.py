"""What stands behind the steps of an optimizer: a plan, a session, rounds, and copies of all of them."""

import copy
from collections import deque
from typing import Any

import torch
from torch import Tensor

from demopt.optim import checkpoint, settings
from demopt.optim._warnings import warn
from demopt.optim.compress import Workspace
from demopt.optim.gradients import Scaling
from demopt.optim.interrupts import deferred
from demopt.optim.overlap import Overlap
from demopt.optim.plan import Inputs, Options, Plan, make_plan
from demopt.optim.round import Round
from demopt.optim.session import Session
from demopt.optim.stats import Stats


class Planned(torch.optim.Optimizer):
    """The part of `DeMo` that nobody calls: it keeps the plan up to date, and begins and ends rounds."""

    _plan: Plan | None
    _round: Round | None  # of this step, until it ends
    _all_states: dict[int, dict[str, Any]] | None  # consolidated, until the state changes

    def flush(self) -> None:
        """See `DeMo.flush`."""
        raise NotImplementedError

    def fingerprint(self, state: bool = False) -> int:
        """See `DeMo.fingerprint`."""
        raise NotImplementedError

    # Plan, session and rounds

    def _begin(self, process_group: Any, options: Options) -> None:
        options.check()
        self._options = options
        self._session = Session(process_group, options.in_background)
        self._plan = None
        self._cycled = False  # warned that a scheduler would change momenta
        self._round = None
        self._in_flight: deque[Round] = deque()  # with delay: sent, but not applied
        self._overlap = Overlap()
        # two, because a background exchange also computes: owners reduce while other buckets are extracted
        self._workspace, self._route_workspace = Workspace(), Workspace()
        self._stats = Stats()
        self._all_states = None
        self._step = torch.zeros((), dtype=torch.int64)  # on the CPU; all parameters' states share it

    def _current_plan(self) -> Plan:
        """Returns the plan; makes it anew if groups, parameters, settings or ranks have changed since."""
        self._keep_momentum()
        plan = self._plan
        inputs = Inputs.of(self.param_groups, *self._session.members)
        same = plan is not None and plan.groups is self.param_groups and plan.options is self._options
        if plan is not None and same and plan.inputs == inputs:
            return plan
        node = self._session.node
        new = make_plan(self.param_groups, self._options, inputs, self._route_workspace, before=plan, node=node)
        if plan is None or new.buckets is not plan.buckets:
            self._require_settled("a change of groups or settings")
            self.flush()
            self._step = checkpoint.attach(self.state, new)
            self._all_states = None
            if self._options.overlap:
                self._overlap.watch(new.buckets, self._ready)
        self._plan = new
        return new

    def _keep_momentum(self) -> None:
        """Takes back what a scheduler has written to the momentum, unless it was asked to."""
        plan = self._plan
        undone = settings.keep_momentum(self.param_groups, plan.inputs.momenta) if plan is not None else ""
        if undone and not self._cycled and self._session.speaks:
            self._cycled = True
            warn(undone)

    def _current_round(self) -> Round:
        """Returns the round of this step; begins it unless backward has."""
        plan = self._current_plan()
        if self._round is None:
            self._all_states = None
            self._round = Round.begin(plan, self._session, int(self._step), self._due_fingerprint(), self._workspace)
        return self._round

    def _extracted_round(self) -> Round:
        if self._round is None:
            raise RuntimeError("there is no message in flight; call extract first")
        return self._round

    def _extract(self, new: Round) -> Tensor:
        message = new.extract(Scaling.of(self))
        for older in self._in_flight:
            older.decayed |= new.took_gradients
        self._stats = new.stats
        return message

    def _complete(self, oldest: Round) -> None:
        """Exchanges, or waits for the exchange, and applies; on an error puts back what the round took out."""
        newer = None if oldest is self._round else self._round
        try:
            result = oldest.exchange()
            self._look()
            oldest.apply(result, newer)
        except BaseException:
            oldest.undo(newer)
            raise
        self._stats = oldest.stats if oldest is self._round else self._stats.with_exchange_of(oldest.stats)

    def _look(self) -> None:
        """Looks for gradients that something else synchronises; now no exchange is in the background."""
        if self._plan is not None:
            self._session.look(self._plan)

    def _end_round(self) -> None:
        self._round = None
        self._all_states = None
        self._step.add_(1)

    @torch.no_grad()
    @deferred()
    def _ready(self, number: int, parameter: Tensor) -> None:
        """With overlap: backward has the gradient of a parameter of bucket `number`."""
        if self._round is None:  # otherwise its plan holds: looking for changes takes time at every parameter
            if not self._session.agreed(self._current_plan()):
                return  # the first step sends nothing before the handshake
            self._current_round()
        self._extracted_round().ready(number, parameter)

    def _due_fingerprint(self) -> int | None:
        step, every = int(self._step), self._options.fingerprint_every
        due = every > 0 and step > 0 and step % every == 0 and self._session.met  # until then weights may differ
        return self.fingerprint() if due else None

    def _require_settled(self, wanted: str) -> None:
        if self._round is not None:
            raise RuntimeError(f"{wanted} came between extract and apply; call apply or rollback first")

    def _require_flushed(self, wanted: str) -> None:
        self._require_settled(wanted)
        if self._in_flight:
            raise RuntimeError(f"{wanted} came while an exchange is in flight; call flush() on all ranks first")

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        self._require_flushed("copying or pickling")
        packed = super().__getstate__()
        return {
            **packed,
            "state": checkpoint.unshared(self.state),
            "process_group": self._session.lost(),
            "options": self._options,
        }

    def __setstate__(self, packed: dict[str, Any]) -> None:
        if "process_group" in packed:  # a pickle or a copy; otherwise load_state_dict calls this
            self._begin(packed.pop("process_group"), packed.pop("options"))
        for abandoned in (*self._in_flight, *([self._round] if self._round else [])):
            abandoned.wait()  # what it took out of the momenta goes with them
        self._round = None
        self._all_states = None
        self._in_flight.clear()
        super().__setstate__(packed)
        for group in self.param_groups:
            for name in settings.NAMES:
                group.setdefault(name, self.defaults[name])
        self._current_plan()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Planned":
        twin: Planned = type(self).__new__(type(self))
        memo[id(self)] = twin
        packed = copy.deepcopy(self.__getstate__(), memo)
        shared = self._session.process_group  # it cannot be copied
        twin.__setstate__({**packed, "process_group": shared})
        return twin

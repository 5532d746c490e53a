"""Elastic training under torchft: each round of DeMo or LocalDeMo is voted on before it is applied.

    extract -> detach -> quorum -> [new workers: meet, heal] -> attach -> exchange -> check -> vote -> apply
                            ^------------------------- refused, or an error: detach <---------'

A message is extracted once, whatever happens to its round: a detached round waits with it, and the momentum keeps its
content until the round is applied, so no gradient is lost and none is sent twice. See docs/integrations.md.
"""

import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from demopt.errors import DemoptError, DriftError, ExchangeError, SettingsError, first_line
from demopt.exchange import Exchange
from demopt.exchange.interface import gather_values
from demopt.interrupts import uninterrupted
from demopt.optim.demo import DeMo
from demopt.optim.local_demo import LocalDeMo
from demopt.replicator.replicator import Round, Stats
from demopt.replicator.wiring import fact_told
from demopt.state import unmarked
from demopt.validation import first_difference

__all__ = ["Optimizer"]

#: Settings that a schedule may change: a worker that is behind takes them over with the weights.
SCHEDULED = ("lr", "weight_decay", "momentum_decay", "momentum")


class Participant(NamedTuple):
    """A worker, as it describes itself. `has_message`: it is in a step; otherwise it has just joined."""

    name: int
    step: int
    weights: int  # fingerprint
    settings: dict[str, str]  # the facts that must be equal
    has_message: bool


class Optimizer(torch.optim.Optimizer):
    """Wraps a DeMo or LocalDeMo so that workers may leave and join between any two rounds.

    `zero_grad`, `step`, schedulers and checkpoints work as before. A worker that joins, or has missed rounds, takes
    parameters, step, rules' state and learning rates from the run. Its own message, if it was not applied, is sent in
    the next round. A new worker starts with a zero momentum (LocalDeMo: zero error, new inner state); the momentum of a
    lost worker is lost.

    Args:
        manager: a torchft.Manager. Its `timeout` bounds the wait for a worker in a round, its `quorum_timeout` the
            wait for enough workers, and the lighthouse's `join_timeout_ms` the wait for a late one.
        optimizer: a DeMo or LocalDeMo with delay=0, for which `process_group` was not given.
        patience: seconds after which a round that never succeeds raises ExchangeError; it is then rolled back. Also the
            wait for workers while weights travel to a joining one.

    Raises:
        SettingsError: settings or model differ from those of the run. ExchangeError: see `patience`.

    Source: torchft's Manager and Lighthouse (github.com/meta-pytorch/torchft); docs/integrations.md.

    Examples:
        >>> import torchft, demopt                                       # doctest: +SKIP
        >>> manager = torchft.Manager(                                   # doctest: +SKIP
        ...     pg=torchft.ProcessGroupGloo(), min_replica_size=2, load_state_dict=None, state_dict=None)
        >>> optimizer = Optimizer(manager, demopt.DeMo(model.parameters()))   # doctest: +SKIP
    """

    def __init__(self, manager: Any, optimizer: DeMo | LocalDeMo, *, patience: float = 600.0) -> None:
        if not isinstance(optimizer, DeMo | LocalDeMo):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}; give a demopt.DeMo or demopt.LocalDeMo")
        if optimizer.replicator.options.background:
            raise ValueError("a round in the background cannot be voted on; give delay=0")
        if isinstance(optimizer, LocalDeMo):
            optimizer.replicator.require_gather()
        super().__setstate__({"defaults": optimizer.defaults})  # torch's hooks; its constructor would add groups
        for name in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            setattr(self, f"_optimizer_{name}_hooks", getattr(optimizer, f"_optimizer_{name}_hooks"))  # inner's own
        self.inner = optimizer
        self._manager = manager
        self._quorum = Quorum(manager)
        self._patience = patience
        self._name = int.from_bytes(os.urandom(7), "little")
        self._names = [self._name]  # of the workers of the last quorum, by rank
        self._counted: dict[int, int] = {}  # by name: the last step at which that worker's message was applied
        self._new = True  # has not trained with the run yet
        self._torn = False  # the weights are a mixture: a peer was lost as it sent its own, or `apply` has failed
        self._detached: Round | None = None  # this worker's message, if it may not have been applied
        self._since = 0  # the step at which it was extracted

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. First joins, or ends an interrupted round: weights must come before a gradient is computed."""
        if self._new or self._detached is not None:  # otherwise the next pseudo-gradient would have its steps again
            self.join()
        self.inner.zero_grad(set_to_none)

    def join(self) -> None:
        """Joins the run, takes its weights if they are newer, and returns when this worker can train."""
        self._round()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """A step; with LocalDeMo a local one, and a round when that is due. Returns when the round is applied."""
        if self._new or self._detached is not None:
            self.join()
        loss: float | None = None
        if isinstance(self.inner, LocalDeMo):
            loss = self.inner.local_step(closure)
            if not self.inner.due:
                return loss
        elif closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.finish_round()
        return loss

    def finish_round(self) -> None:
        """Runs a round, with LocalDeMo even if none is due, or ends an interrupted one; returns when it is applied."""
        if self._detached is None:  # otherwise its steps would be in the momentum twice
            self._extract()
        self._round()

    @property
    def workers(self) -> int:
        """The workers of the last round, including this one."""
        return len(self._names)

    def _extract(self) -> None:
        since = self._manager.current_step()
        with uninterrupted():
            self.inner.extract()
            self._detached, self._since = self.inner.replicator.detach_round(), since

    def _round(self) -> None:
        """Repeats a round until it is applied. If all have just joined, nobody has a message: then until they have met.

        A worker that has just joined others takes part in their round without a gradient.
        """
        began = time.monotonic()
        while True:
            try:
                self._quorum.form()
                if self._quorum.met or self._meet():
                    if self._detached is not None:  # otherwise all have just joined
                        self._attempt(self._detached)
                    break
            except SettingsError:
                self._give_up()
                raise
            except DemoptError as error:
                if time.monotonic() - began > self._patience:
                    self._give_up()
                    raise ExchangeError(f"no round in {self._patience:g} s; the last problem: {error}") from error
                self._quorum.refuse(error)
        self._new = False

    def _attempt(self, detached: Round) -> None:
        """Exchanges, checks, votes, and applies if all agree. On an error the round stays detached."""
        inner, exchange = self.inner, self._quorum.exchange()
        try:
            messages = inner.exchange(inner.replicator.attach_round(detached))
            inner.replicator.check(messages)
            exchange.all_gather(torch.zeros(1, dtype=torch.uint8, device="cpu"))  # now all have checked theirs
            step = self._manager.current_step()
            if not self._quorum.vote():
                raise ExchangeError("the manager voted against the round: too few workers")
        except BaseException:
            if inner.replicator.round is not None:  # otherwise it is still detached
                self._detached = inner.replicator.detach_round()
            raise
        with uninterrupted():
            self._detached = None
            try:
                inner.apply(messages)
            except DriftError:  # it was applied in part
                self._torn = True
                raise
            self._counted |= dict.fromkeys(self._names, step)

    def _give_up(self) -> None:
        self._quorum.close()
        if self._detached is not None:
            with uninterrupted():
                self.inner.replicator.attach_round(self._detached)
                self.inner.rollback()
                self._detached = None

    def _meet(self) -> bool:
        """Compares weights and settings, and heals workers that are behind; False if any were: repeat the quorum."""
        exchange = self._quorum.exchange(self._patience)
        step, fingerprint = -1 if self._torn else self._manager.current_step(), self.inner.fingerprint(state=True)
        mine = Participant(self._name, step, fingerprint, self._fixed(), self._detached is not None)
        workers = [Participant(*found) for found in gather_values(exchange, mine)]
        source = leader(workers)
        if workers[source].step < 0:
            raise ExchangeError("the last worker with whole weights is gone; start all again from a checkpoint")
        _compare_settings(workers, source, exchange.rank)
        newest = (workers[source].step, workers[source].weights)
        behind = [rank for rank, worker in enumerate(workers) if (worker.step, worker.weights) != newest]
        given = gather_values(exchange, self._given() if exchange.rank == source else None)[source]
        if exchange.rank in behind or not mine.has_message:
            for group, scheduled in zip(self.inner.param_groups, given["scheduled"], strict=True):
                group.update(scheduled)
        if behind:
            self._heal(exchange, source, behind, given)
            weights = gather_values(exchange, self.inner.fingerprint(state=True))
            if len(set(weights)) > 1:
                raise ExchangeError("weights differ after a worker took those of another")
        self._names = [worker.name for worker in workers]
        self.inner.regroup(self._quorum.exchange())
        self._quorum.met = True
        if self._detached is None and any(worker.has_message for worker in workers):
            self.inner.zero_grad()
            self._extract()
        return not behind

    def _fixed(self) -> dict[str, str]:
        """Returns the facts that no schedule changes."""
        facts = self.inner.replicator.wiring().facts()
        return {name: text for name, text in facts.items() if not any(f"[{each!r}]" in name for each in SCHEDULED)}

    def _heal(self, exchange: "QuorumExchange", source: int, behind: list[int], given: dict[str, Any]) -> None:
        """Sends weights, step and rules' state from `source` to the ranks behind, which also take over `given`."""
        if exchange.rank not in (source, *behind):
            return
        self._torn = taking = exchange.rank != source
        self.inner.regroup(self._quorum.exchange(self._patience, [source, *behind]))
        self.inner.resync(0)
        self._torn = False
        if not taking:
            return
        self._counted = dict(given["counted"])
        self._manager.load_state_dict(given["manager"])
        if self._new:
            self._detached = None
            self.inner.replicator.clear_momentum()
        elif self._detached is not None and self._counted.get(self._name, -1) >= self._since:
            included, self._detached = self._detached, None
            self.inner.replicator.mark_applied(included)  # may warn of it

    def _given(self) -> dict[str, Any]:
        """Returns the state, besides weights, that a worker that is behind takes over."""
        scheduled = [{name: float(group[name]) for name in SCHEDULED if name in group} for group in self.param_groups]
        return {"manager": self._manager.state_dict(), "scheduled": scheduled, "counted": list(self._counted.items())}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups  # as they are now: loading a state into a LocalDeMo replaces them

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def stats(self) -> Stats:
        """The cost of the last step."""
        return self.inner.stats

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the inner optimizer's; call it on all workers."""
        self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the inner optimizer's state, without a rank; save `manager.state_dict()` with it."""
        found = unmarked(self.inner.state_dict())
        if self._detached is not None and self._detached.finite:
            for entry in found["state"].values():
                if "local" in entry:  # the error has D of an interrupted round: local steps count from here
                    entry |= {"start": entry["local"].clone(), "local_steps": torch.zeros_like(entry["local_steps"])}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        # an interrupted round, the applied ones and a mixture belong to the former weights
        self._detached, self._counted, self._torn = None, {}, False


def _compare_settings(workers: list[Participant], source: int, me: int) -> None:
    """Raises SettingsError if this worker is the odd one: the run goes on without it."""
    for worker in (workers[me], *workers):
        if found := first_difference(workers[source].settings, worker.settings):
            name, there, here = found
            told = f"{fact_told(name, worker.settings)} = {here} here, and {there} in the run"
            raise (
                SettingsError(told) if worker is workers[me] else ExchangeError(f"a worker has other settings: {told}")
            )


def leader(workers: list[Participant]) -> int:
    """Returns the rank whose weights count: of the newest ones, the first with the most common weights.

    A worker in a step comes before one that has just joined, because a new one may lack its learning rate.

    Examples:
        >>> ahead, other = Participant(1, 7, 10, {}, True), Participant(2, 7, 11, {}, True)
        >>> behind = Participant(3, 6, 10, {}, True)
        >>> leader([behind, other, ahead, ahead])
        2
    """
    last = max(worker.step for worker in workers)
    ahead = [rank for rank, worker in enumerate(workers) if worker.step == last]
    [(chosen, _)] = Counter(workers[rank].weights for rank in ahead).most_common(1)
    alike = [rank for rank in ahead if workers[rank].weights == chosen]
    return max(alike, key=lambda rank: workers[rank].has_message)


# The quorum: all private names of torchft's Manager that demopt needs are used here (torchft 0.2.0)


class QuorumExchange(Exchange):
    """The workers of a quorum. `seconds`: the timeout of a call; None: that of the process group.

    Any error closes all connections, so that no worker waits for another. `ranks`: only these workers, in this order.
    """

    def __init__(self, process_group: Any, seconds: float | None = None, ranks: Sequence[int] = ()) -> None:
        self._whole = process_group
        group = process_group.parent  # torch's own
        self._group: Callable[[], Any] = weakref.ref(group)  # gloo closes connections when nobody holds it any more
        self._timeout = None if seconds is None else timedelta(seconds=seconds)
        self._ranks, self._are_all = ranks or range(group.size()), not ranks  # in the group
        self.rank, self.world_size = self._ranks.index(group.rank()), len(self._ranks)

    def all_gather(self, message_B: Tensor) -> Tensor:
        message_B = message_B.cpu()
        rows = [message_B.clone() for _ in range(self.world_size)]
        if not self._are_all:
            for rank, row in enumerate(rows):
                self.broadcast(row, rank)
            return torch.stack(rows)
        options: Any = AllgatherOptions()
        if self._timeout is not None:
            options.timeout = self._timeout
        self._run(lambda: self._group().allgather([rows], [message_B.contiguous()], options))
        return torch.stack(rows)

    def broadcast(self, data_B: Tensor, src: int) -> None:
        data = data_B.cpu()  # gloo sends nothing from a GPU to one rank
        if self.rank == src:
            for rank in self._ranks:
                if rank != self._ranks[src]:
                    self._run(lambda rank=rank: self._group().send([data], rank, 0))
        else:
            self._run(lambda: self._group().recv([data], self._ranks[src], 0))
            data_B.copy_(data)

    def _run(self, start: Any) -> None:
        work = None
        try:
            work = start()
            work.wait() if self._timeout is None else work.wait(self._timeout)
        except (RuntimeError, ValueError, AttributeError) as error:  # AttributeError: closed after an earlier error
            del work  # it holds the connections too
            self._whole.abort()  # the calls of others then fail at once
            raise ExchangeError(f"exchange between {self.world_size} workers failed ({first_line(error)})") from error


class Quorum:
    """The manager's quorum: the workers of the next round."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._number: int | None = None
        self.met = False  # whether its workers have met

    def form(self) -> None:
        """Waits for a quorum. Raises ExchangeError if there is none, or if its workers cannot be reached."""
        manager = self._manager
        try:
            manager.start_quorum(allow_heal=False)  # weights travel between the workers, without pickles
            manager.wait_quorum()
        except Exception as error:  # the coordinator's errors are of several classes
            manager._quorum_future = None  # otherwise the next call would only raise this error again
            self.met = False
            raise ExchangeError(f"no quorum: {first_line(error)}") from error
        self.met = self.met and self._number == manager._quorum_id
        self._number = manager._quorum_id
        failed = manager.errored()
        if failed is not None:
            raise ExchangeError(f"the workers of the quorum were not reached: {first_line(failed.original_exception)}")

    def exchange(self, seconds: float | None = None, ranks: Sequence[int] = ()) -> QuorumExchange:
        """Returns an exchange between the workers. `seconds`, `ranks`: as in `QuorumExchange`."""
        try:
            return QuorumExchange(self._manager._pg, seconds, ranks)
        except AssertionError:
            raise ExchangeError("the workers of the quorum were not reached") from None

    def vote(self) -> bool:
        """Whether the round is to be applied; True advances the manager's step."""
        try:
            return bool(self._manager.should_commit())
        except Exception as error:
            raise ExchangeError(f"no vote: {first_line(error)}") from error

    def refuse(self, error: Exception) -> None:
        """Votes no, so that the manager asks for a quorum with new connections; no worker waits for this one."""
        self.close()
        self._manager.report_error(error)
        self.vote()

    def close(self) -> None:
        """Closes the connections to all workers, so that none waits for this one."""
        self._manager._pg.abort()
        self.met = False

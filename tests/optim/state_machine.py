"""Random sequences of everything a user does to a DeMo optimizer, on real threads, beside the slow oracle.

    python tests/optim/state_machine.py --sequences 10000 --seed 1

After every action all ranks must hold the same parameters, bit for bit, and parameters and momenta must be those of
`oracles.reference`, driven by the table below.

| action | momentum of a rank | parameters |
|---|---|---|
| step | b M + s G - a q | X - lr (U + wd X), with delay one step later |
| step, some rank has a NaN | b M + s G; M where its bucket has the NaN | as before |
| extract, rollback; a step whose exchange fails | b M + s G | as before |
| a round in flight is given up, after a newer one took gradients | M + b a q | as before |

Shapes: W ranks, P parameters.
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor
from torch.nn import Parameter

sys.path.insert(0, str(Path(__file__).parents[1]))

import oracle
import problems
from demopt import DeMo, ExchangeError
from demopt.exchange import Exchange
from demopt.exchange.threads import Threads
from demopt.optim.chunk_group import group_key
from oracles import reference

SHAPES = [(8, 4), (6,), (4, 4), (3,)]
CHUNK = 4
TIGHT = {"rtol": 1e-9, "atol": 1e-10}


@dataclass
class Extracted:
    """A round that took coefficients out of the momenta: U [P] and a q [W][P] by parameter, whether it is skipped."""

    aggregates: dict[int, Tensor]
    sent: list[dict[int, Tensor]]
    skipped: bool
    decayed: list[bool] = field(default_factory=list)  # [W]: whether the momenta have decayed since


class Model:
    """What the optimizers should hold: parameters [P] and momenta [W][P]; settings are read live from rank 0."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.parameters: list[Tensor] = []
        self.momenta: list[list[Tensor]] = [[] for _ in range(world_size)]
        self.pending: Extracted | None = None

    def add(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        self.parameters += [parameter.detach().clone() for parameter in parameters]
        for momenta in self.momenta:
            momenta += [reference.zero_momentum(parameter, group) for parameter in parameters]

    def extract(self, optimizer: DeMo, gradients: list[list[Tensor | None]], poisoned: list[set[int]]) -> Extracted:
        """Takes gradients [W][P] in and coefficients out; `poisoned` [W]: parameters whose bucket has a NaN."""
        new = Extracted({}, [{} for _ in range(self.world_size)], any(poisoned))
        taking = [False] * self.world_size
        for number, (parameter, group) in enumerate(pairs(optimizer)):
            if not parameter.requires_grad:
                continue
            before = [momenta[number] for momenta in self.momenta]
            theirs = [None if number in poisoned[rank] else gradients[rank][number] for rank in range(self.world_size)]
            after, new.aggregates[number] = reference._parameter_step(self.parameters[number], theirs, before, group)
            for rank, momenta in enumerate(self.momenta):
                if number not in poisoned[rank]:
                    taking[rank] = True
                    momenta[number] = after[rank]
                    new.sent[rank][number] = reference.accumulate(before[rank], theirs[rank], group) - after[rank]
        if self.pending is not None:
            older = self.pending.decayed
            self.pending.decayed = [was or now for was, now in zip(older, taking, strict=True)]
        new.decayed = [False] * self.world_size
        return new

    def undo(self, optimizer: DeMo, round_: Extracted) -> None:
        groups = [group for _, group in pairs(optimizer)]
        for rank, sent in enumerate(round_.sent):
            for number, part in sent.items():
                share = groups[number]["momentum"] if round_.decayed[rank] else 1.0
                self.momenta[rank][number] = self.momenta[rank][number] + share * part

    def finish(self, optimizer: DeMo, round_: Extracted) -> None:
        if round_.skipped:
            self.undo(optimizer, round_)
            return
        for number, (_, group) in enumerate(pairs(optimizer)):
            if number in round_.aggregates:
                U = round_.aggregates[number]
                self.parameters[number] = reference.update(self.parameters[number], U, group, {})[0]

    def flush(self, optimizer: DeMo) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            self.finish(optimizer, pending)


def pairs(optimizer: DeMo) -> list[tuple[Tensor, dict[str, Any]]]:
    return [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]


def layout(optimizer: DeMo) -> list[tuple[int, bool]]:
    """What a plan is made anew for, of each parameter: its top_k, and whether it trains."""
    return [(group["top_k"], parameter.requires_grad) for parameter, group in pairs(optimizer)]


def contents(optimizer: DeMo) -> list[tuple[int, bool]]:
    """What a message holds: as `layout`, but of small chunks few are sent, so that another top_k may change nothing."""
    found = []
    for parameter, group in pairs(optimizer):
        rows, columns = group_key(parameter, 0, group)[1].chunk_shape
        found.append((reference.kept_per_chunk(rows * columns, group), parameter.requires_grad))
    return found


class Sequence(RuleBasedStateMachine):
    """The actions."""

    @initialize(
        world_size=st.sampled_from([2, 3]),
        mode=st.sampled_from([{}, {"delay": 1}, {"overlap": 2}]),
        values=st.sampled_from(["float64", "float64", "sign", "2-bit"]),
        reduction=st.sampled_from(["senders", "mean"]),
        alpha=st.sampled_from([1.0, 0.5]),
        weight_decay=st.sampled_from([0.0, 0.1]),
        count=st.integers(1, 3),
    )
    def begin(self, world_size: int, mode: dict[str, int], count: int, **codec: Any) -> None:
        self.world_size, self.mode, self.codec, self.draws = world_size, mode, codec, 0
        self.model = Model(world_size)
        self.meet()
        self.models = [problems.parameters(SHAPES[:count], torch.float64) for _ in range(world_size)]
        self.optimizers = [self.make(parameters, rank) for rank, parameters in enumerate(self.models)]
        self.model.add(list(self.models[0]), self.optimizers[0].param_groups[0])
        self.plan()
        self.agreed_on: Any = None  # the layout for which the ranks have compared settings
        self.failed = False  # whether the exchange in flight has failed

    def meet(self) -> None:
        """New exchanges, as after members have changed."""
        if hasattr(self, "threads"):
            self.threads.close()
        self.threads = Threads(self.world_size, timeout=20.0)
        self.links = [problems.FailsWhenDue(exchange) for exchange in self.threads.exchanges]

    def make(self, parameters: list[Parameter], rank: int) -> DeMo:
        fixed = {"lr": 0.1, "momentum": 0.9, "chunk": CHUNK, "top_k": 5, "update": "sgd", "fingerprint_every": 2}
        return DeMo(parameters, **fixed, **self.codec, **self.mode, process_group=self.links[rank])  # type: ignore[arg-type]

    def teardown(self) -> None:
        if hasattr(self, "threads"):
            self.threads.close()

    def everywhere(self, work: Any) -> list[Any]:
        """Runs work(rank) in every rank's thread; returns results, or ExchangeError if all raised that."""

        def guarded(exchange: Exchange) -> Any:
            try:
                return work(exchange.rank)
            except ExchangeError as error:
                return error

        return self.threads.run(guarded)

    # Gradients

    def gradients(self) -> list[list[Tensor | None]]:
        self.draws += 1
        return [
            [
                problems.draw(p.shape, self.draws, rank, number, dtype=torch.float64) if p.requires_grad else None
                for number, (p, _) in enumerate(pairs(self.optimizers[rank]))
            ]
            for rank in range(self.world_size)
        ]

    def backward(self, rank: int, gradients: list[Tensor | None]) -> None:
        """A real backward pass, for the hooks of overlap."""
        parameters = [parameter for parameter, _ in pairs(self.optimizers[rank])]
        parts = [(p * g).sum() for p, g in zip(parameters, gradients, strict=True) if g is not None]
        if parts:
            torch.stack(parts).sum().backward()

    def poisoned(self, nan_on: int | None, number: int, gradients: list[list[Tensor | None]]) -> list[set[int]]:
        """Puts a NaN into a gradient of one rank; returns, by rank, the parameters of the buckets that have it."""
        found: list[set[int]] = [set() for _ in range(self.world_size)]
        if nan_on is None or nan_on >= self.world_size:
            return found
        number %= len(gradients[nan_on])
        gradient = gradients[nan_on][number]
        if gradient is None:
            return found
        gradient.view(-1)[0] = torch.nan
        optimizer = self.optimizers[nan_on]
        with torch.no_grad():
            buckets = optimizer._current_plan().buckets
        places = {id(p): at for at, (p, _) in enumerate(pairs(optimizer))}
        for bucket in buckets:
            numbers = {places[id(parameter)] for parameter in bucket.parameters}
            if number in numbers:
                found[nan_on] = numbers
        return found

    def settle_changes(self) -> None:
        """What a step does first if the layout has changed: it applies what is in flight by the old one."""
        if self.changed:
            self.model.flush(self.optimizers[0])
        self.plan()

    def plan(self) -> None:
        """Remembers by what the optimizers have made their plans, and what messages then hold."""
        self.planned, self.sent = layout(self.optimizers[0]), contents(self.optimizers[0])

    @property
    def changed(self) -> bool:
        """Whether the layout is another one than at the last step; frozen and thawed again it is not."""
        return layout(self.optimizers[0]) != self.planned

    @property
    def agreed(self) -> bool:
        return layout(self.optimizers[0]) == self.agreed_on

    # Actions

    @precondition(lambda self: not self.failed)
    @rule(
        nan_on=st.sampled_from([None, None, None, 0, 1, 2]),
        missing=st.sampled_from([None, None, 0, 1]),
        number=st.integers(0, 3),
        passes=st.sampled_from([1, 1, 2]),
        closure=st.booleans(),
        fails=st.sampled_from([False, False, False, True]),
    )
    def step(
        self, nan_on: int | None, missing: int | None, number: int, passes: int, closure: bool, fails: bool
    ) -> None:
        if self.changed and self.mode.get("delay") and self.model.pending is not None:
            nan_on = None  # the plan is looked at before the NaN is drawn: keep that simple
        gradients = self.gradients()
        if missing is not None and missing < self.world_size and self.codec["reduction"] == "mean":
            # (of equal coefficients, such as zeros, any may be sent, and senders are counted)
            gradients[missing][number % len(gradients[missing])] = None
        more = self.gradients() if passes == 2 else None
        if self.changed and nan_on is not None:
            nan_on = None
        poisoned = self.poisoned(nan_on, number, gradients)
        fails = fails and self.agreed and not self.mode
        for link in self.links:
            link.due = fails

        def work(rank: int) -> None:
            optimizer = self.optimizers[rank]
            optimizer.zero_grad()

            def all_passes() -> float:
                if more is not None:
                    with optimizer.no_sync():
                        self.backward(rank, more[rank])
                self.backward(rank, gradients[rank])
                return 1.0

            if closure:
                assert optimizer.step(all_passes) == 1.0
            else:
                all_passes()
                optimizer.step()

        outcomes = self.everywhere(work)
        if more is not None:
            gradients = [
                [a if b is None else b if a is None else a + b for a, b in zip(*both, strict=True)]
                for both in zip(gradients, more, strict=True)
            ]
        model, first = self.model, self.optimizers[0]
        self.settle_changes()
        new = model.extract(first, gradients, poisoned)
        if fails:
            assert all(isinstance(outcome, ExchangeError) for outcome in outcomes)
            new.skipped = True
            model.finish(first, new)
            return
        assert outcomes == [None] * self.world_size, outcomes
        self.agreed_on = layout(self.optimizers[0])
        model.flush(first)
        if self.mode.get("delay"):
            model.pending = new
        else:
            model.finish(first, new)

    @precondition(lambda self: not self.failed and self.model.pending is None)
    @rule()
    def extract_and_roll_back(self) -> None:
        gradients = self.gradients()

        def work(rank: int) -> None:
            optimizer = self.optimizers[rank]
            optimizer.zero_grad()
            self.backward(rank, gradients[rank])
            optimizer.extract()
            optimizer.rollback()

        assert self.everywhere(work) == [None] * self.world_size
        self.settle_changes()
        self.model.undo(self.optimizers[0], self.model.extract(self.optimizers[0], gradients, self.nobody()))

    @precondition(lambda self: self.mode.get("overlap"))
    @rule()
    def leave_out_a_batch_after_backward(self) -> None:
        gradients = self.gradients()

        def work(rank: int) -> None:
            self.optimizers[rank].zero_grad()
            self.backward(rank, gradients[rank])
            self.optimizers[rank].rollback()

        assert self.everywhere(work) == [None] * self.world_size
        if self.agreed:  # otherwise nothing was sent during backward
            trained = any(gradient is not None for gradient in gradients[0])
            if trained and not self.changed:
                self.model.undo(self.optimizers[0], self.model.extract(self.optimizers[0], gradients, self.nobody()))

    def nobody(self) -> list[set[int]]:
        return [set() for _ in range(self.world_size)]

    @rule(name=st.sampled_from(["lr", "weight_decay", "momentum", "alpha"]), value=st.sampled_from([0.05, 0.25, 0.5]))
    @precondition(lambda self: self.model.pending is None)
    def change_a_setting(self, name: str, value: float) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0][name] = value

    @rule(top_k=st.integers(1, 9))
    def change_top_k(self, top_k: int) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[-1]["top_k"] = top_k

    @rule(number=st.integers(0, 3))
    def freeze_or_thaw(self, number: int) -> None:
        for optimizer in self.optimizers:
            parameter = pairs(optimizer)[number % len(pairs(optimizer))][0]
            parameter.grad = None
            parameter.requires_grad_(not parameter.requires_grad)

    @precondition(lambda self: len(self.model.parameters) < 5)
    @rule(shape=st.sampled_from(SHAPES))
    def add_group(self, shape: tuple[int, ...]) -> None:
        fresh = [problems.parameters([shape], torch.float64, seed=77 + self.draws) for _ in range(self.world_size)]

        def work(rank: int) -> None:
            with torch.no_grad():
                self.optimizers[rank].add_param_group({"params": fresh[rank], "lr": 0.3})

        assert self.everywhere(work) == [None] * self.world_size
        self.model.flush(self.optimizers[0])
        self.plan()
        self.model.add(list(fresh[0]), self.optimizers[0].param_groups[-1])

    @rule()
    def save_and_load(self) -> None:
        """Into new optimizers over new parameters, among new exchanges."""
        saved = [optimizer.state_dict(in_flight=True) for optimizer in self.optimizers]
        self.meet()
        for rank, old in enumerate(self.optimizers):
            groups = [
                {"params": [Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in group["params"]]}
                for group in old.param_groups
            ]
            new = self.make(groups, rank)  # type: ignore[arg-type]
            new.load_state_dict(saved[rank])
            self.optimizers[rank] = new
        self.agreed_on = None
        if (
            contents(self.optimizers[0]) != self.sent and self.model.pending is not None
        ):  # sent by a layout that is gone: back into the momenta
            self.model.undo(self.optimizers[0], self.model.pending)
            self.model.pending = None
        self.plan()

    @rule()
    def flush(self) -> None:
        def work(rank: int) -> None:
            self.optimizers[rank].flush()

        assert self.everywhere(work) == [None] * self.world_size
        self.model.flush(self.optimizers[0])

    @rule()
    def regroup(self) -> None:
        """Among the same ranks; what was in flight between the old ones goes back into the momenta."""
        self.meet()
        for rank, optimizer in enumerate(self.optimizers):
            optimizer.regroup(self.links[rank])
        if self.model.pending is not None:
            self.model.undo(self.optimizers[0], self.model.pending)
            self.model.pending = None
        self.agreed_on = None

    # What must hold

    @invariant()
    def as_the_oracle_says(self) -> None:
        if not hasattr(self, "optimizers"):
            return
        for optimizer in self.optimizers[1:]:
            for (mine, _), (theirs, _) in zip(pairs(optimizer), pairs(self.optimizers[0]), strict=True):
                assert torch.equal(mine, theirs), "the replicas have drifted"
        for number, (parameter, group) in enumerate(pairs(self.optimizers[0])):
            torch.testing.assert_close(parameter.detach(), self.model.parameters[number], **TIGHT)
            for rank, optimizer in enumerate(self.optimizers):
                own = pairs(optimizer)[number][0]
                momentum = oracle.dense(optimizer.state[own]["momentum"], own, group)
                torch.testing.assert_close(momentum, self.model.momenta[rank][number], **TIGHT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--actions", type=int, default=14, help="at most, in a sequence")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    Sequence._hypothesis_internal_use_seed = given.seed  # type: ignore[attr-defined]
    run_state_machine_as_test(Sequence, settings=of(given.sequences, given.actions, derandomize=False))
    print(f"{given.sequences} sequences, none went wrong")


def of(sequences: int, actions: int, derandomize: bool) -> settings:
    """Hypothesis's settings."""
    return settings(
        max_examples=sequences, stateful_step_count=actions, deadline=None, derandomize=derandomize, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


if __name__ == "__main__":
    main()

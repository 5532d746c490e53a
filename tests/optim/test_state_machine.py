"""Random sequences of a user's actions on DeMo optimizers, on real threads, beside the literal oracle.

After every action all ranks must hold the same parameters, bit for bit, and parameters and momenta must be those of
`oracle.Oracle`: its `step` for the first row below, `fail` for the others.

| action | momentum of a rank | parameters |
|---|---|---|
| step | b M + s G - a q | X - lr (U + wd X) |
| step in which some rank has a NaN | b M + s G; M on that rank | as before |
| extract and rollback; a step whose exchange fails | b M + s G | as before |

Shapes: W ranks, P parameters.
"""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.nn import Parameter

import oracle
import problems
from demopt import DeMo, ExchangeError
from demopt.exchange.threads import Threads

pytestmark = pytest.mark.filterwarnings("ignore:no parameter of this optimizer has had a gradient")

SHAPES = [(8, 4), (6,), (4, 4), (3,)]
CHUNK = 4
TIGHT = {"rtol": 1e-9, "atol": 1e-10}


class Sequence(RuleBasedStateMachine):
    """The actions."""

    world_size = 2

    @initialize(
        values=st.sampled_from(["float64", "float64", "sign", "2-bit"]),
        reduction=st.sampled_from(["senders", "mean"]),
        alpha=st.sampled_from([1.0, 0.5]),
        weight_decay=st.sampled_from([0.0, 0.1]),
        count=st.integers(1, 3),
    )
    def begin(self, count, **codec):
        self.codec, self.draws = codec, 0
        self.meet()
        models = [problems.parameters(SHAPES[:count], torch.float64) for _ in range(self.world_size)]
        self.optimizers = [self.make(parameters, rank) for rank, parameters in enumerate(models)]
        self.model = oracle.Oracle(self.optimizers[0].param_groups, self.world_size)

    def meet(self):
        """New exchanges, as after a change of members."""
        if hasattr(self, "threads"):
            self.threads.close()
        self.threads = Threads(self.world_size, timeout=100.0)
        self.links = [problems.FailsWhenDue(exchange) for exchange in self.threads.exchanges]

    def make(self, parameters, rank):
        fixed = {"lr": 0.1, "momentum_decay": 0.9, "chunk": CHUNK, "top_k": 5, "update": "sgd", "fingerprint_every": 2}
        return DeMo(parameters, process_group=self.links[rank], **fixed, **self.codec)

    def teardown(self):
        if hasattr(self, "threads"):
            self.threads.close()

    def everywhere(self, work):
        """Runs work(rank) in every rank's thread; returns results, or ExchangeErrors."""

        def guarded(exchange):
            try:
                return work(exchange.rank)
            except ExchangeError as error:
                return error

        return self.threads.run(guarded)

    def gradients(self):
        """Sets and returns the gradients of all ranks."""
        self.draws += 1
        for rank, optimizer in enumerate(self.optimizers):
            problems.set_gradients(problems.all_parameters(optimizer), self.draws, rank)
        return [[parameter.grad for parameter in problems.all_parameters(each)] for each in self.optimizers]

    # Actions

    @rule(
        nan_on=st.sampled_from([None, None, None, 0, 1]),
        missing=st.sampled_from([None, None, 0, 1]),
        number=st.integers(0, 3),
        how=st.sampled_from(["step", "step", "closure", "parts", "detached"]),
    )
    def step(self, nan_on, missing, number, how):
        gradients = self.gradients()
        number %= len(gradients[0])
        if missing is not None and all(group["reduction"] == "mean" for group in self.optimizers[0].param_groups):
            # (where senders count, it matters which of equal coefficients, such as zeros, are sent: any may be)
            gradients[missing][number] = problems.all_parameters(self.optimizers[missing])[number].grad = None
        bad = gradients[nan_on][number] if nan_on is not None else None
        if bad is not None:
            bad.view(-1)[0] = torch.nan

        def work(rank):
            optimizer = self.optimizers[rank]
            if how == "step":
                optimizer.step()
            elif how == "closure":
                assert optimizer.step(lambda: 1.0) == 1.0
            else:
                message = optimizer.extract()
                if how == "detached":
                    detached = optimizer.replicator.detach_round()
                    optimizer.regroup(self.links[rank])
                    message = optimizer.replicator.attach_round(detached)
                optimizer.apply(optimizer.exchange(message))
            assert optimizer.stats.skipped == (bad is not None)

        assert self.everywhere(work) == [None] * self.world_size
        if bad is None:
            self.model.step(gradients)
        else:
            self.model.fail(gradients, poisoned=nan_on)

    @rule(fails=st.booleans())
    def round_that_is_not_applied(self, fails):
        """Its exchange fails, or it is rolled back."""
        gradients = self.gradients()
        for link in self.links:
            link.due = fails

        def work(rank):
            if fails:
                self.optimizers[rank].step()
            else:
                self.optimizers[rank].extract()
                self.optimizers[rank].rollback()

        outcomes = self.everywhere(work)
        assert all(isinstance(outcome, ExchangeError) if fails else outcome is None for outcome in outcomes)
        if fails:
            self.regroup()
        self.model.fail(gradients)

    @rule(
        change=st.one_of(
            st.tuples(st.sampled_from(["weight_decay", "momentum_decay", "alpha"]), st.sampled_from([0.05, 0.25, 0.5])),
            st.tuples(st.just("lr"), st.sampled_from([0.0, 0.25])),
            st.tuples(st.just("maximize"), st.booleans()),
            st.tuples(st.just("top_k"), st.integers(1, 9)),
        ),
        group=st.sampled_from([0, -1]),
    )
    def change_a_setting(self, change, group):
        name, value = change
        for optimizer in self.optimizers:
            optimizer.param_groups[group][name] = value

    @precondition(lambda self: self.codec["reduction"] == "mean")
    @rule(reduction=st.sampled_from(["mean", "senders"]))
    def change_the_reduction(self, reduction):
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["reduction"] = reduction

    @rule(number=st.integers(0, 3))
    def freeze_or_unfreeze(self, number):
        for optimizer in self.optimizers:
            parameters = problems.all_parameters(optimizer)
            parameter = parameters[number % len(parameters)]
            parameter.grad = None
            parameter.requires_grad_(not parameter.requires_grad)

    @precondition(lambda self: len(self.model.parameters) < 5)
    @rule(shape=st.sampled_from(SHAPES), frozen=st.booleans())
    def add_group(self, shape, frozen):
        for optimizer in self.optimizers:
            (fresh,) = problems.parameters([shape], torch.float64, seed=77 + self.draws)
            optimizer.add_param_group({"params": fresh.requires_grad_(not frozen), "lr": 0.3})
        self.model.add(self.optimizers[0].param_groups[-1])

    @rule()
    def save_and_load(self):
        """Into new optimizers over new parameters, with new exchanges."""
        saved = [optimizer.state_dict() for optimizer in self.optimizers]
        self.meet()
        for rank, old in enumerate(self.optimizers):
            groups = [
                {"params": [Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in group["params"]]}
                for group in old.param_groups
            ]
            self.optimizers[rank] = self.make(groups, rank)
            self.optimizers[rank].load_state_dict(saved[rank])
        self.model.groups = [*self.optimizers[0].param_groups]

    @rule()
    def regroup(self):
        self.meet()
        for rank, optimizer in enumerate(self.optimizers):
            optimizer.regroup(self.links[rank])

    @rule(src=st.integers(0, 1))
    def resync(self, src):
        assert self.everywhere(lambda rank: self.optimizers[rank].resync(src)) == [None] * self.world_size

    @invariant()
    def equals_the_oracle(self):
        if not hasattr(self, "optimizers"):
            return
        values = problems.values(self.optimizers[0])
        torch.testing.assert_close(values, self.model.parameters, **TIGHT)
        for rank, optimizer in enumerate(self.optimizers):
            assert problems.same(problems.values(optimizer), values), "the replicas have drifted"
            settings = [group for group in optimizer.param_groups for _ in group["params"]]
            of_rank = zip(problems.all_parameters(optimizer), settings, self.model.momenta[rank], strict=True)
            for parameter, group, wanted in of_rank:
                if parameter in optimizer.state:
                    momentum = oracle.dense(optimizer.state[parameter]["momentum"], parameter, group)
                    torch.testing.assert_close(momentum, wanted, **TIGHT)
                else:
                    assert not wanted.any(), "only what never trained has no state"


class SequenceOfThree(Sequence):
    world_size = 3


class TestTwoRanks(Sequence.TestCase):
    """Half as many sequences as the profile of hypothesis says: `make nightly` runs more."""

    settings = settings(
        max_examples=settings().max_examples // 2, stateful_step_count=10, suppress_health_check=list(HealthCheck)
    )


class TestThreeRanks(SequenceOfThree.TestCase):
    settings = TestTwoRanks.settings

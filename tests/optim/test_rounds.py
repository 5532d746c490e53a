"""extract, exchange, apply and rollback; detached rounds; other ranks, and errors on only one; torch.compile."""

import functools
import itertools
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import problems
import ranks
from demopt import DriftError, ExchangeError, MessageError, SettingsError
from demopt.codec.steps import subtract_sent
from demopt.exchange import SingleRank, Threads
from demopt.replicator.route import Route


def _optimizer(exchange=None, **more):
    return problems.demo(exchange, dtype=torch.float64, **{"values": "float64", "weight_decay": 0.1, **more})


def test_rank_that_extracted_nothing_follows_by_apply_alone():
    """Its parameters become those of the ranks that trained, without a network; its momentum stays as it was."""

    def run(exchange):
        optimizer, results = _optimizer(exchange), []
        for step in range(3):
            results.append(optimizer.exchange(problems.extracted(optimizer, step, exchange.rank)).clone())
            optimizer.apply(results[-1])
        return results, optimizer.fingerprint(state=True)

    results, mark = ranks.threads(run, 2)[0]
    watcher = _optimizer(Threads(2, 60.0).exchanges[1])
    for messages in results:
        damaged = messages.clone()
        damaged[0, -1] ^= 1
        with pytest.raises(MessageError):
            watcher.apply(damaged)
        watcher.apply(messages)
    assert watcher.fingerprint(state=True) == mark
    assert not any(momentum.any() for momentum in problems.momenta(watcher))
    watcher.state_dict()  # no round is open

    def go_on(exchange):
        optimizer = _optimizer(exchange)
        problems.fingerprints(optimizer, [0], exchange.rank)
        for messages in results[1:]:  # messages of another session
            optimizer.apply(messages)
        return optimizer.fingerprint(state=True)

    assert ranks.threads(go_on, 2) == [mark, mark]


def test_profile_names_the_stages_of_a_step():
    optimizer = _optimizer(SingleRank())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        problems.fingerprints(optimizer, [0])
    assert {f"demopt.{stage}" for stage in optimizer.stats.seconds} <= {event.key for event in profile.key_averages()}


MAKERS = (
    functools.partial(problems.demo, shapes=[(20, 12)], lr=0.1, update="sgd"),
    functools.partial(problems.local, shapes=[(20, 12)], sync_every=2, top_k=4),
)


def _outcome(optimizer):
    return [*problems.values(optimizer), *problems.momenta(optimizer)]


@pytest.mark.parametrize("make", MAKERS)
def test_check_refuses_like_apply_and_changes_nothing(make):
    optimizer = make(SingleRank())
    messages = optimizer.exchange(problems.extracted(optimizer)).clone()
    others = messages.clone()
    with problems.unchanged(optimizer):
        for refuses in (optimizer.replicator.check, optimizer.apply):
            messages[0, -1] ^= 1  # also after it was checked
            with pytest.raises(MessageError):
                refuses(messages)
            messages[0, -1] ^= 1
            optimizer.replicator.check(messages)
        others[0, -1] ^= 1
        while messages._version != others._version:
            min(messages, others, key=lambda each: each._version).add_(0)
        optimizer.replicator.check(messages)
        for refused in (others, torch.tensor(0, dtype=torch.uint8), messages[0], messages.float()):
            with pytest.raises(MessageError):  # the first is another tensor, changed as often
                optimizer.apply(refused)


@pytest.mark.parametrize("make", MAKERS)
def test_attached_round_among_fewer_ranks_is_the_round_that_they_would_have_had(make):
    """A round marked as applied, as by the rank that is now alone, leaves the momentum like one that was applied."""
    fewer = Threads(2, 60.0).exchanges

    def lose_one(exchange):
        optimizer = make(exchange)
        with pytest.raises(RuntimeError, match="call extract first"):
            optimizer.replicator.detach_round()
        problems.extracted(optimizer, 0, exchange.rank)
        with pytest.raises(RuntimeError, match="apply or rollback first"):
            optimizer.extract()
        detached = optimizer.replicator.detach_round()
        if exchange.rank == 2:
            optimizer.replicator.mark_applied(detached)
        else:
            optimizer.regroup(fewer[exchange.rank])
            optimizer.apply(optimizer.exchange(optimizer.replicator.attach_round(detached)))
        return _outcome(optimizer)

    def calm(exchange, rank):
        optimizer = make(exchange)
        optimizer.apply(optimizer.exchange(problems.extracted(optimizer, 0, rank)))
        return _outcome(optimizer)

    *stayed, (_, left) = ranks.threads(lose_one, 3)
    assert all(map(problems.same, stayed, ranks.threads(lambda exchange: calm(exchange, exchange.rank), 2)))
    assert torch.equal(left, calm(SingleRank(), 2)[1])


def test_round_in_the_background_cannot_be_detached():
    optimizer = problems.local(SingleRank(), delay=1)
    optimizer.extract()
    with pytest.raises(ValueError, match="delay=0"):
        optimizer.replicator.detach_round()


def _trained(kind, compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    parameters = list(model.parameters())
    optimizer = problems.optimizer_of(kind, parameters, process_group=SingleRank())
    if compiled == "model":
        model = torch.compile(model, backend="eager")
    step = torch.compile(optimizer.step, backend="eager") if compiled == "step" else optimizer.step

    def train(inputs):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        step()

    if compiled == "loop":
        train = torch.compile(train, backend="eager")
    for number in range(4):
        train(problems.draw((5, 16), number))  # torch 2.6 compiles no Generator
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@pytest.mark.parametrize("compiled", ["model", "step", "loop"])
def test_torch_compile_changes_nothing(kind, compiled):
    torch._dynamo.reset()
    assert problems.same(_trained(kind, compiled), _trained(kind, "nothing"))


@pytest.mark.parametrize("leaver", [0, 2])  # the ranks after it get new numbers
@pytest.mark.parametrize("settings", [{}, {"update": "adamw", "fingerprint_every": 1}], ids=str)
def test_regroup_after_a_rank_has_left(settings, leaver):
    fewer = Threads(2, 60.0).exchanges

    def shrink(exchange):
        optimizer = problems.demo(exchange, **settings)
        problems.fingerprints(optimizer, range(3), exchange.rank)
        if exchange.rank == leaver:
            return []
        other = fewer[exchange.rank - (exchange.rank > leaver)]
        with problems.unchanged(optimizer):
            optimizer.regroup(other)
        return problems.fingerprints(optimizer, range(3, 6), other.rank)

    one, other = filter(None, ranks.threads(shrink, 3))
    assert one == other
    assert len({*one}) == 3


@pytest.mark.filterwarnings("ignore:initial parameters")
@pytest.mark.parametrize("trained", [True, False])
def test_rank_that_joins_takes_the_weights_of_rank_0(trained):
    """It has trained alone, or a resync gives it the step of the others; a step with lr 0 shows whose weights count."""
    fewer = Threads(2, 60.0).exchanges

    def grow(exchange):
        alone = SingleRank() if trained else exchange
        optimizer = problems.demo(fewer[exchange.rank] if exchange.rank < 2 else alone, seed=exchange.rank // 2)
        mark = optimizer.fingerprint()
        if exchange.rank < 2 or trained:
            mark = problems.fingerprints(optimizer, range(2), exchange.rank)[-1]
            with problems.unchanged(optimizer):
                optimizer.regroup(exchange)
        momenta = problems.momenta(optimizer)
        if not trained:
            optimizer.resync(0)
        assert problems.same(problems.momenta(optimizer), momenta)
        rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
        kept = problems.fingerprints(optimizer, [2], exchange.rank) == [mark]
        optimizer.param_groups[0]["lr"] = rate
        return kept, problems.fingerprints(optimizer, range(3, 6), exchange.rank)

    (kept, marks), *others = ranks.threads(grow, 3)
    assert [kept, others] == [True, [(True, marks), (False, marks)]]
    assert len({*marks}) == 3


def test_regroup_does_not_wait_for_the_round_in_flight():
    fewer = Threads(2, 60.0).exchanges

    def in_flight(exchange):
        optimizer, marks = problems.local(exchange, delay=1), []
        for step in range(7):
            if exchange.rank == 2 and step == 3:
                return []  # it never sends this message
            marks += problems.fingerprints(optimizer, [step], exchange.rank)
            if step == 3:
                sent = optimizer.replicator.round
                optimizer.regroup(fewer[exchange.rank])
                assert not sent.work.done()
        optimizer.flush()
        assert marks[4] == marks[3], "the first round after regroup is in flight when its step ends"
        return [*marks[4:], optimizer.fingerprint()]

    one, other, _ = ranks.threads(in_flight, 3)
    assert one == other
    assert len(set(one)) == 4


@pytest.mark.parametrize(("kind", "more"), [("DeMo", {}), ("LocalDeMo", {}), ("LocalDeMo", {"delay": 1})], ids=str)
@ranks.alike(3)
def test_state_loaded_on_one_rank_changes_nothing(exchange, kind, more):
    """The others compare settings with it in their next round, find them equal, and repeat that round."""
    optimizer = problems.optimizer_of(kind, problems.parameters(problems.FEW), process_group=exchange, **more)
    marks = problems.fingerprints(optimizer, range(3), exchange.rank)
    if kind == "LocalDeMo":
        optimizer.flush()
    if exchange.rank == 1:
        problems.warned(lambda: optimizer.load_state_dict(optimizer.state_dict()))  # the warning is about local weights
    marks += problems.fingerprints(optimizer, range(3, 9), exchange.rank)
    assert len(set(marks)) >= 4
    return marks


@pytest.mark.parametrize("repairs", [False, True])
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(("undone", "error"), [("load", SettingsError), ("rollback", MessageError)])
@ranks.alike(2)
def test_round_in_flight_that_one_rank_undoes_is_told_or_repaired_by_resync(exchange, undone, error, rounds, repairs):
    """Also the first round, after which the others still compare gradients."""
    optimizer = problems.two_way(exchange, route="gather", delay=1)
    problems.fingerprints(optimizer, range(rounds), exchange.rank)
    if exchange.rank == 1:
        optimizer.load_state_dict(optimizer.state_dict()) if undone == "load" else optimizer.rollback()
    if repairs:
        optimizer.resync(0)
        return problems.fingerprints(optimizer, range(3, 6), exchange.rank)
    with pytest.raises(error, match=rf"step.* {rounds - 1}"):
        problems.fingerprints(optimizer, range(3, 6), exchange.rank)
    return None


@ranks.alike(2)
def test_two_optimizers_of_a_rank_exchange_in_the_background_without_meeting_each_other(exchange):
    """Even with ranks in threads, each optimizer has an exchange of its own."""
    both = [problems.local(exchange, [shape], sync_every=2, delay=1) for shape in ((32, 16), (20,))]
    marks = [m for step in range(6) for each in both for m in problems.fingerprints(each, [step], exchange.rank)]
    for each in both:
        each.flush()
    return [*marks, *(each.fingerprint() for each in both)]


@pytest.mark.parametrize("local", [False, True])
def test_failed_step_leaves_no_loss_scale(local):
    link = problems.FailsWhenDue(SingleRank())
    link.due = True
    optimizer = problems.local(link) if local else problems.demo(link)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    with pytest.raises(ExchangeError):
        optimizer.step()
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("applies", [True, False])
@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_round_counts_once_where_memory_ends_as_what_was_sent_leaves_the_momentum(kind, applies, monkeypatch):
    exactly = {"shapes": [(64, 64), (8, 8)], "transform": "identity", "top_k": 256, "values": "float32"}
    if kind == "DeMo":
        optimizer = problems.demo(**exactly, update="sgd", gradient_scale="lr")
    else:
        optimizer = problems.local(**exactly, sync_every=1, error_decay=1.0)
    problems.fingerprints(optimizer, [0])
    calls = itertools.count()

    def full(*given):
        if next(calls):
            raise torch.OutOfMemoryError("device is full")
        subtract_sent(*given)

    with monkeypatch.context() as broken:
        broken.setattr("demopt.replicator.route.subtract_sent", full)
        if not applies:
            broken.setattr(Route, "apply", Mock(side_effect=MemoryError("in the middle")))
        problems.set_gradients(problems.all_parameters(optimizer), 1)
        error = (
            nullcontext()
            if applies
            else pytest.raises(DriftError, match=r"in the middle.*Call resync\(src\) .* without")
        )
        with pytest.warns(UserWarning, match=r"could not leave all momenta of this rank \(device is full\)"), error:
            optimizer.step()
    assert [bool(momentum.any()) for momentum in problems.momenta(optimizer)] == [False, False]
    assert (int(optimizer.replicator.round_number), getattr(optimizer, "local_steps", 0)) == (1 + applies, 0)
    before = [value.clone() for value in problems.values(optimizer)]
    optimizer.zero_grad()
    optimizer.step()
    assert problems.same(before, problems.values(optimizer))


@pytest.mark.filterwarnings("ignore:initial parameters")
@ranks.alike(2)
def test_first_step_after_a_resumption_takes_weights_before_it_compares_fingerprints(exchange):
    """Only rank 0 has loaded the weights, and a fingerprint is due in the step."""
    optimizer = problems.demo(exchange, fingerprint_every=2)
    optimizer.replicator.round_number.fill_(2)
    if exchange.rank == 1:
        problems.all_parameters(optimizer)[0].data.add_(1.0)
    return problems.train(optimizer, range(2), exchange.rank)  # no DriftError


@ranks.alike(2)
def test_resync_of_ranks_with_other_parameters_is_refused_on_all(exchange):
    with pytest.raises(SettingsError, match=r"rank 1 has tensor 0 to copy = .*\[4\] where rank 0 has .*\[3\]"):
        problems.demo(exchange, [(3 + exchange.rank,)]).resync()


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@ranks.each(2)
def test_resync_that_takes_weights_that_are_not_finite_says_so(rank, kind):
    """On all ranks, because in these processes a warning is an error."""
    optimizer = problems.optimizer_of(kind, problems.parameters(problems.FEW))
    problems.train(optimizer, range(2), rank)
    problems.all_parameters(optimizer)[rank].data.view(-1)[0] = torch.nan
    with pytest.raises(UserWarning, match="resync took weights of rank 1 that are not finite; load others there"):
        optimizer.resync(1, **({} if kind == "DeMo" else {"model": True}))
    return optimizer.fingerprint()

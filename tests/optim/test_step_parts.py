"""extract, exchange, apply and rollback; detached rounds; the stats of a step; torch.compile around it."""

import functools

import pytest
import torch
from torch import nn

import problems
import ranks
from demopt import MessageError
from demopt.exchange import SingleRank, Threads


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
        for messages in results[1:]:  # of another session
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
    """One marked as applied, as by the rank that is alone now, has left the momentum like one that was applied."""
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


def test_stats_of_a_single_rank_count_kept_and_payload():
    optimizer = _optimizer(values="float32")
    assert optimizer.stats.payload_bytes == 0
    problems.train(optimizer, range(1))
    stats = optimizer.stats
    assert (stats.sent_bytes, stats.received_bytes, stats.skipped) == (0, 0, False)
    assert set(stats.seconds) == {"extract", "exchange", "apply"}
    # 32x16: two full chunks, 24 each; 17x19: four of 9x10, 8 each; 20: two of 1x10, 1 each; one element
    assert stats.kept == 2 * 24 + 4 * 8 + 2 * 1 + 1
    assert stats.payload_bytes < 64 + stats.kept * 5 + 16


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

"""A NaN or Inf gradient on one rank: all ranks skip together, none is poisoned; the same with GradScaler."""

from math import inf, nan

import pytest
import torch

import problems
import ranks


@pytest.mark.parametrize(
    "settings",
    [{"values": "float32"}, {"values": "2-bit"}, *({"update": u, "values": "sign"} for u in ("sgd", "adamw", "lion"))],
    ids=str,
)
@pytest.mark.parametrize(
    ("world_size", "bad_ranks", "bad_step", "bad"),
    [(1, {0}, 1, -inf), (3, {2}, 0, nan), (3, {0, 1}, 2, inf), (3, {0, 1, 2}, 0, -inf)],
    ids=str,
)
def test_nonfinite_gradient_skips_on_all_ranks(settings, world_size, bad_ranks, bad_step, bad):
    """optim/test_state_machine.py compares what is left in the momenta with the oracle."""

    def work(exchange):
        optimizer, histories, payloads = problems.demo(exchange, weight_decay=0.1, **settings), [], set()
        weights_and_rules = optimizer.replicator.wiring().replicated_tensors

        def spoil(step):
            if step == bad_step and exchange.rank in bad_ranks:
                problems.all_parameters(optimizer)[1].grad[3, 4] = bad

        for step in range(4):
            momenta, before = problems.momenta(optimizer), [each.clone() for each in weights_and_rules()]
            histories.append(problems.train(optimizer, [step], exchange.rank, spoil))
            after, is_bad = histories[-1], step == bad_step
            assert optimizer.stats.skipped == is_bad
            assert problems.same(weights_and_rules(), before) == is_bad
            assert problems.same(momenta, after.momenta) == (is_bad and exchange.rank in bad_ranks)
            assert all(bool(tensor.isfinite().all()) for tensor in after.parameters + after.momenta)
            payloads.add(optimizer.stats.payload_bytes)
        assert len(payloads) == 1
        return histories

    for of_step in zip(*ranks.threads(work, world_size), strict=True):
        problems.assert_replicas(of_step)


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_rounds_that_are_skipped_again_and_again_are_told_once_and_name_the_rank(kind):
    def work(exchange):
        optimizer = problems.demo(exchange) if kind == "DeMo" else problems.local(exchange)

        def spoil(step):
            if exchange.rank == 1 and step not in (15, 40):
                problems.all_parameters(optimizer)[0].grad.fill_(torch.nan)

        problems.fingerprints(optimizer, range(60), exchange.rank, spoil)

    assert problems.warned(lambda: ranks.threads(work, 2)) == [
        "the last 20 rounds were skipped, because gradients of rank 1 were not finite: nothing is trained. Look at its "
        "data and loss, or lower its learning rate or loss scale"
    ]


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        *(({"values": values}, size) for values in ("float32", "float64") for size in (3.4e38, 3e37)),
        ({"update": "adamw"}, 1e25),  # whose square overflows
    ],
    ids=str,
)
def test_overflowing_finite_gradients_poison_nothing(settings, size):
    """The transform adds up a chunk, and bfloat16 rounds up: both can make Inf of finite gradients."""
    optimizer = problems.demo(shapes=[(16, 16)], **{"momentum_decay": 0.0, **settings})
    (parameter,) = problems.all_parameters(optimizer)
    before = parameter.detach().clone()
    parameter.grad = torch.full_like(parameter, size)
    optimizer.step()
    assert optimizer.stats.skipped or bool(torch.isfinite(parameter).all())
    assert not optimizer.stats.skipped or torch.equal(parameter, before)
    assert all(bool(torch.as_tensor(each).isfinite().all()) for each in optimizer.state[parameter].values())
    optimizer.load_state_dict(problems.by_file(optimizer.state_dict()))
    problems.train(optimizer, range(2))
    assert not optimizer.stats.skipped
    assert bool(torch.isfinite(parameter).all())


def _scaled(exchange, mode, bad_step):
    optimizer = problems.demo(exchange, dtype=torch.float64)
    parameters = problems.all_parameters(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=mode != "off")
    fingerprints, skipped, scales = [], [], []
    for step in range(5):
        optimizer.zero_grad()
        gradients = problems.gradients_of_ranks(parameters, step, 2)[exchange.rank]
        scaler.scale(sum((p * g).sum() for p, g in zip(parameters, gradients, strict=True))).backward()
        if step == bad_step and exchange.rank == 1 and parameters[1].grad is not None:
            parameters[1].grad[0, 0] = inf
        if mode == "unscale first":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 1e9)
        scaler.step(optimizer)
        scaler.update()
        fingerprints.append(optimizer.fingerprint())
        skipped.append(optimizer.stats.skipped)
        scales.append(scaler.get_scale())
    ends = optimizer.fingerprint(state=True), problems.values(optimizer), problems.momenta(optimizer)
    return problems.History(fingerprints, *ends), skipped, scales


@pytest.mark.parametrize("mode", ["on", "unscale first"])
@pytest.mark.parametrize("bad_step", [None, 2])
def test_grad_scaler_unscales_exactly_and_skips_on_all_ranks(mode, bad_step):
    """While scales grow. It calls step also on the rank that overflowed; otherwise the others would wait for it."""
    scaled, unscaled = (ranks.threads(_scaled, 2, each, bad_step) for each in (mode, "off"))
    problems.assert_replicas([history for history, _, _ in scaled])
    for (history, skipped, scales), (plain, _, _) in zip(scaled, unscaled, strict=True):
        assert skipped == [step == bad_step for step in range(5)]
        assert len(set(scales)) > 1
        torch.testing.assert_close(history.parameters, plain.parameters, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(history.momenta, plain.momenta, rtol=1e-4, atol=1e-6)
    assert bad_step is None or scaled[1][2][2] < scaled[0][2][2], "ranks may have different scales"

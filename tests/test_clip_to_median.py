"""clip_to_median: a rank that lies is left out, whatever it sends, or counts for no more than an honest one.

A rank that sends a million times too much moves nothing further than an honest one does. The bound, for update "sgd",
reduction "mean" and a chunk c: |U_c| = |Q_c| <= the mean over ranks of their clipped norms <= the median of the ranks'
norms, up to the rounding of a clipped scale to 4 bits of mantissa and that of exact sums. In the attacks, a gradient is
a signal that all ranks share, plus the rank's own noise; attackers know all other messages.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

import demopt
import problems
from demopt.core.agreement import FULL, trusted
from demopt.runs.exchange import FolderExchange
from demopt.runs.store import ObjectStore
from demopt.train.config import TrainConfig, resolve
from demopt.wire.message import HEADER_BYTES, pack_message
from demopt.wire.quantizers import QUANTIZERS

SHAPES = [(128, 128), (64, 64), (64,)]
CODECS = [{}, *({"top_k": 512, "values": values} for values in ("sign", "2-bit", "float32"))]


def _gradient(rank, number, shape):
    return problems.draw(shape, 0, 1000 + number) + problems.draw(shape, 1 + rank, number)


def _built(honest, lies=(), clip=True, **codec):
    """The LocalDeMo of the last rank, and the messages of all, liars first, after one local step each."""
    made = [*lies, *(lambda number, shape, rank=rank: _gradient(rank, number, shape) for rank in honest)]
    messages = []
    for place, gradient in enumerate(made):
        exchange = problems.OneOf(place, len(made))
        optimizer = problems.local(exchange, SHAPES, chunk=64, route="gather", clip_to_median=clip, **codec)
        for number, parameter in enumerate(problems.all_parameters(optimizer)):
            parameter.grad = gradient(number, tuple(parameter.shape))
        optimizer.local_step()
        messages.append(optimizer.extract())
    return optimizer, torch.stack(messages)


def _decoded(optimizer, messages):
    return optimizer.replicator.wiring().route.layout.checked(messages[:, HEADER_BYTES:])


def _applied(optimizer, messages):
    optimizer.apply(messages)
    return torch.cat([each.flatten() for each in problems.values(optimizer)])


def _update(*ranks, **settings):
    return _applied(*_built(*ranks, **settings))


LIES = {
    "flipped": lambda number, shape: -_gradient(9, number, shape),
    "noise": lambda number, shape: problems.draw(shape, 99, number),
    "against all": lambda number, shape: -sum(_gradient(rank, number, shape) for rank in range(3)),
}


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("lie", LIES)
def test_security_one_of_four_that_lies_is_left_out(lie, codec):
    honest = _update([0, 1, 2], **codec)
    assert torch.equal(_update([0, 1, 2], [LIES[lie]], **codec), honest)
    assert not torch.equal(_update([0, 1, 2], [LIES[lie]], clip=False, **codec), honest)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_four_honest_ranks_all_count(codec):
    """Nobody's coefficients are left out."""
    optimizer, messages = _built([0, 1, 2, 3], **codec)
    decoded = _decoded(optimizer, messages)
    assert optimizer.replicator.wiring().route._trusted(decoded) is decoded


@pytest.mark.parametrize("count", [5, 8])
def test_a_minority_that_agrees_with_itself_is_left_out(count):
    minority = (count - 1) // 2
    honest = range(count - minority)
    assert torch.equal(_update(honest, [LIES["against all"]] * minority), _update(honest))


def test_a_rank_that_pleases_two_and_fights_the_third_counts_for_nothing():
    """Nobody can say whether the liar or the third one lies: both are left out, and the other two make the update."""

    def lie(number, shape):
        return _gradient(0, number, shape) + _gradient(1, number, shape) - 2 * _gradient(2, number, shape)

    assert torch.equal(_update([0, 1, 2], [lie]), _update([0, 1]))


def test_liar_of_two_counts_and_so_does_one_of_four_that_lies_in_a_quarter():
    def in_part(number, shape):
        lie = LIES["against all"](number, shape)
        return torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(number)) < 0.25, lie, -lie)

    for honest, lie in (([0], LIES["flipped"]), ([0, 1, 2], in_part)):
        assert not torch.equal(_update(honest, [lie]), _update(honest))


def test_security_samples_count_up_to_the_medians():
    """With clip_to_median, 2**32 - 1 samples count only as many as those of the others; two ranks both keep theirs."""

    def update(samples, clip, ranks=4):
        optimizer, messages = _built(range(ranks), clip=clip)
        loud = replace(optimizer.replicator.round.header, rank=0, samples=samples)
        messages[0] = pack_message(loud, messages[0, HEADER_BYTES:])
        return _applied(optimizer, messages)

    assert torch.equal(update(2**32 - 1, True), update(1, True))
    assert not torch.equal(update(2**32 - 1, False), update(1, False))
    assert not torch.equal(update(5, True, ranks=2), update(1, True, ranks=2))


def test_flips_among_the_signs_are_weighed_by_the_scales_that_count():
    """Agreeing in chunks of scale 0 earns nothing: the other chunks are flipped."""
    decoded = _decoded(*_built([0, 1, 2, 3]))
    agreed = torch.stack([each.agreement() for each in decoded]).sum(0)
    for each in decoded:
        each.codes[0, ::2] = 0
        each.signs[0, 1::2] ^= 255
    changed = torch.stack([each.agreement() for each in decoded]).sum(0)
    assert trusted(agreed) == [0, 1, 2, 3]
    assert bool((changed[0, 0, 1:] < 0).all())
    assert trusted(changed) == [1, 2, 3]


def test_agreement_is_the_literal_count():
    """For signs of all coefficients, against a slow count of equal and different ones, at equal scales."""
    for each in _decoded(*_built([0, 1, 2], [LIES["noise"]])):
        each.codes.fill_(2032)
        signs = 1 - 2 * each.negative.long()
        others = ~torch.eye(4, dtype=torch.bool)
        assert torch.equal(each.agreement()[0][others], torch.einsum("wcn,vcn->wv", signs, signs)[others] * FULL)


def test_agreement_is_counted_exactly_inside_autocast():
    decoded = _decoded(*_built([0, 1, 2], [LIES["noise"]], top_k=500, values="float32"))
    counted = [each.agreement() for each in decoded]
    with torch.autocast("cpu", torch.bfloat16):
        assert problems.same([each.agreement() for each in decoded], counted)


def test_folders_leave_out_liars_by_default():
    """Over connections it is an option."""

    def asks(**more):
        optimizer = demopt.LocalDeMo(torch.optim.SGD([nn.Parameter(torch.zeros(4))], lr=1.0), **more)
        return optimizer.replicator.groups[0]["clip_to_median"]

    assert asks(process_group=FolderExchange(ObjectStore()))
    assert not asks(process_group=FolderExchange(ObjectStore()), clip_to_median=False)
    assert not asks(process_group=problems.OneOf(0, 2))
    assert resolve(TrainConfig(run="somewhere")).clip_to_median
    assert not resolve(TrainConfig()).clip_to_median
    assert not resolve(TrainConfig(run="somewhere", clip_to_median=False)).clip_to_median


WORLD, SCALE, SMALL = 8, 1e6, [(48, 32), (40,)]
ROUNDING = 1.05  # a code of a scale has 4 bits of mantissa: half a unit is 1/32


def _moved(codec, clip, scales):
    """How far a step moves each chunk of 16 x 16, and the whole vector, if ranks' gradients are scaled by `scales`."""
    settings = {"lr": 1.0, "momentum_decay": 0.0, "update": "sgd", "reduction": "mean", "clip_to_median": clip}
    messages = []
    for rank, scale in enumerate(scales):
        optimizer = problems.demo(problems.OneOf(rank, len(scales)), SMALL, **settings, **codec)
        problems.set_gradients(problems.all_parameters(optimizer), 0, rank)
        for parameter in problems.all_parameters(optimizer):
            parameter.grad *= scale
        messages.append(optimizer.extract())
    before = problems.values(optimizer)
    optimizer.apply(torch.stack(messages))
    pairs = zip(problems.values(optimizer), before, strict=True)
    matrix, vector = ((now - then).double() for now, then in pairs)
    return torch.cat((matrix.unfold(0, 16, 16).unfold(1, 16, 16).flatten(2).norm(dim=2).flatten(), vector.norm()[None]))


@pytest.mark.parametrize("hostile", [1, 4])
@pytest.mark.parametrize("codec", [*({"values": values} for values in QUANTIZERS), {"top_k": 256}], ids=str)
def test_clip_to_median_bounds_hostile_ranks_by_honest_norms_and_keeps_most_of_honest_updates(codec, hostile):
    """Half of the ranks may be hostile, as the lower of two medians counts."""
    honest = WORLD - hostile
    alone = [_moved(codec, False, [WORLD * (each == rank) for each in range(WORLD)]) for rank in range(honest)]
    strongest = torch.stack(alone).amax(0)  # as far as an honest rank would move each chunk, were all to send the same
    attacked = [1.0] * honest + [SCALE] * hostile
    assert bool((_moved(codec, True, attacked) <= ROUNDING * strongest).all())
    assert bool((_moved(codec, False, attacked) > 1000 * strongest).all()), "or the line before could not fail"
    plain, clipped = (_moved(codec, clip, [1.0] * WORLD) for clip in (False, True))
    assert bool((clipped > 0.7 * plain).all())
    assert bool((clipped <= 1.1 * plain).all())
    assert torch.equal(_moved(codec, True, [1.0]), _moved(codec, False, [1.0]))

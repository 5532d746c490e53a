"""clip_to_median: a rank that lies is left out, whatever it sends, or counts for no more than an honest one.

A rank that sends a million times too much moves nothing further than an honest one does. The bound, for update "sgd",
reduction "mean" and a chunk c: |U_c| = |Q_c| <= the mean over ranks of their clipped norms <= the median of the ranks'
norms, up to the rounding of a clipped scale to 4 bits of mantissa and that of exact sums. In the attacks, gradients are
a signal that all ranks have, and noise of each; they know all other messages.
"""

import pytest
import torch
from torch import nn

import demopt
import problems
from demopt.core.agreement import FULL, trusted
from demopt.runs.exchange import FolderExchange
from demopt.runs.store import ObjectStore
from demopt.train.config import TrainConfig, resolve
from demopt.wire.message import HEADER_BYTES, Header, pack_message
from demopt.wire.quantizers import QUANTIZERS

SHAPES = [(128, 128), (64, 64), (64,)]
CODECS = [{}, *({"top_k": 512, "values": values} for values in ("sign", "2-bit", "float32"))]


def _gradient(rank, number, shape):
    return problems.draw(shape, 0, 1000 + number) + problems.draw(shape, 1 + rank, number)


def _built(honest, lies, clip, **codec):
    """LocalDeMos of honest ranks and of liars, with one local step each, and their messages."""
    made = [*lies, *(lambda number, shape, rank=rank: _gradient(rank, number, shape) for rank in honest)]
    optimizers, messages = [], []
    for place, gradient in enumerate(made):
        exchange = problems.OneOf(place, len(made))
        optimizer = problems.local(exchange, SHAPES, chunk=64, route="gather", clip_to_median=clip, **codec)
        for number, parameter in enumerate(problems.all_parameters(optimizer)):
            parameter.grad = gradient(number, tuple(parameter.shape))
        optimizer.local_step()
        optimizers.append(optimizer)
        messages.append(optimizer.extract())
    return optimizers, torch.stack(messages)


def _applied(optimizers, messages):
    optimizers[-1].apply(messages)
    return torch.cat([each.flatten() for each in problems.values(optimizers[-1])])


LIES = {
    "flipped": lambda number, shape: -_gradient(9, number, shape),
    "noise": lambda number, shape: problems.draw(shape, 99, number),
    "against all": lambda number, shape: -sum(_gradient(rank, number, shape) for rank in range(3)),
}


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("lie", LIES)
def test_security_one_of_four_that_lies_is_left_out(lie, codec):
    honest = _applied(*_built([0, 1, 2], [], True, **codec))
    assert torch.equal(_applied(*_built([0, 1, 2], [LIES[lie]], True, **codec)), honest)
    assert not torch.equal(_applied(*_built([0, 1, 2], [LIES[lie]], False, **codec)), honest)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_four_honest_ranks_all_count(codec):
    """The first three alone move the weights elsewhere."""
    optimizers, messages = _built([0, 1, 2, 3], [], True, **codec)
    route = optimizers[0].replicator.wiring().route
    decoded = route.layout.checked(messages[:, HEADER_BYTES:])
    assert route._trusted(decoded) is decoded


@pytest.mark.parametrize("count", [5, 8])
def test_a_minority_that_agrees_with_itself_is_left_out(count):
    lies, honest = [LIES["against all"]] * ((count - 1) // 2), list(range(count - (count - 1) // 2))
    assert torch.equal(_applied(*_built(honest, lies, True)), _applied(*_built(honest, [], True)))


def test_a_rank_that_pleases_two_and_fights_the_third_counts_for_nothing():
    """Nobody can say who of the two lies: both are left out, and the update is that of the other two."""

    def lie(number, shape):
        return _gradient(0, number, shape) + _gradient(1, number, shape) - 2 * _gradient(2, number, shape)

    assert torch.equal(_applied(*_built([0, 1, 2], [lie], True)), _applied(*_built([0, 1], [], True)))


def test_liar_of_two_counts_and_so_does_one_of_four_that_lies_in_a_quarter():
    def in_part(number, shape):
        lie = LIES["against all"](number, shape)
        return torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(number)) < 0.25, lie, -lie)

    for honest, lie in (([0], LIES["flipped"]), ([0, 1, 2], in_part)):
        assert not torch.equal(_applied(*_built(honest, [lie], True)), _applied(*_built(honest, [], True)))


def test_security_samples_count_up_to_the_medians():
    """All of 2**32 - 1, with clip_to_median they are worth as many as those of the others; of two, each has its own."""

    def update(samples, clip, ranks=4):
        optimizers, messages = _built([*range(ranks)], [], clip)
        header, size = optimizers[0].replicator.round.header, messages.shape[1] - HEADER_BYTES
        messages = messages.clone()
        loud = Header(**{**vars(header), "samples": samples})
        messages[0] = pack_message(loud, messages[0, HEADER_BYTES:], size=size, device=messages.device)
        return _applied(optimizers, messages)

    assert torch.equal(update(2**32 - 1, True), update(1, True))
    assert not torch.equal(update(2**32 - 1, False), update(1, False))
    assert not torch.equal(update(5, True, ranks=2), update(1, True, ranks=2))


def test_flips_among_the_signs_are_weighed_by_the_scales_that_count():
    """Agreeing in chunks of scale 0 earns nothing: the other chunks are flipped."""
    optimizers, messages = _built([0, 1, 2, 3], [], True)
    decoded = optimizers[0].replicator.wiring().route.layout.checked(messages[:, HEADER_BYTES:])
    agreed = torch.stack([each.agreement() for each in decoded]).sum(0)
    for each in decoded:
        each.codes[0, ::2] = 0
        each.signs[0, 1::2] ^= 255
    changed = torch.stack([each.agreement() for each in decoded]).sum(0)
    assert trusted(agreed) == [0, 1, 2, 3]
    assert bool((changed[0, 0, 1:] < 0).all())
    assert trusted(changed) == [1, 2, 3]


def test_agreement_is_the_literal_count():
    """Of signs of all coefficients against the slow count of equal and different ones, at equal scales."""
    optimizers, messages = _built([0, 1, 2], [LIES["noise"]], True)
    for each in optimizers[0].replicator.wiring().route.layout.checked(messages[:, HEADER_BYTES:]):
        each.codes.fill_(2032)
        signs = 1 - 2 * each.negative.long()
        literal = torch.einsum("wcn,vcn->wv", signs, signs) * FULL
        found = each.agreement()[0]
        off = ~torch.eye(4, dtype=torch.bool)
        assert torch.equal(found[off], literal[off])


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
    """How far each chunk of 16 x 16 (8 columns of vectors) is moved by one step of ranks with gradients so scaled."""
    settings = {"lr": 1.0, "momentum_decay": 0.0, "update": "sgd", "reduction": "mean", "clip_to_median": clip}
    optimizers, messages = [], []
    for rank, scale in enumerate(scales):
        optimizers.append(problems.demo(problems.OneOf(rank, len(scales)), SMALL, **settings, **codec))
        problems.set_gradients(problems.all_parameters(optimizers[-1]), 0, rank)
        for parameter in problems.all_parameters(optimizers[-1]):
            parameter.grad *= scale
        messages.append(optimizers[-1].extract())
    optimizers[0].apply(torch.stack(messages))
    matrix, vector = (
        (now.detach() - begun.detach()).double()
        for now, begun in zip(problems.all_parameters(optimizers[0]), problems.parameters(SMALL), strict=True)
    )
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

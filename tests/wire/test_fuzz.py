"""Mutated messages, given to whole optimizers: each is refused with nothing changed, or makes sense."""

import random

import pytest
import torch

import problems
from demopt import MessageError
from demopt.wire.checksum import checksum

CULPRIT = 1  # of two ranks; rank 0 reads
SETTINGS = {
    "float32": {"values": "float32"},
    "float64": {"values": "float64", "update": "sgd", "transform": "identity"},
    "2-bit": {"values": "2-bit", "update": "nesterov", "gradient_scale": "lr"},
    "sign": {"values": "sign", "clip_to_median": True, "update": "sgd"},
}


class Carried(problems.OneOf):
    """One of two ranks: `parts` are those that an owner receives."""

    def __init__(self, rank, parts=None):
        super().__init__(rank, 2)
        self.parts = parts

    def all_to_all(self, parts_WB):
        return self.parts


def _mutated(rows, generator):
    """The rows with the culprit's mutated; three in five get a correct checksum again. Any new length is all rows'."""
    data = bytearray(bytes(rows[CULPRIT].tolist()))
    (kind,) = generator.choices(("length", "bits", "copy", "fill", "body"), (2, 43, 15, 20, 20))
    at, size = generator.randrange(64, len(data) - 8), generator.randrange(1, 9)
    if kind == "length":
        size = generator.choice((0, 1, 63, 64, 65, len(data) - 1, len(data) + 1, len(data) + 8))
        return torch.nn.functional.pad(rows, (0, size - len(data)))
    if kind == "bits":
        for _ in range(generator.choice((1, 1, 1, 2, 8))):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    elif kind == "copy":
        size = generator.randrange(1, len(data) // 3)
        first, second = generator.randrange(len(data) - size), generator.randrange(len(data) - size)
        data[first : first + size] = data[second : second + size]
    elif kind == "fill":
        data[at : at + size] = generator.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * size
    else:
        data[64:] = generator.randbytes(len(data) - 64)
    after = rows.clone()
    after[CULPRIT] = torch.frombuffer(data, dtype=torch.uint8)
    if generator.random() < 0.6:  # as a hostile sender would write it
        after[CULPRIT, 56:64] = 0
        after[CULPRIT, 56:64] = checksum(after[CULPRIT].clone()).reshape(1).view(torch.uint8)
    return after


def _exchanged(name, damage):
    """Rank 0's optimizer and the damaged result of its exchange; on route owner, "answers" or "parts" it owns."""
    if name in ("answers", "parts"):
        optimizers = [problems.two_way(Carried(rank), [(17, 8), (5,)], chunk=8) for rank in range(2)]
    else:
        settings = {"chunk": 8, "weight_decay": 0.1, **SETTINGS[name]}
        optimizers = [problems.demo(Carried(rank), [(9, 8), (5,)], **settings) for rank in range(2)]
    messages = torch.stack([problems.extracted(optimizer, 0, rank) for rank, optimizer in enumerate(optimizers)])
    if name in SETTINGS:
        return optimizers[0], damage(messages)
    answers = []
    for rank, optimizer in enumerate(optimizers):
        received, current = messages.view(2, 2, -1)[:, rank], optimizer.replicator.round
        carried = Carried(rank, damage(received) if name == "parts" and rank == 0 else received)
        answers.append(current.wiring.route.exchange(messages[rank], carried, current.header)[0])
    rows = torch.stack(answers)
    return optimizers[0], rows if name == "parts" else damage(rows)


def _is_refused(optimizer, rows, whole):
    """Whether the rows were refused and nothing changed; otherwise all is finite. `whole`: the culprit can be named."""
    before, momenta = optimizer.fingerprint(state=True), problems.momenta(optimizer)
    try:
        optimizer.apply(rows)
    except MessageError as error:
        refusal = error
    else:
        assert all(bool(tensor.isfinite().all()) for tensor in problems.values(optimizer) + problems.momenta(optimizer))
        return False
    accuses = "refused by rank 1" in str(refusal)  # the culprit may accuse any rank
    assert refusal.rank == CULPRIT or accuses or not whole, refusal
    assert optimizer.fingerprint(state=True) == before
    assert problems.same(problems.momenta(optimizer), momenta)
    return True


@pytest.mark.parametrize("name", [*SETTINGS, "answers", "parts"])
def test_mutated_message_is_refused_or_makes_sense(name):
    refused, ends = 0, []
    for seed in range(150):
        generator, pair = random.Random(seed), []  # true and damaged

        def damage(rows, generator=generator, pair=pair):
            pair[:] = rows.clone(), _mutated(rows, generator)
            return pair[1]

        optimizer, rows = _exchanged(name, damage)
        if not _is_refused(optimizer, rows, whole=pair[0].shape == pair[1].shape):
            continue
        refused += 1
        if name != "parts":  # the true messages are applied as if nothing had come before
            optimizer.apply(pair[0])
            ends.append((optimizer.fingerprint(), problems.momenta(optimizer)))
    assert 70 < refused < 149, "all: or nothing reached the decoders"
    calm, rows = _exchanged(name, lambda rows: rows)
    calm.apply(rows)
    for mark, momenta in ends:
        assert mark == calm.fingerprint()
        assert problems.same(momenta, problems.momenta(calm))

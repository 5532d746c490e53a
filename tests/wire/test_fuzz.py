"""Mutated messages, given to whole optimizers: each is refused with nothing changed, or makes sense.

Every field and bit of a header is refused in test_message.py, damage on the way in tests/routes.
"""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import problems
from demopt import DeMo, MessageError
from demopt.wire.checksum import checksum

CULPRIT = 1  # of two ranks; rank 0 reads
HEADER_FIELDS = [(0, 4), (4, 2), (6, 2), (8, 8), (16, 4), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8), (56, 8)]
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"values": "float32"},
    "float64": {"values": "float64", "update": "sgd", "transform": "identity"},
    "int8": {"values": "int8", "clip_to_median": True, "update": "sgd"},
    "2-bit": {"values": "2-bit", "update": "nesterov", "gradient_scale": "lr"},
    "sign": {"values": "sign"},
}


class Carried(problems.OneOf):
    """One of two ranks: `parts` are those that an owner receives."""

    def __init__(self, rank: int, parts: Tensor | None = None) -> None:
        super().__init__(rank, 2)
        self.parts = parts

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        del parts_WB
        assert self.parts is not None
        return self.parts


def _mutated(rows: Tensor, generator: random.Random) -> Tensor:
    """The rows with the culprit's mutated; three in five get a correct checksum again. All rows change in length."""
    data, kind = bytearray(bytes(rows[CULPRIT].tolist())), generator.random()
    if kind < 0.02:
        size = generator.choice((0, 1, 63, 64, 65, len(data) - 1, len(data) + 1, len(data) + 8))
        return torch.nn.functional.pad(rows, (0, size - len(data)))
    if kind < 0.45:
        for _ in range(generator.choice((1, 1, 1, 2, 8))):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    elif kind < 0.6:
        size = generator.randrange(1, len(data) // 3)
        first, second = generator.randrange(len(data) - size), generator.randrange(len(data) - size)
        data[first : first + size] = data[second : second + size]
    elif kind < 0.75:
        data[64:] = generator.randbytes(len(data) - 64)
    elif kind < 0.85:
        at, size = generator.choice(HEADER_FIELDS)
        small = generator.randrange(17).to_bytes(8, "little")[:size]
        data[at : at + size] = generator.choice((generator.randbytes(size), small, b"\xff" * size))
    elif kind < 0.97:
        start = generator.randrange(64, len(data))
        size = len(data[start : start + generator.randrange(1, 9)])
        data[start : start + size] = generator.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * size
    else:
        data = bytearray(generator.randbytes(len(data)))
    after = rows.clone()
    after[CULPRIT] = torch.frombuffer(data, dtype=torch.uint8)
    return _sealed(after) if generator.random() < 0.6 else after


def _sealed(rows: Tensor) -> Tensor:
    """The rows with a correct checksum in the culprit's, as a hostile sender would write it."""
    rows[CULPRIT, 56:64] = 0
    rows[CULPRIT, 56:64] = checksum(rows[CULPRIT].clone()).reshape(1).view(torch.uint8)
    return rows


def _extracted(rank: int, settings: dict[str, Any]) -> tuple[DeMo, Tensor]:
    optimizer = problems.demo(Carried(rank), [(9, 8), (5,)], **{"chunk": 8, "weight_decay": 0.1, **settings})
    problems.set_gradients(problems.all_parameters(optimizer), 0, rank)
    return optimizer, optimizer.extract()


def _gather(settings: dict[str, Any], damage: Callable[[Tensor], Tensor]) -> tuple[DeMo, Tensor]:
    """The optimizer of rank 0 and the damaged result of its exchange."""
    pairs = [_extracted(rank, {**settings, "route": "gather"}) for rank in range(2)]
    return pairs[0][0], damage(torch.stack([message for _, message in pairs]))


def _owner(settings: dict[str, Any], damage: Callable[[Tensor], Tensor], parts: bool) -> tuple[DeMo, Tensor]:
    """As `_gather`; the damage is to the parts that rank 0 owns, or to the answers that it receives."""
    pairs = [_extracted(rank, {**settings, "route": "owner"}) for rank in range(2)]
    answers = []
    for rank, (optimizer, message) in enumerate(pairs):
        received = torch.stack([other.view(2, -1)[rank] for _, other in pairs])
        current = optimizer.replicator.round
        assert current is not None
        carried = Carried(rank, damage(received) if parts and rank == 0 else received)
        answers.append(current.plan.route.exchange(message, carried, current.header)[0])
    return pairs[0][0], torch.stack(answers) if parts else damage(torch.stack(answers))


def _verdict(optimizer: DeMo, rows: Tensor, whole: bool) -> str:
    """Whether the rows were "refused" or "valid"; fails for everything else. `whole`: the culprit can be told."""
    before, momenta = optimizer.fingerprint(state=True), problems.momenta(optimizer)
    refusal: MessageError | None = None
    try:
        optimizer.apply(rows)
    except MessageError as error:
        refusal = error
    if refusal is not None:
        accuses = "refused by rank 1" in str(refusal)  # the culprit may accuse any rank
        assert refusal.rank == CULPRIT or accuses or not whole, refusal
        assert optimizer.fingerprint(state=True) == before
        assert problems.same(problems.momenta(optimizer), momenta)
        return "refused"
    assert all(bool(p.detach().isfinite().all()) for p in problems.all_parameters(optimizer))
    assert all(bool(momentum.isfinite().all()) for momentum in problems.momenta(optimizer))
    return "valid"


@pytest.mark.parametrize("route", ["gather", "owner", "parts"])
@pytest.mark.parametrize("name", SETTINGS)
def test_mutated_message_is_refused_or_makes_sense(name: str, route: str) -> None:
    settings = SETTINGS[name]
    if route != "gather":
        settings = {key: value for key, value in settings.items() if key != "update"}
    counts, ends = Counter[str](), []
    for seed in range(150):
        generator, pair = random.Random(seed), list[Tensor]()  # true and damaged

        def damage(rows: Tensor, generator: random.Random = generator, pair: list[Tensor] = pair) -> Tensor:
            pair[:] = rows.clone(), _mutated(rows, generator)
            return pair[1]

        if route == "gather":
            optimizer, rows = _gather(settings, damage)
        else:
            optimizer, rows = _owner(settings, damage, parts=route == "parts")
        verdict = _verdict(optimizer, rows, whole=pair[0].shape == pair[1].shape)
        counts[verdict] += 1
        if verdict == "refused" and route != "parts":  # the true messages are applied as if nothing had come before
            optimizer.apply(pair[0])
            ends.append((optimizer.fingerprint(), problems.momenta(optimizer)))
    assert counts["refused"] > 70
    assert counts["valid"] > 1, "or nothing reached the decoders"
    if route != "parts":
        calm, rows = (_gather if route == "gather" else partial(_owner, parts=False))(settings, lambda rows: rows)
        calm.apply(rows)
        for mark, momenta in ends:
            assert mark == calm.fingerprint()
            assert problems.same(momenta, problems.momenta(calm))

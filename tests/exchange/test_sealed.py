"""A key keeps strangers, forgeries and replays out, and costs 16 bytes a message."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import problems
import ranks
from demopt import DeMo, LocalDeMo, MessageError, SettingsError
from demopt.exchange import Exchange, Faulty, Meter, Sealed, seal
from demopt.exchange.sealed import greet

KEY, OTHER = bytes(range(32)), bytes(32)
GONE = 3.0  # seconds until the others notice that a rank has refused and ended
Damage = Callable[[Tensor], Tensor]


def _all_ranks(damage: Damage, act: Callable[[Sealed], Any]) -> list[ranks.Outcome]:
    """Three ranks; what rank 0 receives after the handshake is damaged."""

    def work(exchange: Exchange) -> Any:
        armed: list[bool] = []
        inner = Faulty(exchange, lambda rows: damage(rows) if armed else rows) if exchange.rank == 0 else exchange
        sealed = Sealed(inner, KEY)
        sealed.all_gather(torch.zeros(8, dtype=torch.uint8))
        armed.append(True)
        return act(sealed)

    return ranks.thread_outcomes(work, 3, timeout=GONE)


def _gather_twice(exchange: Sealed) -> list[list[int]]:
    first = exchange.all_gather(torch.full((8,), exchange.rank, dtype=torch.uint8))
    second = exchange.all_gather(torch.full((8,), 10 + exchange.rank, dtype=torch.uint8))
    return [first[:, 0].tolist(), second[:, 0].tolist()]


def _to_each(exchange: Sealed) -> list[int]:
    parts = torch.full((3, 8), exchange.rank, dtype=torch.uint8)
    return exchange.all_to_all(parts)[:, 0].tolist()


def _to_rank_0(exchange: Sealed) -> list[int] | None:
    rows = exchange.gather(torch.full((8,), exchange.rank, dtype=torch.uint8), 0)
    return None if rows is None else rows[:, 0].tolist()


def _flip(row: int, byte: int) -> Damage:
    def damage(rows: Tensor) -> Tensor:
        rows[row, byte] ^= 1
        return rows

    return damage


def _replay() -> Damage:
    """Delivers rank 2's last message again."""
    kept: list[Tensor] = []

    def damage(rows: Tensor) -> Tensor:
        kept.append(rows[2].clone())
        rows[2] = kept[0]
        return rows

    return damage


def _swap(rows: Tensor) -> Tensor:
    return rows[[0, 2, 1]]


@pytest.mark.parametrize(
    ("damage", "act", "seat"),
    [
        pytest.param(_flip(1, 0), _gather_twice, 1, id="a changed body"),
        pytest.param(_flip(2, -1), _gather_twice, 2, id="a changed tag"),
        pytest.param(_flip(1, 3), _to_each, 1, id="a changed part"),
        pytest.param(_flip(2, 3), _to_rank_0, 2, id="a changed body for one rank"),
        pytest.param(_replay(), _gather_twice, 2, id="a replay"),
        pytest.param(_swap, _gather_twice, 1, id="one member's message in another's seat"),
        pytest.param(lambda rows: torch.zeros_like(rows), _gather_twice, 1, id="zeros"),
    ],
)
def test_sealed_refuses_naming_the_seat(damage: Damage, act: Callable[[Sealed], Any], seat: int) -> None:
    refused, *_ = _all_ranks(damage, act)
    assert isinstance(refused.error, MessageError), refused
    assert refused.error.rank == seat
    assert "forged, changed, replayed" in str(refused.error)


def test_sealed_without_damage_delivers_what_was_sent() -> None:
    assert [outcome.value for outcome in _all_ranks(lambda rows: rows, _gather_twice)] == 3 * [
        [[0, 1, 2], [10, 11, 12]]
    ]
    assert [outcome.value for outcome in _all_ranks(lambda rows: rows, _to_each)] == 3 * [[0, 1, 2]]
    assert [outcome.value for outcome in _all_ranks(lambda rows: rows, _to_rank_0)] == [[0, 1, 2], None, None]


class _Tape:
    """Records what a session receives, to play it in a later one."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.played = 0

    def record(self, rows: Tensor) -> Tensor:
        self.kept.append(rows.clone())
        return rows

    def play(self) -> Tensor:
        self.played += 1
        return self.kept[self.played - 1]


def test_message_of_an_earlier_session_is_refused() -> None:
    """The same ranks, the same key, the same collective: yesterday's bytes."""

    def work(exchange: Exchange) -> str:
        tape = _Tape()

        def replay(rows: Tensor) -> Tensor:
            earlier = tape.play()
            return rows if tape.played <= 2 else earlier  # greeting and answers are of today

        Sealed(Faulty(exchange, tape.record), KEY).all_gather(torch.zeros(8, dtype=torch.uint8))
        with pytest.raises(MessageError) as caught:
            Sealed(Faulty(exchange, replay), KEY).all_gather(torch.zeros(8, dtype=torch.uint8))
        return str(caught.value)

    assert ["forged, changed, replayed" in told for told in ranks.threads(work, 2)] == [True, True]


def test_replayed_handshake_is_refused() -> None:
    def work(exchange: Exchange) -> str:
        tape = _Tape()

        def replay(rows: Tensor) -> Tensor:
            """Rank 1's seat says what it said yesterday."""
            rows[1] = tape.play()[1]
            return rows

        Sealed(Faulty(exchange, tape.record), KEY).all_gather(torch.zeros(8, dtype=torch.uint8))
        attacked = Faulty(exchange, replay) if exchange.rank == 0 else exchange
        try:
            Sealed(attacked, KEY).all_gather(torch.zeros(8, dtype=torch.uint8))
        except SettingsError as error:
            return str(error)
        return ""

    refused, *_ = ranks.thread_outcomes(work, 3, timeout=GONE)
    assert "rank 1 does not have the key" in refused.value


@pytest.mark.parametrize("key", [OTHER, None], ids=["another key", "no key"])
def test_stranger_in_a_seat_is_refused_before_anything_is_exchanged(key: bytes | None) -> None:
    def work(exchange: Exchange) -> str:
        try:
            if exchange.rank == 2 and key is None:
                greet(exchange)
            Sealed(exchange, key or KEY if exchange.rank == 2 else KEY).all_gather(torch.zeros(8, dtype=torch.uint8))
        except SettingsError as error:
            return str(error)
        return ""

    told = ranks.threads(work, 3)
    assert all("rank 2" in one and "give the same key to all ranks" in one for one in told[:2])


def test_key_of_a_few_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="the key has 3 bytes, wanted 16 to 64"):
        seal(None, b"abc")


@pytest.mark.parametrize("size", [3, 5000])
def test_sealed_all_reduce_has_the_same_bits_on_all_ranks(size: int) -> None:
    def work(exchange: Exchange) -> Tensor:
        values = problems.draw((size,), exchange.rank, dtype=torch.float64)
        Sealed(exchange, KEY).all_reduce(values)
        return values

    first, *others = ranks.threads(work, 3)
    torch.testing.assert_close(first, sum(problems.draw((size,), rank, dtype=torch.float64) for rank in range(3)))
    assert all(torch.equal(first, other) for other in others)


def test_meter_counts_the_tags() -> None:
    def count(exchange: Exchange) -> tuple[int, int]:
        meter = Meter(Sealed(exchange, KEY))
        meter.all_gather(torch.zeros(100, dtype=torch.uint8))
        gathered = meter.sent_bytes
        meter.all_to_all(torch.zeros(3, 100, dtype=torch.uint8))
        return gathered, meter.sent_bytes - gathered

    assert ranks.threads(count, 3) == 3 * [(2 * 116, 2 * 116)]


@pytest.mark.parametrize("route", ["gather", "owner"])
def test_demo_learns_the_same_with_a_key(route: str) -> None:
    def train(exchange: Exchange, key: bytes | None) -> problems.History:
        group = exchange if key is None else seal(exchange, key)
        optimizer = DeMo(
            problems.parameters(problems.FEW),
            **{**problems.SMALL, "route": route, "update": "signum"},
            process_group=group,
        )
        return problems.train(optimizer, range(3), exchange.rank)

    for sealed, plain in zip(ranks.threads(train, 2, KEY), ranks.threads(train, 2, None), strict=True):
        for got, want in zip(sealed.parameters + sealed.momenta, plain.parameters + plain.momenta, strict=True):
            assert torch.equal(got, want)


def _delayed(rank: int, world_size: int) -> int:
    """Rounds in the background have a sealed group of their own."""
    parameters = problems.parameters(problems.FEW)
    inner = torch.optim.SGD(parameters, lr=0.1)
    optimizer = LocalDeMo(inner, sync_every=1, delay=1, process_group=seal(dist.group.WORLD, KEY))
    for step in range(3):
        problems.set_gradients(parameters, step, rank)
        optimizer.step()
    optimizer.flush()
    return optimizer.fingerprint()


def test_sealed_rounds_in_the_background_over_gloo() -> None:
    one, other = ranks.run(_delayed, 2)
    assert one == other

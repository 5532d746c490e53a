"""consolidate_state_dict: one rank's file holds all ranks' states; each takes its own, also among more or fewer."""

from typing import Any

import carriers
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import demopt
import problems
import ranks
from demopt.errors import MessageError
from demopt.state import separated


def _by_file(rank: int, world_size: int, kind: str) -> tuple[Any, Any]:
    """A run that goes on, and one that was loaded from the file of one rank."""
    optimizer = carriers.build(kind)
    problems.fingerprints(optimizer, range(5), rank)  # of LocalDeMo: two steps after a round
    carriers.consolidate(optimizer, to=1)
    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, carriers.saved(optimizer))
    state = problems.by_file(states[1])
    names = {name for rank_ in separated(state) for name in state["ranks"][rank_]["state"][0]}
    assert not names & set(state["state"][0]), "what is shared is there once"
    with carriers.shown(optimizer):
        new = carriers.build(kind, parameters=problems.twins(optimizer))
    new.load_state_dict(state)
    assert not separated(carriers.saved(new))
    assert bool(separated(carriers.saved(optimizer))) == (rank == 1)
    return carriers.end(optimizer, rank), carriers.end(new, rank)


@pytest.mark.parametrize("kind", carriers.KINDS)
def test_consolidated_file_of_one_rank_resumes_all_bit_for_bit(kind):
    for expected, resumed in ranks.run(_by_file, 3, kind):
        assert problems.same(expected[0], resumed[0])
        assert expected[1] == resumed[1]


def test_consolidated_state_is_of_rank_0_until_the_next_change():
    """Such as a step, a load, and a new group."""

    def consolidated(exchange: Any) -> list[bool]:
        optimizer, found = carriers.build("DeMo", process_group=exchange), []
        for change in (
            lambda: None,
            lambda: problems.fingerprints(optimizer, range(1), exchange.rank),
            lambda: optimizer.load_state_dict(optimizer.state_dict()),
            lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(4))]}),
        ):
            carriers.consolidate(optimizer)
            change()
            found.append(bool(separated(optimizer.state_dict())))
        return found

    assert ranks.threads(consolidated, 2) == [[True, False, False, False], [False] * 4]


def test_consolidation_waits_for_a_round_in_flight():
    """Both use one exchange; the round's content is in the errors, and it is applied afterwards."""

    def consolidated(exchange: Any) -> tuple[int, dict[str, Any]]:
        optimizer = carriers.build("LocalDeMo", process_group=exchange, delay=1)
        problems.fingerprints(optimizer, range(4), exchange.rank)
        assert optimizer.replicator.in_flight
        carriers.consolidate(optimizer)
        state = carriers.saved(optimizer)
        optimizer.flush()
        return optimizer.fingerprint(), state

    (one, state), (other, _) = ranks.threads(consolidated, 2)
    assert one == other
    assert [bool(separated(state)[rank]["state"][0]["error"].any()) for rank in range(2)] == [True, True]


def _in_nodes(rank: int, world_size: int) -> list[int]:
    optimizer = carriers.build("DeMo", process_group=init_device_mesh("cpu", (2, 2)))
    problems.fingerprints(optimizer, range(2), rank)
    carriers.consolidate(optimizer, to=1)
    return list(separated(optimizer.state_dict()))


def test_consolidated_state_is_on_the_first_process_of_a_node():
    assert ranks.run(_in_nodes, 4) == [[], [], [0, 1], []]


def _consolidated(exchange: Any, kind: str) -> Any:
    optimizer = carriers.build(kind, process_group=exchange)
    problems.fingerprints(optimizer, range(5), exchange.rank)
    mine = carriers.saved(optimizer)
    carriers.consolidate(optimizer)
    return mine, carriers.saved(optimizer)


@pytest.mark.parametrize("kind", carriers.KINDS)
@pytest.mark.filterwarnings("ignore:the state was saved by")
def test_consolidated_state_loads_among_other_ranks_as_reshard_says(kind, monkeypatch):
    monkeypatch.setattr("demopt.state.PIECE_BYTES", 1001)  # each state takes several, and the last is shorter
    results = ranks.threads(_consolidated, 4, kind)

    def takes(exchange: Any) -> Any:
        optimizer = carriers.build(kind, process_group=exchange)
        optimizer.load_state_dict(results[0][1])
        return carriers.saved(optimizer)

    if kind == carriers.OWNERS:
        assert all(carriers.owned(mine) for mine, _ in results)
    expected = demopt.reshard([mine for mine, _ in results], 3)
    for state, wanted in zip(ranks.threads(takes, 3), expected, strict=True):
        carriers.assert_resharded(state, wanted)


@pytest.mark.parametrize("ranks", [3, [1], {"0": {}}, {0: 3}, {0: {}}, {0: {"state": {0: 3}}}, {1: {}}], ids=str)
def test_consolidated_state_of_another_form_is_refused(ranks):
    optimizer = carriers.build("DeMo")
    before = problems.by_file(optimizer.state_dict())
    before["state"] = {n: {"step": entry["step"]} for n, entry in before["state"].items()}
    with pytest.raises((ValueError, TypeError), match="state"):
        optimizer.load_state_dict({**before, "ranks": ranks})


@pytest.mark.parametrize("saved_by", [[], [0, 2], [0.0, 1.0, 0.0, 1.0, 3.0], [3, 1, 0, 1, 3]], ids=str)
def test_mark_of_another_form_counts_as_none(saved_by):
    optimizer = carriers.build("DeMo")
    before = problems.by_file(optimizer.state_dict())
    optimizer.load_state_dict({**before, "ranks": {0: {"state": {0: {"saved_by": torch.tensor(saved_by)}}}}})
    for number, entry in optimizer.state_dict()["state"].items():
        assert problems.same([*entry.values()], [*before["state"][number].values()])


def test_consolidated_state_without_a_rank_is_refused():
    state = ranks.threads(_consolidated, 2, "DeMo")[0][1]
    del state["ranks"][1]
    with pytest.raises(ValueError, match="saved by 2 ranks, but has nothing of rank 1"):
        carriers.build("DeMo").load_state_dict(state)


@pytest.mark.parametrize(("kind", "more", "many"), [("DeMo", {}, 0), ("LocalDeMo", {"sync_every": 20}, 1)])
def test_consolidation_says_what_it_costs(kind, more, many, monkeypatch):
    monkeypatch.setattr("demopt.state.MANY_STEPS", 300)  # the model is small beside the description of its state
    sync_every, results = more.get("sync_every", 1), list[Any]()

    def cost(exchange: Any) -> tuple[int, ...]:
        """The bytes of a step, of a consolidation, and of a step after it."""
        optimizer = carriers.build(kind, process_group=exchange, **more)
        problems.fingerprints(optimizer, range(sync_every), exchange.rank)
        step = optimizer.stats.received_bytes
        for _ in range(2):  # it warns once
            optimizer.consolidate_state_dict(to=1)
        whole = optimizer.stats.consolidated_bytes
        problems.fingerprints(optimizer, range(1), exchange.rank)
        return step, whole, optimizer.stats.consolidated_bytes

    told = problems.warned(lambda: results.extend(ranks.threads(cost, 2)))
    (step, whole, after), (_, *theirs) = results
    assert [whole, after] == theirs, "as many bytes are received as sent"
    assert whole > step
    assert after == 0
    assert (whole > 300 * step / sync_every) == bool(many)
    assert len(told) == many, "rank 1 alone warns"
    assert [f"rank 1 received {whole:,} bytes of states, as many as in" in text for text in told] == [True] * many


@pytest.mark.parametrize("byte", [0, 64])
def test_damaged_state_is_refused(byte):
    def damage(rows: Tensor) -> Tensor:
        if rows.shape[1] > 16:  # not the sizes
            rows[1, byte] ^= 0xFF
        return rows

    def consolidate(exchange: Any) -> None:
        carriers.build("DeMo", process_group=problems.Faulty(exchange, damage)).consolidate_state_dict()

    with pytest.raises(MessageError, match="message of rank 1: the state that came to be consolidated is damaged"):
        ranks.threads(consolidate, 2)


def test_consolidate_refuses_unknown_ranks_and_objects_in_inner_states():
    optimizer = carriers.build("LocalDeMo")
    with pytest.raises(ValueError, match="to is 1; there are ranks 0 to 0"):
        optimizer.consolidate_state_dict(to=1)
    optimizer.inner[0].state[problems.all_parameters(optimizer)[0]]["thing"] = object()
    with pytest.raises(TypeError, match="holds thing, a object, which cannot be consolidated"):
        optimizer.consolidate_state_dict()

"""States or a consolidated file, loaded by more or fewer ranks: no gradient is lost, and none counts twice."""

import copy
import functools
import io
from unittest.mock import Mock

import carriers
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter

import demopt
import problems
import ranks
from demopt.errors import MessageError, SettingsError
from demopt.state import consolidated, separated, share_of, unmarked


@functools.cache
def _states(world_size):
    def saved(exchange):
        optimizer = problems.demo(exchange, dtype=torch.float64, update="sgd")
        problems.train(optimizer, range(3), exchange.rank)
        return optimizer.state_dict()

    return ranks.threads(saved, world_size)


def _goes_on(exchange, states, reduction):
    """Loads a state and takes a step without new gradients that sends all of the momenta."""
    everything = {"top_k": 16 * 16, "values": "float64", "reduction": reduction, "update": "sgd", "alpha": 1.0}
    optimizer = problems.demo(exchange, dtype=torch.float64, fingerprint_every=0, **everything)
    optimizer.load_state_dict(states[exchange.rank])
    optimizer.param_groups[0].update(everything)
    optimizer.step()
    return problems.values(optimizer), problems.momenta(optimizer)


@pytest.mark.filterwarnings("ignore:no parameter of this optimizer has had a gradient")
@pytest.mark.parametrize("reduction", ["mean", "senders"])
@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 3), (3, 1)])
def test_reshard_loses_no_gradient_and_counts_none_twice(reduction, before, now):
    states = _states(before)
    old, _ = ranks.threads(_goes_on, before, states, reduction)[0]
    for new, left in ranks.threads(_goes_on, now, demopt.reshard(states, now), reduction):
        torch.testing.assert_close(new, old, rtol=1e-9, atol=1e-12)
        assert all(bool((momentum == 0).all()) for momentum in left)


@pytest.mark.parametrize(
    ("skipped", "settings"), [(False, {"top_k": 24}), (True, {"top_k": 24}), (False, {"route": "owner"})], ids=str
)
def test_reshard_of_local_keeps_errors_and_pseudo_gradients_and_copies_inner_states(skipped, settings):
    """After a round that some rank dropped, the others have a start of their own. Owners' errors become ranks'."""

    def saved(exchange):
        """Two steps after a round, which is skipped because of rank 0's weights."""
        optimizer = problems.local(exchange, inner=problems.ADAMW, sync_every=4, **settings)

        def spoil(step):
            if skipped and step == 3 and exchange.rank == 0:
                problems.all_parameters(optimizer)[0].data[0] = torch.inf

        problems.fingerprints(optimizer, range(6), exchange.rank, spoil)
        with optimizer.shared():
            return optimizer.state_dict()

    before = ranks.threads(saved, 3)
    assert any("owner_error" in state["state"][0] for state in before) == ("route" in settings)
    assert ["start" in state["state"][0] for state in before] == [False, skipped, skipped]
    after = demopt.reshard(before, 2)
    kept = [
        lambda entry: problems.unsent(entry, len(before)),
        lambda entry: entry.get("start", entry["global"]) - entry["local"],
    ]
    for number in range(len(problems.FEW)):
        old, new = ([state["state"][number] for state in states] for states in (before, after))
        for part in kept:
            torch.testing.assert_close(*(torch.stack([part(entry) for entry in each]).mean(0) for each in (new, old)))
        assert torch.equal(new[0]["exp_avg"], old[0]["exp_avg"])
        assert torch.equal(new[1]["exp_avg"], old[2]["exp_avg"])
        assert {int(entry["local_steps"]) for entry in new} == {2}
    # local weights that are not finite drop only the steps of their own rank
    first = before[0]["state"][0]
    for local in (first.get("start", first["global"]), first["local"] + torch.inf):
        first["local"] = local
        after.append(demopt.reshard(before, 1)[0])
    assert torch.equal(after[-1]["state"][0]["local"], after[-2]["state"][0]["local"])


def test_consolidated_state_keeps_what_a_rank_has_of_a_parameter_of_which_the_saving_rank_has_nothing():
    mine, other = ({"state": state["state"], "param_groups": []} for state in _states(2))
    mine = {**mine, "state": {number: entry for number, entry in mine["state"].items() if number}}
    found = separated(consolidated({0: mine, 1: other}, mine))
    assert found[1]["state"].keys() == other["state"].keys() > found[0]["state"].keys()


def test_reshard_refuses_states_that_are_not_those_of_all_ranks():
    whole, other = _states(2)
    later = {n: {**entry, "step": entry["step"] + 1} for n, entry in other["state"].items()}
    for states, ranks_now, says in (
        ([whole, {**other, "state": later}], 3, "rank 0 and rank 1 are of different models or steps"),
        ([other, whole], 1, "was saved by rank 1; give the states of all ranks in the order"),
        ([whole], 3, r"1 states came, and states\[0\] was saved by one of 2 ranks"),
        *((none, 1, "there are no states") for none in ([], torch.zeros(2), None, 3)),
        ([{"model": {}, "optimizer": whole}], 1, "something that is no optimizer's state"),
        ([whole, 3], 1, "something that is no optimizer's state"),
        ([{**whole, "state": [1]}], 1, "the states are damaged"),
        ([{**whole, "state": {0: {**whole["state"][0], "momentum": None}}}, other], 1, "the states are damaged"),
        ([whole], 0, "world_size is 0"),
        ([whole], "2", "world_size is '2'; give a whole number"),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            demopt.reshard(states, ranks_now)
    with pytest.raises(ValueError, match="the ranks saved at different rounds"):  # as in a folder of DCP
        share_of({0: whole, 1: {**other, "state": later}}, 0, 1, 2)
    assert len(demopt.reshard([*map(unmarked, (whole, other))], 3)) == 3, "these do not say whose they are"


def test_state_of_a_parameter_that_only_some_ranks_have_is_taken_or_refused():
    one, two = _states(2)
    frozen = {"exp_avg": torch.ones(2)}  # of a frozen parameter, where an inner optimizer began anew on a rank
    for old in (one, {**one, "state": {**one["state"], 9: frozen}}):
        taken = share_of({0: old, 1: two}, 0, 1, 2)["state"]
        assert taken.keys() == old["state"].keys()
    assert taken[9] == frozen
    for wrong in (None, "momentum", torch.ones(3), torch.ones(9, 256)):
        damaged = {**two["state"], 0: {**two["state"][0], "momentum": wrong}}
        with pytest.raises(ValueError, match="the state of parameter 0 is damaged in some rank"):
            share_of({0: one, 1: {**two, "state": damaged}}, 0, 1, 2)


def _nested(value):
    return torch.nested.nested_tensor([value, value])


#: Values that a file may have in place of a part, by name: not addable, or larger in memory than in the file.
UNLIKE = {
    "sparse": Tensor.to_sparse,
    "expanded": lambda value: torch.ones(()).expand_as(value),
    "overlapping": lambda value: torch.ones(sum(value.shape)).as_strided(value.shape, (1,) * value.dim()),
    "nested": _nested,
    "on meta": lambda value: value.to("meta"),
    "of one row": lambda value: value[:1].clone(),
}


@functools.cache
def _of_two_owners():
    return ranks.threads(_consolidated, 2, carriers.OWNERS)


@pytest.mark.filterwarnings("ignore:the state was saved by", "ignore:.*nested tensors is in prototype stage")
@pytest.mark.parametrize(
    ("name", "unlike"),
    [
        *((name, unlike) for name in ("error", "local", "start", "global") for unlike in UNLIKE),
        # an owner's error is never longer than the rank's error that it is added to
        *(("owner_error", unlike) for unlike in UNLIKE if unlike not in ("expanded", "overlapping")),
    ],
)
def test_parts_of_old_ranks_that_are_not_dense_or_differ_in_shape_are_refused_before_sums(name, unlike):
    (one, whole), (two, _) = copy.deepcopy(_of_two_owners())
    entry = two["state"][0]
    entry.setdefault("start", entry["global"].clone())
    if (name, unlike) == ("owner_error", "of one row"):
        entry["owner_start"] += entry["error"].shape[0]
    entry[name] = UNLIKE[unlike](entry[name])
    with pytest.raises(ValueError, match=r"of parameter 0 is damaged in some rank|states are damaged|different models"):
        demopt.reshard([one, two], 1)
    whole["ranks"][1]["state"][0] = entry
    new = carriers.build(carriers.OWNERS)
    with (
        problems.unchanged(new),
        pytest.raises(ValueError, match="the state of parameter 0 is damaged in some rank"),
    ):
        new.load_state_dict(whole)


@pytest.mark.parametrize("kind", carriers.KINDS)
def test_consolidated_file_of_one_rank_resumes_all_bit_for_bit(kind):
    states = {}

    def work(exchange):
        optimizer = carriers.trained(kind, exchange)
        carriers.consolidate(optimizer, to=1)
        states[exchange.rank] = problems.saved(carriers.saved(optimizer))
        exchange.all_gather(torch.zeros(1, dtype=torch.uint8))  # waits until all have saved
        state = torch.load(io.BytesIO(states[1]))
        names = {name for rank in separated(state) for name in state["ranks"][rank]["state"][0]}
        assert not names & set(state["state"][0]), "what is shared is there once"
        with carriers.shown(optimizer):
            new = carriers.build(kind, parameters=problems.twins(optimizer), process_group=exchange)
        new.load_state_dict(state)
        assert not separated(carriers.saved(new))
        assert bool(separated(carriers.saved(optimizer))) == (exchange.rank == 1)
        return carriers.end(optimizer, exchange.rank), carriers.end(new, exchange.rank)

    for expected, resumed in ranks.threads(work, 3):
        assert expected == resumed


@ranks.alike(2)
def test_consolidated_state_is_of_rank_0_until_the_next_change(exchange):
    optimizer = carriers.build("DeMo", process_group=exchange)
    for change in (
        lambda: problems.fingerprints(optimizer, range(1), exchange.rank),
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
        lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(4))]}),
    ):
        carriers.consolidate(optimizer)
        assert bool(separated(optimizer.state_dict())) == (exchange.rank == 0)
        change()
        assert not separated(optimizer.state_dict())


@ranks.alike(2)
def test_consolidated_state_is_none_once_a_parameter_trains_or_inner_state_is_gone(exchange):
    for kind in ("DeMo", "LocalDeMo"):
        parameters = problems.parameters(carriers.SHAPES)
        frozen = parameters[1].requires_grad_(False)
        optimizer = carriers.trained(kind, exchange, parameters=parameters)
        for changes_inner in (False, True)[: 1 + (kind == "LocalDeMo")]:
            carriers.consolidate(optimizer)
            if changes_inner:
                optimizer.inner[0].state.clear()
            else:
                frozen.requires_grad_()
            state = carriers.saved(optimizer)
            assert not separated(state)
            optimizer.load_state_dict(state)


@ranks.alike(2)
def test_consolidation_waits_for_a_round_in_flight(exchange):
    """Both use one exchange; the errors have the content of the round, which is applied afterwards."""
    optimizer = carriers.trained("LocalDeMo", exchange, 4, delay=1)
    assert optimizer.replicator.in_flight
    carriers.consolidate(optimizer)
    states = separated(carriers.saved(optimizer))
    assert all(state["state"][0]["error"].any() for state in states.values())
    assert len(states) == (2 if exchange.rank == 0 else 0)
    optimizer.flush()
    return optimizer.fingerprint()


@ranks.each(4)
def test_consolidated_state_is_on_the_first_process_of_a_node(rank):
    optimizer = carriers.build("DeMo", process_group=init_device_mesh("cpu", (2, 2)))
    problems.fingerprints(optimizer, range(2), rank)
    carriers.consolidate(optimizer, to=1)
    assert [*separated(optimizer.state_dict())] == ([0, 1] if rank == 2 else [])


def _consolidated(exchange, kind):
    optimizer = carriers.trained(kind, exchange)
    mine = carriers.saved(optimizer)
    carriers.consolidate(optimizer)
    return mine, carriers.saved(optimizer)


@pytest.mark.parametrize("kind", carriers.KINDS)
@pytest.mark.filterwarnings("ignore:the state was saved by")
def test_consolidated_state_loads_among_other_ranks_as_reshard_says(kind, monkeypatch):
    monkeypatch.setattr("demopt.state.PIECE_BYTES", 1001)  # each state takes several pieces, and the last is shorter
    results = ranks.threads(_consolidated, 4, kind)

    expected = demopt.reshard([mine for mine, _ in results], 3)

    def takes(exchange):
        optimizer = carriers.build(kind, process_group=exchange)
        optimizer.load_state_dict(results[0][1])
        carriers.assert_resharded(carriers.saved(optimizer), expected[exchange.rank])

    assert kind != carriers.OWNERS or all(carriers.owned(mine) for mine, _ in results)
    ranks.threads(takes, 3)


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        *((each, "entry 'ranks' is .*; give states by rank") for each in (3, [1], {"0": {}})),
        *((each, "this is no optimizer's state") for each in ({0: 3}, {0: {"state": {0: 3}}})),
        ({0: {}}, "should hold a momentum of shape"),
        ({1: {}}, "saved by 1 ranks, but has nothing of rank 0"),
    ],
)
def test_consolidated_state_of_another_form_is_refused(ranks, told):
    optimizer = carriers.build("DeMo")
    before = problems.by_file(optimizer.state_dict())
    before["state"] = {n: {"step": entry["step"]} for n, entry in before["state"].items()}
    with pytest.raises((ValueError, TypeError), match=told):
        optimizer.load_state_dict({**before, "ranks": ranks})


@pytest.mark.parametrize("saved_by", [[], [0, 2], [0.0, 1.0, 0.0, 1.0, 3.0], [3, 1, 0, 1, 3]], ids=str)
def test_mark_of_another_form_counts_as_none(saved_by):
    optimizer = carriers.build("DeMo")
    before = problems.by_file(optimizer.state_dict())
    optimizer.load_state_dict({**before, "ranks": {0: {"state": {0: {"saved_by": torch.tensor(saved_by)}}}}})
    for number, entry in optimizer.state_dict()["state"].items():
        assert problems.same([*entry.values()], [*before["state"][number].values()])


@pytest.mark.parametrize("kind", carriers.KINDS)
def test_consolidated_state_whose_parts_are_gone_as_torch_drops_them_says_so(kind):
    states = ranks.threads(_consolidated, 2, kind)[0][1]
    new = carriers.build(kind)
    del states["ranks"]
    with (
        problems.unchanged(new),
        pytest.raises(ValueError, match=r"consolidated, and its entry 'ranks'.*is gone: torch's"),
    ):
        new.load_state_dict(states)


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_state_of_another_optimizer_that_counts_steps_is_not_called_consolidated(kind):
    optimizer = problems.optimizer_of(kind, problems.parameters([(4, 4)]))
    entry = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(4, 4)}
    with pytest.raises(ValueError, match="another optimizer"):
        optimizer.load_state_dict({"state": {0: entry}, "param_groups": [{"params": [0], "lr": 0.1}]})


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_state_that_was_rounded_since_it_was_saved_is_told(kind):
    optimizer = problems.optimizer_of(kind, problems.parameters([(4, 4)]))
    state = problems.by_file(optimizer.state_dict())
    for entry in state["state"].values():
        entry.update({n: v.half() for n, v in entry.items() if n in ("momentum", "global", "local", "error")})
    with pytest.warns(UserWarning, match=r"the state was converted to torch\.float16 since it was saved"):
        optimizer.load_state_dict(state)


def test_consolidated_state_without_a_rank_is_refused():
    state = ranks.threads(_consolidated, 2, "DeMo")[0][1]
    del state["ranks"][1]
    with pytest.raises(ValueError, match="saved by 2 ranks, but has nothing of rank 1"):
        carriers.build("DeMo").load_state_dict(state)


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@ranks.each(2)
def test_consolidation_refuses_ranks_at_different_rounds_as_an_interrupt_leaves_them(rank, kind, behind):
    optimizer = problems.demo() if kind == "DeMo" else problems.local()
    for step in range(2):
        problems.set_gradients(optimizer.param_groups[0]["params"], step, rank)
        if (step, rank) == (1, behind):
            optimizer.replicator.apply = Mock(side_effect=KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        else:
            optimizer.step()
    with pytest.raises(SettingsError, match=rf"rank 1 has applied .* rounds .*: call resync\(src={1 - behind}\)"):
        optimizer.consolidate_state_dict()
    vars(optimizer.replicator).pop("apply", None)
    optimizer.resync(src=1 - behind)
    assert int(optimizer.replicator.round_number) == 2
    optimizer.consolidate_state_dict()
    assert len(optimizer.state_dict().get("ranks", {})) == 2 * (rank == 0)


@pytest.mark.parametrize(("kind", "more", "many"), [("DeMo", {}, 0), ("LocalDeMo", {"sync_every": 20}, 1)])
def test_consolidation_says_what_it_costs(kind, more, many, monkeypatch):
    monkeypatch.setattr("demopt.optim.replicated._MANY_STEPS", 300)  # states of a small model are large
    sync_every, costs = more.get("sync_every", 1), []

    def consolidates(exchange):
        optimizer = carriers.trained(kind, exchange, sync_every, **more)
        step = optimizer.stats.received_bytes
        for _ in range(2):  # it warns once
            optimizer.consolidate_state_dict(to=1)
        whole = optimizer.stats.consolidated_bytes
        assert whole > step
        assert (whole > 300 * step / sync_every) == bool(many)
        costs.append(whole)
        problems.fingerprints(optimizer, range(1), exchange.rank)
        assert optimizer.stats.consolidated_bytes == 0

    told = problems.warned(lambda: ranks.threads(consolidates, 2))
    assert costs[0] == costs[1], "as many bytes are received as sent"
    says = f"rank 1 received {costs[0]:,} bytes of states, as many as in"
    assert [says in text for text in told] == [True] * many, "rank 1 alone warns"


@pytest.mark.parametrize("byte", [0, 64])
def test_damaged_state_is_refused(byte):
    def damage(rows):
        if rows.shape[1] > 16:  # not the sizes
            rows[1, byte] ^= 0xFF
        return rows

    def consolidate(exchange):
        carriers.build("DeMo", process_group=problems.Faulty(exchange, damage)).consolidate_state_dict()

    with pytest.raises(MessageError, match="message of rank 1: the state that came to be consolidated is damaged"):
        ranks.threads(consolidate, 2)


def test_consolidate_refuses_unknown_ranks_and_objects_in_inner_states():
    optimizer = carriers.build("LocalDeMo")
    with pytest.raises(ValueError, match="to is 1; there are ranks 0 to 0"):
        optimizer.consolidate_state_dict(to=1)
    optimizer.inner[0].state[problems.all_parameters(optimizer)[0]] |= {"unset": None, "thing": object()}
    with pytest.raises(TypeError, match="holds thing, a object, which cannot be consolidated"):
        optimizer.consolidate_state_dict()


class OfAClass(Tensor):
    """A parameter of a class of its own, which its inner optimizer's moments have too."""


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
@ranks.alike(2)
def test_states_of_parameters_of_another_class_are_consolidated_and_loading_copies_them(exchange, kind):
    optimizer = carriers.build(
        kind, parameters=[Parameter(torch.ones(8, 8).as_subclass(OfAClass))], process_group=exchange
    )
    problems.fingerprints(optimizer, range(3), exchange.rank)

    def by_file():
        return torch.load(io.BytesIO(problems.saved(carriers.saved(optimizer))), weights_only=False)

    own = by_file()
    before = problems.saved(own)
    carriers.consolidate(optimizer)
    for state in (own, by_file() if exchange.rank == 0 else own):
        optimizer.load_state_dict(state)
        end = carriers.end(optimizer, exchange.rank)
    assert problems.saved(own) == before
    return end[0]

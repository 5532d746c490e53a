"""Mistakes that are noticed.

Parameters that no DeMo has, and steps of an inner optimizer alone, after which ranks would drift unseen; gradients
that something else already synchronises, DDP or FSDP2 over the same ranks; buffers that nothing does; local weights
that are evaluated, or lost; AdamW's learning rate for Muon; and calls of all ranks that one rank makes.
"""

import contextlib
import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import demopt
import problems
import ranks
from demopt import DeMo, LocalDeMo
from demopt.codec.hyperparameters import Codec
from demopt.exchange import liveness


def _optimizers(kind: str, matrices: list[nn.Parameter], others: list[nn.Parameter]) -> list[Any]:
    """The optimizers of a model; "AdamW for biases" has the others in one of its own."""
    if kind == "AdamW for biases":
        return [DeMo(matrices, **problems.SMALL), torch.optim.AdamW(others)]
    if kind == "LocalDeMo, AdamW for biases":
        return [LocalDeMo(torch.optim.AdamW(matrices), sync_every=2), torch.optim.AdamW(others)]
    if kind == "frozen biases":
        for parameter in others:
            parameter.requires_grad_(False)
        return [DeMo(matrices, **problems.SMALL)]
    if kind == "a model of AdamW's beside":
        apart = demopt.unsync(nn.Linear(2, 2))
        adamw: Any = torch.optim.AdamW(apart.parameters())
        adamw.model = apart  # which lives as long
        return [DeMo([*matrices, *others], **problems.SMALL), adamw]
    inner = [torch.optim.AdamW(each) for each in (matrices, others)]
    return [LocalDeMo(inner, sync_every=2)]


def _heard(rank: int, world_size: int, kind: str) -> list[str]:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(problems.draw(parameter.shape, number))
    demopt.unsync(model)
    parameters = [[p for p in model.parameters() if p.dim() == dim] for dim in (2, 1)]
    optimizers, heard = _optimizers(kind, *parameters), []
    for step in range(3):
        problems.set_gradients(model.parameters(), step, rank)
        for optimizer in optimizers:
            heard += problems.warned(optimizer.step)
    return heard


@pytest.mark.parametrize("kind", ["AdamW for biases", "LocalDeMo, AdamW for biases"])
def test_parameters_of_an_unsynced_model_that_no_demo_has_are_noticed_once(kind: str) -> None:
    ((told,), other) = ranks.run(_heard, 2, kind)
    assert "parameter '0.bias' and 1 more of the model that went through unsync can train" in told
    assert "demopt.muon_groups" in told
    assert other == [], "rank 0 alone warns"


@pytest.mark.parametrize("kind", ["frozen biases", "LocalDeMo around two", "a model of AdamW's beside"])
def test_models_whose_parameters_are_all_kept_equal_do_not_warn(kind: str) -> None:
    assert ranks.run(_heard, 2, kind) == [[], []]


def _wrapped() -> tuple[torch.optim.Optimizer, LocalDeMo]:
    parameters = problems.parameters([(4, 4)])
    inner = torch.optim.AdamW(parameters, lr=0.1)
    return inner, LocalDeMo(inner, sync_every=2)


def test_step_of_an_inner_optimizer_alone_is_refused_and_moves_nothing() -> None:
    _, optimizer = _wrapped()
    for each in (optimizer, copy.deepcopy(optimizer)):
        parameter = problems.all_parameters(each)[0]
        before = parameter.detach().clone()
        problems.set_gradients([parameter], 0)
        says = r"step\(\) of the AdamW inside a LocalDeMo was called.*call step\(\) of"
        with pytest.raises(RuntimeError, match=says):
            each.inner[0].step()
        assert torch.equal(parameter, before)
        each.step()
        assert each.local_steps == 1
        assert not torch.equal(parameter, before)


def test_inner_optimizer_steps_where_that_is_no_mistake() -> None:
    inner, optimizer = _wrapped()
    again = LocalDeMo(inner, sync_every=2)  # replaces the other
    problems.set_gradients(problems.all_parameters(again), 0)
    again.step()
    inner.param_groups[0]["lr"] = 0.0  # as torch does to create the state
    inner.step()
    inner.param_groups[0]["lr"] = 0.1
    del optimizer, again
    inner.step()


# Gradients that are synchronised already


def _backward(model: nn.Module, data: torch.Tensor) -> None:
    model.zero_grad()
    model(data).square().mean().backward()


def _optimizer(model: nn.Module, method: str) -> torch.optim.Optimizer:
    if method == "demo":
        return DeMo(model.parameters(), **problems.SMALL)
    inner = torch.optim.AdamW(model.parameters(), weight_decay=0.1)  # moves all ranks alike without gradients
    return LocalDeMo(
        inner, sync_every=1 + (method == "local"), top_k=24, delay=int(method != "local"), codec=Codec(chunk=16)
    )


def _steps(rank: int, world_size: int, kind: str, method: str) -> list[list[str]]:
    """The warnings of each of three steps."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(9, 4)
    if kind in ("ddp", "ddp without its synchronisation"):
        model = DistributedDataParallel(model)
    optimizer = _optimizer(model, method)
    heard = []
    for step in range(3):
        seed = 0 if kind.startswith("the same data") else rank
        data = torch.zeros(5, 9) if kind == "zero gradients" else problems.draw((5, 9), seed, step)
        quiet = model.no_sync() if kind == "ddp without its synchronisation" else contextlib.nullcontext()
        with quiet:
            _backward(model, data)
        if kind == "zero gradients" or (kind == "the same data, first with zero gradients" and step == 0):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        if kind == "no gradients":
            model.zero_grad()
        told = problems.warned(optimizer.step)
        heard.append([text for text in told if kind != "no gradients" or "has had a gradient" not in text])
    return heard


LATE = "the same data, first with zero gradients"  # as after a first step with a loss of zero


@pytest.mark.parametrize(
    ("kind", "method", "at"),
    [
        *(("ddp", "demo", 0), ("the same data", "demo", 0)),
        *((LATE, method, 1) for method in ("demo", "local", "local with delay")),
        *(("ddp without its synchronisation", "demo", None), ("no gradients", "demo", None)),
        *(("zero gradients", method, None) for method in ("demo", "local", "local with delay")),
    ],
)
def test_synchronised_gradients_warn_once_when_they_are_not_zero(kind: str, method: str, at: int | None) -> None:
    first, second = ranks.run(_steps, 2, kind, method)
    assert [len(texts) for texts in first] == [int(step == at) for step in range(3)]
    assert at is None or "bit-identical gradients, so something already synchronizes them (Distr" in first[at][0]
    assert second == [[], [], []], "rank 0 alone warns"


def _fsdp(rank: int, world_size: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = DeMo(model.parameters(), **problems.SMALL)
    _backward(model, problems.draw((5, 8), rank))
    return problems.warned(optimizer.step)


def test_fsdp2_over_the_same_ranks_is_refused() -> None:
    for outcome in ranks.outcomes(_fsdp, 2):
        assert isinstance(outcome.error, ValueError), outcome.value
        assert "FSDP2" in str(outcome.error)


# Buffers that nothing synchronises


class Normed(nn.Sequential):
    def __init__(self, *norms: nn.Module) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 4), *norms, nn.Linear(4, 2))


def _batch_norm(rank: int, world_size: int, how: str) -> list[str]:
    """The warnings of construction, and of three steps."""
    model: Any = Normed(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    if how == "SyncBatchNorm":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if how == "frozen":
        for norm in list(model)[1:3]:
            norm.eval()
    if how == "without statistics":
        model = Normed(nn.BatchNorm1d(4, track_running_stats=False), nn.InstanceNorm1d(4), nn.LayerNorm(4))
    heard, made = list[str](), list[Any]()

    def build() -> None:
        wrapped = DistributedDataParallel(model) if how == "unsync" else model
        if how in ("unsync", "unsync of a plain model"):
            demopt.unsync(wrapped)
        if how == "muon_groups":
            made.append(DeMo(demopt.muon_groups(wrapped, lr=0.1)))
        else:
            made.append(LocalDeMo(demopt.muon_adamw(wrapped, lr=0.1), sync_every=2))

    heard += problems.warned(build)
    before = len(heard)
    for step in range(3):
        problems.set_gradients(model.parameters(), step, rank)
        heard += problems.warned(made[0].step)
    assert len(heard) == before, "at construction"
    return heard


@pytest.mark.parametrize("how", ["unsync", "unsync of a plain model", "muon_adamw", "muon_groups"])
def test_batch_norm_warns_once_where_the_model_is_given(how: str) -> None:
    (told,), other = ranks.run(_batch_norm, 2, how)
    assert re.search(
        r"BatchNorm1d \((module\.)?1, 2 in all\), whose running statistics every rank takes from its own", told
    )
    assert "demopt.broadcast_buffers(model)" in told
    assert other == [], "rank 0 alone warns"
    assert ranks.run(_batch_norm, 1, how) == [[]]


@pytest.mark.parametrize("how", ["SyncBatchNorm", "frozen", "without statistics"])
def test_norms_whose_buffers_stay_equal_do_not_warn(how: str) -> None:
    assert ranks.run(_batch_norm, 2, how) == [[], []]


# Local weights


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(inputs).tanh())
        return found


def _evaluated(rank: int, world_size: int, how: str, at: int) -> list[str]:
    """The warnings of two evaluations after `at` steps of a LocalDeMo with a round every 2."""
    torch.manual_seed(0)
    model: Any = Layers()
    if how in ("DDP", "module of DDP"):
        model = demopt.unsync(DistributedDataParallel(model))
    elif how == "compiled":
        model = torch.compile(model, backend="eager", fullgraph=True)
    elif how == "trains in eval()":
        model.eval()
    optimizer: Any = LocalDeMo(demopt.muon_adamw(model, lr=0.02), sync_every=2) if how != "DeMo" else None
    optimizer = optimizer or DeMo(demopt.unsync(model).parameters(), **problems.SMALL)
    for step in range(at):
        optimizer.zero_grad()
        model(problems.draw((3 + step, 6), rank, step)).square().mean().backward()
        optimizer.step()
    shown = model.module if how == "module of DDP" else copy.deepcopy(model) if how == "a copy" else model
    shown = problems.by_pickle(model) if how == "pickled" else shown

    def evaluate() -> None:
        shown.eval()
        with optimizer.shared() if how == "shared" else torch.no_grad():
            shown(problems.draw((3, 6), rank))
        shown.train()
        shown(problems.draw((3, 6), rank))

    return [*problems.warned(evaluate), *problems.warned(evaluate)]


@pytest.mark.parametrize("how", ["plain", "DDP", "module of DDP", "compiled"])
def test_evaluation_between_rounds_outside_of_shared_warns_once(how: str) -> None:
    (told,), other = ranks.run(_evaluated, 2, how, 3)
    assert told.startswith("the model ran in eval() 1 step after the last round, with the local weights of rank 0")
    assert "with optimizer.shared():" in told
    assert other == [], "rank 0 alone warns"


@pytest.mark.parametrize("how", ["shared", "a copy", "pickled", "trains in eval()", "DeMo"])
def test_evaluations_that_are_no_mistake_do_not_warn(how: str) -> None:
    assert ranks.run(_evaluated, 2, how, 3) == [[], []]


def test_evaluation_right_after_a_round_or_of_one_rank_does_not_warn() -> None:
    assert ranks.run(_evaluated, 2, "plain", 4) == [[], []]
    assert ranks.run(_evaluated, 1, "plain", 3) == [[]]


def _shown_at_once(rank: int, world_size: int, how: str) -> tuple[list[str], int]:
    """The warnings of two `shared()` before the first step, and the weights that they show."""
    torch.manual_seed(0 if how == "the same seed" else rank)
    model: Any = nn.Linear(6, 4)
    if how == "DDP":
        model = demopt.unsync(DistributedDataParallel(model))
    optimizer = LocalDeMo(torch.optim.AdamW(model.parameters()), sync_every=2)
    if how == "rank 0 alone" and rank > 0:
        return [], 0

    def show() -> None:
        with optimizer.shared():
            pass

    return [*problems.warned(show), *problems.warned(show)], optimizer.fingerprint()


def test_shared_before_the_first_step_shows_the_weights_of_rank_0_or_says_that_it_does_not() -> None:
    (quiet, _), ((told,), _) = ranks.run(_shown_at_once, 2, "other seeds")
    assert quiet == []
    assert told.startswith("shared() came before the first step, in which rank 1 takes rank 0's weights: until then")
    for how in ("the same seed", "DDP"):
        first, second = ranks.run(_shown_at_once, 2, how)
        assert first == second == ([], first[1])
    assert ranks.run(_shown_at_once, 2, "rank 0 alone")[0][0] == []


def _loaded(rank: int, world_size: int, order: str) -> list[str]:
    """The warnings of the first step after loading a state that was saved between two rounds."""
    parameters = problems.parameters([(4, 4)])
    optimizer = LocalDeMo(torch.optim.AdamW(parameters, lr=0.1), sync_every=2)
    for step in range(3):
        problems.set_gradients(parameters, step, rank)
        optimizer.step()
    with optimizer.shared():
        weights, state = [p.detach().clone() for p in parameters], problems.by_file(optimizer.state_dict())
    others = problems.parameters([(4, 4)], seed=1)
    again = LocalDeMo(torch.optim.AdamW(others, lr=0.1), sync_every=2)
    for what in order.split(", "):
        if what == "optimizer":
            again.load_state_dict(state)
        else:
            with torch.no_grad():
                others[0].copy_(weights[0])
    problems.set_gradients(others, 3, rank)
    return problems.warned(again.step)


def test_model_loaded_after_the_optimizer_is_noticed() -> None:
    ((told,), other) = ranks.run(_loaded, 2, "optimizer, model")
    assert told.endswith("its steps since the last round are lost. Load the model first, then the optimizer")
    assert other == [], "rank 0 alone warns"
    assert ranks.run(_loaded, 2, "model, optimizer") == [[], []]


# The learning rate of a script


def _rates(kind: str) -> list[int]:
    """The rounds with a hint, of 12."""
    parameters = problems.parameters([(4, 4), (4,)])
    optimizer = LocalDeMo([torch.optim.SGD([p], lr=0.02) for p in parameters], sync_every=1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.1) if kind == "a scheduler" else None
    written = {
        "AdamW's": lambda _: 0.002,
        "AdamW's, after a warm-up": lambda step: 0.002 * min(1.0, (step + 1) / 4),
        "half": lambda _: 0.01,
        "its own, after a warm-up": lambda step: 0.02 * min(1.0, (step + 1) / 10),
        "its own, decayed": lambda step: 0.02 * 0.5**step,
        "a scheduler": None,
        "nothing": None,
    }[kind]
    rounds = []
    for step in range(12):
        for group in optimizer.param_groups:
            group["lr"] = written(step) if written else group["lr"]
        problems.set_gradients(parameters, step)
        if texts := problems.warned(optimizer.step):
            assert texts == [texts[0]]
            assert "the learning rate of inner group 0 is 0.002; it was built with 0.02" in texts[0]
            rounds.append(step)
        if schedule is not None:
            schedule.step()
    return rounds


@pytest.mark.parametrize(
    ("kind", "rounds"),
    [
        *(("AdamW's", [3]), ("AdamW's, after a warm-up", [6])),
        *((kind, []) for kind in ("half", "its own, after a warm-up", "its own, decayed", "a scheduler", "nothing")),
    ],
)
def test_rate_of_the_script_far_below_the_one_that_was_given_causes_one_hint(kind: str, rounds: list[int]) -> None:
    assert _rates(kind) == rounds


def test_a_run_that_goes_on_late_has_small_rates() -> None:
    parameters = problems.parameters([(4, 4)])
    optimizer = LocalDeMo(torch.optim.SGD(parameters, lr=0.02), sync_every=1)
    optimizer.load_state_dict(problems.by_file(optimizer.state_dict()))
    for step in range(8):
        optimizer.param_groups[0]["lr"] = 0.001
        problems.set_gradients(parameters, step)
        assert problems.warned(optimizer.step) == []


# Calls of all ranks that one rank makes


def _alone(rank: int, world_size: int, call: str) -> str:
    """What a rank says if rank 0 alone makes a call of all ranks, and the others take the next step."""
    liveness.ANSWER_SECONDS = 60.0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4))
    optimizer = LocalDeMo(torch.optim.AdamW(model.parameters(), lr=0.1), sync_every=1)
    model.register_buffer("mean", torch.zeros(3))
    calls = {
        "consolidate_state_dict()": optimizer.consolidate_state_dict,
        "resync()": optimizer.resync,
        "broadcast_buffers()": lambda: demopt.broadcast_buffers(model),
    }
    problems.set_gradients(model.parameters(), 0, rank)
    optimizer.step()
    calls[call]()  # on all ranks it does its work
    try:
        if rank == 0:
            calls[call]()
        problems.set_gradients(model.parameters(), 1, rank)
        optimizer.step()
    except demopt.ExchangeError as error:
        if rank == 0:  # nothing was sent: it can go on, as the others do
            optimizer.step()
            return str(error)
        raise
    return f"went on: {optimizer.fingerprint()}"


@pytest.mark.filterwarnings("ignore:rank 0 received")
@pytest.mark.parametrize("call", ["consolidate_state_dict()", "resync()", "broadcast_buffers()"])
def test_call_of_all_ranks_under_rank_0_names_itself_and_sends_nothing(call: str) -> None:
    first, second = ranks.run(_alone, 2, call)
    assert re.match(rf"rank 0( \(host .*\))? called {re.escape(call)}, and rank 1 .*of 2 went on without", first)
    assert first.endswith("call it on all ranks, not under `if rank == 0:`")
    assert second.startswith("went on: ")

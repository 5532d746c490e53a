"""demopt.integrations.accelerate: save_state and load_state, with a file per rank."""

import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import demopt
import problems
import ranks
from demopt.exchange import liveness
from forked import accelerate_rank

pytest.importorskip("accelerate", reason="needs accelerate: make test-integrations")

from accelerate import Accelerator

from demopt.integrations.accelerate import register


def _built(accelerator=None):
    """An Accelerator, and as it prepared them a model of two layers, and their optimizers: LocalDeMo, and DeMo."""
    accelerator = accelerator or Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    local = demopt.LocalDeMo(torch.optim.AdamW(model[0].parameters(), lr=0.1), sync_every=2)
    model, *optimizers = accelerator.prepare(model, local, demopt.DeMo(model[1].parameters(), lr=0.1))
    demopt.unsync(model)
    for optimizer in optimizers:
        assert register(accelerator, optimizer) is optimizer.optimizer
    return accelerator, model, optimizers


def _resumed(rank, world_size, folder, save):
    """The fingerprints after five steps; saves after the first two, or loads them."""
    with accelerate_rank(rank, world_size):
        accelerator, model, optimizers = _built()
        if save:
            _train(model, optimizers, range(2), rank)
            accelerator.save_state(folder)
        else:
            accelerator.load_state(folder)
        return _train(model, optimizers, range(2, 5), rank)


def _train(model, optimizers, steps, rank):
    for step in steps:
        problems.set_gradients(model.parameters(), step, rank)
        for optimizer in optimizers:
            optimizer.step()
    return [optimizer.optimizer.fingerprint() for optimizer in optimizers]


def test_load_state_restores_every_rank_more_or_fewer_take_shares_and_a_missing_or_damaged_file_is_named(tmp_path):
    folder, damaged, old = str(tmp_path), tmp_path / "demopt0_rank1_of_2.pt", tmp_path / "demopt0_rank0_of_1.pt"
    for world_size in (1, 2):
        whole = ranks.run(_resumed, world_size, folder, True)
        assert (damaged.exists(), old.exists()) == (world_size == 2, world_size == 1)
    assert whole + ranks.run(_resumed, 2, folder, False) == [whole[0]] * 4
    first, *others = ranks.run(_resumed, 3, folder, False)
    assert others == [first] * 2
    damaged.write_bytes(damaged.read_bytes()[:-99])
    with pytest.raises(ValueError, match=r"demopt0_rank1_of_2\.pt cannot be read: .*; load another checkpoint"):
        ranks.run(_resumed, 1, folder, False)
    damaged.unlink()
    with pytest.raises(ValueError, match=r"lacks demopt0_rank1_of_2\.pt: each rank wrote its own state"):
        ranks.run(_resumed, 1, folder, False)


@ranks.each(2)
def test_state_saved_between_rounds_has_the_global_model_and_goes_on_exactly(rank, tmp_path):
    with accelerate_rank(rank, 2):
        accelerator, model, optimizers = _built()
        _train(model, optimizers, range(3), rank)
        accelerator.save_state(tmp_path)  # a warning would be an error
        marks = _train(model, optimizers, range(3, 4), rank)
        accelerator.load_state(tmp_path)
        weight = accelerator.unwrap_model(model)[0].weight
        with optimizers[0].optimizer.shared():
            shown = weight.detach().clone()
        saved = load_file(tmp_path / "model.safetensors")
        assert torch.equal(next(value for name, value in saved.items() if name.endswith("0.weight")), shown)
        assert not torch.equal(weight, shown), "this rank's local weights came back"
        assert _train(model, optimizers, range(3, 4), rank) == marks
        assert torch.equal(*accelerator.gather(torch.tensor([[mark >> 1 for mark in marks]])))


def test_register_refuses_another_optimizer():
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"the optimizer is AdamW, and after demopt\.unsync only"):
        register(accelerator, accelerator.prepare(torch.optim.AdamW(model.parameters())))


def test_register_refuses_an_optimizer_that_load_state_would_not_restore():
    accelerator, optimizer = Accelerator(cpu=True), demopt.DeMo(nn.Linear(2, 2).parameters())
    accelerator.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(ValueError, match=r"the DeMo was not prepared, and accelerator\.load_state would"):
        register(accelerator, optimizer)
    accelerator.prepare(optimizer)
    assert register(accelerator, optimizer) is optimizer


def test_a_state_loaded_after_load_state_failed_is_not_replaced_by_the_one_that_failed(tmp_path):
    accelerator, model, (_, optimizer) = _built()
    fresh = optimizer.state_dict()
    problems.set_gradients(model.parameters(), 0, 0)
    optimizer.step()
    accelerator.save_state(tmp_path)
    (tmp_path / "optimizer_1.bin").unlink()
    with pytest.raises(FileNotFoundError):
        accelerator.load_state(tmp_path)
    optimizer.load_state_dict(fresh)
    assert not int(optimizer.optimizer.replicator.round_number)


def test_an_accelerator_lets_freed_optimizers_go_and_resumes_those_that_it_has(tmp_path):
    accelerator, _, optimizers = _built()
    freed = [weakref.ref(optimizer.optimizer) for optimizer in optimizers]
    accelerator.free_memory()
    _, model, kept = _built(accelerator)
    for _ in range(2):  # in the first pass the freed ones are still held here
        assert register(accelerator, kept[0]) is kept[0].optimizer, "the second time changes nothing"
        _train(model, kept, range(2), 0)
        accelerator.save_state(tmp_path)
        assert {path.name for path in tmp_path.glob("demopt*")} == {f"demopt{n}_rank0_of_1.pt" for n in range(2)}
        marks = _train(model, kept, range(2, 5), 0)
        for resumed in ((accelerator, model, kept), _built()):
            resumed[0].load_state(tmp_path)
            assert _train(*resumed[1:], range(2, 5), 0) == marks
        optimizers = None
        gc.collect()
    assert [each() for each in freed] == [None, None]


@ranks.each(2)
def test_save_state_on_the_main_process_alone_names_itself_and_deletes_nothing(rank, tmp_path):
    liveness.ANSWER_SECONDS = 60.0
    with accelerate_rank(rank, 2):
        accelerator, model, optimizers = _built()
        _train(model, optimizers, range(2), rank)
        accelerator.save_state(tmp_path)
        if rank == 0:
            told = r"rank 0 .*called accelerator\.save_state\(\), and rank 1 .*of 2 went on without"
            with pytest.raises(demopt.ExchangeError, match=told):
                accelerator.save_state(tmp_path)
        marks = _train(model, optimizers, range(2, 4), rank)
        assert len([*tmp_path.glob("demopt*")]) == 4
        return marks


def test_hooks_and_models_whose_states_have_other_names_save_the_global_weights(tmp_path):
    accelerator, seen = Accelerator(cpu=True), []
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 2)))  # its state drops a part of the names
    accelerator.register_save_state_pre_hook(
        lambda *_: seen.extend(each.detach().clone() for each in model.parameters())
    )
    local = demopt.LocalDeMo(torch.optim.AdamW(model.parameters(), lr=0.1), sync_every=2)
    register(accelerator, accelerator.prepare(model, local)[1])
    problems.set_gradients(model.parameters(), 0, 0)
    local.step()
    accelerator.save_state(tmp_path)
    with local.shared():
        shown = [weight.detach().clone() for weight in model.parameters()]
    assert not any(map(torch.equal, shown, model.parameters()))
    for saved in (seen, load_file(tmp_path / "model.safetensors").values()):
        assert all(any(torch.equal(each, other) for other in saved) for each in shown)

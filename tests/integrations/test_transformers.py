"""demopt.integrations.transformers: the callback alone; examples/hf_trainer.py trains and resumes with it."""

import gc
import os
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn.utils import parameters_to_vector

import demopt
import problems
import ranks
from forked import accelerate_rank

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="needs accelerate: make test-integrations")

import transformers.integrations
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel
from transformers.trainer_utils import HPSearchBackend

from demopt.integrations.transformers import DeMoCallback


def test_callback_applies_a_round_in_flight_before_the_trainer_saves():
    parameters = problems.parameters([(4, 4)])
    optimizer = demopt.LocalDeMo(torch.optim.SGD(parameters, lr=0.1), sync_every=1, delay=1)
    for step, control in enumerate((TrainerControl(), TrainerControl(should_save=True))):
        problems.set_gradients(parameters, step)
        optimizer.step()
        DeMoCallback().on_step_end(TrainingArguments("unused"), TrainerState(), control, optimizer=optimizer)
        assert optimizer.replicator.in_flight == (not control.should_save)


@pytest.mark.parametrize(
    ("kind", "saves", "told"),
    [
        (demopt.DeMo, True, "enable_jit_checkpoint saves weights and state of rank 0 alone"),
        (torch.optim.AdamW, False, "the optimizer is AdamW, and with DeMoCallback only DeMo and LocalDeMo"),
    ],
)
def test_callback_refuses_jit_checkpoints_and_the_trainers_default_optimizer(kind, saves, told):
    parts = {"optimizer": kind(problems.parameters([(4, 4)])), "model": torch.nn.Linear(2, 2)}
    arguments = TrainingArguments("unused", enable_jit_checkpoint=saves)
    with pytest.raises((ValueError, TypeError), match=told):
        DeMoCallback().on_train_begin(arguments, TrainerState(), TrainerControl(), **parts)


def _model():
    torch.manual_seed(0)
    small = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**small, **rates, bos_token_id=0, eos_token_id=0))


@pytest.mark.parametrize("over_all_ranks", [True, False])
@ranks.each(2)
def test_trainer_with_demo_averages_over_the_tokens_of_all_ranks(rank, over_all_ranks, tmp_path):
    """In one step: DeMo without momentum sends all gradients as they are, and takes their mean."""
    tokens = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, 0] = -100  # nothing predicts it
    for row, known in enumerate((2, 7, 12, 16)):  # the rows have different numbers of labels
        labels[row, known:] = -100
    rows = [{"input_ids": one, "labels": other} for one, other in zip(tokens, labels, strict=True)]
    expected = _model()
    expected(input_ids=tokens, labels=labels).loss.backward()
    torch.optim.SGD(expected.parameters(), lr=0.5).step()
    everything = {"update": "sgd", "momentum_decay": 0.0, "top_k": 4096, "values": "float32", "reduction": "mean"}
    with accelerate_rank(rank, 2):
        arguments = TrainingArguments(
            tmp_path, max_steps=1, per_device_train_batch_size=2, report_to="none", max_grad_norm=0.0, use_cpu=True,
            learning_rate=0.5, lr_scheduler_type="constant", save_strategy="no", disable_tqdm=True,
            average_tokens_across_devices=over_all_ranks,
        )  # fmt: skip
        chosen = (demopt.DeMo, {"lr": 0.5, "weight_decay": 0.0, "transform": "identity", **everything})
        model, callbacks = _model(), [DeMoCallback()]
        Trainer(model, arguments, train_dataset=rows, optimizer_cls_and_kwargs=chosen, callbacks=callbacks).train()
    weights, sgd = (parameters_to_vector(each.parameters()).detach() for each in (model, expected))
    apart = (weights - sgd).abs().max()
    assert apart < 1e-5 if over_all_ranks else apart > 1e-3


def _sum(tensors):
    return sum(tensor.detach().double().sum().item() for tensor in tensors)


@pytest.mark.parametrize("strategy", ["steps", "best", "on_step_end", "on_log"])  # save_strategy, or the deciding hook
@ranks.each(2)
def test_trainer_evaluates_and_saves_the_global_weights_between_rounds(rank, strategy, tmp_path):
    seen, exported = [], []  # sums of weights, at each evaluation and at the ends of training

    def look(*given, model, **parts):
        seen.append(_sum(model.parameters()))

    def export(*given, model, **parts):
        exported.append(_sum(model.parameters()))

    def decide(args, state, control, **parts):
        control.should_evaluate = control.should_save = state.global_step in (3, 5)

    other = TrainerCallback()
    vars(other).update({"on_evaluate": look, strategy: decide, "on_train_end": export})
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(32, (24, 16)).unbind()]
    every = "no" if strategy.startswith("on_") else "steps"
    with accelerate_rank(rank, 2), warnings.catch_warnings():
        warnings.filterwarnings("error", "the model ran in eval")
        warnings.filterwarnings("ignore", "rank 0 received")
        arguments = TrainingArguments(
            tmp_path, max_steps=5, per_device_train_batch_size=1, report_to="none", use_cpu=True, disable_tqdm=True,
            eval_strategy=every, eval_steps=3, save_strategy="best" if strategy == "best" else every, save_steps=3,
            learning_rate=0.05, load_best_model_at_end=strategy == "best", metric_for_best_model="loss", seed=rank,
            data_seed=0, logging_steps=1,
        )  # fmt: skip

        def trained(resumed):
            model = _model()
            optimizer = demopt.LocalDeMo(demopt.muon_adamw(model, lr=0.05), sync_every=2)
            data = {"train_dataset": rows, "eval_dataset": rows[:4]}
            given = {"optimizers": (optimizer, None), "callbacks": [other, DeMoCallback()]}
            trainer = Trainer(model, arguments, **data, **given)
            trainer.train(resume_from_checkpoint=resumed)
            return optimizer, trainer

        optimizer, trainer = trained(None)
        trainer.evaluate()
        last = max(tmp_path.glob("checkpoint-*"), key=lambda path: path.name)
        saved = _sum(load_file(last / "model.safetensors").values())
        with optimizer.shared():
            after = _sum(trainer.model.parameters())
        if strategy == "steps":
            arguments.eval_on_start = True
            trained(tmp_path / "checkpoint-3")
    third, fifth, end, *resumed = seen
    assert third != fifth, "after steps 3 and 5, with rounds after 2 and 4"
    assert saved == pytest.approx(fifth if last.name == "checkpoint-5" else third, rel=1e-6)
    assert resumed == ([third, fifth] if strategy == "steps" else [])
    assert exported[0] == pytest.approx(after, rel=1e-12), "a callback before this one, too, has the final weights"
    if strategy == "best":
        assert after == pytest.approx(saved, rel=1e-6)
    else:
        assert after == end
        assert after not in (third, fifth), "the fifth step is in a last round"
    return seen, after


class _Rated(Trainer):
    """A Trainer whose loss has a parameter of its own, as some in sentence-transformers do."""

    def __init__(self, model, *given, **named):
        super().__init__(model, *given, **named)
        self.loss = {"all": torch.nn.ModuleDict({"model": model, "scale": torch.nn.Linear(1, 1)})}

    def compute_loss(self, model, inputs, *given, **named):
        return self.loss["all"]["scale"](super().compute_loss(model, inputs, *given, **named).view(1)).sum()


@ranks.each(2)
def test_callback_that_comes_after_a_training_has_the_global_weights_saved_and_a_loss_without_optimizer_is_told(
    rank, tmp_path
):
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.arange(96).view(6, 16) % 32]
    with accelerate_rank(rank, 2), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        arguments = TrainingArguments(
            tmp_path, max_steps=2, per_device_train_batch_size=1, report_to="none", use_cpu=True, disable_tqdm=True,
            save_strategy="no",
        )  # fmt: skip
        model, saves = _model(), []
        optimizer = demopt.LocalDeMo(demopt.muon_adamw(model, lr=0.05), sync_every=2)
        trainer = _Rated(model, arguments, train_dataset=rows, optimizers=(optimizer, None), callbacks=[DeMoCallback()])
        trainer.critic = critic = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        trainer.train()
        critic(torch.full((1, 1), float(rank))).sum().backward()

        class Later(TrainerCallback):
            def on_step_end(self, args, state, control, **parts):
                control.should_save = state.global_step == 1

            def on_save(self, *given, **parts):
                saves.append((optimizer.local_steps, _sum(optimizer._weights.global_of.values())))

        trainer.add_callback(Later())
        trainer.train()
        saved = _sum(load_file(tmp_path / "checkpoint-1" / "model.safetensors").values())
    assert critic.module.weight.grad == 0.5, "a model that the optimizer does not train is synchronised as before"
    assert saves == [(1, pytest.approx(saved, rel=1e-6))]
    texts = [str(each.message) for each in told if "no DeMo or LocalDeMo has it" in str(each.message)]
    assert ["'scale.weight' and 1 more" in text for text in texts] == [True] * (rank == 0)


@ranks.each(1)
def test_trainer_resumes_exactly_after_an_evaluation_that_failed(rank, tmp_path):
    fails = True

    def evaluated(*given, **parts):
        if fails:
            raise MemoryError

    other = TrainerCallback()
    other.on_evaluate = evaluated
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(32, (8, 16)).unbind()]
    with accelerate_rank(rank, 1), warnings.catch_warnings():
        warnings.filterwarnings("error", "the weights were changed")
        arguments = TrainingArguments(
            tmp_path, max_steps=5, per_device_train_batch_size=1, report_to="none", use_cpu=True, disable_tqdm=True,
            eval_strategy="steps", eval_steps=3, save_steps=1, learning_rate=0.05,
        )  # fmt: skip

        def weights():
            return parameters_to_vector(trainer.model.parameters()).detach()

        def trainer_of():
            model = _model()
            optimizer = demopt.LocalDeMo(torch.optim.AdamW(model.parameters(), lr=0.05), sync_every=4)
            data = {"train_dataset": rows, "eval_dataset": rows[:4]}
            return Trainer(model, arguments, **data, optimizers=(optimizer, None), callbacks=[other, DeMoCallback()])

        trainer = trainer_of()
        with pytest.raises(MemoryError):
            trainer.train()
        fails = False
        trainer.train(resume_from_checkpoint=True)
        resumed, trainer = weights(), trainer_of()
        trainer.train()
    assert torch.equal(resumed, weights())


@ranks.each(1)
def test_callback_finds_its_trainer_also_where_the_garbage_collector_does_not_list_it(rank, tmp_path):
    with accelerate_rank(rank, 1):
        trainer = _trainer(tmp_path, rank, _local_demo)
        gc.freeze()
        try:
            trainer.train()
        finally:
            gc.unfreeze()
        assert trainer.optimizer.optimizer.local_steps == 0  # of four, with a round after three


def _trainer(folder, rank, kind, callbacks=(), **arguments):
    """A Trainer, on a machine with a folder of its own, that saves after two of four steps and at the end."""
    rows = torch.randint(32, (24, 16), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in rows]
    arguments = TrainingArguments(
        folder / str(rank), max_steps=4, per_device_train_batch_size=1, report_to="none", use_cpu=True, save_steps=2,
        disable_tqdm=True, eval_steps=2, learning_rate=0.05, **arguments,
    )  # fmt: skip
    model = _model()
    data = {"train_dataset": rows, "eval_dataset": rows[:4]}
    return Trainer(model, arguments, **data, optimizers=(kind(model), None), callbacks=[*callbacks, DeMoCallback()])


def _demo(model):
    return demopt.DeMo(model.parameters(), lr=0.05)


def _local_demo(model):
    return demopt.LocalDeMo(demopt.muon_adamw(model, lr=0.05), sync_every=3)


@pytest.mark.parametrize("kind", [_demo, _local_demo])
@pytest.mark.parametrize("first_is_best", [True, False])  # then rank 1 has its folder without weights, or no folder
@ranks.each(2)
def test_best_checkpoint_of_one_machine_is_loaded_on_all(rank, kind, first_is_best, tmp_path):
    with accelerate_rank(rank, 2), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "rank 0 received")
        metric = {"metric_for_best_model": "step", "greater_is_better": not first_is_best}
        trainer = _trainer(tmp_path, rank, kind, eval_strategy="steps", load_best_model_at_end=True, **metric)
        trainer.compute_metrics = lambda _: {"step": trainer.state.global_step}
        trainer.train()
    best = tmp_path / "0" / f"checkpoint-{2 if first_is_best else 4}"
    assert (trainer.state.best_model_checkpoint is None) == (rank == 1 and not first_is_best)
    saved, weights = load_file(best / "model.safetensors"), trainer.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in saved.items())
    return trainer.optimizer.optimizer.fingerprint()


@pytest.mark.parametrize("trial", [None, SimpleNamespace(number=7, params={})])
@ranks.each(2)
def test_optimizer_of_each_node_is_saved_with_all_ranks_states_at_once_also_in_a_search(rank, trial, tmp_path):
    seen, checkpoint = [], tmp_path / str(rank) / ("run-7" if trial else "") / "checkpoint-2"
    other = TrainerCallback()
    other.on_save = lambda *_, **__: seen.append(torch.load(checkpoint / "optimizer.pt"))
    nodes = mock.patch.dict(os.environ, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    found = mock.patch.object(transformers.integrations, "hp_params", return_value={})  # the real one imports optuna
    with accelerate_rank(rank, 2), nodes, found, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "rank . received")
        trainer = _trainer(tmp_path, rank, _local_demo, [other], save_on_each_node=True)
        trainer.hp_search_backend, trainer.hp_space, trainer.hp_name = HPSearchBackend.OPTUNA, lambda _: {}, None
        trainer.train(trial=trial)
    assert [[*state["ranks"]] for state in seen] == [[0, 1]] * 2

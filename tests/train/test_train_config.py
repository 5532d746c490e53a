"""One dataclass of settings: flags, file and record say the same; presets and optimizers fill in the rest."""

import inspect
import json
from pathlib import Path

import pytest
import torch

from demopt import V1, DeMo, LocalDeMo, cli
from demopt.exchange import SingleRank
from demopt.train import method as method_module
from demopt.train.config import DEFAULTS, SETTINGS, InputError, TrainConfig, assemble, check_same_run, resolve
from demopt.train.method import check_settings, make_method, make_optimizer
from demopt.train.model import build, count_parameters
from demopt.train.team import Team


def test_flags_reach_the_config_and_override_its_file(tmp_path, monkeypatch, command):
    seen = []
    monkeypatch.setattr(cli, "_train", lambda config: seen.append(config) or 0)
    (tmp_path / "run.json").write_text('{"lr": 1, "top_k": 3, "data": ["x"]}')
    command("train", "--config", tmp_path / "run.json", "--top-k=9", "--compile", "--data=a", "--data=b")
    assert seen == [TrainConfig(lr=1.0, top_k=9, compile=True, data=["a", "b"])]


def test_same_run_may_change_its_free_settings_alone():
    check_same_run(TrainConfig(out="b", save_every=7, resume=True, threads=2), "", TrainConfig().record(), "", "", "")
    with pytest.raises(InputError, match=r"^--seed is 3, and it has 0; go$"):
        check_same_run(TrainConfig(steps=7, seed=3), "", TrainConfig().record(), "", "it", "go")


def test_resume_auto_starts_and_goes_on(tmp_path):
    first = assemble({"out": str(tmp_path), "resume_auto": True})
    assert (first.resume, first.overwrite) == (False, True)
    (tmp_path / "config.json").write_text(json.dumps(TrainConfig(out=str(tmp_path), steps=7).record()))
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    assert assemble({"out": str(tmp_path), "resume_auto": True}).overwrite  # a save that was interrupted
    (tmp_path / "checkpoints" / "step-00000005" / ".metadata").touch()
    again = assemble({"out": str(tmp_path), "resume_auto": True})
    assert (again.resume, again.overwrite, again.steps) == (True, False, 7)
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000005").symlink_to(tmp_path / "elsewhere" / "step-00000005")
    assert not assemble({"out": str(tmp_path), "resume_auto": True}).overwrite


def test_config_file_may_hold_settings_of_another_optimizer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(resolve(TrainConfig(optimizer="demo")).record()))
    config = assemble({"optimizer": "adamw"}, tmp_path / "config.json")
    assert (config.optimizer, config.update) == ("adamw", "muon")
    with pytest.raises(InputError, match="--top-k is for"):
        assemble({"optimizer": "adamw", "top_k": 3}, tmp_path / "config.json")


@pytest.mark.parametrize(("preset", "millions"), [("demo-300m", 319.9), ("demo-1b", 1176.8), ("124m", 123.6)])
def test_presets_have_the_papers_sizes(preset, millions):
    with torch.device("meta"):
        model = build(resolve(TrainConfig(preset=preset)))
    assert count_parameters(model) / 1e6 == pytest.approx(millions, abs=0.1)
    if preset.startswith("demo"):
        assert not any("norm" in name or "bias" in name for name, _ in model.named_parameters())


def test_example_is_the_papers_training():
    config = resolve(assemble({}, Path(__file__).parents[2] / "examples" / "demo-300m.json"))
    demo = make_optimizer(config, torch.nn.Linear(3, 3), SingleRank())
    of_paper = {**V1, **V1["codec"].hyperparameters()}
    for name in ("momentum_decay", "update", "values", "top_k"):
        assert demo.param_groups[0][name] == of_paper[name], name
    assert 64 * config.tokens_per_step * config.steps == pytest.approx(100e9, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "update", "momentum", "lr"),
    [
        ({}, None, 0.9, 0.015),
        ({"optimizer": "demo"}, "muon", 0.95, 0.02),
        ({"optimizer": "demo", "momentum": 0.9, "lr": 0.1}, "muon", 0.9, 0.1),
        ({"optimizer": "demo", "update": "signum"}, "signum", 0.99, 1e-3),
        ({"optimizer": "demo", "update": "sgd"}, "sgd", 0.99, 32.0),
        ({"optimizer": "adamw"}, None, None, 1.5e-3),
    ],
)
def test_defaults_depend_on_optimizer_and_update(given, update, momentum, lr):
    config = resolve(TrainConfig(**given))
    assert (config.update, config.momentum, config.lr) == (update, momentum, lr)


def test_defaults_of_local_are_those_of_local_demo():
    library = {name: item.default for name, item in inspect.signature(LocalDeMo).parameters.items()}
    ours = resolve(TrainConfig(optimizer="local")).record()
    local = {name for name, about in SETTINGS.items() if about["fits"] == ("local",)}
    for name in (*local - {"global_batch"}, "top_k"):  # that one is the trainer's
        assert ours[name] == library[name], name
    demo = {name: item.default for name, item in inspect.signature(DeMo).parameters.items()}
    assert DEFAULTS["demo"]["top_k"] == demo["top_k"]


@pytest.mark.parametrize("optimizer", ["local", "demo", "adamw"])
def test_every_optimizer_is_built_at_rate_1_times_its_factors(optimizer, monkeypatch):
    monkeypatch.setattr(method_module, "DistributedDataParallel", lambda forward, **_: forward)  # needs ranks
    config = resolve(TrainConfig(preset="tiny", vocab_size=40, optimizer=optimizer))
    check_settings(config)
    method = make_method(config, build(config), Team(0, 1, torch.device("cpu"), SingleRank()))
    assert isinstance(method.optimizer, {"local": LocalDeMo, "demo": DeMo, "adamw": torch.optim.AdamW}[optimizer])
    assert method.factors == {"local": (1.0, 1.0), "demo": (1.0, 0.2), "adamw": (1.0,)}[optimizer]
    method.set_lr(0.5)
    assert [group["lr"] for group in method.optimizer.param_groups] == [0.5 * factor for factor in method.factors]
    assert {group["weight_decay"] for group in method.optimizer.param_groups} == {0.0 if optimizer == "demo" else 0.1}

"""One dataclass: flags, file and record say the same."""

import dataclasses
import json
import sys
import types

import pytest
import torch

from demopt import V1, DeMo, cli
from demopt.core.update import rule_of
from demopt.exchange import SingleRank
from demopt.train.assemble import assemble, read_file
from demopt.train.config import InputError, TrainConfig, differences, flag
from demopt.train.method import check_settings, demo_groups, make_method
from demopt.train.model import PRESETS, build, count_parameters, resolve
from demopt.train.team import Team

CHANGED = TrainConfig(
    out="elsewhere", data=("a", "b"), layers=3, lr=0.5, compile=True, top_k=7, values="bfloat16", beta2=0.9
)


def test_train_config_round_trips_through_json(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CHANGED.record()))
    assert TrainConfig(**read_file(tmp_path / "config.json")) == CHANGED


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_train_config_flags_override_toml(tmp_path):
    (tmp_path / "run.toml").write_text('lr = 1\ntop_k = 3\ndata = ["x"]\n')
    config = assemble({"top_k": 9, "steps": None}, tmp_path / "run.toml")
    assert (config.lr, config.top_k, config.data, config.steps) == (1.0, 9, ("x",), TrainConfig.steps)


@pytest.mark.parametrize("preset", ["demo-300m", "demo-1b"])
def test_presets_of_the_paper_bring_its_training(preset, tmp_path):
    config = resolve(assemble({"preset": preset, "top_k": 8}))
    demo = DeMo([torch.nn.Parameter(torch.zeros(3, 3))], process_group=SingleRank(), **config.demo_settings())
    assert {name: demo.defaults[name] for name in V1} == {**V1, "top_k": 8}
    tokens = 64 * config.batch * config.accumulate * config.sequence * config.steps
    assert tokens == pytest.approx(100e9, rel=1e-3)
    adamw = resolve(assemble({"preset": preset, "optimizer": "adamw"}))
    assert (adamw.lr, adamw.beta1, adamw.beta2, adamw.weight_decay) == (4e-4, 0.9, 0.95, 0.1)
    assert (adamw.steps, adamw.warmup, adamw.final_lr, adamw.clip) == (23842, 250, 0.1, 1.0)
    (tmp_path / "own.json").write_text('{"steps": 5}')
    assert assemble({"preset": preset}, tmp_path / "own.json").steps == 5


def test_train_help_lists_every_setting(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["demopt", "train", "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        cli.main()
    shown = capsys.readouterr().out
    assert not end.value.code
    for item in dataclasses.fields(TrainConfig):
        assert item.metadata["help"]
        assert flag(item.name) in shown
    for name in PRESETS:
        assert name in shown


def test_train_flags_reach_the_config(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "_train", lambda config: seen.append(config) or 0)
    flags = "--out elsewhere --data a --data b --layers 3 --lr 0.5 --compile --top-k 7 --values bfloat16 --beta2 0.9"
    monkeypatch.setattr(sys, "argv", ["demopt", "train", *flags.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    assert seen == [CHANGED]


def test_demo_settings_are_arguments_of_demo():
    config = resolve(TrainConfig(preset="tiny", optimizer="demo"))
    names = {f.name for f in dataclasses.fields(TrainConfig) if "demo" in (f.metadata["fits"] or ())}
    assert config.demo_settings().keys() == names | {"lr", "weight_decay"}

    DeMo([torch.nn.Parameter(torch.zeros(2, 2))], process_group=SingleRank(), **config.demo_settings())


def test_differences_ignores_what_may_change_on_resume():
    one = TrainConfig().record()
    assert differences(one, TrainConfig(out="b", save_every=7, resume=True, prompt="x").record()) == []
    assert differences(one, TrainConfig(steps=7, seed=3).record()) == ["seed", "steps"]


@pytest.mark.parametrize("value", [True, 1.5, "3", None])
def test_train_config_refuses_wrong_types(value):
    with pytest.raises(InputError, match="--steps: wanted int"):
        TrainConfig(steps=value)


def test_train_config_record_is_json():
    assert json.loads(json.dumps(CHANGED.record())) == CHANGED.record()


@pytest.mark.parametrize(("preset", "millions"), [("demo-300m", 319.9), ("demo-1b", 1176.8), ("124m", 123.6)])
def test_presets_have_the_papers_sizes(preset, millions):
    with torch.device("meta"):
        model = build(resolve(TrainConfig(preset=preset)))
    assert count_parameters(model) / 1e6 == pytest.approx(millions, abs=0.1)
    if preset.startswith("demo"):
        assert not any("norm" in name or "bias" in name for name, _ in model.named_parameters())


def test_beta2_default_depends_on_optimizer():
    assert resolve(TrainConfig(optimizer="demo", update="lion")).beta2 == 0.99
    assert resolve(TrainConfig(optimizer="adamw")).beta2 == 0.95
    assert resolve(TrainConfig(optimizer="adamw", beta2=0.9)).beta2 == 0.9
    assert not {"beta1", "beta2", "eps"} & TrainConfig(optimizer="demo").demo_settings().keys()


@pytest.mark.parametrize(
    ("update", "text"),
    [
        ("signum", "signum"),
        ("sgd", "sgd"),
        ("nesterov", "nesterov(beta=0.5)"),
        ("lion", "lion(beta1=0.5, beta2=0.9)"),
        ("adamw", "adamw(beta2=0.9, eps=1e-06)"),
        ("lion(beta1=0.2)", "lion(beta1=0.2)"),
        ("muon", "muon"),
    ],
)
def test_betas_and_eps_reach_the_rule(update, text):
    config = resolve(TrainConfig(optimizer="demo", update=update, beta1=0.5, beta2=0.9, eps=1e-6))
    assert config.demo_settings()["update"] == text
    groups = make_method(config, torch.nn.Linear(3, 3), Team(0, 1, torch.device("cpu"))).optimizer.param_groups
    others = "adamw(beta2=0.9, eps=1e-06)" if update == "muon" else None
    assert [rule_of(group["update"]) for group in groups] == [rule_of(each) for each in (text, others) if each]
    assert rule_of(resolve(TrainConfig(optimizer="demo", update=update)).demo_settings()["update"]) == rule_of(update)


@pytest.mark.parametrize("given", [{"update": "lion", "beta1": 1.0}, {"beta2": 1.0}, {"update": "lion(beta=1)"}])
def test_settings_that_no_rule_takes_are_refused_before_workers_start(given):
    with pytest.raises(InputError, match=r"beta. of (Lion|AdamW) is 1.0; .*0, 1|write its settings as in 'lion"):
        check_settings(resolve(TrainConfig(optimizer="demo", **given)))


@pytest.mark.parametrize(
    ("given", "update", "momentum", "lr"),
    [
        ({}, None, 0.8, 0.015),
        ({"optimizer": "demo"}, "muon", 0.95, 0.02),
        ({"optimizer": "demo", "momentum": 0.9, "lr": 0.1}, "muon", 0.9, 0.1),
        ({"optimizer": "demo", "update": "signum"}, "signum", 0.99, 1e-3),
        ({"optimizer": "demo", "route": "owner"}, "signum", 0.99, 1e-3),
        ({"optimizer": "demo", "update": "sgd"}, "sgd", 0.99, 32.0),
        ({"optimizer": "adamw"}, None, None, 1.5e-3),
    ],
)
def test_momentum_and_lr_defaults_depend_on_update(given, update, momentum, lr):
    config = resolve(TrainConfig(**given))
    assert (config.update, config.momentum, config.lr) == (update, momentum, lr)


@pytest.mark.parametrize("preset", ["tiny", "demo-300m"])
def test_demo_groups_gives_muon_the_inner_matrices(preset):
    with torch.device("meta"):
        model = build(resolve(TrainConfig(preset=preset, vocab_size=300)))
    groups = demo_groups(model, "muon")
    names = {id(p): name for name, p in model.named_parameters()}
    matrices, *rest = [[names[id(p)] for p in group["params"]] for group in groups]
    assert all("_proj" in name for name in matrices)
    assert "model.embed_tokens.weight" in rest[0]
    assert sorted(matrices + rest[0]) == sorted(names.values())
    assert [group.get("update") for group in groups] == ["muon", "adamw"]
    assert len(demo_groups(model, "lion")) == 1


def test_set_lr_scales_the_rate_of_each_group():
    config = resolve(TrainConfig(preset="tiny", vocab_size=300, optimizer="demo"))
    method = make_method(config, build(config), types.SimpleNamespace(world_size=1, sealed=None))
    method.set_lr(0.5)
    assert [group["lr"] for group in method.optimizer.param_groups] == [0.5, 0.1]
    assert [group["update"] for group in method.optimizer.param_groups] == ["muon", "adamw"]

"""`--optimizer local` and `--optimizer muon`: rounds, bytes, checkpoints in the middle of them, and the same split."""

import dataclasses
import json
import types

import pytest
import torch
from rich.filesize import decimal
from test_train_mistakes import refuse
from test_train_resume import goes_on_with, resume_as
from train_runs import STEPS, as_killed, here, metrics, once

import ranks
from demopt import LocalDeMo
from demopt.exchange import SingleRank
from demopt.train import checkpoint, records
from demopt.train.assemble import assemble
from demopt.train.config import InputError, TrainConfig
from demopt.train.folder import RunFolder
from demopt.train.method import Together, check_settings, inner_optimizers, make_method
from demopt.train.model import PRESETS, build, resolve
from demopt.train.published import PUBLISHED
from demopt.train.team import Team

LOCAL = ("--optimizer", "local", "--top-k", "40")
CASES = {
    "local": LOCAL,
    "delay": (*LOCAL, "--delay", "1", "--sync-every", "3", "--outer-momentum", "0.3", "--values", "2-bit"),
    "muon": ("--optimizer", "muon", "--accumulate", "2"),
}
ROUNDS = {"local": [5, 10, 12], "delay": [3, 6, 9, 12]}  # the steps that make a message
ARRIVALS = {"local": [5, 10, 12], "delay": [4, 8, 12]}  # the steps that apply some: with delay before an evaluation


@pytest.fixture(scope="module", params=CASES)
def whole(request, tmp_path_factory, text):
    """An uninterrupted run: its case, its folder and what it printed."""
    flags = CASES[request.param]
    out, result = once(tmp_path_factory, f"whole-{request.param}", lambda out: here(out, text, *flags))
    return request.param, out, result


def test_train_loss_falls_and_every_step_has_all_fields(whole, finished):
    rows = metrics(whole[1])
    assert [row.keys() for row in rows] == [row.keys() for row in metrics(finished[0])]
    assert rows[-1]["val_loss"] < rows[3]["val_loss"]
    assert whole[2].stderr == ""


def test_metrics_bytes_of_local_are_zero_between_rounds(whole):
    case, out, _ = whole
    if case == "muon":
        pytest.skip("sends in every step")
    rows = metrics(out)
    assert [row["step"] for row in rows if row["payload_bytes"]] == ROUNDS[case]
    (message,) = {row["payload_bytes"] for row in rows if row["payload_bytes"]}
    for column in ("sent_bytes", "received_bytes"):
        assert [row["step"] for row in rows if row[column]] == ARRIVALS[case]
        assert sum(row[column] for row in rows) == len(ROUNDS[case]) * message


def test_summary_of_local_counts_rounds_and_means_bytes_over_steps(whole):
    case, out, result = whole
    if case == "muon":
        assert "rounds" not in result.stdout
        return
    count = len(ROUNDS[case])
    (line,) = [line for line in result.stdout.splitlines() if "│ rounds" in line]
    assert [cell.strip() for cell in line.split("│")[2:5]] == [str(count), str(STEPS), f"{STEPS / count:.1f}x"]
    assert "message a round" in result.stdout
    mean = sum(row["sent_bytes"] for row in metrics(out)) / STEPS
    (last,) = [line for line in result.stdout.splitlines() if line.startswith(f"step {STEPS}/{STEPS} ")]
    assert f"{decimal(round(mean))} up" in last
    assert "route gather: " in result.stdout
    assert "owner" not in result.stdout


def test_train_killed_between_rounds_resumes_bit_for_bit(whole, tmp_path):
    _, reference, _ = whole
    resume_as(reference, as_killed(reference, tmp_path / "run"))


def test_resume_with_a_round_in_flight_and_three_workers_goes_on(whole, tmp_path):
    case, out, _ = whole
    if case != "delay":
        pytest.skip("no round is in flight")
    goes_on_with(3, as_killed(out, tmp_path / "run"))


def test_checkpoint_of_local_holds_shared_weights_once_and_the_rest_by_rank(whole):
    case, out, _ = whole
    if case == "muon":
        pytest.skip("replicated")
    path = RunFolder(out).checkpoints / "step-00000009"
    keys = checkpoint.FileSystemReader(path).read_metadata().state_dict_metadata
    assert not [key for key in keys if key.endswith(".shared")]
    parameters = sum(key.startswith("model.model.") for key in keys)
    for rank in (0, 1):
        for name in ("own", "error", *(["start"] if case == "delay" else [])):
            found = [key for key in keys if key.startswith(f"rank{rank}.optimizer.") and key.endswith(f".{name}")]
            assert len(found) == parameters
    assert any("in_flight" in key for key in keys) == (case == "delay")


def test_final_weights_of_local_are_those_of_its_last_checkpoint(whole):
    from safetensors.torch import load_file

    _, out, _ = whole
    saved = load_file(out / "model" / "model.safetensors")
    path = RunFolder(out).checkpoints / f"step-{STEPS:08d}"
    state = {f"model.{name}": torch.empty_like(value) for name, value in saved.items()}
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.load_sharded(state, storage_reader=checkpoint.FileSystemReader(path), no_dist=True)
    for name, value in saved.items():
        assert torch.equal(state[f"model.{name}"], value)


def _loaded(rank, world_size, folder, delay):
    """A run that stops two steps after a round, saved and loaded: its next steps are those of the run that goes on."""
    given = {"optimizer": "local", "preset": "tiny", "vocab_size": 40, "sync_every": 3, "top_k": 9, "delay": delay}
    config = resolve(TrainConfig(**given, workers=world_size))
    team = Team(rank, world_size, torch.device("cpu"))

    def advance(method, model, steps):
        for step in steps:
            method.set_lr(0.01)
            tokens = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))
            method.optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            method.step(looked_at=False)
        return [p.detach().clone() for p in model.parameters()]

    model = build(config)
    method = make_method(config, model, team)
    advance(method, model, range(8))
    before = [p.detach().clone() for p in model.parameters()]
    saved = records.Saved(8, "text", config.record(), 0)
    with method.shared():
        checkpoint.save(folder, saved, model, method.optimizer, team, method.private)
    assert all(map(torch.equal, before, model.parameters()))
    expected = advance(method, model, range(8, 14))

    twin = build(dataclasses.replace(config, seed=7))
    again = make_method(config, twin, team)
    checkpoint.load(records.newest(folder), twin, again.optimizer, team, again.private)
    assert all(map(torch.equal, before, twin.parameters()))
    assert all(map(torch.equal, expected, advance(again, twin, range(8, 14))))


@pytest.mark.parametrize("delay", [0, 1])
def test_checkpoint_between_rounds_gives_each_rank_its_own_weights_back(tmp_path, delay):
    ranks.run(_loaded, 2, tmp_path, delay)


def _method(**given):
    config = resolve(TrainConfig(preset="tiny", vocab_size=40, **given))
    return make_method(config, build(config), types.SimpleNamespace(world_size=1, sealed=None))


def test_local_and_demo_split_parameters_alike():
    demo, local = _method(optimizer="demo"), _method(optimizer="local")
    shapes = [[[p.shape for p in g["params"]] for g in method.optimizer.param_groups] for method in (demo, local)]
    assert shapes[0] == shapes[1]
    assert demo.shares == local.shares == (1.0, 0.2)
    local.set_lr(0.5)
    assert [group["lr"] for group in local.optimizer.param_groups] == [0.5, 0.1]


def test_muon_and_local_have_the_same_inner_settings():
    configs = [resolve(TrainConfig(preset="tiny", vocab_size=40, optimizer=name)) for name in ("local", "muon")]
    settings = []
    for config in configs:
        groups = [group for each in inner_optimizers(build(config), config) for group in each.param_groups]
        settings.append([{name: value for name, value in g.items() if name != "params"} for g in groups])
    assert settings[0] == settings[1]
    assert (settings[0][0]["nesterov"], settings[0][0]["adjust_lr_fn"]) == (True, "match_rms_adamw")
    assert [group["weight_decay"] for group in settings[0]] == [0.1, 0.1]
    assert configs[0].lr == configs[1].lr


def test_together_saves_and_loads_all_optimizers_in_one_state():
    def both():
        parameters = [torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3))]
        inner = [torch.optim.Muon(parameters[:1], lr=0.1), torch.optim.AdamW(parameters[1:], lr=0.1, fused=True)]
        return parameters, Together(inner)

    def steps(parameters, optimizer, numbers):
        for number in numbers:
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            optimizer.step()

    parameters, optimizer = both()
    steps(parameters, optimizer, range(3))
    others, twin = both()
    twin.load_state_dict(json_free(optimizer.state_dict()))
    with torch.no_grad():
        for parameter, other in zip(parameters, others, strict=True):
            other.copy_(parameter)
    twin.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"] = 0.3  # the inner one's group is this one
    steps(parameters, optimizer, range(3, 6))
    steps(others, twin, range(3, 6))
    assert all(map(torch.equal, parameters, others))


def json_free(state):
    """A deep copy, as after saving and loading."""
    return {**state, "state": {n: {k: v.clone() for k, v in e.items()} for n, e in state["state"].items()}}


def test_local_settings_are_arguments_of_local_demo():
    config = resolve(TrainConfig(optimizer="local", sync_every=2, error_decay=0.5))
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, 2))], lr=0.1)
    assert LocalDeMo(inner, process_group=SingleRank(), **config.local_settings()).sync_every == 2
    assert (config.top_k, TrainConfig.optimizer) == (224, "local")
    assert resolve(TrainConfig(optimizer="demo")).top_k == 32


@pytest.mark.parametrize("preset", PUBLISHED)
def test_paper_presets_are_demo_unless_told_and_leave_local_its_own_settings(preset):
    assert assemble({"preset": preset}).optimizer == "demo"
    config = resolve(assemble({"preset": preset, "optimizer": "local"}))
    assert (config.momentum, config.lr, config.chunk, config.steps) == (0.8, 0.015, 64, 23842)
    assert preset in PRESETS


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--optimizer", "adamw", "--top-k", "8"], "--top-k is for --optimizer demo or local, and the optimizer is ad"),
        (["--optimizer", "muon", "--sync-every", "5"], "--sync-every is for --optimizer local, and the optimizer is"),
        (["--optimizer", "local", "--overlap", "2"], "--overlap is for --optimizer demo, and the optimizer is local"),
        (["--optimizer", "local", "--update", "muon"], "--update is for --optimizer demo"),
        (["--optimizer", "adamw", "--momentum", ".9"], "--momentum is for --optimizer demo or local or muon"),
        (["--optimizer", "demo", "--error-decay", ".5"], "--error-decay is for --optimizer local"),
        (["--optimizer", "local", "--route", "owner"], "--route owner carries signs alone"),
        (["--optimizer", "local", "--sync-every", "0"], "--sync-every is 0, wanted at least 1"),
        (["--optimizer", "local", "--error-decay", "1"], "error_decay is 1.0"),
        (["--optimizer", "local", "--outer-lr", "-1"], "lr is -1.0"),
        (["--optimizer", "local", "--outer-momentum", "1"], "outer_momentum is 1.0"),
        (["--optimizer", "local", "--top-k", "5000"], "top_k is 5000"),
        (["--optimizer", "muon", "--momentum", "1.5"], "--momentum is 1.5, wanted at least 0 and less than 1"),
    ],
)
def test_flag_that_does_not_fit_the_optimizer_is_refused(monkeypatch, capsys, tmp_path, flags, told):
    assert told in refuse(monkeypatch, capsys, "--out", tmp_path / "run", *flags)
    assert not (tmp_path / "run").exists()


def test_config_file_of_another_optimizer_is_no_mistake(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(resolve(TrainConfig(optimizer="demo")).record()))
    config = assemble({"optimizer": "adamw"}, tmp_path / "config.json")
    assert (config.optimizer, config.update) == ("adamw", "muon")
    with pytest.raises(InputError, match="--top-k is for"):
        assemble({"optimizer": "adamw", "top_k": 3}, tmp_path / "config.json")
    assert json.loads((tmp_path / "config.json").read_text())["top_k"] == 32


def test_check_settings_takes_every_optimizer():
    for optimizer in ("demo", "local", "muon", "adamw"):
        check_settings(resolve(TrainConfig(optimizer=optimizer)))

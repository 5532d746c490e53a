"""One dataclass of settings for flags, file and record; every mistake is one line that says what and where."""

import errno
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from train_runs import COMMAND, SMALL

from demopt import V1, DeMo, LocalDeMo, cli
from demopt.errors import DemoptError
from demopt.exchange import SingleRank
from demopt.train import checkpoint, team
from demopt.train import method as method_module
from demopt.train.config import (
    SETTINGS,
    InputError,
    SharedInputError,
    TrainConfig,
    assemble,
    check_paths,
    check_same_run,
    config_of,
    resolve,
)
from demopt.train.data import find_files
from demopt.train.loop import Training
from demopt.train.method import check_settings, make_optimizer, refuse_if_too_large
from demopt.train.model import build, count_parameters, save
from demopt.train.out import OutFolder, write_whole
from demopt.train.runs.worker import train_in_folder
from demopt.train.team import pick_device


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
    given, step = {"out": str(tmp_path), "resume_auto": True}, tmp_path / "checkpoints" / "step-00000005"
    first = assemble(given)
    assert (first.resume, first.overwrite) == (False, True)
    (tmp_path / "config.json").write_text(json.dumps(TrainConfig(out=str(tmp_path), steps=7).record()))
    step.mkdir(parents=True)
    assert assemble(given).overwrite  # a save that was interrupted
    (step / ".metadata").touch()
    again = assemble(given)
    assert (again.resume, again.overwrite, again.steps) == (True, False, 7)
    step.symlink_to(step.rename(tmp_path / "elsewhere"))
    assert not assemble(given).overwrite
    with pytest.raises(InputError, match=f"^--resume: {tmp_path}/none holds no run; start one without --resume"):
        assemble({**given, "out": f"{tmp_path}/none", "resume": True})


def test_config_file_may_hold_settings_of_another_optimizer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(resolve(TrainConfig(optimizer="demo", update="lion")).record()))
    config = assemble({"optimizer": "adamw"}, tmp_path / "config.json")
    assert (config.optimizer, config.update) == ("adamw", "lion")
    with pytest.raises(InputError, match="--top-k is for"):
        assemble({"optimizer": "adamw", "top_k": 3}, tmp_path / "config.json")


@pytest.mark.parametrize(
    ("first", "given"),
    [
        ({}, {}),
        ({}, {"optimizer": "adamw"}),
        ({}, {"optimizer": "demo"}),
        ({"optimizer": "demo"}, {"update": "signum"}),
        ({"optimizer": "demo", "update": "sgd"}, {"optimizer": "local"}),
        ({}, {"preset": "medium"}),
        ({}, {"preset": "124m"}),
        ({"preset": "124m"}, {"preset": "tiny"}),
        ({}, {"run": "run"}),
        ({}, {"epochs": 2}),
        ({}, {"tokenizer": "mine"}),
        ({}, {"model": "model"}),
        ({}, {"model": "model", "lora": 2}),
        ({"model": "model"}, {"model": "other"}),
        ({"model": "model", "lora": 2}, {"model": "other"}),
    ],
)
def test_flag_that_decides_defaults_takes_its_own_beside_the_record_of_a_run(first, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in (("model", 300), ("other", 400)):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps({"vocab_size": rows, "max_position_embeddings": rows}))
    record = resolve(TrainConfig(**first, seed=5))
    Path("record.json").write_text(json.dumps({**record.record(), "vocab_size": record.vocab_size or 256}))  # of bytes
    expected = resolve(TrainConfig(**{**first, **given}, seed=5))
    of_bytes = expected.vocab_size is record.vocab_size is None and expected.tokenizer == "bytes"
    expected = replace(expected, vocab_size=256 if of_bytes else expected.vocab_size)
    assert resolve(assemble(given, Path("record.json"))) == expected
    chosen = {"lr": 0.5, "sequence": 32, "top_k": 7}
    Path("record.json").write_text(json.dumps({**record.record(), **chosen}))
    assert {name: getattr(assemble(given, Path("record.json")), name) for name in chosen} == chosen
    Path("mine.json").write_text(json.dumps({"lr": record.lr, "optimizer": record.optimizer}))
    assert assemble(given, Path("mine.json")).lr == record.lr


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


def test_defaults_are_those_of_the_library():
    local = {name for name, about in SETTINGS.items() if about["fits"] == ("local",)}
    shared = (*local - {"global_batch"}, "top_k")  # global_batch is the trainer's
    for kind, optimizer, names in (("local", LocalDeMo, shared), ("demo", DeMo, ["top_k"])):
        ours, library = resolve(TrainConfig(optimizer=kind)).record(), inspect.signature(optimizer).parameters
        assert {name: ours[name] for name in names} == {name: library[name].default for name in names}


@pytest.mark.parametrize(
    ("optimizer", "kind", "factors"),
    [("local", LocalDeMo, [1.0, 1.0]), ("demo", DeMo, [1.0, 0.2]), ("adamw", torch.optim.AdamW, [1.0])],
)
def test_every_optimizer_is_built_at_rate_1_times_its_factors(optimizer, kind, factors):
    config = resolve(TrainConfig(preset="tiny", vocab_size=40, optimizer=optimizer))
    check_settings(config)
    made = make_optimizer(config, build(config), SingleRank())
    assert (type(made), [group["lr"] for group in made.param_groups]) == (kind, factors)
    Training.set_lr(Mock(optimizer=made, factors=factors), 0.5)
    assert [group["lr"] for group in made.param_groups] == [0.5 * factor for factor in factors]
    assert {group["weight_decay"] for group in made.param_groups} == {0.0 if optimizer == "demo" else 0.1}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--steps", "0"], "--steps is 0; it must be greater than or equal to 1"),
        (["--lr", "nan"], "--lr is nan; it must be a finite number"),
        (["--sync-every", "99999999999999999999"], "; it must be less than or equal to 1000000000000"),
        (["--layers", "1000000000"], "--layers is 1000000000; it must be less than or equal to 10000"),
        (["--workers", f"1{'0' * 400}"], "it must be less than or equal to 1000000000000"),
        (["--run", "a\udcff"], r"--run is 'a\udcff': not utf-8"),
        (["--preset", "huge"], "--preset is 'huge'; choose one of 'tiny', 'small'"),
        (["--optimizer", "sgd"], "--optimizer is 'sgd'; it must be 'local', 'demo' or 'adamw'"),
        (["--heads", "5"], "--width is 192; it must be an even multiple of --heads 5"),
        (["--device", "cuda"], "--device cuda: this torch has cpu here; take one"),
        (["--device", "mps", "--optimizer", "demo"], "--device mps takes --optimizer local"),
        (["--epochs", "1", "--steps", "7"], "leave out --steps or --epochs"),
        (["--global-batch", "5", "--top-k", "9"], "--global-batch does not go with --top-k"),
        (["--key-file", "run.key"], "--key-file is for a run in a folder, which --run names"),
        (["--colour", "red"], "No such option"),
        (["--steps"], "requires an argument (see demopt train --help)"),
        (["--steps", "x"], "got 'x'"),
        (["--lr=1e-3y"], "got '1e-3y'"),
        (["--data=~/no/such"], f"--data {Path.home()}/no/such: no such file"),
        (["--stpes", "3"], "--steps"),  # in words that differ from one version of typer to another
        (["--values", "2bit"], "did you mean '2-bit'?"),
        (["--tracker", "wanbd"], "did you mean 'wandb'?"),
        (["--config", "no/such.json"], "config file no/such.json: No such file"),
        (["--run", ""], "--run is empty: is the variable set?"),
        (["--run="], "--run= is empty"),
        (["--run", "here", "--out", "./here/"], "--out here would replace --run"),
        (["--out", "x" * 300], "File name too long"),
        (["--out", "a\udcff"], r"--out is 'a\udcff': not utf-8; rename it, or set LC_ALL"),
        (["--resume"], "holds no run; start one without --resume"),
        (["--values", "morse"], "--optimizer local: values is 'morse'; choose one of"),
        (["--outer-momentum", "1"], "outer_momentum is 1.0"),
        (["--optimizer", "demo", "--update", "lion(beta=1)"], "--optimizer demo: "),
        (["--optimizer", "adamw", "--top-k", "8"], "--top-k is for --optimizer demo or local; the optimizer is adamw"),
        (["--optimizer", "demo", "--delay", "1"], "--delay is for --optimizer local; the optimizer is demo"),
    ],
)
def test_train_refuses_bad_flags(command, tmp_path, flags, told):
    assert told in command("train", "--out", tmp_path / "run", *flags, code=2)
    assert not (tmp_path / "run").exists()


def test_address_is_no_path_that_this_machine_could_refuse(monkeypatch):
    with monkeypatch.context() as windows:
        windows.setattr(os, "stat", Mock(side_effect=OSError(errno.EINVAL, "The filename syntax is incorrect")))
        check_paths({"run": "s3://bucket/mine"})


@pytest.mark.parametrize("name", ["out", "data", "model", "tokenizer"])
def test_folder_that_may_not_be_entered_is_told(name, tmp_path, monkeypatch):
    given = {name: [str(tmp_path)] if name == "data" else str(tmp_path)}
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path) and mode == os.X_OK)
    for resume in {False, name == "out"}:
        with pytest.raises(InputError, match=f"^--{name} {tmp_path}: Permission denied$"):
            assemble({**given, "resume": resume})
    config_of(given, elsewhere=True)


def test_paths_of_a_run_of_another_machine_may_be_where_nobody_may_look_here(monkeypatch):
    theirs = {"data": ["/root/text.txt"], "model": "/root/model"}
    with monkeypatch.context() as denied:
        denied.setattr(os, "stat", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
        check_same_run(TrainConfig(), "text", theirs, "text", "the run in x", "")
        with pytest.raises(InputError, match=r"--data /root/text\.txt: Permission denied"):
            config_of(theirs)
    with pytest.raises(InputError, match=r"--model a{200}: File name too long"):
        config_of({"model": "a" * 5000}, elsewhere=True)


@pytest.mark.parametrize(
    ("name", "place"),
    [("run", "file://{}"), ("run", "{}/model/run"), ("model", "{}/model"), ("tokenizer", "{}/model"), ("data", "{}"),
     ("data", "{}/checkpoints/text"), ("key_file", "{}/wandb/key")],
)  # fmt: skip
def test_overwriting_a_run_deletes_nothing_that_the_new_one_reads(tmp_path, name, place):
    place = place.format(tmp_path)
    config = TrainConfig(out=f"{tmp_path}/x/..", overwrite=True, **{name: [place] if name == "data" else place})
    with pytest.raises(InputError, match=f"would replace --{name.replace('_', '-')} .*; give another --out"):
        OutFolder(Path(config.out)).refuse_if_taken(config)
    for folder in (tmp_path / "bytes", Path()):
        OutFolder(folder).refuse_if_taken(replace(config, tokenizer="bytes"))


def test_pipe_and_device_are_told_from_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(InputError, match="a pipe or a device, which is read once"):
            find_files(TrainConfig(data=[str(place)]))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["config.json", "model", "wandb", "state.pt", "checkpoints"])
def test_folder_that_holds_what_is_of_no_run_is_left_as_it_is(tmp_path, name, overwrite):
    place = tmp_path / name
    place.write_text('{"model_type": "llama", "vocab_size": 300}') if name == "config.json" else place.mkdir()
    told = pytest.raises(InputError, match=f"holds {name}, and no run that it is of")
    with told, OutFolder(tmp_path).claimed(TrainConfig(overwrite=overwrite)):
        pass
    assert place.exists()


def test_overwriting_a_run_empties_its_folders_on_other_disks_but_follows_no_link_in_them(tmp_path):
    out, disk = OutFolder(tmp_path / "run"), tmp_path / "disk"
    (disk / "step-00000012").mkdir(parents=True)
    (disk / "step-00000012" / ".metadata").touch()
    (disk / "step-latest").symlink_to(disk / "step-00000012")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    (disk / "mine").symlink_to(tmp_path / "mine")
    with out.claimed(TrainConfig()):
        out.checkpoints.symlink_to(disk)
        out.model.mkdir()
    with out.claimed(TrainConfig(overwrite=True)):
        assert (checkpoint.whole(out.checkpoints), [*disk.iterdir()]) == ([], [])
        assert (out.checkpoints.is_symlink(), out.model.exists()) == (True, False)
    assert (tmp_path / "mine" / "notes").exists()


def test_folder_of_a_run_that_cannot_be_emptied_is_told(tmp_path, monkeypatch):
    out = OutFolder(tmp_path)
    with out.claimed(TrainConfig()):
        (out.checkpoints / "step-00000012").mkdir(parents=True)
    monkeypatch.setattr(os, "rmdir", Mock(side_effect=OSError(errno.EBUSY, "Device or resource busy")))
    with pytest.raises(InputError, match="busy"), out.claimed(TrainConfig(overwrite=True)):
        pass


@pytest.mark.parametrize("overwrite", [False, True])
def test_stop_file_counts_if_it_is_newer_than_the_command(tmp_path, overwrite):
    config = TrainConfig(resume=not overwrite, overwrite=overwrite)
    with OutFolder(tmp_path).claimed(TrainConfig()):
        (tmp_path / "stop").touch()
        os.utime(tmp_path / "stop", (1, 1))
    old, new = OutFolder(tmp_path), OutFolder(tmp_path)
    with old.claimed(config):
        assert not old.stop.exists()
    for _ in range(2):  # made, then touched again
        new.stop.touch()
        with new.claimed(config):
            assert new.stop.exists()


def test_stop_file_that_comes_before_the_run_is_no_other_runs(tmp_path):
    out = OutFolder(tmp_path)
    out.stop.touch()
    with out.claimed(TrainConfig()):
        assert out.stop.exists()
    out.config.unlink()
    told = pytest.raises(InputError, match="holds stop, and no run that it is of")
    with told, OutFolder(tmp_path).claimed(TrainConfig()):
        pass


@pytest.mark.parametrize("how", ["resume", "resume_auto", "overwrite"])
def test_run_whose_checkpoints_are_on_a_disk_that_is_away_is_left_as_it_is(how, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TrainConfig(out=str(tmp_path)).record()))
    (tmp_path / "checkpoints").symlink_to(tmp_path / "away")
    with pytest.raises(InputError, match="checkpoints is a link to nothing; is its disk mounted"):
        assemble({"out": str(tmp_path), how: True})


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", ["identity", "state.pt", "metrics.jsonl", "loss.svg"])
def test_what_is_no_file_in_the_place_of_one_is_named(tmp_path, name, make):
    out = OutFolder(tmp_path)
    with out.claimed(TrainConfig()):
        make(tmp_path / name)
    out.merged.symlink_to(out.merged)  # a link to itself has no place that could be one of the run's sources
    with pytest.raises(InputError, match=f"{name} is no file; delete it"):
        out.refuse_if_taken(TrainConfig(resume=True))
    out.refuse_if_taken(TrainConfig(overwrite=True))


def test_stop_on_a_share_that_is_away_for_a_moment_asks_for_nothing(tmp_path, monkeypatch):
    out = OutFolder(tmp_path)
    out.stop.touch()
    assert out.asks_to_stop
    with monkeypatch.context() as away:
        away.setattr(os, "stat", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
        assert not out.asks_to_stop


def test_disk_that_takes_no_files_is_told(tmp_path):
    with pytest.raises(DemoptError, match="cannot be written: No such file"), OutFolder(tmp_path / "gone").writing():
        write_whole(tmp_path / "gone/state.pt", lambda aside: torch.save({}, aside))
    (tmp_path / "model").write_text("mine")
    with pytest.raises(DemoptError, match="cannot be written: File exists"), OutFolder(tmp_path).writing():
        save(TrainConfig(), None, tmp_path / "model")
    for size in (9, 3_000_000):  # torch fails in two ways
        with pytest.raises(DemoptError, match="is its disk full"), OutFolder(tmp_path).writing():
            torch.save(torch.zeros(size), "/dev/full")


@pytest.mark.parametrize(
    ("find", "told"), [("os.getcwd", "current folder is gone"), ("tempfile.gettempdir", "set TMPDIR to one")]
)
def test_folder_that_every_process_needs_is_told(monkeypatch, find, told):
    monkeypatch.setattr(find, Mock(side_effect=FileNotFoundError))
    monkeypatch.setattr(cli, "tell", lambda text, code: (text, code))
    text, code = cli._run(["status", "/run"])
    assert (told in text, code) == (True, 2)


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_device_is_one_that_torch_has_and_auto_takes_cuda(kind, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert pick_device(kind, 1, 2) == torch.device(kind, 1)
    assert pick_device("auto", 1, 2) == (torch.device("cuda", 1) if kind == "cuda" else torch.device("cpu"))
    assert pick_device("cpu", 1, 9) == torch.device("cpu")
    with pytest.raises(InputError, match="3 workers but 2 GPUs"):
        pick_device(kind, 0, 3)
    other = "xpu" if kind == "mps" else "mps"
    with pytest.raises(InputError, match=f"--device {other}: this torch has cpu and {kind} here"):
        pick_device(other, 0, 1)


def test_mistake_in_the_flags_comes_before_anything_is_said_to_start(capsys):
    with pytest.raises(InputError, match="--preset is 'huge'"):
        cli._train(TrainConfig(preset="huge"))
    assert capsys.readouterr().out == ""


def test_out_of_a_run_on_a_share_that_is_away_is_of_no_other_run(tmp_path, monkeypatch):
    def exists(place, real=Path.exists):
        if place.name == "away":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(place)

    config = TrainConfig(run=str(tmp_path / "run"), out=str(tmp_path / "out"), preset="tiny")
    (tmp_path / "out").mkdir()
    written = {"run": str(tmp_path / "away"), "optimizer": "local"}
    (tmp_path / "out" / "config.json").write_text(json.dumps(written))
    monkeypatch.setattr(Path, "exists", exists)
    with pytest.raises(InputError, match=f"^--out {tmp_path / 'out'} already holds a run"):
        train_in_folder(config)
    with pytest.raises(DemoptError, match="away: the disk does not answer"):
        train_in_folder(replace(config, run=str(tmp_path / "away")))


def test_model_that_cannot_fit_is_refused_with_its_memory_before_anything_is_read(tmp_path, monkeypatch):
    huge = {"layers": 2, "width": 8192, "heads": 64, "mlp": 32768, "out": str(tmp_path / "run")}  # 2.1 G parameters
    config = resolve(TrainConfig(**huge, preset="tiny", data=["nowhere"], workers=2))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2**23, "SC_PAGE_SIZE": 4096}.get)  # 34 GB
    cpu = torch.device("cpu")
    folder = replace(config, workers=1, run=str(tmp_path / "store"))
    for refuse in (lambda: refuse_if_too_large(config, cpu, 2), lambda: train_in_folder(folder)):
        with pytest.raises(InputError, match=r"^--preset tiny does not fit: memory about 43.. GB: weights 8.6 GB"):
            refuse()
    built = Mock(wraps=method_module.build)
    monkeypatch.setattr(method_module, "build", built)
    with pytest.raises(InputError, match="does not fit"):
        refuse_if_too_large(replace(config, layers=200), cpu, 2)
    assert max(call.args[0].layers for call in built.mock_calls) < 200, "as many layers take long to build"
    small = resolve(TrainConfig(preset="tiny"))
    refuse_if_too_large(small, cpu, 2)
    with pytest.raises(InputError, match=r"activations 838.4 GB; .* take a smaller model, a smaller --batch"):
        refuse_if_too_large(replace(small, batch=10**6), cpu, 1)
    refuse_if_too_large(replace(small, batch=1, sequence=1 << 16), cpu, 1)  # .9 GB; 34 with a mask, which none needs
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2**40, "SC_PAGE_SIZE": 4096}.get)
    with pytest.raises(InputError, match=r"a message would have .* bytes"):
        refuse_if_too_large(replace(config, width=32768, mlp=131072), cpu, 1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "content", "told"),
    [
        *(("--out {}/run --config {}/config.json", content, told) for content, told in [
            ('{"stpes": 3}', "unknown setting 'stpes'; did you mean 'steps'?"),
            ('{"sync-every": 3}', "did you mean 'sync_every'?"),
            ('\ufeff{"steps": "3"}', "config.json: --steps is '3'; it must be a valid integer"),
            ('{"data": [1]}', "--data is 1; it must be a valid string"),
            *(("[1]", "wanted settings by name, got list"), ("{", "config file")),
        ]),
        *(("--resume --out {}", content, "delete it, or give another --out") for content in ("", "[]", "{")),
    ],
)  # fmt: skip
def test_bad_config_file_and_damaged_record_of_out_are_told(command, tmp_path, flags, content, told):
    (tmp_path / "config.json").write_text(content)
    assert told in command("train", *flags.format(tmp_path, tmp_path).split(), code=2)


def test_train_refuses_out_that_holds_a_run_or_is_not_writable(command, tmp_path, finished, text):
    told = command("train", *SMALL, "--data", text, "--out", finished[0], code=2)
    assert "already holds a run; go on with --resume, replace it with --overwrite" in told
    told = command("train", "--out", finished[0], "--resume", "--overwrite", code=2)
    assert "--overwrite deletes the run that --resume continues" in told
    (tmp_path / "run").write_text("")
    out = OutFolder(tmp_path / "run/run")
    with pytest.raises(InputError, match="cannot be written: Not a directory"), out.claimed(TrainConfig()):
        pass
    (tmp_path / "start").mkdir()
    for place in (tmp_path, tmp_path / "start", tmp_path / "rounds/00000001"):
        assert "is in the folder of a run" in command("train", "--out", place, "--overwrite", code=2)
    told = command("train", "--out", tmp_path / "new/moments", "--run", tmp_path / "new", code=2)
    assert "is in the folder of a run" in told
    assert not (tmp_path / "new").exists()


def test_out_on_a_disk_without_locks_is_used_and_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with OutFolder(tmp_path / "out").claimed(TrainConfig()):
        pass
    assert "not locked against a second run: No locks available" in capsys.readouterr().err


def test_resume_refuses_another_run(tmp_path, finished):
    *_, newest = checkpoint.whole(shutil.copytree(finished[0] / "checkpoints", tmp_path / "checkpoints"))
    saved, record, text = checkpoint.read(newest), newest / "run.json", "the text or tokenizer here is not that of the "
    config = config_of(saved.settings)
    assert checkpoint.find(newest.parent, config, saved.fingerprint) == (newest, saved)
    for change, told in (
        ({"width": 128}, "--width is 128, and the run in"),
        ({"optimizer": "adamw"}, " has demo; go on with the same settings or start anew in another --out"),
        ({}, text),
    ):
        with pytest.raises(InputError, match=re.escape(told)):
            checkpoint.find(newest.parent, replace(config, **change), "of another text")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"fingerprint": None}))
    with pytest.raises(InputError, match=text):
        checkpoint.find(newest.parent, config, saved.fingerprint)
    (tmp_path / "step-00000003").mkdir()  # a save that was interrupted
    with pytest.raises(InputError, match="holds no whole checkpoint"):
        checkpoint.find(tmp_path, config, saved.fingerprint)


def test_mistake_that_workers_find_is_one_line_and_leaves_out_free(tmp_path):
    flags = [*SMALL, "--data", "nowhere.txt", "--out", tmp_path / "a"]
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "reading nowhere.txt, starting 2 workers ...\n")
    assert done.stderr == "demopt: --data nowhere.txt: no such file or folder\n"
    assert not (tmp_path / "a").exists()


def test_command_line_without_typer_says_what_to_install():
    program = "import sys; sys.modules['typer'] = None; from demopt.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "train"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("demopt: typer is missing; install the command line with: pip install '.[train]'")


def test_under_torchrun_a_run_in_a_folder_is_refused_after_the_address_of_the_first_worker(monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "10.0.0.1\x1b"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SharedInputError, match="--run needs no torchrun"):
        cli._train(TrainConfig(run="folder"))
    assert "waiting for all 2 workers at 10.0.0.1\\x1b:29500 ..." in capsys.readouterr().out


@pytest.mark.parametrize("given", [{}, {"WORLD_SIZE": "1"}])
def test_rank_that_nobody_has_set_for_a_run_is_told(given, monkeypatch):
    names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", **given}.items():
        monkeypatch.setenv(name, value)
    absent = ", ".join(name for name in names if name not in given)
    with pytest.raises(InputError, match=f"^RANK is set, as by torchrun, but not {absent}; start .*, or unset RANK$"):
        cli._train(TrainConfig())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
            for value in ("1.5", "-1", "x")
        ),
        *(("RANK", "2"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "3"), ("MASTER_PORT", "65536")),
    ],
)
def test_place_under_torchrun_that_is_no_number_in_range_is_refused(name, value, monkeypatch):
    whole = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
    for each, usual in {**whole, name: value}.items():
        monkeypatch.setenv(each, usual)
    with pytest.raises(InputError, match=f"^{name} is '{value}', expected a whole number from . to .*; start the work"):
        cli._train(TrainConfig())


def test_master_address_that_no_host_can_have_is_on_another_machine(monkeypatch):
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "1"), ("MASTER_ADDR", "a..b")):
        monkeypatch.setenv(name, value)
    assert team._spans_machines()


def test_line_about_a_long_value_is_cut_and_ends_with_the_remedy(command):
    told = command("train", "--lora", "x" * 70_000, code=2)
    assert len(told) < 2200
    assert told.startswith("demopt: Invalid value for '--lora': ")
    assert told.endswith("x' (see demopt train --help)\n")


def test_mistyped_command_and_flags_of_other_programs_are_answered_with_those_meant(command):
    assert "id you mean 'train'?" in command("trian", code=2)
    for other, ours in (("--learning-rate", "--lr"), ("--output-dir", "--out")):
        told = " ".join(command("train", other, "1", code=2).split())
        assert re.search(f"{other}.*; here it is {ours} \\(see", told)

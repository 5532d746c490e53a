"""The model card, the tables at the end, and the upload to the hub, which fails without losing anything."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys

import huggingface_hub
import pytest
import typer
from huggingface_hub import constants
from train_runs import COMMAND, LIMIT, metrics

from demopt.train import hub, summary
from demopt.train.assemble import assemble, read_file
from demopt.train.card import command, model_card
from demopt.train.config import InputError, TrainConfig, differences
from demopt.train.curve import read_curve
from demopt.train.folder import RunFolder
from demopt.train.model import resolve
from demopt.train.options import config_command
from demopt.train.processes import RunError


def config_of(out):
    return TrainConfig(**read_file(out / "config.json"))


@pytest.fixture(params=["finished", "finished_adamw"])
def out(request):
    return request.getfixturevalue(request.param)[0]


def test_model_card_says_what_how_and_from_what(out):
    card, rows, curve = RunFolder(out).card.read_text(), metrics(out), read_curve(RunFolder(out).curve)
    front, _, body = card.removeprefix("---\n").partition("---\n")
    assert "library_name: transformers" in front
    assert "pipeline_tag: text-generation" in front
    assert curve.fingerprint in body
    assert f"| {rows[-1]['tokens']:,} |" in body
    assert f"| final validation loss, nats a byte | {rows[-1]['val_loss']:.4f} |" in body
    counted = "computed" if "adamw" in out.name else "counted"
    assert f"uploaded by one worker, {counted} | {sum(row['sent_bytes'] for row in rows):,} bytes" in body
    assert f"    {command(config_of(out))}\n" in body
    assert json.loads(body.partition("```json\n")[2].partition("```")[0]) == curve.settings


def test_model_card_names_no_path(out):
    assert str(out.parent) not in RunFolder(out).card.read_text()
    assert "/tmp" not in RunFolder(out).card.read_text()


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--preset tiny --steps 20 --lr 0.5 --workers 3 --no-compile",
        "--optimizer demo",
        "--optimizer demo --route owner --no-exact",
        "--optimizer demo --update lion --momentum 0.5",
        "--optimizer adamw --vocab-size 300 --compile",
        "--preset demo-300m",
        "--preset demo-300m --optimizer adamw --beta2 0.9",
        "--prompt 'a b' --sync-every 3 --data elsewhere --tokenizer other --text-field body",
    ],
)
def test_command_of_a_card_gives_the_same_run(flags):
    def parsed(words):
        seen = []
        app = typer.Typer()
        app.command()(config_command(lambda config: seen.append(config) or 0, "help"))
        typer.main.get_command(app).main(words, standalone_mode=False)
        return resolve(seen[0])

    config = parsed(shlex.split(flags))
    again = shlex.split(command(config))
    assert again[:2] == ["demopt", "train"]
    assert differences(config.record(), parsed(again[2:]).record()) == []
    assert parsed(again[2:]).workers == config.workers
    assert parsed(again[2:]).data == config.data


def test_command_of_a_default_run_is_short():
    assert command(resolve(TrainConfig(workers=2, vocab_size=256))) == "demopt train --workers 2"
    assert command(resolve(assemble({"optimizer": "demo"}))) == "demopt train --optimizer demo"


def tables(out, monkeypatch, **changes):
    """The cells of the tables at the end, by column."""
    seen = []
    monkeypatch.setattr(summary.Console, "print", lambda _, table: seen.append(table))
    rows = [{**row, **changes} for row in metrics(out)]
    summary.print_table(rows, config_of(out), 1000, 1.0)
    return [{column.header: list(column.cells) for column in table.columns} for table in seen]


def test_tables_have_no_blank_cell_and_say_what_was_measured(out, monkeypatch):
    measured, traffic = tables(out, monkeypatch)
    for table in (measured, traffic):
        assert all(cell.strip() for column in table.values() for cell in column)
    assert list(measured) == ["measured", "this run"]
    if "adamw" in out.name:
        assert list(traffic) == ["bytes of one worker, each way", "computed, not counted"]
    else:
        assert list(traffic) == ["bytes of one worker", "this run, counted", "dense, computed", "ratio"]


def test_tables_of_one_worker_leave_bytes_out(finished, monkeypatch):
    assert len(tables(finished[0], monkeypatch, sent_bytes=0, received_bytes=0)) == 1


def test_hub_check_refuses_before_the_run(monkeypatch):
    config = TrainConfig(push_to_hub="me/model", online=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    hub.check(TrainConfig())
    for changes, told in (
        ({"online": False}, "--push-to-hub me/model needs the network; add --online"),
        ({"push_to_hub": "a/b/c"}, "--push-to-hub a/b/c: "),
        ({}, "--push-to-hub me/model: not logged in; run hf auth login, or set HF_TOKEN"),
    ):
        with pytest.raises(InputError) as error:
            hub.check(dataclasses.replace(config, **changes))
        assert str(error.value).startswith(told)
        assert "\n" not in str(error.value)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    hub.check(config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set"):
        hub.check(config)


class FakeApi:
    """Stands for huggingface_hub.HfApi."""

    error: BaseException | None = None
    calls: list = []  # noqa: RUF012

    def create_repo(self, name, **how):
        self.calls.append((name, how))
        return huggingface_hub.RepoUrl(f"https://huggingface.co/me/{name}")

    def upload_folder(self, **how):
        if self.error:
            raise self.error
        self.calls.append(sorted(path.name for path in how["folder_path"].iterdir()))
        self.calls.append(how["repo_id"])


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    monkeypatch.setattr(FakeApi, "calls", [])
    return FakeApi


def test_push_uploads_model_and_card_to_a_private_repository(finished, api, capsys):
    hub.push(TrainConfig(), RunFolder(finished[0]))
    assert api.calls == []
    hub.push(TrainConfig(push_to_hub="model"), RunFolder(finished[0]))
    (name, how), files, place = api.calls
    assert (name, how, place) == ("model", {"private": True, "exist_ok": True}, "me/model")
    assert {"README.md", "model.safetensors", "config.json", "tokenizer.json"} <= set(files)
    assert "the model is at https://huggingface.co/me/model" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "code"), [(OSError("no route\nto host"), 1), (KeyboardInterrupt(), 130)])
def test_push_that_fails_says_so_in_one_line_and_loses_nothing(finished, api, monkeypatch, error, code):
    monkeypatch.setattr(api, "error", error)
    before = sorted(path.name for path in RunFolder(finished[0]).model.iterdir())
    with pytest.raises(RunError) as told:
        hub.push(TrainConfig(push_to_hub="model"), RunFolder(finished[0]))
    assert told.value.code == code
    assert "\n" not in str(told.value)
    assert f"Again with: hf upload model {RunFolder(finished[0]).model} --private" in str(told.value)
    assert sorted(path.name for path in RunFolder(finished[0]).model.iterdir()) == before


def test_run_that_cannot_reach_the_hub_ends_whole(tmp_path, text):
    """The real command and the real library, at an address where nothing listens."""
    flags = "--preset tiny --layers 1 --sequence 32 --batch 2 --steps 2 --warmup 1 --sample-tokens 0 --threads 1"
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hf_x", "HF_HOME": str(tmp_path / "home")}
    env.pop("HF_HUB_OFFLINE", None)  # a test before this one may have loaded a tokenizer here
    out = tmp_path / "run"
    command = [*COMMAND, *flags.split(), "--data", str(text), "--out", str(out), "--push-to-hub", "me/m", "--online"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=env)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("demopt: --push-to-hub: ")
    assert done.stderr.count("\n") == 1
    folder = RunFolder(out)
    for path in (folder.card, folder.plot, folder.curve, folder.model / "model.safetensors"):
        assert path.exists()
    assert len(metrics(out)) == 2


def test_card_of_a_run_with_a_name_on_the_hub_carries_it(finished):
    curve = read_curve(RunFolder(finished[0]).curve)
    config = dataclasses.replace(config_of(finished[0]), push_to_hub="me/model")
    assert 'from_pretrained("me/model")' in model_card(config, metrics(finished[0]), curve, 1000)


START = """
import builtins, sys
tell = builtins.print
def first(*words, **how):
    tell(*words, "torch" in sys.modules)
    raise SystemExit
builtins.print = first
import demopt.cli
sys.argv = ["demopt", "train", "--workers", "2", "--data", "nowhere.txt"]
demopt.cli.main()
"""


def test_train_says_what_it_reads_before_it_imports_torch(tmp_path):
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT)
    assert done.stdout == "reading nowhere.txt, starting 2 workers ... False\n"

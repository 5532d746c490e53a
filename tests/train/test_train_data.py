"""Tokens, the split, batches that depend only on seed, step and rank; epochs, each sequence once; parts by speed."""

import errno
import hashlib
import json
import math
import os
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import hypothesis
import numpy as np
import pytest
import torch
import train_runs
from hypothesis import strategies as st
from train_runs import metrics

import forked
from demopt import fit_batches
from demopt.errors import DemoptError
from demopt.exchange import SingleRank
from demopt.train import data
from demopt.train.checkpoint import CheckpointRecord
from demopt.train.config import InputError, TrainConfig, resolve
from demopt.train.data import Corpus, Tokens, load_tokenizer, numbered, sequences
from demopt.train.loop import learning_rate
from demopt.train.team import Team
from demopt.train.worker import Connected

CONFIG = TrainConfig(sequence=16, batch=3)


def test_documents_default_to_stdlib_without_tests():
    texts = [text for file in data.find_files(TrainConfig())[0] for text in data.documents(file)]
    assert len(texts) > 300
    assert any(b"def namedtuple" in text for text in texts)


def test_corpus_ignores_file_names_and_places(tmp_path, text):
    for place in "ab":
        (tmp_path / place).mkdir()
        for number, file in enumerate(sorted(text.iterdir(), reverse=place == "b")):
            (tmp_path / place / f"{place}{number}").write_bytes(file.read_bytes())
    one, other = (data.load_corpus(replace(CONFIG, data=[str(tmp_path / place)])) for place in "ab")
    assert one.fingerprint == other.fingerprint
    assert np.array_equal(one.train.rows[0], other.train.rows[0])


def test_text_that_memory_cannot_hold_is_refused(text, monkeypatch):
    monkeypatch.setattr("pathlib.Path.read_bytes", Mock(side_effect=MemoryError))
    with pytest.raises(
        InputError, match=r"^--data: .*[kM]B.* take more memory than there is; give less, or tokens in a"
    ):
        data.load_corpus(replace(CONFIG, data=[str(text)]))


def test_split_puts_no_document_on_both_sides():
    texts = [bytes([65 + n]) * (10 + n) for n in range(40)] * 2
    train, val = data.split(texts, 0.2)
    assert sorted(train + val) == sorted(set(texts))
    assert 0.1 < sum(map(len, val)) / sum(map(len, set(texts))) <= 0.2


def test_of_few_documents_each_is_cut_and_a_conversation_never_is():
    assert data.split([b"x" * 100], 0.1) == ([b"x" * 90], [b"x" * 10])
    train, val = data.split([b"x" * 100, b"y" * 1000, b"y" * 1000, b"z"], 0.1)
    assert sorted(train) == [b"", b"x" * 90, b"y" * 900]
    assert sorted(val) == [b"x" * 10, b"y" * 100, b"z"]
    chats = [data.Chat(b"x" * length) for length in (100, 50, 70)]
    train, val = data.split(chats, 0.1)
    assert (sorted(train), val) == ([b"x" * 70, b"x" * 100], [b"x" * 50])


def test_conversation_that_validates_is_the_same_in_all_processes():
    chats = [data.Chat(bytes([65 + n]) * 100) for n in range(40)]
    first = min(chats, key=lambda chat: hashlib.blake2b(chat).digest())  # whatever the order of a set is
    assert data.split(chats, 0.01)[1] == [first]


def test_validation_has_a_fifth_of_its_fraction_at_least_where_some_documents_are_large_and_some_small():
    books, notes = ([bytes([65 + n]) * length for n in range(10 * i, 10 * i + 11)] for i, length in ((0, 9000), (2, 9)))
    train, val = data.split(books + notes, 0.05)
    assert sorted(map(len, val)) == [1] * 11 + [450] * 11
    assert sorted(map(len, train)) == [8] * 11 + [8550] * 11
    assert data.split([b"", *books, *books[:9]], 0.1)[1] != [b""]
    train, val = data.split([data.Chat(text) for text in books + notes], 0.05)
    assert sorted(map(len, val)) == [9] * 11 + [9000]
    assert sorted(map(len, train)) == [9000] * 10
    train, val = data.split([data.Chat(text) for text in books[:2] + notes], 0.05)
    assert sorted(map(len, train)) == [9000] * 2  # neither validates: as much would validate as train


def test_files_that_are_mixed_are_all_in_both_parts(tmp_path, text):
    names = ("calendar", "heapq")
    corpus = data.load_corpus(replace(CONFIG, data=[str(text / f"{name}.py") for name in names]))
    for tokens, part in ((corpus.train, 0.95), (corpus.val, 0.05)):
        found = bytes(tokens.rows[0])
        files = [(text / f"{name}.py").read_bytes() for name in names]
        assert len(found) == pytest.approx(part * sum(map(len, files)), rel=0.01)
        assert all((file[:1000] if part > 0.5 else file[-100:]) in found for file in files)


def test_text_may_begin_after_a_long_blank(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\n" * 9000 + b"words")
    assert data.find_files(replace(CONFIG, data=[str(tmp_path)])) == ([tmp_path / "x.txt"], [])


def test_batch_depends_on_seed_step_rank_and_part():
    tokens = data.Tokens((np.arange(5000),))
    first = data.batch(tokens, CONFIG, 1, 0)
    assert first.shape == (3, 17)
    assert np.array_equal(first, data.batch(tokens, CONFIG, 1, 0))
    for other in ((CONFIG, 2, 0, 0), (CONFIG, 1, 1, 0), (CONFIG, 1, 0, 1), (replace(CONFIG, seed=1), 1, 0, 0)):
        assert not np.array_equal(first, data.batch(tokens, *other))


def test_validation_windows_are_shared_out_without_remainder():
    tokens, config = data.Tokens((np.arange(5000),)), replace(CONFIG, eval_sequences=10)
    whole = data.validation_windows(tokens, config, 0, 1)
    parts = [data.validation_windows(tokens, config, rank, 3) for rank in range(3)]
    assert len(whole) == 10
    assert sorted(map(tuple, np.concatenate(parts))) == sorted(map(tuple, whole))
    assert data.validation_windows(tokens, replace(config, eval_sequences=1), 1, 2).shape == (0, 17)
    assert [*data.validation_windows(data.Tokens((np.arange(20),)), config, 0, 1)[:, 0]] == [0, 1, 2, 3]


def test_tokens_windows_stay_in_their_row():
    tokens = data.Tokens((np.arange(4), np.arange(10, 12), np.arange(20, 24)))
    found = [tokens.window(index, 3).tolist() for index in range(tokens.windows(3))]
    assert found == [[0, 1, 2], [1, 2, 3], [20, 21, 22], [21, 22, 23]]


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_token_files_are_read_on_where_one_is_replaced_and_a_change_in_one_ends_the_run(tmp_path, suffix):
    row, files = np.arange(400, dtype=np.uint16), [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        np.save(file, row) if suffix == ".npy" else row.tofile(file)
    corpus = data.load_corpus(replace(CONFIG, data=[*map(str, files)]))
    assert (len(corpus.train), len(corpus.val), corpus.vocab_size) == (760, 40, 400)
    assert corpus.bytes_per_token is None
    before = data.batch(corpus.train, CONFIG, 1, 0)
    for file in files:
        file.rename(file.with_suffix(".aside"))
        file.write_bytes(b"another")  # in its place, as a download does
    assert np.array_equal(data.batch(corpus.train, CONFIG, 1, 0), before)
    for file in files:
        os.replace(file.with_suffix(".aside"), file)
        os.truncate(file, 10)
    with pytest.raises(DemoptError, match="changed since it was opened; put its content back"):
        data.batch(corpus.train, CONFIG, 1, 0)


def test_documents_leaves_out_what_the_run_writes(tmp_path):
    (tmp_path / "text.txt").write_text("some words " * 99)
    config, model = replace(CONFIG, data=[str(tmp_path)], out=str(tmp_path / "runs")), tmp_path / "runs" / "model"
    before = data.load_corpus(config)
    model.mkdir(parents=True)
    (model / "tokenizer.json").write_text("7")
    assert data.load_corpus(config).fingerprint == before.fingerprint
    shutil.copytree(model, tmp_path / "nas" / "run" / "rounds")
    for run in (tmp_path / "nas" / "run", (tmp_path / "nas" / "run").as_uri()):
        assert data.load_corpus(replace(config, run=str(run))).fingerprint == before.fingerprint
    elsewhere = data.load_corpus(replace(config, run="s3://bucket/run")).fingerprint
    assert elsewhere != before.fingerprint
    assert data.load_corpus(replace(config, run=str(tmp_path.parent))).fingerprint == elsewhere, "it has the text, too"
    shutil.rmtree(tmp_path / "nas")
    (tmp_path / ".more").mkdir()
    (tmp_path / ".more" / "text.txt").write_text("other words " * 99)
    (tmp_path / ".more" / "loop").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(".more")
    assert [file.parent.name for file in data.find_files(config)[0]] == ["link", tmp_path.name]
    (tmp_path / "link").unlink()
    for name in ("lost+found_texts", "lost+found"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lost+found.txt").write_text("more words " * 99)
    assert [file.parent.name for file in data.find_files(config)[0]] == ["lost+found_texts", tmp_path.name]
    shutil.rmtree(tmp_path / "lost+found_texts")
    (tmp_path / "text.txt").rename(tmp_path / ".hidden")
    with pytest.raises(InputError, match="it has no file but hidden ones and those of --out and --run"):
        data.load_corpus(config)


@pytest.mark.parametrize("target", ["away", "link"])
def test_link_to_nothing_in_data_is_told_and_not_left_out(target, tmp_path):
    config = replace(CONFIG, data=[str(tmp_path)], out=str(tmp_path / "runs"))
    (tmp_path / "text.txt").write_text("some words " * 99)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(tmp_path / "away")
    assert data.find_files(config)[0] == [tmp_path / "text.txt"]
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(InputError, match=f"^--data {tmp_path}/link: a link to nothing; is its disk mounted"):
        data.find_files(config)


@pytest.mark.parametrize(("call", "name"), [("scandir", "more"), ("stat", "text.txt"), ("scandir", "lost+found")])
def test_part_of_data_that_cannot_be_read_is_told_and_not_left_out(call, name, tmp_path, monkeypatch):
    def denied(place, *given, **more):
        if str(place) == str(tmp_path / name):
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return real(place, *given, **more)

    real, of_root = getattr(os, call), name == "lost+found"  # the file system's own, without text
    (tmp_path / "text.txt").write_text("some words " * 99)
    if call == "scandir":
        (tmp_path / name).mkdir()
    told = pytest.raises(InputError, match=f"^--data {tmp_path / name}: Permission denied")
    with monkeypatch.context() as patch, nullcontext() if of_root else told:
        patch.setattr(os, call, denied)
        data.find_files(replace(CONFIG, data=[str(tmp_path)]))


def test_load_corpus_uses_a_tokenizer_file(tmp_path, text):
    from tokenizers import ByteLevelBPETokenizer

    trainer = ByteLevelBPETokenizer()
    trainer.train([str(file) for file in text.iterdir()], vocab_size=400, show_progress=False)
    trainer.save(str(tmp_path / "tokenizer.json"))
    config = replace(CONFIG, data=[str(text)], tokenizer=str(tmp_path / "tokenizer.json"))
    corpus = data.load_corpus(config)
    assert corpus.vocab_size == 400
    assert 1.3 < corpus.bytes_per_token < 5
    assert len(load_tokenizer(config.tokenizer)) == 400
    latin = tmp_path / "z.txt"
    config = replace(config, data=[str(text), str(latin)])
    latin.write_bytes(b"all in order, then " + "ein Müller".encode("latin-1"))
    with pytest.raises(InputError, match=r"z\.txt: byte 24 of it \(0xfc\) is not UTF-8, .*; write it as UTF-8"):
        data.load_corpus(config)
    latin.write_bytes("cut by head -c: ü".encode()[:-1])
    data.load_corpus(config)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("empty.txt", b"", "no text in it"),
        ("windows.txt", "some words".encode("utf-16"), "UTF-16; write it as UTF-8"),
        ("wide.txt", "some words".encode("utf-32"), "UTF-32; write it as UTF-8"),
        ("packed.txt", b"\xfd7zXZ\0", "compressed; unpack it"),
        ("null.jsonl", b'{"text": null}', r"an object with text \(a string\) .*, got an object with text \(NoneType\)"),
        ("chats.json", b'[\n {"messages": []}]', "chats.json is JSON; write it as JSON lines"),
        ("chats.ndjson", b'{"text": "a"}\n{"text": "b"}', "into a file whose name ends in .jsonl"),
        ("short.txt", b"only a few words", "part has"),
        ("bad.npy", b"not numpy", "not a token file"),
        ("archive.npy", {"one": np.arange(1000)}, "not a token file"),
        ("float.npy", np.zeros(1000), "wanted one row of integers, got float64 of shape"),
        ("negative.npy", np.array([-1, 3] * 400), "holds numbers from -1 to 3; tokens go from 0 to"),
        ("zeros.bin", bytes(9999 * 2), "all of its tokens are 0"),
        ("one_more.npy", np.array([0, 2**24] * 400), "holds numbers from 0 to 16777216; tokens go from 0 to 16777215"),
        ("large.npy", np.array([0, 2**40] * 400), "holds numbers from 0 to 1099511627776"),
    ],
)
def test_load_corpus_refuses_bad_data(tmp_path, name, content, told):
    place = tmp_path / name
    if isinstance(content, dict):
        np.savez(tmp_path / "archive.npz", **content)
        (tmp_path / "archive.npz").rename(place)
    else:
        place.write_bytes(content) if isinstance(content, bytes) else np.save(place, content)
    with pytest.raises(InputError, match=told):
        data.load_corpus(replace(CONFIG, data=[str(place)]))


def test_load_corpus_refuses_mixed_data_a_small_vocabulary_and_a_tokenizer_that_is_none(tmp_path, text):
    with pytest.raises(InputError, match="--vocab-size is 100, but the tokens need 256"):
        data.load_corpus(replace(CONFIG, data=[str(text)], vocab_size=100))
    with pytest.raises(InputError, match="--tokenizer no/such: no such file or folder"):
        data.load_corpus(replace(CONFIG, data=[str(text)], tokenizer="no/such"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="not a tokenizer"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    (tmp_path / "model").mkdir()
    with pytest.raises(InputError, match="has no tokenizer; copy its tokenizer"):
        load_tokenizer(str(tmp_path / "model"))
    np.save(tmp_path / "tokens.npy", np.zeros(1000, np.uint16))
    with pytest.raises(InputError, match="mixes token files"):
        data.load_corpus(replace(CONFIG, data=[str(tmp_path)]))


def test_tokenizer_that_cannot_encode_the_text_is_told(tmp_path, text):
    tokenizers = pytest.importorskip("tokenizers")
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))  # it has no token for unknown words
    bare.save(str(tmp_path / "words.json"))
    with pytest.raises(InputError, match="the tokenizer cannot encode it: WordLevel error"):
        data.load_corpus(replace(CONFIG, data=[str(text)], tokenizer=str(tmp_path / "words.json")))


def test_tokens_that_the_tokenizer_lacks_are_told_and_numbers_may_have_gaps(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"x": 0, "a": 1, "b": 7}, unk_token="x"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.txt").write_text("a b " * 500)
    config = replace(CONFIG, data=[str(tmp_path / "x.txt")], tokenizer=str(tmp_path / "tokenizer.json"))
    assert data.load_corpus(config).vocab_size == 8
    config = replace(config, data=[str(tmp_path / "x.npy")])
    np.save(tmp_path / "x.npy", np.arange(400) % 8)
    assert data.load_corpus(config).vocab_size == 8
    np.save(tmp_path / "x.npy", np.arange(400) % 9)
    with pytest.raises(InputError, match=r"tokenizer\.json has tokens up to 7, and --data holds 8; give the one that"):
        data.load_corpus(config)


def test_model_may_have_a_tokenizer_with_more_tokens_than_rows_unless_the_text_holds_one(tmp_path):
    tokenizer = data.byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.chat_template = "{% for each in messages %}{{ each.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    config = replace(CONFIG, model="mine", tokenizer=str(tmp_path), vocab_size=256)
    for name in ("text.txt", "chats.jsonl"):
        config = replace(config, data=[str(tmp_path / name)])
        for more in ("", "<pad>"):
            lines = [f"{n} {more} some words" for n in range(40)]
            chats = [[{"role": role, "content": line + role} for role in ("user", "assistant")] for line in lines]
            (tmp_path / "text.txt").write_text("".join(lines))
            (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in chats))
            told = "^--model mine: its vocabulary is 256, and the text holds token 256; encode it by the model's own to"
            with pytest.raises(InputError, match=told) if more else nullcontext():
                data.load_corpus(config)


EPOCHS = resolve(TrainConfig(preset="tiny", sequence=8, epochs=2))


def _corpus(number):
    """Tokens whose values are their places, in two rows, each with a rest that fills no sequence."""
    cut = 8 * (number // 3) + 4
    rows = (np.arange(cut), np.arange(cut - 4, 8 * number + 3))
    return Corpus(Tokens(rows), Tokens(rows), 9999, "", None)


@hypothesis.given(st.randoms(use_true_random=True))
@hypothesis.settings(max_examples=200)
def test_every_sequence_is_read_once_per_epoch_by_ranks_whose_number_changes(draw):
    """The ranks' speeds change, too."""
    number, epochs = draw.randint(3, 60), draw.randint(1, 3)
    whole = draw.choice([None, draw.randint(1, 9)])
    config = replace(EPOCHS, epochs=epochs, global_batch=whole, accumulate=1 if whole else draw.randint(1, 2))
    config = replace(config, batch=draw.randint(1, 4), seed=draw.randint(0, 99))
    read, resumed, over = Counter(), None, False
    while not over:
        size = draw.randint(1, 5)
        corpus, cpu = _corpus(number), torch.device("cpu")
        teams = [Team(rank, size, cpu, SingleRank()) for rank in range(size)]
        ranks = [
            Connected(config, None, team, corpus, torch.nn.Linear(1, 1), Mock(param_groups=[]), None, resumed)
            for team in teams
        ]
        for _ in range(draw.randint(1, 8)):
            speeds = {str(rank): draw.uniform(0.1, 9.0) for rank in range(len(ranks))}
            drawn = [rounds.draw() for rounds in ranks]
            over = not drawn[0]
            assert {bool(each) for each in drawn} == {not over}
            for rounds, windows in zip(ranks, drawn, strict=True):
                assert all(len(part) <= config.batch for part in windows)
                read.update(int(window[0]) // 8 for part in windows for window in part if window[1] >= 0)
                rounds.share_out(speeds)
        assert len({(each.number, each.tokens) for each in ranks}) == 1
        resumed = CheckpointRecord(ranks[0].number, "", {}, ranks[0].tokens)
    assert resumed.tokens == 8 * number * epochs
    assert read == Counter(dict.fromkeys(range(number), epochs))


def test_sequences_touch_and_an_epoch_has_an_order_of_its_own():
    tokens, single = _corpus(30).train, replace(EPOCHS, batch=1)
    assert sequences(tokens, EPOCHS) == 30
    orders = [[int(part[0][0]) for part in numbered(tokens, single, range(at, at + 30))] for at in (0, 30)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(0, 240, 8))
    assert orders[0] != orders[1]
    (nothing,) = numbered(tokens, EPOCHS, [])
    assert nothing.shape == (1, 9)
    assert (nothing < 0).all()
    assert learning_rate(EPOCHS, 99, 0.5) == pytest.approx(EPOCHS.lr * (0.1 + 0.9 * 0.5))


@pytest.mark.parametrize("optimizer", ["local", "adamw"])
def test_run_of_an_epoch_goes_on_with_more_workers_where_it_stopped(tmp_path, text, optimizer):
    data = tmp_path / "text.txt"
    data.write_bytes((text / "calendar.py").read_bytes()[:3500])
    more = f"--batch 3 --warmup 3 --workers 2 --epochs 1 --save-every 5 --optimizer {optimizer}"
    more += " --sync-every 3" if optimizer == "local" else ""
    place = ("--data", data, "--out", tmp_path / "run")
    done = forked.demopt("train", *f"{forked.TINY} {more}".split(), *place)
    number = 3325 // 32  # without the twentieth for validation
    assert f"1 epoch of {number} sequences" in done.stdout
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [*range(1, math.ceil(number / 6) + 1)]
    assert (rows[-1]["tokens"], rows[-1]["epoch"], "val_loss" in rows[-1]) == (number * 32, 1.0, True)
    again = train_runs.as_killed(tmp_path / "run", tmp_path / "again", last=18)
    train_runs.resume(again, "--workers", 3)
    rows = metrics(again)
    assert rows[14]["tokens"] == 15 * 6 * 32
    assert [row["tokens"] // 32 for row in rows[15:]] == [99, number]


# Parts by speed: whole, complete, as quick as whole sequences allow, and steady under noise

SPEEDS = st.dictionaries(st.text("abc", min_size=1), st.floats(0.01, 1000), min_size=1, max_size=8)


@hypothesis.given(SPEEDS, st.integers(1, 200))
def test_fitted_batches_have_the_total_and_the_shortest_step(speeds, total):
    batches = fit_batches(speeds, total)
    assert min(batches.values()) >= 1
    assert sum(batches.values()) == max(total, len(speeds))
    slowest = max(batches[worker] / speeds[worker] for worker in speeds)
    quicker = [int(slowest * (1 - 1e-9) * speed) for speed in speeds.values()]  # the most in a shorter step
    assert min(quicker) < 1 or sum(quicker) < sum(batches.values())


@hypothesis.given(SPEEDS, st.integers(8, 200), st.lists(st.floats(0.97, 1.03), min_size=8, max_size=8))
def test_fitted_batches_ignore_noise_and_follow_drift(speeds, total, noise):
    batches = fit_batches(speeds, total)
    noisy = {worker: speed * factor for (worker, speed), factor in zip(speeds.items(), noise, strict=False)}
    assert fit_batches(noisy, total, batches) == batches
    first = next(iter(speeds))
    drifted = {worker: speed * (0.25 if worker == first else 1) for worker, speed in speeds.items()}
    again = fit_batches(drifted, total, batches)
    best = fit_batches(drifted, total)
    assert max(again[w] / drifted[w] for w in again) <= 1.1 * max(best[w] / drifted[w] for w in best)


def test_fitted_batches_of_a_huge_total_come_at_once_and_workers_may_be_named_by_numbers():
    assert fit_batches({"a": 1.0, 2: 3.0}, 1 << 31) == {"a": 1 << 29, 2: 3 << 29}
    assert fit_batches({"b": 5.0, 3: 5.0, "a": 5.0}, 7) == {"b": 2, 3: 3, "a": 2}
    with pytest.raises(ValueError, match="total is 4294967296; it must be at most 4294967295"):
        fit_batches({"a": 1.0}, 1 << 32)


@pytest.mark.parametrize("tolerance", [None, ".1", -1, float("nan"), float("inf"), torch.zeros(2)])
def test_fitted_batches_refuse_an_impossible_tolerance(tolerance):
    with pytest.raises((TypeError, ValueError), match="tolerance is "):
        fit_batches({"a": 1.0}, 4, {"a": 4}, tolerance)


def test_fitted_batches_take_an_unmeasured_worker_for_the_mean():
    assert fit_batches({"a": 10.0, "b": 30.0, "new": 0.0}, 12) == {"a": 2, "b": 6, "new": 4}


@pytest.mark.parametrize("speeds", [{}, {"a": -1.0}, {"a": float("nan")}, {"a": float("inf")}, {"a": 10**400}, [1.0]])
def test_fitted_batches_refuse_what_is_no_speed_and_no_batch(speeds):
    with pytest.raises(ValueError, match="sequences per second"):
        fit_batches(speeds, 4)
    for before, told in (
        ({"a": "few"}, "the batch of a before is 'few'; give a whole"),
        (3, "before is 3; give a map"),
    ):
        with pytest.raises(TypeError, match=told):
            fit_batches({"a": 1.0}, 4, before)

"""--epochs: each sequence is read exactly once per epoch, with any number of ranks, which may change on the way."""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
import torch
import train_runs
from hypothesis import strategies as st
from train_runs import metrics

import forked
from demopt.exchange import SingleRank
from demopt.train.checkpoint import CheckpointRecord
from demopt.train.config import TrainConfig, resolve
from demopt.train.data import Corpus, Tokens, numbered, sequences
from demopt.train.loop import learning_rate
from demopt.train.team import Team
from demopt.train.worker import Connected

CONFIG = resolve(TrainConfig(preset="tiny", sequence=8, epochs=2))


def _corpus(number):
    """Tokens that say their own place, in two rows, of which each has a rest that fills no sequence."""
    cut = 8 * (number // 3) + 4
    rows = (np.arange(cut), np.arange(cut - 4, 8 * number + 3))
    return Corpus(Tokens(rows), Tokens(rows), 9999, "", None)


@hypothesis.given(st.randoms(use_true_random=True))
@hypothesis.settings(max_examples=200)
def test_every_sequence_is_read_once_per_epoch_by_ranks_whose_number_changes(draw):
    """And so do their speeds."""
    number, epochs = draw.randint(3, 60), draw.randint(1, 3)
    whole = draw.choice([None, draw.randint(1, 9)])
    config = replace(CONFIG, epochs=epochs, global_batch=whole, accumulate=1 if whole else draw.randint(1, 2))
    config = replace(config, batch=draw.randint(1, 4), seed=draw.randint(0, 99))
    read, resumed, over = Counter(), None, False
    while not over:
        size = draw.randint(1, 5)
        corpus, cpu = _corpus(number), torch.device("cpu")
        teams = [Team(rank, size, cpu, SingleRank()) for rank in range(size)]
        ranks = [Connected(SimpleNamespace(config=config, team=team, corpus=corpus), resumed) for team in teams]
        for _ in range(draw.randint(1, 8)):
            speeds = {str(rank): draw.uniform(0.1, 9.0) for rank in range(len(ranks))}
            drawn = [rounds.draw() for rounds in ranks]
            over = not drawn[0]
            assert {bool(each) for each in drawn} == {not over}
            for rounds, windows in zip(ranks, drawn, strict=True):
                assert all(len(part) <= config.batch for part in windows)
                read.update(int(window[0]) // 8 for part in windows for window in part if window[1] >= 0)
                rounds.sizes.fit(speeds)
        assert len({(each.number, each.tokens) for each in ranks}) == 1
        resumed = CheckpointRecord(ranks[0].number, "", {}, ranks[0].tokens)
    assert resumed.tokens == 8 * number * epochs
    assert read == Counter(dict.fromkeys(range(number), epochs))


def test_sequences_touch_and_an_epoch_has_an_order_of_its_own():
    tokens, single = _corpus(30).train, replace(CONFIG, batch=1)
    assert sequences(tokens, CONFIG) == 30
    orders = [[int(part[0][0]) for part in numbered(tokens, single, range(at, at + 30))] for at in (0, 30)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(0, 240, 8))
    assert orders[0] != orders[1]
    (nothing,) = numbered(tokens, CONFIG, [])
    assert nothing.shape == (1, 9)
    assert (nothing < 0).all()
    assert learning_rate(CONFIG, 99, 0.5) == pytest.approx(CONFIG.lr * (0.1 + 0.9 * 0.5))


@pytest.mark.parametrize("optimizer", ["local", "adamw"])
def test_run_of_an_epoch_goes_on_with_more_workers_where_it_stopped(tmp_path, text, optimizer):
    data = tmp_path / "text.txt"
    data.write_bytes((text / "calendar.py").read_bytes()[:3500])
    flags = ["--preset", "tiny", "--layers", 1, "--sequence", 32, "--batch", 3, "--warmup", 3, "--threads", 1]
    flags += ["--workers", 2, "--epochs", 1, "--optimizer", optimizer, "--save-every", 5, "--out", tmp_path / "run"]
    flags += ["--eval-sequences", 6, "--data", data, *(["--sync-every", 3] if optimizer == "local" else [])]
    done = forked.demopt("train", *flags)
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

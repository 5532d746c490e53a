"""Batches by speed: whole, complete, as quick as whole sequences allow, and steady under noise."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from demopt import fit_batches

SPEEDS = st.dictionaries(st.text("abc", min_size=1), st.floats(0.01, 1000), min_size=1, max_size=8)


@given(SPEEDS, st.integers(1, 200))
def test_fitted_batches_have_the_total_and_the_shortest_step(speeds, total):
    batches = fit_batches(speeds, total)
    assert min(batches.values()) >= 1
    assert sum(batches.values()) == max(total, len(speeds))
    slowest = max(batches[worker] / speeds[worker] for worker in speeds)
    quicker = [int(slowest * (1 - 1e-9) * speed) for speed in speeds.values()]  # the most in a shorter step
    assert min(quicker) < 1 or sum(quicker) < sum(batches.values())


@given(SPEEDS, st.integers(8, 200), st.lists(st.floats(0.97, 1.03), min_size=8, max_size=8))
def test_fitted_batches_ignore_noise_and_follow_drift(speeds, total, noise):
    batches = fit_batches(speeds, total)
    noisy = {worker: speed * factor for (worker, speed), factor in zip(speeds.items(), noise, strict=False)}
    assert fit_batches(noisy, total, batches) == batches
    first = next(iter(speeds))
    drifted = {worker: speed * (0.25 if worker == first else 1) for worker, speed in speeds.items()}
    again = fit_batches(drifted, total, batches)
    best = fit_batches(drifted, total)
    assert max(again[w] / drifted[w] for w in again) <= 1.1 * max(best[w] / drifted[w] for w in best)


def test_fitted_batches_take_an_unmeasured_worker_for_the_mean():
    assert fit_batches({"a": 10.0, "b": 30.0, "new": 0.0}, 12) == {"a": 2, "b": 6, "new": 4}


@pytest.mark.parametrize("speeds", [{}, {"a": -1.0}, {"a": float("nan")}, {"a": float("inf")}])
def test_fitted_batches_refuse_what_is_no_speed(speeds):
    with pytest.raises(ValueError, match="sequences per second"):
        fit_batches(speeds, 4)

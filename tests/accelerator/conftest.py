"""Processes with the device "toy", which ordinary ones never have: `on_toy(function, world_size, *args)`."""

import pytest
import toy

import ranks

POOL = ranks.Pool()


@pytest.fixture(scope="session")
def on_toy():
    """Runs `function(rank, world_size, *args)` in processes of a gloo group; returns what each returned."""
    if toy.COMPILER is None:
        pytest.skip("no C++ compiler: the toy accelerator cannot be built")
    toy.build()  # once, before its clock starts

    def run(function, world_size, *args):
        return ranks.values_of(POOL.outcomes(toy.call, world_size, (function, *args)))

    yield run
    POOL.close()

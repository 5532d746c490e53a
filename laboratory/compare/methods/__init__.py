"""The methods by name: a constructor make(workers, **settings) of a `laboratory.simulation.workers.Method`."""

from collections.abc import Callable

from laboratory.compare.methods import averaged, demo, muloco
from laboratory.simulation.demo import DeMoWorkers
from laboratory.simulation.workers import Method

METHODS: dict[str, Callable[..., Method]] = {
    **{name: averaged.averaged(name) for name in averaged.MAKERS},
    "demo": DeMoWorkers,
    "local": demo.local,
    "sparseloco": demo.sparseloco,
    "muloco": muloco.MuLoCo,
}

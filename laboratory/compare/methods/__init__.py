"""The methods by name: a constructor make(workers, **settings) of a `laboratory.simulation.workers.Method`."""

from collections.abc import Callable

from laboratory.compare.methods import averaged, demo, galore, local_averages, one_bit_adam, powersgd, sparse
from laboratory.simulation.demo import DeMoWorkers
from laboratory.simulation.workers import Method

METHODS: dict[str, Callable[..., Method]] = {
    **{name: averaged.averaged(name) for name in averaged.MAKERS},
    "demo": DeMoWorkers,
    "published": demo.Published,
    "local": demo.local,
    "sparseloco": demo.sparseloco,
    "local-sgd": local_averages.local_sgd,
    "diloco": local_averages.diloco,
    "muloco": local_averages.muloco,
    "powersgd": powersgd.PowerSGD,
    "one-bit-adam": one_bit_adam.OneBitAdam,
    "dgc": sparse.DGC,
    "random-k": sparse.RandomK,
    "galore": galore.GaLore,
}

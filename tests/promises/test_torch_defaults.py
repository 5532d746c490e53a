"""Torch's defaults in the process (dtype, device, mode) change no bit of a run."""

import functools
import sys
from contextlib import contextmanager

import pytest
import torch

import problems
import ranks
from demopt import DeMo, LocalDeMo

KINDS = {
    "signum": {},
    "sgd": {"update": "sgd"},
    "adamw on floats": {"update": "adamw", "values": "float32"},
    "clipped": {"update": "sgd", "clip_to_median": True},
    "2-bit": {"update": "lion", "values": "2-bit", "reduction": "mean"},
    "muon": {"update": "muon"},
    "identity": {"transform": "identity", "gradient_scale": "lr"},
    "local": {},
    "local top-k": {"top_k": 24},
    "local owner": {"route": "owner"},
    "local later": {"delay": 1, "outer_momentum": 0.5},
}


@contextmanager
def _default(name, value, before):
    getattr(torch, f"set_default_{name}")(value)
    try:
        yield
    finally:
        getattr(torch, f"set_default_{name}")(before)


DTYPES = ("float64", "bfloat16", "float16")
DEFAULTS = {
    **{name: functools.partial(_default, "dtype", getattr(torch, name), torch.float32) for name in DTYPES},
    "meta": lambda: _default("device", "meta", None),
    "with cpu": lambda: torch.device("cpu"),
    "inference": torch.inference_mode,
}


def _bits(exchange, kind, kernels, defaults=""):
    """The fingerprints after steps, a save, a load and more steps; each call of demopt's is under the defaults."""
    settings, is_local = dict(KINDS[kind]), kind.startswith("local")
    shapes = [(33, 20), (16, 16)] if settings.get("update") == "muon" else problems.FEW
    parameters = problems.parameters(shapes)
    if not is_local:
        parameters[0] = problems.parameters(shapes[:1], torch.bfloat16)[0]
    under = DEFAULTS[defaults] if defaults else torch.no_grad
    modules = [module for name, module in sys.modules.items() if name.startswith("demopt.")]
    for each in {each for module in modules for each in vars(module).values() if hasattr(each, "cache_clear")}:
        if each.__name__ != "library":
            each.cache_clear()  # constants that other tests have made without these defaults

    def make(of):
        with under() if defaults != "inference" else torch.no_grad():
            if is_local:
                inner = torch.optim.SGD(of, lr=0.1)
                return LocalDeMo(inner, sync_every=2, process_group=exchange, chunk=16, kernels=kernels, **settings)
            return DeMo(of, process_group=exchange, kernels=kernels, **{**problems.SMALL, **settings})

    optimizer = make(parameters)

    def train(steps):
        for number in steps:
            problems.set_gradients(parameters, number, exchange.rank)
            with under() if number != 6 else torch.no_grad():
                optimizer.step()

    train(range(5))
    with under():
        if isinstance(optimizer, LocalDeMo):
            optimizer.flush()
            with optimizer.shared():
                shown = optimizer.fingerprint()
                optimizer.state_dict()
            assert shown == optimizer.fingerprint()
        saved = problems.by_file(optimizer.state_dict(), "cpu")
        optimizer.consolidate_state_dict()
        optimizer.load_state_dict(saved)
    train(range(5, 8))
    return [optimizer.fingerprint(), optimizer.fingerprint(state=True)]


@pytest.mark.filterwarnings("ignore:the state was saved", "ignore:rank 0 received")
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_defaults_of_the_process_change_no_bit(kind, kernels):
    """A default dtype is the process's, so it is set around all ranks; and no constant stays from before."""
    expected = ranks.threads(_bits, 2, kind, "torch")
    assert expected[0] == expected[1]
    for defaults in DEFAULTS:
        if defaults in DTYPES:
            with DEFAULTS[defaults]():
                found = ranks.threads(_bits, 2, kind, kernels)
        else:
            found = ranks.threads(_bits, 2, kind, kernels, defaults)
        if kernels == "auto" and kind in ("adamw on floats", "muon"):
            continue  # momenta of kernels differ by rounding, and so may floats that follow from them
        assert found == expected, defaults

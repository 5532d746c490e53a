"""torchft: exchanges among the workers of a quorum, over its gloo; and hooks of torch in the wrapper."""

import types
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

import demopt
import problems
import ranks
from demopt.errors import ExchangeError

pytest.importorskip("torchft")

TIMEOUT = timedelta(seconds=90)  # far longer than anything here takes


def one_closes_and_the_other_waits(rank, world_size, port):
    import torchft

    from demopt.integrations.torchft import QuorumExchange

    whole = torchft.ProcessGroupGloo(timeout=TIMEOUT)
    whole.configure(f"localhost:{port}/members", str(rank), rank, world_size, 1)
    held = [QuorumExchange(whole), QuorumExchange(whole)]  # an optimizer still has another
    told = held[0].all_gather(torch.tensor([rank], dtype=torch.uint8)).flatten().tolist()
    if rank == 0:
        whole.abort()
        said = None
    else:
        with pytest.raises(ExchangeError) as raised:
            held[1].all_gather(torch.zeros(1, dtype=torch.uint8))
        said = str(raised.value)
    with pytest.raises(ExchangeError):
        held[1].all_gather(torch.zeros(1, dtype=torch.uint8))
    return told, said


def test_close_releases_waiting_workers_though_others_hold_the_exchange():
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    (first, _), (second, said) = ranks.run(one_closes_and_the_other_waits, 2, store.port)
    assert first == second == [0, 1]
    assert "closed" in said.lower() or "reset" in said.lower()
    assert "Timed out" not in said


@pytest.mark.parametrize("kind", ["DeMo", "LocalDeMo"])
def test_hooks_of_torch_run(kind):
    """The wrapper is a torch optimizer."""
    from demopt.integrations.torchft import Optimizer

    (parameter,) = problems.parameters([(4, 4)])
    inner = demopt.DeMo([parameter]) if kind == "DeMo" else problems.local(shapes=[(4, 4)])
    manager = types.SimpleNamespace(current_step=lambda: 0)  # what the wrapper asks when it is built
    optimizer = Optimizer(manager, inner)
    optimizer.finish_round, optimizer._new, called = lambda: None, False, []
    names = [f"{of}_{when}" for of in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")]
    for name in names:
        getattr(optimizer, f"register_{name}_hook")(lambda *_, name=name: called.append(name))
    problems.set_gradients(problems.all_parameters(inner), 0)
    optimizer.step()
    if kind == "LocalDeMo":
        inner.finish_round()
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == names

"""demopt.integrations.torchtitan: FSDP2 with torchtitan's gradient factor, over gloo."""

import importlib.util
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import problems
import ranks
from demopt.checkpoint import OptimizerState

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("needs torchtitan: make test-integrations", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan's own
    from demopt.integrations.torchtitan import DeMoContainer, parallelize


@ranks.each(2)
def test_parallelize_sums_a_replicas_gradients_over_gloo(rank):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))

    def torchtitan_fn(model):
        fully_shard(model, mesh=mesh)
        model.set_gradient_divide_factor(1.0)
        return model

    torch.manual_seed(0)
    model = parallelize(torchtitan_fn)(nn.Linear(8, 4, bias=False))
    model(problems.draw((5, 8), rank)).sum().backward()
    wanted = problems.draw((5, 8), 0).sum(0) + problems.draw((5, 8), 1).sum(0)
    torch.testing.assert_close(model.weight.grad.full_tensor(), wanted.expand(4, 8))


def test_container_refuses_a_checkpoint_from_between_two_rounds():
    containers = []
    for _ in range(2):
        optimizer = problems.local(None, [(4, 4)], sync_every=2)
        container = DeMoContainer.__new__(DeMoContainer)
        container.optimizers, container._states = [optimizer], {"layers.0.weight": OptimizerState(optimizer)}
        containers.append(container)
    (saved, fresh), optimizer = containers, containers[0].optimizers[0]
    for steps in (1, 2):
        problems.fingerprints(optimizer, [steps])
        with warnings.catch_warnings(), optimizer.shared():
            warnings.simplefilter("ignore")  # of the state from between two rounds
            state = saved.state_dict()
        if steps == 1:
            with pytest.raises(ValueError, match=r"checkpoint\.interval and training.steps multiples of sync_every=2"):
                fresh.load_state_dict(state)
        else:
            fresh.load_state_dict(state)

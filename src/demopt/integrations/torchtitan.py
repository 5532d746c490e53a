"""torchtitan: FSDP2 inside a replica as torchtitan does it, DeMo or LocalDeMo between replicas."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.optimizer import OptimizersContainer

from demopt.checkpoint import OptimizerState
from demopt.exchange import SingleRank
from demopt.optim.demo import DeMo
from demopt.optim.local_demo import LocalDeMo
from demopt.parallel import unsync

REPLICAS = "dp_replicate"  # torchtitan's name of the mesh dimension


class DeMoContainer(OptimizersContainer):
    """OptimizersContainer for DeMo and LocalDeMo, whose checkpoints hold all ranks' states.

        optimizer=DeMoContainer.Config(param_groups=[
            ParamGroupConfig(pattern=".*", optimizer_name="DeMo", optimizer_kwargs={"lr": 1e-3})])

    `optimizer_kwargs` are a group's settings: of DeMo, or for "LocalDeMo" of the AdamW inside. Settings of the whole
    optimizer go into `optimizer_factory_kwargs_by_name`, such as {"LocalDeMo": {"sync_every": 10}}. Messages travel
    between the replicas of `parallelism.data_parallel_replicate_degree`; with one replica there are none.

    torchtitan divides a replica's loss by the tokens of all replicas, so gradients are smaller than elsewhere by a
    factor of the number of replicas: update "sgd" needs a learning rate larger by it; other rules are not affected.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The same settings; `implementation` has no effect."""

    def __init__(self, config: "DeMoContainer.Config", *, model_parts: list[nn.Module]) -> None:
        names = sorted({group.optimizer_name for group in config.param_groups})
        if len(names) != 1:  # parameters of another optimizer would not be synchronised
            raise ValueError(f"param_groups name the optimizers {names}; give all groups DeMo, or all LocalDeMo")
        super().__init__(config, model_parts=model_parts)
        name_of = {id(weight): name for part in model_parts for name, weight in part.named_parameters()}
        firsts = [name_of[id(optimizer.param_groups[0]["params"][0])] for optimizer in self.optimizers]
        self._states = dict(zip(firsts, map(OptimizerState, self.optimizers), strict=True))

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name not in ("DeMo", "LocalDeMo"):
            raise ValueError(f'optimizer_name is {name!r}; DeMoContainer has "DeMo" and "LocalDeMo"')

        def make(groups: list[dict[str, Any]], **settings: Any) -> DeMo | LocalDeMo:
            mesh, replicas = getattr(groups[0]["params"][0], "device_mesh", None), None
            if mesh is not None:
                replicas = mesh[REPLICAS] if REPLICAS in (mesh.mesh_dim_names or ()) else SingleRank()
            if name == "DeMo":
                return DeMo(groups, process_group=replicas, **settings)
            return LocalDeMo(torch.optim.AdamW(groups), process_group=replicas, **settings)

        return make

    @staticmethod
    def _build_impl_kwargs(config: OptimizersContainer.Config) -> dict[str, Any]:
        return {}  # neither fused nor foreach

    def state_dict(self) -> dict[str, Any]:
        """Returns the states, named by their pipeline stages' first parameters: those of two ranks must not collide."""
        return {name: each.state_dict() for name, each in self._states.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives each optimizer its own part; ValueError if it was saved between two rounds of LocalDeMo."""
        for optimizer, (name, each) in zip(self.optimizers, self._states.items(), strict=True):
            each.load_state_dict(state_dict[name])
            if any("local" in entry for entry in optimizer.state.values()):  # torchtitan loads the model after this
                raise ValueError(
                    "the checkpoint was saved between two rounds of LocalDeMo, and from it all replicas would go on "
                    "with the local weights of one; load another, and make checkpoint.interval and training.steps "
                    f"multiples of sync_every={optimizer.sync_every}; with delay=1, call flush() before each save"
                )


def parallelize(torchtitan_fn: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Returns a model's `parallelize_fn`, but without the dense all-reduce between replicas.

    On CPUs, FSDP2 then also sums gradients instead of scaling them in the collective, which gloo cannot do.

    spec = dataclasses.replace(spec, parallelize_fn=parallelize(spec.parallelize_fn))
    """

    @functools.wraps(torchtitan_fn)
    def parallelized(model: nn.Module, **settings: Any) -> nn.Module:
        parallel = unsync(torchtitan_fn(model, **settings))
        meshes = [getattr(parameter, "device_mesh", None) for parameter in parallel.parameters()]
        if any(mesh is not None and mesh.device_type == "cpu" for mesh in meshes):
            for module in parallel.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        return parallel

    return parallelized

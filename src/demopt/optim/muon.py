"""Muon for matrices and AdamW for the rest: `muon_groups` for DeMo, and `muon_adamw` as LocalDeMo's inner optimizers.

The second needs torch 2.9, which has Muon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from demopt.core.rules import Muon, Rule
from demopt.exchange.dtensor import shard_as, shard_of, to_local, whole_of
from demopt.optim.mistakes import remember
from demopt.validation import check_number

_TorchMuon: Any = getattr(torch.optim, "Muon", torch.optim.Optimizer)  # older torch: `muon_adamw` says so


#: Of Muon's learning rate, for the parameters that AdamW takes: its update has an RMS of about 1, Muon's of 0.2.
_ADAMW_SHARE = 0.2


def muon_groups(
    model: nn.Module, lr: float, others: Iterable[nn.Module] = (), others_update: str | Rule = "adamw"
) -> list[dict[str, Any]]:
    """Returns parameter groups for `DeMo`: matrices with "muon" at `lr`, all others with "adamw" at a fifth of it.

    Not treated as matrices: embeddings, heads of transformers models (also nested ones), the modules in `others`, and
    parameters of one, three or more dimensions. A head outside transformers cannot be recognised by its shape: list it
    in `others`. Experts [E, R, S] work with "muon" as a batch of matrices: move them to the first group yourself.
    Frozen parameters are left out.

    `others_update` replaces "adamw". Its updates should have an RMS of about 1, as a fifth of `lr` assumes:
    `demopt.AdamW(beta2=0.95)`, "lion" or "signum".

    Raises:
        ValueError: nothing is left for muon.

    Source: arXiv 2502.16982, section 2.2 (which parameters, and the scale of the update).

    Examples:
        >>> import demopt
        >>> head = nn.Linear(16, 2)
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), head)
        >>> groups = muon_groups(model, lr=0.02, others=[head])
        >>> [(group["update"], group["lr"], len(group["params"])) for group in groups]
        [('muon', 0.02, 1), ('adamw', 0.004, 3)]
        >>> optimizer = demopt.DeMo(groups, momentum_decay=0.95)
    """
    matrices, rest = _split_matrices(model, others)
    remember(model, "muon_groups")
    if not matrices:
        raise ValueError(
            f"none of the model's {len(rest)} parameters that train is a matrix for update='muon'; use another update, "
            "such as 'signum', which needs no groups"
        )
    groups = [{"params": matrices, "update": "muon", "lr": lr}]
    return [*groups, {"params": rest, "update": others_update, "lr": _ADAMW_SHARE * lr}] if rest else groups


def _split_matrices(
    model: nn.Module, others: Iterable[nn.Module] = ()
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the trainable parameters: those for Muon, and the rest; `others` as in `muon_groups`."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    ask = [getattr(module, "get_output_embeddings", None) for module in model.modules()]
    heads = [head for find in ask if find is not None and (head := find()) is not None]
    apart = {id(parameter) for module in (*others, *embeddings, *heads) for parameter in module.parameters()}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.dim() == 2 and id(parameter) not in apart]
    inside = {id(parameter) for parameter in matrices}
    return matrices, [parameter for parameter in parameters if id(parameter) not in inside]


def muon_adamw(
    model: nn.Module,
    lr: float,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.99),
    others: Iterable[nn.Module] = (),
) -> list[torch.optim.Optimizer]:
    """Returns [Muon for a model's matrices, AdamW for all other parameters], the inner optimizers for `LocalDeMo`.

    `muon_groups` defines the matrices. One rate fits both, because Muon's scale is "match_rms_adamw". An optimizer
    without parameters is left out. On a CPU, and on sharded matrices, Muon iterates in float32 (`Float32Muon`).

    Args:
        lr: learning rate of both.
        momentum: Muon's Nesterov momentum, in [0, 1); local steps want a slower one than DDP (docs/results.md).
        weight_decay: decoupled weight decay of both.
        betas: those of AdamW. A worker's batch is a part of DDP's, so averages want more steps (arXiv 2507.07101).
        others: modules whose matrices go to AdamW, such as a head outside transformers.

    Raises:
        RuntimeError: torch is older than 2.9 and has no Muon.

    Source: arXiv 2502.16982, section 2.2.

    Examples:
        >>> import demopt
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        >>> inner = muon_adamw(model, lr=0.015)
        >>> [(type(each).__name__, each.param_groups[0]["lr"]) for each in inner]
        [('Float32Muon', 0.015), ('AdamW', 0.015)]
        >>> optimizer = demopt.LocalDeMo(inner, sync_every=5)
    """
    if not hasattr(torch.optim, "Muon"):
        raise RuntimeError(f"torch.optim.Muon came with torch 2.9, and this is torch {torch.__version__}; update torch")
    check_number("momentum", momentum, high=1.0)
    matrices, rest = _split_matrices(model, others)
    remember(model, "muon_adamw")
    found: list[torch.optim.Optimizer] = []
    if matrices:
        muon = Float32Muon if matrices[0].is_cpu or any(shard_of(each)[1] > 1 for each in matrices) else _TorchMuon
        found.append(muon(matrices, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw"))
    if rest:
        fused = rest[0].device.type in ("cpu", "cuda")
        found.append(torch.optim.AdamW(rest, lr, betas, weight_decay=weight_decay, fused=fused))
    return found


class Float32Muon(_TorchMuon):  # type: ignore[misc]
    """torch.optim.Muon with the Newton-Schulz iteration in float32, on whole matrices: for CPUs, and for shards.

    The ranks that hold the shards of a matrix (FSDP2, tensor parallelism) gather it once a step, and each iterates on
    the whole: the same bits as without shards. torch's Muon communicates within the iteration.

    torch iterates in bfloat16, for tensor cores; a CPU without bfloat16 instructions takes 21 to 104 times as long
    (docs/design-notes.md). The scale is always "match_rms_adamw". Settings and saved state are those of torch.

    Examples:
        >>> matrix = nn.Parameter(torch.zeros(64, 128))
        >>> matrix.grad = torch.randn(64, 128)
        >>> Float32Muon([matrix], lr=1.0, weight_decay=0.0).step()
        >>> matrix.detach().square().mean().sqrt().round(decimals=1)
        tensor(0.2000)
    """

    stands_for = "Muon"  # so that CPUs and accelerators can train together

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all matrices that have a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, matrix.grad, group)
        return loss

    def _update(self, matrix_RS: nn.Parameter, gradient_RS: Tensor, group: dict[str, Any]) -> None:
        state, lr, momentum = self.state[matrix_RS], group["lr"], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient_RS)
        average = state["momentum_buffer"].lerp_(gradient_RS, 1 - momentum)
        ahead = gradient_RS.lerp(average, momentum) if group["nesterov"] else average
        direction = Muon()(whole_of(to_local(ahead).float(), like=matrix_RS), torch.empty(0, device="cpu"), {})
        local = to_local(matrix_RS.detach())
        local.mul_(1 - lr * group["weight_decay"]).add_(shard_as(direction, like=matrix_RS), alpha=-lr)

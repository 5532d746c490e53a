"""Muon for matrices and AdamW for the rest: `muon_groups` for DeMo, and `muon_adamw` as LocalDeMo's inner optimizers.

`muon_adamw` needs torch 2.9, which has Muon.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from demopt.codec.gradients import check_parameters
from demopt.core.rules import Muon, Rule
from demopt.exchange.dtensor import shard_as, to_local, whole_of
from demopt.optim.mistakes import check_model, remember
from demopt.validation import check_number

_TorchMuon: Any = getattr(torch.optim, "Muon", torch.optim.Optimizer)  # older torch: `muon_adamw` says so

_BATCH_ELEMENTS = 1 << 25  # of matrices that iterate together on an accelerator, which takes a few times their memory
_DEVICE_DTYPE = torch.bfloat16  # of the iteration there, as torch's Muon has it: for tensor cores

#: The share of Muon's learning rate that AdamW's parameters get: AdamW's update has an RMS of about 1, Muon's of 0.2.
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
    check_number("lr", lr)
    matrices, rest = _split_matrices(model, others)
    remember(model, "muon_groups")
    if not matrices:
        lacks = f"none of the model's {len(rest)} parameters that train is a matrix for update='muon'"
        raise ValueError(f"{lacks}; use another update, such as 'signum', which needs no groups")
    groups = [{"params": matrices, "update": "muon", "lr": lr}]
    return [*groups, {"params": rest, "update": others_update, "lr": _ADAMW_SHARE * lr}] if rest else groups


def _split_matrices(model: nn.Module, others: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the trainable parameters: those for Muon, and the rest; `others` as in `muon_groups`."""
    is_one = isinstance(others, nn.Module | torch.Tensor) or not isinstance(others, Iterable)
    others = [others] if is_one else [*others]
    for module in (model, *others):
        check_model(module)
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    ask = [getattr(module, "get_output_embeddings", None) for module in model.modules()]
    heads = [head for find in ask if find is not None and (head := find()) is not None]
    apart = {id(parameter) for module in (*others, *embeddings, *heads) for parameter in module.parameters()}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("no parameter of the model trains; call requires_grad_() of those that are to")
    check_parameters(parameters)
    matrices = [parameter for parameter in parameters if parameter.dim() == 2 and id(parameter) not in apart]
    return matrices, [parameter for parameter in parameters if parameter.dim() != 2 or id(parameter) in apart]


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
    without parameters is left out. Muon is `BatchedMuon`, which needs torch 2.9.

    Args:
        lr: learning rate of both.
        momentum: Muon's Nesterov momentum, in [0, 1); local steps want a slower one than DDP (docs/results.md).
        weight_decay: decoupled weight decay of both.
        betas: those of AdamW. A worker's batch is a part of DDP's, so averages want more steps (arXiv 2507.07101).
        others: modules whose matrices go to AdamW, such as a head outside transformers.

    Source: arXiv 2502.16982, section 2.2.

    Examples:
        >>> import demopt
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        >>> inner = muon_adamw(model, lr=0.015)
        >>> [(type(each).__name__, each.param_groups[0]["lr"]) for each in inner]
        [('BatchedMuon', 0.015), ('AdamW', 0.015)]
        >>> optimizer = demopt.LocalDeMo(inner, sync_every=5)
    """
    if not hasattr(torch.optim, "Muon"):
        raise RuntimeError(f"torch.optim.Muon came with torch 2.9, and this is torch {torch.__version__}; update torch")
    check_number("lr", lr)
    check_number("momentum", momentum, high=1.0)
    weight_decay = check_number("weight_decay", weight_decay)
    try:
        if isinstance(betas, str):
            raise TypeError
        first, second = (betas[n] for n in range(len(betas)))  # also of an array, or of a configuration
    except (TypeError, ValueError, LookupError):
        raise TypeError(f"betas is {betas!r}; give two numbers") from None
    betas = check_number("betas[0]", first, high=1.0), check_number("betas[1]", second, high=1.0)
    matrices, rest = _split_matrices(model, others)
    remember(model, "muon_adamw")
    found: list[torch.optim.Optimizer] = []
    if matrices:
        found.append(BatchedMuon(matrices, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw"))
    if rest:
        # Where a weight and its state lie differently in memory, such as after a change to channels_last, torch's fused
        # AdamW silently takes the wrong elements on a CPU. It takes either plain tensors or DTensors, not both.
        is_mixed, device = len({hasattr(p, "placements") for p in rest}) > 1, rest[0].device.type
        fused = not is_mixed and device in ("cpu", "cuda") and all(p.dim() < 4 and p.is_contiguous() for p in rest)
        # None, not False, which would also turn off the implementation that torch chooses on an accelerator.
        found.append(torch.optim.AdamW(rest, lr, betas, weight_decay=weight_decay, fused=fused or None))
    return found


class BatchedMuon(_TorchMuon):  # type: ignore[misc]
    """torch.optim.Muon, except that matrices of one shape iterate together on an accelerator, and in float32 on a CPU.

    torch launches some forty kernels per matrix, and iterates in bfloat16, for which a CPU takes 21 to 104 times as
    long (docs/design-notes.md). The ranks that hold the shards of a matrix (FSDP2, tensor parallelism) gather it once a
    step, and each iterates on the whole: on a CPU with the same bits as without shards.

    The scale is always "match_rms_adamw". Settings and saved state are those of torch.

    Examples:
        >>> matrix = nn.Parameter(torch.zeros(64, 128))
        >>> matrix.grad = torch.randn(64, 128)
        >>> BatchedMuon([matrix], lr=1.0, weight_decay=0.0).step()
        >>> matrix.detach().square().mean().sqrt().round(decimals=1)
        tensor(0.2000)
    """

    stands_for = "Muon"  # so that workers with torch's own can train along

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all matrices that have a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[Any, list[nn.Parameter]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    is_alone = matrix.is_cpu or hasattr(matrix, "placements")
                    kind = matrix if is_alone else (matrix.shape, matrix.dtype, matrix.device)
                    alike.setdefault(kind, []).append(matrix)
            for same in alike.values():
                most = max(_BATCH_ELEMENTS // max(same[0].numel(), 1), 1)
                for first in range(0, len(same), most):
                    self._update(same[first : first + most], group)
        return loss

    def _update(self, batch: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Updates matrices of one shape, or a shard."""
        lr, momentum = group["lr"], group["momentum"]
        gradients = [to_local(each.grad) for each in batch if each.grad is not None]
        for matrix in batch:
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            elif state["momentum_buffer"].dtype != matrix.dtype:  # as after model.bfloat16()
                state["momentum_buffer"] = state["momentum_buffer"].to(matrix.dtype)
        averages = [to_local(self.state[matrix]["momentum_buffer"]) for matrix in batch]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, averages, momentum) if group["nesterov"] else averages
        dtype = torch.float32 if ahead[0].is_cpu else _DEVICE_DTYPE
        together_BRS = ahead[0].new_empty((len(batch), *batch[0].shape), dtype=dtype)
        torch._foreach_copy_(together_BRS.unbind(), [whole_of(*each) for each in zip(ahead, batch, strict=True)])
        # a single one goes in as a matrix, whose products have other bits than those of a batch of one
        phi_BRS = Muon()(together_BRS.squeeze(0), torch.empty(0, device="cpu"), {}).view_as(together_BRS)
        weights = [to_local(matrix.detach()) for matrix in batch]
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_add_(weights, [shard_as(*each) for each in zip(phi_BRS, batch, strict=True)], alpha=-lr)

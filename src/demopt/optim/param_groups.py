"""Parameter groups for matrices and all other parameters, and the paper's two versions as settings."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from demopt.codec.hyperparameters import Codec
from demopt.core.rules import Rule
from demopt.optim.models import remember

#: arXiv 2411.19870 v1 and its code: gradients enter the momentum times the learning rate, and K is fixed for any chunk.
V1: dict[str, Any] = {
    "top_k": 32,
    "update": "signum",
    "momentum_decay": 0.999,
    "alpha": 1.0,
    "gradient_scale": "lr",
    "chunking": "divisor",
    "codec": Codec(values="float32", reduction="senders"),
}

#: arXiv 2411.19870 v2: the momentum is an exponential moving average; a fifth of the sent part is subtracted from it.
V2: dict[str, Any] = {
    "top_k": 32,
    "update": "signum",
    "momentum_decay": 0.995,
    "alpha": 0.2,
    "gradient_scale": "ema",
    "chunking": "padded",
    "codec": Codec(values="float32", reduction="mean"),
}

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
    matrices, rest = split_matrices(model, others)
    remember(model, "muon_groups")
    if not matrices:
        raise ValueError(
            f"none of the model's {len(rest)} parameters that train is a matrix for update='muon'; use another update, "
            "such as 'signum', which needs no groups"
        )
    groups = [{"params": matrices, "update": "muon", "lr": lr}]
    return [*groups, {"params": rest, "update": others_update, "lr": _ADAMW_SHARE * lr}] if rest else groups


def split_matrices(model: nn.Module, others: Iterable[nn.Module] = ()) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the trainable parameters: those for Muon, and the rest; `others` as in `muon_groups`."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    ask = [getattr(module, "get_output_embeddings", None) for module in model.modules()]
    heads = [head for find in ask if find is not None and (head := find()) is not None]
    apart = {id(parameter) for module in (*others, *embeddings, *heads) for parameter in module.parameters()}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.dim() == 2 and id(parameter) not in apart]
    inside = {id(parameter) for parameter in matrices}
    return matrices, [parameter for parameter in parameters if id(parameter) not in inside]

"""The DeMo step, its update rules and LocalDeMo's round, slow and literal: the oracles for tests of every faster path.

Decoupled Momentum Optimization, arXiv 2411.19870, section 3 and algorithm 1, line by line: one parameter, one rank,
one chunk at a time. The momentum is dense and in the parameter's own domain. One transform picks what is sent, a second
subtracts it from the momentum, a third turns the ranks' aggregate into an update. One call steps all ranks. Each update
rule follows its paper, on a parameter's whole U and in U's dtype, and ignores memory, blocks and the order of
operations.

Shapes: W ranks, P parameters, (R, C) a parameter's matrix padded to whole chunks, (r, c) one chunk.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from demopt.core.rules import AdamW, Lion, Muon, Nesterov, Signum, rule_of
from oracles import wire

Settings: TypeAlias = Mapping[str, Any]  # one param group: every hyper-parameter of DeMo by its name
Coefficients: TypeAlias = dict[int, float]  # the part of one chunk that a rank sends: position in the chunk -> value
Chunk: TypeAlias = tuple[slice, slice]
#: A rule's state of a parameter: tensors shaped like U, and the number of updates; initially empty.
RuleState: TypeAlias = dict[str, Any]

WIRE = {"float64": torch.float64, "float32": torch.float32}
VALUE_BITS = {"float64": 64, "float32": 32, "2-bit": 2, "sign": 1}


def step(
    parameter: Tensor,
    gradients: Sequence[Tensor | None],
    momenta: Sequence[Tensor],
    settings: Settings,
    rule_state: RuleState | None = None,
) -> tuple[Tensor, list[Tensor], Tensor, RuleState]:
    """Does one step of a parameter on W ranks (arXiv 2411.19870, algorithm 1).

    Returns the parameter, the rest of each momentum, U before the update rule, and the rule's new state. A gradient of
    None is zero. The computation uses the dtype of the momenta. `settings` is a param group of DeMo, or a dict with the
    same names; `rule_state` is the one that the last step returned.

    Examples:
        >>> settings = dict(lr=0.1, momentum_decay=0.5, alpha=1.0, top_k=2, chunk=2, transform="identity", update="sgd",
        ...                 reduction="mean", values="float32", weight_decay=0.0, gradient_scale="ema",
        ...                 chunking="divisor", maximize=False)
        >>> x, g = torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> _, momenta, U, _ = step(x, [g], [zero_momentum(x, settings)], settings)
        >>> momenta[0].tolist(), U.tolist()  # the two largest are gone: they were sent
        ([[0.5, 1.0], [0.0, 0.0]], [[0.0, 0.0], [1.5, 2.0]])
    """
    r, c = chunk_shape(parameter.shape, settings)
    K = kept_per_chunk(r * c, settings) if parameter.numel() else 0
    bases = [basis(settings["transform"], n, momenta[0].dtype) for n in (r, c)]
    after = [accumulate(m, g, settings) for m, g in zip(momenta, gradients, strict=True)]
    aggregate = torch.zeros_like(after[0])
    for chunk in chunks(aggregate, r, c):
        messages = []
        for momentum in after:
            sent = largest(forward(momentum[chunk], bases), K, settings["values"])
            momentum[chunk] -= settings["alpha"] * inverse(sent, momentum[chunk], bases)
            messages.append(sent)
        aggregate[chunk] = inverse(reduce(messages, settings["reduction"]), aggregate[chunk], bases)
    U = unpad(aggregate, parameter)
    X, new_state = update(parameter, U, settings, rule_state or {})
    return X, after, U, new_state


def zero_momentum(parameter: Tensor, settings: Settings, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns the momentum before the first step (arXiv 2411.19870, algorithm 1): zeros, padded to whole chunks."""
    rows, columns = matrix_shape(parameter.shape)
    r, c = chunk_shape(parameter.shape, settings)
    return torch.zeros(_round_up(rows, r), _round_up(columns, c), dtype=dtype)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the matrix shape of a parameter: a vector is one row, more than two dimensions become (d0, rest)."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def chunk_shape(shape: Sequence[int], settings: Settings) -> tuple[int, int]:
    """Returns the rows and columns of a parameter's chunks (arXiv 2411.19870, section 3).

    Examples:
        >>> chunk_shape((128, 50257), dict(chunk=64, chunking="divisor"))
        (64, 29)
    """
    rows, columns = matrix_shape(shape)
    return _chunk_side(rows, settings), _chunk_side(columns, settings)


def _chunk_side(n: int, settings: Settings) -> int:
    chunk: int = settings["chunk"]
    divisor: int = max((d for d in range(1, chunk + 1) if n > 0 and n % d == 0), default=1)
    if settings["chunking"] == "divisor" or n <= chunk or 2 * divisor >= chunk:
        return divisor
    chunks = math.ceil(n / chunk)
    return math.ceil(n / chunks)


def kept_per_chunk(chunk_elements: int, settings: Settings) -> int:
    """Returns how many coefficients of a chunk are sent; top_k for a full one (arXiv 2411.19870, section 3, its k).

    "divisor" keeps top_k for any chunk size. "padded" scales it with the chunk, and sends a whole chunk if that takes
    no more bits than the kept values with their positions.

    Examples:
        >>> kept_per_chunk(1024, dict(top_k=32, chunk=64, chunking="padded", values="float32"))
        8
        >>> kept_per_chunk(4, dict(top_k=4, chunk=2, chunking="padded", values="float32"))
        4
    """
    N, top_k, chunk = chunk_elements, int(settings["top_k"]), int(settings["chunk"])
    if settings["chunking"] == "divisor":
        return min(N, top_k)
    K = min(N, max(1, math.floor(top_k * N / chunk**2 + 0.5)))
    value_bits = VALUE_BITS[settings["values"]]
    return N if position_bits(K, N) + K * value_bits >= N * value_bits else K


def position_bits(K: int, N: int) -> int:
    """Returns the bits of K positions among N, in the shorter of two codes: all bits of each, or Elias-Fano's.

    Elias-Fano: floor(log2(N / K)) low bits of each; of the rest, one bit per position and one per step upwards.
    """
    low = math.floor(math.log2(N / K))
    return min(K * math.ceil(math.log2(N)), K * low + K + (N - 1 >> low))


def basis(name: str, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The orthonormal transform of a side of n, one basis vector per row (arXiv 2411.19870, section 3: DCT-II)."""
    if name == "identity":
        return torch.eye(n, dtype=dtype)
    rows = [[_dct_entry(k, x, n) for x in range(n)] for k in range(n)]
    return torch.tensor(rows, dtype=dtype).reshape(n, n)


def _dct_entry(k: int, x: int, n: int) -> float:
    return math.sqrt((1 if k == 0 else 2) / n) * math.cos(math.pi * (2 * x + 1) * k / (2 * n))


def accumulate(momentum: Tensor, gradient: Tensor | None, settings: Settings) -> Tensor:
    """M <- b M + s G: s is 1 - b, or the learning rate (v1 of the paper), or 1 (for `local_round`)."""
    decay: float = settings["momentum_decay"]
    new: Tensor = decay * momentum
    if gradient is not None:
        rows, columns = matrix_shape(gradient.shape)
        scale = {"lr": settings["lr"], "ema": 1 - decay, "sum": 1.0}[settings["gradient_scale"]]
        sign = -1 if settings["maximize"] else 1
        new[:rows, :columns] += sign * scale * gradient.detach().to(new.dtype).reshape(rows, columns)
    return new


def chunks(matrix: Tensor, r: int, c: int) -> Iterator[Chunk]:
    for top in range(0, matrix.shape[0], r):
        for left in range(0, matrix.shape[1], c):
            yield slice(top, top + r), slice(left, left + c)


def forward(chunk: Tensor, bases: list[Tensor]) -> list[float]:
    coefficients: list[float] = (bases[0] @ chunk @ bases[1].T).flatten().tolist()
    return coefficients


def inverse(coefficients: Coefficients, like: Tensor, bases: list[Tensor]) -> Tensor:
    dense = torch.zeros(like.numel(), dtype=like.dtype)
    for position, value in coefficients.items():
        dense[position] = value
    return bases[0].T @ dense.reshape(like.shape) @ bases[1]


def largest(coefficients: list[float], K: int, codec: str) -> Coefficients:
    """Returns the K largest in magnitude, quantised as in a message (section 3: fast-moving components)."""
    order = sorted(range(len(coefficients)), key=lambda position: -abs(coefficients[position]))
    largest = {j: coefficients[j] for j in order[:K]}
    if codec in WIRE:
        return {j: float(torch.tensor(value, dtype=torch.float64).to(WIRE[codec])) for j, value in largest.items()}
    scale, levels = wire.quantized(list(largest.values()), codec)
    return {j: scale * level for j, level in zip(largest, levels, strict=True)}


def reduce(messages: list[Coefficients], reduction: str) -> Coefficients:
    """Sums a coefficient over the ranks, then divides by the number of those that sent it, or of all."""
    aggregate = {}
    for position in sorted(set().union(*messages)):
        values = [message[position] for message in messages if position in message]
        aggregate[position] = sum(values) / {"senders": len(values), "mean": len(messages)}[reduction]
    return aggregate


def update(parameter: Tensor, U: Tensor, settings: Settings, rule_state: RuleState) -> tuple[Tensor, RuleState]:
    """Returns X - lr (phi(U) + wd X) and the rule's new state."""
    X = parameter.detach().to(U.dtype)
    direction, rule_state = phi(U, settings, rule_state)
    after: Tensor = X - settings["lr"] * (direction + settings["weight_decay"] * X)
    return after.to(parameter.dtype), rule_state


def unpad(matrix: Tensor, parameter: Tensor) -> Tensor:
    rows, columns = matrix_shape(parameter.shape)
    return matrix[:rows, :columns].reshape(parameter.shape)


def _round_up(n: int, side: int) -> int:
    return math.ceil(n / side) * side


def phi(U: Tensor, settings: Mapping[str, Any], rule_state: RuleState) -> tuple[Tensor, RuleState]:
    """Returns the direction phi(U) and the rule's state for the next one."""
    rule, V = rule_of(settings["update"]), rule_state.get("V", torch.zeros_like(U))
    if isinstance(rule, Signum):  # arXiv 2411.19870, section 3
        return U.sign(), {}
    if isinstance(rule, Nesterov):
        V = rule.beta * V + U
        return U + rule.beta * V, {"V": V}
    if isinstance(rule, Lion):  # arXiv 2302.06675, algorithm 2
        b1, b2 = rule.beta1, rule.beta2
        return (b1 * V + (1 - b1) * U).sign(), {"V": b2 * V + (1 - b2) * U}
    if isinstance(rule, AdamW):  # arXiv 1412.6980, algorithm 1, with U in the place of the bias-corrected first moment
        b2, t = rule.beta2, rule_state.get("t", 0) + 1
        V = b2 * V + (1 - b2) * U**2
        corrected = V / (1 - b2**t)
        return U / (corrected.sqrt() + rule.eps), {"V": V, "t": t}
    if isinstance(rule, Muon):  # arXiv 2502.16982, equations 2 and 4
        return 0.2 * max(U.shape) ** 0.5 * newton_schulz(U), {}
    if rule.name == "sgd":
        return U, {}
    raise ValueError(f"there is no literal update {rule}")


def newton_schulz(U: Tensor) -> Tensor:
    """Does five steps X <- a X + b (X X^T) X + c (X X^T)^2 X from U / |U|."""
    norm = U.square().sum().sqrt()
    X = U / norm if norm > 0 else U
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
    return X


def local_round(
    global_weights: Sequence[Tensor],
    local_weights: Sequence[Sequence[Tensor]],
    errors: Sequence[Sequence[Tensor]],
    settings: dict[str, Any],
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Returns the global weights [P] and the errors [W][P] after a round of LocalDeMo.

    Each rank has moved from the global weights by local steps to `local_weights` [W][P]. Its pseudo-gradient D goes
    through `step` with the error as its momentum (e <- e + T(D), the sent part leaves e), the global weights
    move by the mean, and errors decay (e <- b e). `settings` has error_decay, outer_lr, top_k, chunk, transform,
    reduction and values, as LocalDeMo has them.
    """
    as_demo = {**settings, "lr": settings["outer_lr"], "momentum_decay": 1.0, "alpha": 1.0, "gradient_scale": "sum"}
    as_demo |= {"chunking": "padded", "update": "sgd", "weight_decay": 0.0, "maximize": False}
    after, left = [], [list[Tensor]() for _ in errors]
    for n, start in enumerate(global_weights):
        pseudo_gradients = [start - of_rank[n] for of_rank in local_weights]
        X, momenta, _, _ = step(start, pseudo_gradients, [of_rank[n] for of_rank in errors], as_demo)
        after.append(X)
        for of_rank, momentum in zip(left, momenta, strict=True):
            of_rank.append(settings["error_decay"] * momentum)
    return after, left

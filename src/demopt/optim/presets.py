"""Settings without torch: the paper's two versions as keyword arguments, DeMo(params, lr=..., **V1), and defaults."""

from typing import Any

#: Bytes per coefficient in the published format: a 64-bit index and a 32-bit value.
PUBLISHED_BYTES = 12

#: arXiv 2411.19870 v1 and its code: gradients enter the momentum times the learning rate, and K is fixed for any chunk.
V1: dict[str, Any] = {
    "momentum": 0.999,
    "alpha": 1.0,
    "top_k": 32,
    "chunk": 64,
    "transform": "dct",
    "update": "signum",
    "reduction": "senders",
    "values": "float32",
    "gradient_scale": "lr",
    "chunking": "divisor",
}

#: arXiv 2411.19870 v2: the momentum is an exponential moving average; a fifth of what is sent is subtracted from it.
V2: dict[str, Any] = {
    "momentum": 0.995,
    "alpha": 0.2,
    "top_k": 32,
    "chunk": 64,
    "transform": "dct",
    "update": "signum",
    "reduction": "mean",
    "values": "float32",
    "gradient_scale": "ema",
    "chunking": "padded",
}

#: Defaults of `LocalDeMo` that others show or start from; a test compares them with its signature.
LOCAL: dict[str, Any] = {"sync_every": 5, "top_k": 224, "error_decay": 0.5, "outer_lr": 1.0, "outer_momentum": 0.0}

#: Of Muon's learning rate, for the parameters that AdamW takes: its update has an RMS of about 1, Muon's of 0.2.
OTHERS_SHARE = 0.2

"""The loss of a model on a text, which needs no benchmark and compares models with different tokenizers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from demopt.eval.loaded import Loaded
from demopt.train import sources
from demopt.train.config import InputError, TrainConfig
from demopt.train.evaluate import loss_sum
from demopt.train.tokens import encode

PROBE = "a z\n\x7f\u00e9\u20ac"


@dataclass(frozen=True)
class TextLoss:
    """The cross-entropy of `tokens` tokens, in nats, and the bytes of text that they stand for.

    Examples:
        >>> loss = TextLoss(nats=math.log(2) * 8, tokens=4, bytes=8)
        >>> round(loss.nats_per_token, 3), loss.bits_per_byte
        (1.386, 1.0)
    """

    nats: float
    tokens: int
    bytes: int

    @property
    def nats_per_token(self) -> float:
        """The validation loss of `demopt train`, on this text."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits that the text takes, coded with the model, for each of its bytes."""
        return self.nats / self.bytes / math.log(2)


@torch.no_grad()
def text_loss(loaded: Loaded, config: TrainConfig, batch: int) -> TextLoss:
    """Return the loss on the text that --data names.

    Every token but the first is predicted once, in windows one after the other; at the start of a window the model
    has seen nothing yet, as in training.
    """
    if files := sources.token_files(config):
        raise InputError(f"--data {files[0]} holds tokens; eval reads text")
    documents = sources.documents(config)
    tokens = encode(documents, None if _is_bytes(loaded.tokenizer) else loaded.tokenizer).astype(np.int64)
    if len(tokens) < 2:
        raise InputError(f"--data: {len(tokens)} tokens, wanted at least 2")
    if (largest := int(tokens.max())) >= loaded.model.config.vocab_size:
        raise InputError(f"the tokenizer has token {largest}, the model {loaded.model.config.vocab_size} rows")
    nats = sum(
        loss_sum(loaded.model, windows, loaded.device).item() for windows in batches(tokens, loaded.sequence, batch)
    )
    size = sum(map(len, documents)) * (len(tokens) - 1) / len(tokens)  # without the first token
    return TextLoss(nats, len(tokens) - 1, round(size))


def batches(tokens: NDArray[np.int64], sequence: int, batch: int) -> list[NDArray[np.int64]]:
    """Cut a row of tokens into windows [batch, sequence + 1], each beginning with the last one's last token.

    The last batch may be smaller, and the last window, in a batch of its own, shorter.

    Examples:
        >>> [windows.tolist() for windows in batches(np.arange(8), sequence=3, batch=2)]
        [[[0, 1, 2, 3], [3, 4, 5, 6]], [[6, 7]]]
    """
    whole = (len(tokens) - 1) // sequence
    rows = [tokens[first * sequence : (first + 1) * sequence + 1] for first in range(whole)]
    found = [np.stack(rows[first : first + batch]) for first in range(0, whole, batch)]
    rest = tokens[whole * sequence :]
    return [*found, rest[None]] if len(rest) > 1 else found


def _is_bytes(tokenizer: Any) -> bool:
    """Whether it is the byte tokenizer of `demopt train`, for which there is a quicker way."""
    found: list[int] = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    return len(tokenizer) == 256 and found == list(PROBE.encode())

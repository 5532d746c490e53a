"""Turns text into tokens: bytes, or any tokenizer that transformers can load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demopt.errors import one_line
from demopt.train.config import InputError

# Token 0 of the byte vocabulary ends a document; `encode` replaces NUL bytes in the text.
END_OF_TEXT = "<|endoftext|>"
BATCH = 256  # documents encoded at once


def byte_tokenizer() -> Any:
    """Build a byte-level transformers tokenizer: token = byte, and 0 ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {END_OF_TEXT: 0} | {_letter(byte): byte for byte in range(1, 256)}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=END_OF_TEXT))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token=END_OF_TEXT, unk_token=END_OF_TEXT)


def load_tokenizer(name: str, online: bool) -> Any:
    """Load the transformers tokenizer `name`: 'bytes', a tokenizer.json, a folder or a hub name."""
    if name == "bytes":
        return byte_tokenizer()
    if not online:
        os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if Path(name).is_file():
            return PreTrainedTokenizerFast(tokenizer_file=name)
        return AutoTokenizer.from_pretrained(name, local_files_only=not online)
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
        if Path(name).exists():
            raise InputError(f"--tokenizer {name}: not a tokenizer: {one_line(error)}") from None
        hint = one_line(error) if online else "no such file or folder; to fetch that name from the hub add --online"
        raise InputError(f"--tokenizer {name}: {hint}") from None


def encode(documents: list[bytes], tokenizer: Any) -> NDArray[Any]:
    """Encode all documents as one row of tokens, each followed by the end-of-text token if there is one.

    `tokenizer` None means bytes.

    Examples:
        >>> encode([b"ab", b"c"], None).tolist()
        [97, 98, 0, 99, 0]
    """
    if tokenizer is None:
        return np.frombuffer(b"".join(document.replace(b"\0", b" ") + b"\0" for document in documents), np.uint8)
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = []
    for first in range(0, len(documents), BATCH):
        texts = [document.decode("utf-8", "replace") for document in documents[first : first + BATCH]]
        for row in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            rows.append(np.array(row + end, dtype))
    return np.concatenate(rows) if rows else np.empty(0, dtype)


def _letter(byte: int) -> str:
    """Return the printable character that stands for a byte in byte-level tokenizers (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))

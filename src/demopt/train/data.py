"""Tokens for training and validation, and batches that depend only on seed, step, rank and pass."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demopt.errors import one_line
from demopt.train import sources
from demopt.train.config import InputError, TrainConfig
from demopt.train.tokens import encode, load_tokenizer

BYTE_VOCABULARY = 256
MOST_TOKEN = 2**24  # a larger number is no token: no vocabulary is so large
HASH_BLOCK = 1 << 24  # tokens hashed at once


@dataclass(frozen=True)
class Tokens:
    """Rows of tokens, in memory or memory-mapped; a window never crosses from one row to the next.

    Examples:
        >>> tokens = Tokens((np.arange(5), np.arange(10, 13)))
        >>> tokens.windows(3), tokens.window(3, 3).tolist()
        (4, [10, 11, 12])
    """

    rows: tuple[NDArray[Any], ...]

    def __len__(self) -> int:
        return sum(len(row) for row in self.rows)

    def windows(self, length: int) -> int:
        """Return the number of windows of `length` tokens."""
        return sum(max(0, len(row) - length + 1) for row in self.rows)

    def window(self, index: int, length: int) -> NDArray[np.int64]:
        """Return window number `index`."""
        for row in self.rows:
            here = max(0, len(row) - length + 1)
            if index < here:
                return row[index : index + length].astype(np.int64)
            index -= here
        raise IndexError(index)


@dataclass(frozen=True)
class Corpus:
    """The tokens that a run trains and validates on. `fingerprint` is a hash of all of them."""

    train: Tokens
    val: Tokens
    vocab_size: int
    fingerprint: str
    bytes_per_token: float | None  # of the validation text; None if --data names token files


def load_corpus(config: TrainConfig, prepared: Path | None = None) -> Corpus:
    """Read what --data names, or memory-map the tokens that `save_corpus` wrote to the folder `prepared`."""
    if files := sources.token_files(config):
        return _checked(config, _from_token_files(config, files))
    if prepared is not None:
        known = json.loads((prepared / "corpus.json").read_text(encoding="utf-8"))
        train, val = (np.load(prepared / f"{part}.npy", mmap_mode="r") for part in ("train", "val"))
        return Corpus(Tokens((train,)), Tokens((val,)), **known)
    return _checked(config, _from_documents(config, sources.documents(config)))


def with_vocabulary(config: TrainConfig, corpus: Corpus) -> TrainConfig:
    """Return the settings with the corpus's vocabulary, unless --vocab-size is given."""
    return replace(config, vocab_size=config.vocab_size or corpus.vocab_size)


def save_corpus(corpus: Corpus, folder: Path) -> None:
    """Write the tokens where all workers of this machine can memory-map them, so that text is encoded once.

    Token files are mapped where they lie.
    """
    if corpus.bytes_per_token is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, tokens in (("train", corpus.train), ("val", corpus.val)):
        np.save(folder / f"{name}.npy", tokens.rows[0])
    known = {name: getattr(corpus, name) for name in ("vocab_size", "fingerprint", "bytes_per_token")}
    (folder / "corpus.json").write_text(json.dumps(known) + "\n", encoding="utf-8")


def batch(tokens: Tokens, config: TrainConfig, step: int, rank: int, part: int = 0) -> NDArray[np.int64]:
    """Draw training windows [batch, sequence + 1]; the draw depends only on (seed, step, rank, part).

    Examples:
        >>> tokens, config = Tokens((np.arange(100),)), TrainConfig(sequence=4, batch=2)
        >>> bool((batch(tokens, config, 7, 1) == batch(tokens, config, 7, 1)).all())
        True
    """
    length = _window(config)
    draw = np.random.default_rng((config.seed, step, rank, part))
    starts = draw.integers(0, tokens.windows(length), size=config.batch)
    return np.stack([tokens.window(int(start), length) for start in starts])


def validation_windows(tokens: Tokens, config: TrainConfig, rank: int, world_size: int) -> NDArray[np.int64]:
    """Return this rank's validation windows, spread evenly over the text; every evaluation uses the same ones."""
    length = _window(config)
    spread = np.linspace(0, tokens.windows(length) - 1, config.eval_sequences).astype(np.int64)
    mine = np.unique(spread)[rank::world_size]
    return np.array([tokens.window(int(start), length) for start in mine]).reshape(-1, length)


def split(texts: list[bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Split whole documents into training and validation by a hash of their content.

    Duplicates are dropped, so that no document is on both sides. A single document is cut in two instead.

    Examples:
        >>> train, val = split([b"one", b"two", b"three", b"one"], 0.3)
        >>> len(train), len(val)
        (2, 1)
    """
    by_hash = {hashlib.blake2b(text).digest(): text for text in texts}
    if len(by_hash) == 1:
        (text,) = by_hash.values()
        cut = len(text) - max(1, int(len(text) * fraction))
        return [text[:cut]], [text[cut:]]
    left = fraction * sum(map(len, by_hash.values()))
    chosen = set()
    for key in sorted(by_hash):
        if len(by_hash[key]) <= left:
            chosen.add(key)
            left -= len(by_hash[key])
    if not chosen:
        chosen = {min(by_hash, key=lambda key: (len(by_hash[key]), key))}
    ordered = sorted(by_hash)
    return [by_hash[k] for k in ordered if k not in chosen], [by_hash[k] for k in ordered if k in chosen]


def _from_documents(config: TrainConfig, texts: list[bytes]) -> Corpus:
    if not texts:
        raise InputError("--data: no text found")
    tokenizer = None if config.tokenizer == "bytes" else load_tokenizer(config.tokenizer, config.online)
    train_texts, val_texts = split(texts, config.val_fraction)
    train, val = Tokens((encode(train_texts, tokenizer),)), Tokens((encode(val_texts, tokenizer),))
    size = BYTE_VOCABULARY if tokenizer is None else len(tokenizer)
    ratio = 1.0 if tokenizer is None else sum(map(len, val_texts)) / max(1, len(val))
    return Corpus(train, val, size, _fingerprint(train, val), ratio)


def _from_token_files(config: TrainConfig, files: list[Path]) -> Corpus:
    rows = [_map_tokens(file) for file in files]
    cuts = [len(row) - max(1, int(len(row) * config.val_fraction)) for row in rows]
    train = Tokens(tuple(row[:cut] for row, cut in zip(rows, cuts, strict=True)))
    val = Tokens(tuple(row[cut:] for row, cut in zip(rows, cuts, strict=True)))
    if config.tokenizer == "bytes":
        size = 1 + max(_largest_token(file, row) for file, row in zip(files, rows, strict=True))
    else:
        size = len(load_tokenizer(config.tokenizer, config.online))
    return Corpus(train, val, size, _fingerprint(train, val), None)


def _largest_token(file: Path, row: NDArray[Any]) -> int:
    least, most = (int(row.min()), int(row.max())) if len(row) else (0, 0)
    if least < 0 or most > MOST_TOKEN:
        raise InputError(f"--data {file}: holds numbers from {least} to {most}; tokens go from 0 to {MOST_TOKEN}")
    return most


def _map_tokens(file: Path) -> NDArray[Any]:
    try:
        if file.suffix == ".npy":
            row: NDArray[Any] = np.load(file, mmap_mode="r")
        else:
            row = np.memmap(file, np.uint16, mode="r")
    except Exception as error:  # numpy evaluates the header of a damaged file, which can fail in any way
        raise InputError(f"--data {file}: not a token file: {one_line(error)}") from None
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise InputError(f"--data {file}: wanted one row of integers, got {row.dtype} of shape {row.shape}")
    return row


def _checked(config: TrainConfig, corpus: Corpus) -> Corpus:
    length = _window(config)
    for name, tokens in (("training", corpus.train), ("validation", corpus.val)):
        if not tokens.windows(length):
            raise InputError(
                f"--data: the {name} part has {len(tokens):,} tokens, fewer than a sequence of "
                f"{config.sequence} and its last target; give more text or a smaller --sequence"
            )
    if config.vocab_size is not None and config.vocab_size < corpus.vocab_size:
        raise InputError(f"--vocab-size is {config.vocab_size}, but the tokens need {corpus.vocab_size}")
    return corpus


def _window(config: TrainConfig) -> int:
    if config.sequence is None:
        raise TypeError("sequence is None: resolve the config first")
    return config.sequence + 1


def _fingerprint(*parts: Tokens) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tokens in parts:
        for row in tokens.rows:
            digest.update(f"{row.dtype.str} {len(row)};".encode())
            for first in range(0, len(row), HASH_BLOCK):
                digest.update(np.ascontiguousarray(row[first : first + HASH_BLOCK]).data)
    return digest.hexdigest()

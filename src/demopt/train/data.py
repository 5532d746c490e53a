"""Text to tokens to batches. Documents come from files, folders, or the standard library.

Batches depend on seed, step, rank and pass alone.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demopt.errors import first_line
from demopt.train.config import InputError, TrainConfig

TOKEN_SUFFIXES = (".npy", ".bin")
# Left out of the standard library: tests, which some builds lack, and folders that are not part of it.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
END_OF_TEXT = "<|endoftext|>"  # token 0 of the byte vocabulary; `encode` replaces NUL bytes in the text
BYTE_VOCABULARY = 256
MOST_TOKEN = 2**24  # a larger number is no token: no vocabulary is so large
ENCODED_AT_ONCE = 256  # documents


@dataclass(frozen=True)
class Tokens:
    """Rows of tokens, in memory or memory-mapped; a window never crosses from one row to the next."""

    rows: tuple[NDArray[Any], ...]

    def __len__(self) -> int:
        return sum(len(row) for row in self.rows)

    def windows(self, length: int) -> int:
        """Returns the number of windows of `length` tokens."""
        return sum(max(0, len(row) - length + 1) for row in self.rows)

    def window(self, index: int, length: int) -> NDArray[np.int64]:
        """Returns window number `index`."""
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


def load_corpus(config: TrainConfig) -> Corpus:
    """Reads --data: memory-maps token files, or encodes text."""
    files = token_files(config)
    return _checked(config, _from_token_files(config, files) if files else _from_documents(config, documents(config)))


def with_vocabulary(config: TrainConfig, corpus: Corpus) -> TrainConfig:
    """Returns the settings with the corpus's vocabulary, unless --vocab-size is given."""
    return replace(config, vocab_size=config.vocab_size or corpus.vocab_size)


def batch(tokens: Tokens, config: TrainConfig, step: int, rank: int, part: int = 0) -> NDArray[np.int64]:
    """Draws training windows [batch, sequence + 1]; the draw depends only on (seed, step, rank, part)."""
    length = _window(config)
    draw = np.random.default_rng((config.seed, step, rank, part))
    starts = draw.integers(0, tokens.windows(length), size=config.batch)
    return np.stack([tokens.window(int(start), length) for start in starts])


def validation_windows(tokens: Tokens, config: TrainConfig, rank: int, world_size: int) -> NDArray[np.int64]:
    """Returns this rank's validation windows, spread evenly over the text; every evaluation uses the same ones."""
    length = _window(config)
    spread = np.linspace(0, tokens.windows(length) - 1, config.eval_sequences).astype(np.int64)
    mine = np.unique(spread)[rank::world_size]
    return np.array([tokens.window(int(start), length) for start in mine]).reshape(-1, length)


def split(texts: list[bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Splits whole documents into training and validation by a hash of their content.

    Duplicates are dropped, so that no document is on both sides. A single document is cut in two instead.
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


# Documents


def documents(config: TrainConfig) -> list[bytes]:
    """Returns the documents of --data, one per file; a folder sorted by name."""
    if not config.data:
        return [text for file in _standard_library() for text in _text(file)]
    found: list[bytes] = []
    for name in config.data:
        texts = [text for file in _files(Path(name), config) for text in _text(file)]
        if not texts:
            raise InputError(f"--data {name}: no text in it")
        found += texts
    return found


def token_files(config: TrainConfig) -> list[Path]:
    """Returns the token files of --data, empty if it names text; InputError if it names both."""
    files = [file for name in config.data for file in _files(Path(name), config)]
    tokens = [file for file in files if file.suffix in TOKEN_SUFFIXES]
    if tokens and len(tokens) < len(files):
        raise InputError(f"--data mixes token files ({tokens[0]}) with text; give one kind")
    return tokens


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in NOT_LIBRARY]  # others' packages may be many: not entered
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return [root / name for name in sorted(names)]


def _files(path: Path, config: TrainConfig) -> list[Path]:
    """Returns `path` itself, or all files below a folder sorted by name, without hidden ones and those of --out."""
    if not path.exists():
        raise InputError(f"--data {path}: no such file or folder")
    if path.is_file():
        return [path]
    out = Path(config.out).resolve()
    below = ((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())
    seen = [file for name, file in sorted(below) if not any(part.startswith(".") for part in name.split("/"))]
    return [file for file in seen if out not in file.resolve().parents]


def _text(file: Path) -> Iterator[bytes]:
    """Yields the file as one document, or nothing if it is empty or binary."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"--data {file}: {error.strerror}") from None
    if content.strip() and b"\0" not in content[:8192]:
        yield content


# Tokens


def byte_tokenizer() -> Any:
    """Builds a byte-level transformers tokenizer: token = byte, and 0 ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {END_OF_TEXT if byte == 0 else letter: byte for byte, letter in bytes_to_unicode().items()}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=END_OF_TEXT))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token=END_OF_TEXT, unk_token=END_OF_TEXT)


def load_tokenizer(name: str) -> Any:
    """Loads the transformers tokenizer `name`: 'bytes', a tokenizer.json or a folder."""
    if name == "bytes":
        return byte_tokenizer()
    if not Path(name).exists():
        raise InputError(f"--tokenizer {name}: no such file or folder")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if Path(name).is_file():
            return PreTrainedTokenizerFast(tokenizer_file=name)
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
        raise InputError(f"--tokenizer {name}: not a tokenizer: {first_line(error)}") from None


def encode(texts: list[bytes], tokenizer: Any) -> NDArray[Any]:
    """Encodes all documents as one row of tokens, each with the end-of-text token if there is one. None: bytes."""
    if tokenizer is None:
        return np.frombuffer(b"".join(text.replace(b"\0", b" ") + b"\0" for text in texts), np.uint8)
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = []
    for first in range(0, len(texts), ENCODED_AT_ONCE):
        decoded = [text.decode("utf-8", "replace") for text in texts[first : first + ENCODED_AT_ONCE]]
        for row in tokenizer(decoded, add_special_tokens=False)["input_ids"]:
            rows.append(np.array(row + end, dtype))
    return np.concatenate(rows) if rows else np.empty(0, dtype)


def _from_documents(config: TrainConfig, texts: list[bytes]) -> Corpus:
    tokenizer = None if config.tokenizer == "bytes" else load_tokenizer(config.tokenizer)
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
        size = 1 + max(int(row.max(initial=0)) for row in rows)
    else:
        size = len(load_tokenizer(config.tokenizer))
    return Corpus(train, val, size, _fingerprint(train, val), None)


def _map_tokens(file: Path) -> NDArray[Any]:
    try:
        row: NDArray[Any] = np.load(file, mmap_mode="r") if file.suffix == ".npy" else np.memmap(file, np.uint16, "r")
    except Exception as error:  # numpy evaluates the header of a damaged file, which can fail in any way
        raise InputError(f"--data {file}: not a token file: {first_line(error)}") from None
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise InputError(f"--data {file}: wanted one row of integers, got {row.dtype} of shape {row.shape}")
    least, most = int(row.min(initial=0)), int(row.max(initial=0))
    if least < 0 or most > MOST_TOKEN:
        raise InputError(f"--data {file}: holds numbers from {least} to {most}; tokens go from 0 to {MOST_TOKEN}")
    return row


def _checked(config: TrainConfig, corpus: Corpus) -> Corpus:
    length = _window(config)
    for name, tokens in (("training", corpus.train), ("validation", corpus.val)):
        if not tokens.windows(length):
            raise InputError(
                f"--data: the {name} part has {len(tokens):,} tokens, fewer than a sequence of {config.sequence} and "
                "its last target; give more text or a smaller --sequence"
            )
    if config.vocab_size is not None and config.vocab_size < corpus.vocab_size:
        raise InputError(f"--vocab-size is {config.vocab_size}, but the tokens need {corpus.vocab_size}")
    return corpus


def _window(config: TrainConfig) -> int:
    assert config.sequence is not None, "resolve the config first"
    return config.sequence + 1


def _fingerprint(*parts: Tokens) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tokens in parts:
        for row in tokens.rows:
            digest.update(f"{row.dtype.str} {len(row)};".encode())
            digest.update(np.ascontiguousarray(row).data)
    return digest.hexdigest()

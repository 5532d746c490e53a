"""Text to tokens to batches. Documents come from files, folders, or the standard library.

Batches depend only on seed, step, rank and pass or, with --epochs, on the numbers of their sequences.
"""

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.filesize import decimal

from demopt.errors import DemoptError, first_line
from demopt.runs.reading import sequence_at
from demopt.runs.store import full
from demopt.train.config import BYTE_VOCABULARY, MANY, InputError, TrainConfig

ANSWERER = "assistant"
TOKEN_SUFFIXES = (".npy", ".bin")
LINES_SUFFIX = ".jsonl"
# The start of JSON that is not plain text to train on, recognised by the first name in its first object
_LIKE_LINES = re.compile(rb'\s*\[?\s*\{\s*"(messages|text|conversations|instruction|prompt)"\s*:')
COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\3\4", b"BZh", b"\xfd7zXZ")  # gzip, zstd, zip, bzip2, xz
# Left out of the standard library: tests, which some builds lack, and folders that are not part of it.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HIDDEN = re.compile(r"\.|lost\+found\Z")  # skipped in --data; lost+found is the file system's, for root only
END_OF_TEXT = "<|endoftext|>"  # token 0 of the byte vocabulary; `encode` replaces NUL bytes in the text
MOST_TOKEN = MANY - 1  # a larger number is not a token: no vocabulary is so large
ENCODED_AT_ONCE = 256  # documents

Batch = NDArray[np.int64]  # windows of tokens [sequences, sequence + 1]


@dataclass(frozen=True)
class Tokens:
    """Rows of tokens, in memory or memory-mapped; a window never crosses from one row to the next.

    With `starts`, of conversations, windows begin only there: those of an epoch at its second array, others at its
    first. A window that passes the row's end goes on at its start.
    """

    rows: tuple[NDArray[Any], ...]
    starts: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    files: tuple[tuple[Path, os.stat_result], ...] = ()  # of mapped rows, as they were when opened

    def __len__(self) -> int:
        return sum(len(row) for row in self.rows)

    def windows(self, length: int, stride: int = 1) -> int:
        """Returns the number of windows of `length` tokens that begin `stride` tokens apart; 1: anywhere."""
        if self.starts:
            return len(self.starts[stride > 1])
        return sum(max(0, (len(row) - length) // stride + 1) for row in self.rows)

    def window(self, index: int, length: int, stride: int = 1) -> NDArray[np.int64]:
        if self.starts:
            places = np.arange(length) + self.starts[stride > 1][index]
            found: NDArray[np.int64] = self.rows[0].take(places, mode="wrap")
            return found
        for number, row in enumerate(self.rows):
            here = max(0, (len(row) - length) // stride + 1)
            if index < here:
                if self.files:
                    _check_unchanged(*self.files[number])
                return row[index * stride : index * stride + length].astype(np.int64)
            index -= here
        raise IndexError(index)


def _check_unchanged(file: Path, opened: os.stat_result) -> None:
    """Raises DemoptError if a mapped file has changed: a read past its end kills the process. A new file is fine."""
    with suppress(OSError):
        now = file.stat()
        same = (now.st_size, now.st_mtime_ns) == (opened.st_size, opened.st_mtime_ns)
        if os.path.samestat(now, opened) and not same:
            raise DemoptError(f"--data {file}: changed since it was opened; put its content back, and start again")


@dataclass(frozen=True)
class Corpus:
    """The tokens that a run trains and validates on. `fingerprint` is a hash of all of them."""

    train: Tokens
    val: Tokens
    vocab_size: int
    fingerprint: str
    bytes_per_token: float | None  # of the validation text; None for token files and conversations
    source: str = ""  # the names and the total size of the files read

    @property
    def about(self) -> str:
        """Returns two lines about the tokens, for the user."""
        starts = self.train.starts
        chats = f" in {len(starts[0]):,} windows of conversations" if starts else ""
        return f"read {self.source}\n{len(self.train):,} training tokens{chats}, {len(self.val):,} for validation"


def load_corpus(config: TrainConfig) -> Corpus:
    """Reads --data: memory-maps token files, or encodes text. InputError if it is too little."""
    files, left = find_files(config)
    tokens = [file for file in files if file.suffix in TOKEN_SUFFIXES]
    if tokens and len(tokens) < len(files) + len(left):
        raise InputError(f"--data mixes token files ({tokens[0]}) with text; give one kind")
    # Taken before minutes of reading, after which a file may be gone.
    source = _source(files, left) if config.data else "the text of Python's standard library"
    try:
        train, val, size, ratio = _from_token_files(config, tokens) if tokens else _from_text(config, files)
    except MemoryError:
        remedy = "give less, or tokens in a .npy or .bin file, which stays on the disk"
        raise InputError(f"--data: {source} take more memory than there is; {remedy}") from None
    for name, part in (("training", train), ("validation", val)):
        if not part.windows(_window(config)):
            wanted = f"a sequence takes {_window(config):,}: give more text or a smaller --sequence"
            raise InputError(f"--data: the {name} part has {len(part):,} tokens, and {wanted}")
    if size < 2:
        raise InputError("--data: all of its tokens are 0, as in a file that was made and not filled")
    if config.vocab_size is not None and config.vocab_size < size:
        if not config.model:
            raise InputError(f"--vocab-size is {config.vocab_size}, but the tokens need {size}")
        # The model's tokenizer may have more tokens than its embedding has rows, such as for padding, not in the text.
        rows = [row for part in (train, val) for row in part.rows]
        if (most := max(max(int(row.max(initial=0)), ~int(row.min(initial=0))) for row in rows)) >= config.vocab_size:
            told = f"its vocabulary is {config.vocab_size:,}, and the text holds token {most:,}"
            raise InputError(f"--model {config.model}: {told}; encode it by the model's own tokenizer")
    return Corpus(train, val, size, _fingerprint(train, val), ratio, source)


def batch(tokens: Tokens, config: TrainConfig, step: int, rank: int, part: int = 0, size: int | None = None) -> Batch:
    """Draws `size` training windows, by default --batch; the draw depends only on (seed, step, rank, part) and size."""
    length = _window(config)
    draw = np.random.default_rng((config.seed, step, rank, part))
    starts = draw.integers(0, tokens.windows(length), size=size or config.batch)
    return np.stack([tokens.window(int(start), length) for start in starts])


def sequences(tokens: Tokens, config: TrainConfig) -> int:
    """Returns the number of sequences in an epoch.

    They touch, and no token is the target of two, but a part of a conversation that one cuts is in the next one, too.
    """
    return tokens.windows(_window(config), _window(config) - 1)


def numbered(tokens: Tokens, config: TrainConfig, numbers: Sequence[int]) -> list[Batch]:
    """Returns the windows of these numbers, counted over all epochs, by forward pass; for none, one without targets."""
    length, every = _window(config), sequences(tokens, config)
    if not numbers:
        row = tokens.window(0, length)
        return [np.where(row < 0, row, ~row)[None]]
    places = [sequence_at(number, every, config.seed) for number in numbers]
    passes = [places[first : first + config.batch] for first in range(0, len(places), config.batch)]
    return [np.stack([tokens.window(place, length, length - 1) for place in part]) for part in passes]


def validation_windows(tokens: Tokens, config: TrainConfig, rank: int, world_size: int) -> Batch:
    """Returns this rank's validation windows, spread evenly over the text; every evaluation uses the same ones."""
    length = _window(config)
    spread = np.linspace(0, tokens.windows(length) - 1, config.eval_sequences).astype(np.int64)
    mine = np.unique(spread)[rank::world_size]
    return np.array([tokens.window(int(start), length) for start in mine]).reshape(-1, length)


def split(texts: list[bytes], fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Splits unique documents into training and validation by a hash: none is on both sides.

    Each is cut at its end if there are fewer than 1 / `fraction`, where one may be all of its kind, or if those that
    fit are under a fifth of it. Conversations are not: the shortest of the rest joins, if that is nearer to `fraction`.
    """
    unique = sorted(set(texts), key=lambda text: hashlib.blake2b(text).digest())
    left, chosen = fraction * sum(map(len, unique)), set[bytes]()
    for text in unique:
        if len(text) <= left:
            chosen.add(text)
            left -= len(text)
    few = left > 0.8 * fraction * sum(map(len, unique))
    if any(isinstance(text, Chat) for text in unique):
        others = sorted((text for text in unique if text not in chosen), key=len)  # of equal ones, by hash
        if not chosen or (few and len(others[0]) < 2 * left):
            chosen.add(others[0])
    elif few or len(unique) * fraction < 1:
        cuts = [(text, len(text) - max(1, int(len(text) * fraction))) for text in unique]
        return [text[:cut] for text, cut in cuts], [text[cut:] for text, cut in cuts]
    return [text for text in unique if text not in chosen], [text for text in unique if text in chosen]


def find_files(config: TrainConfig) -> tuple[list[Path], list[Path]]:
    """Returns the files of --data, each folder sorted by name: those to read, and those left out for lack of text."""
    if not config.data:
        return _standard_library(), []
    read, left = list[Path](), list[Path]()
    for name in config.data:
        faults = {file: unfit(file) for file in _files(name, config)}
        if all(faults.values()):
            none = "it has no file but hidden ones and those of --out and --run"
            first = next((f"{file.name} is {fault}" for file, fault in faults.items()), none)
            raise InputError(f"--data {name}: no text in it: {first}")
        read += [file for file, fault in faults.items() if not fault]
        left += [file for file, fault in faults.items() if fault]
    return read, left


def unfit(file: Path) -> str:
    """Returns the kind of a file that is neither text nor tokens; empty if it may be one of these."""
    if file.suffix in TOKEN_SUFFIXES:
        return ""
    try:
        with file.open("rb") as opened:
            head, more = opened.read(8192), opened.read(1)
    except OSError as error:
        raise InputError(f"--data {file}: {error.strerror}") from None
    if head.startswith(b"PAR1"):
        return "a parquet file; write it as JSON lines: datasets.load_dataset('parquet', ...).to_json('x.jsonl')"
    if head.startswith(COMPRESSED):
        return "compressed; unpack it"
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32; write it as UTF-8, as iconv -f UTF-32 -t UTF-8 does"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):  # as editors on Windows write "Unicode"
        return "UTF-16; write it as UTF-8, as iconv -f UTF-16 -t UTF-8 does"
    if file.suffix != LINES_SUFFIX and _LIKE_LINES.match(head):
        return "JSON; write it as JSON lines, an object per line, into a file whose name ends in .jsonl"
    if b"\0" in head:
        return "binary, not text; tokens are read from .npy and .bin files"
    return "" if head.strip() or more else "empty"


def documents(file: Path, as_text: bool = False) -> Iterator[bytes]:
    """Yields the documents of a file: all of it, or the text or conversation of each line of JSON.

    `as_text`: InputError if it is not UTF-8, which a tokenizer reads.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"--data {file}: {error.strerror}") from None
    if file.suffix != LINES_SUFFIX:
        if as_text:
            _check_utf8(file, content)
        if content.strip():
            yield content
        return
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"--data {file}, line {number}: not JSON: {first_line(error)}") from None
        got = found if isinstance(found, dict) else {}
        text, chat = got.get("text"), parse(got.get("messages"))
        if chat is not None:
            yield chat
        elif isinstance(text, str):
            yield text.encode("utf-8", "replace")
        else:
            fields = ", ".join(f"{name} ({type(value).__name__})" for name, value in got.items())
            kind = f"an object with {fields}" if got else json.dumps(found)[:40]
            wanted = "an object with text (a string) or messages (a list of objects with role and content)"
            raise InputError(f"--data {file}, line {number}: wanted {wanted}, got {kind}")


def _check_utf8(file: Path, content: bytes) -> None:
    """Raises InputError unless the content is UTF-8; its last character may be cut, as by `head -c`."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            raise InputError(
                f"--data {file}: byte {error.start:,} of it (0x{content[error.start]:02x}) is not UTF-8, which a "
                "tokenizer reads; write it as UTF-8, as iconv -f LATIN1 -t UTF-8 does, or leave it out"
            ) from None


def _source(read: list[Path], left: list[Path]) -> str:
    more = f" and {len(read) - 2} more" if len(read) > 2 else ""
    size = decimal(sum(file.stat().st_size for file in read))
    out = f"; left out {len(left)} without text, such as {left[0].name}" if left else ""
    return f"{', '.join(file.name for file in read[:2])}{more}, {size}{out}"


def _standard_library() -> list[Path]:
    found: list[Path] = []
    for folder, below, files in os.walk(sysconfig.get_path("stdlib")):
        below[:] = [name for name in below if name not in NOT_LIBRARY]  # skips installed packages, maybe many
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=Path.as_posix)


def _files(name: str, config: TrainConfig) -> list[Path]:
    """Returns a file, or all below a folder and its links, sorted, but no hidden ones and none of --out and --run."""
    if not (path := Path(name)).exists():
        raise InputError(f"--data {name}: no such file or folder")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InputError(f"--data {path}: a pipe or a device, which is read once; write its content to a file first")
    if (path / "config.json").exists() and any(path.glob("*.safetensors")):
        raise InputError(f"--data {path}: it is a model's folder; to go on from the model: --model {path}")
    ours = {os.path.realpath(config.out)}
    with suppress(ValueError):  # no run, or an invalid one, reported where it is opened
        run = full(config.run)
        ours |= {run} if Path(run) not in Path(os.path.realpath(path)).parents else set()  # a share may hold both
    found, entered, faults = list[Path](), {*ours}, list[OSError]()
    try:
        for folder, below, files in os.walk(path, onerror=faults.append, followlinks=True):
            real = os.path.realpath(folder)
            below[:] = () if real in entered else sorted(each for each in below if not HIDDEN.match(each))
            found += [Path(folder, each) for each in files if real not in entered and not HIDDEN.match(each)]
            entered.add(real)
        if faults:
            raise faults[0]
        found = [file for file in found if ours.isdisjoint(map(str, Path(os.path.realpath(file)).parents))]
        if gone := next((file for file in found if file.is_symlink() and not file.exists()), None):
            raise InputError(f"--data {gone}: a link to nothing; is its disk mounted?")
        return sorted((file for file in found if file.is_file()), key=Path.as_posix)
    except OSError as error:
        raise InputError(f"--data {error.filename}: {error.strerror}") from None


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
        return AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
        why = "not a tokenizer: " + first_line(error)
        if Path(name).is_dir() and not [*Path(name).glob("*tok*"), *Path(name).glob("vocab*")]:
            why = "has no tokenizer; copy its tokenizer.json into it, or give another --tokenizer"
        raise InputError(f"--tokenizer {name}: {why}") from None


def _size(tokenizer: Any) -> int:
    """Returns the rows that an embedding needs for all tokens, whose numbers may have gaps."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def save_tokenizer(config: TrainConfig, folder: Path, text: bool) -> None:
    """Saves the tokenizer beside a model. If --data named tokens (`text` is false), --model need not have one."""
    assert config.tokenizer
    if text or config.tokenizer != "bytes":
        try:
            load_tokenizer(config.tokenizer).save_pretrained(folder)
        except InputError:
            if text or config.tokenizer != config.model:
                raise


def encode(texts: list[bytes], tokenizer: Any) -> NDArray[Any]:
    """Encodes all documents as one row of tokens, with an end-of-text token after each if there is one. None: bytes."""
    if tokenizer is None:
        return np.frombuffer(b"".join(text.replace(b"\0", b" ") + b"\0" for text in texts), np.uint8)
    dtype = np.uint16 if _size(tokenizer) <= 1 << 16 else np.uint32
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    rows = [np.empty(0, dtype)]
    for first in range(0, len(texts), ENCODED_AT_ONCE):
        decoded = [text.decode("utf-8", "replace") for text in texts[first : first + ENCODED_AT_ONCE]]
        try:
            found = tokenizer(decoded, add_special_tokens=False, verbose=False)["input_ids"]
        except Exception as error:  # the library's bare class, as of a tokenizer without a token for unknown words
            raise InputError(f"--data: the tokenizer cannot encode it: {first_line(error)}") from None
        rows += [np.array(row + end, dtype) for row in found]
    return np.concatenate(rows)


def _from_text(config: TrainConfig, files: list[Path]) -> tuple[Tokens, Tokens, int, float | None]:
    """Returns training and validation tokens, the size of the vocabulary, and the bytes per token."""
    tokenizer: Any = load_tokenizer(config.tokenizer) if config.tokenizer not in (None, "bytes") else None
    texts = [text for file in files for text in documents(file, as_text=tokenizer is not None)]
    chats = [text for text in texts if isinstance(text, Chat)]
    if chats and len(chats) < len(texts):
        raise InputError("--data mixes conversations with text; give one kind")
    if len(set(chats)) == 1:
        raise InputError("--data has one conversation; give at least two, one of them for validation")
    parts = split(texts, config.val_fraction)
    if chats:
        rows = [encode_chats(part, tokenizer, _window(config) - 1) for part in parts]
        if not all((row >= 0).any() for row, _ in rows):
            raise InputError(f"--data: its conversations have no message of the role {ANSWERER}")
        train, val = (Tokens((row,), (starts, read_once(starts, len(row), _window(config)))) for row, starts in rows)
        return train, val, _size(tokenizer), None
    train, val = (Tokens((encode(part, tokenizer),)) for part in parts)
    if tokenizer is None:
        return train, val, BYTE_VOCABULARY, 1.0
    return train, val, _size(tokenizer), sum(map(len, parts[1])) / max(1, len(val))


def _from_token_files(config: TrainConfig, files: list[Path]) -> tuple[Tokens, Tokens, int, None]:
    mapped = tuple((file, file.stat()) for file in files)
    rows, most = zip(*map(_map_tokens, files), strict=True)
    cuts = [len(row) - max(1, int(len(row) * config.val_fraction)) for row in rows]
    train = Tokens(tuple(row[:cut] for row, cut in zip(rows, cuts, strict=True)), files=mapped)
    val = Tokens(tuple(row[cut:] for row, cut in zip(rows, cuts, strict=True)), files=mapped)
    size = 1 + max(most)
    if config.tokenizer not in (None, "bytes", config.model):
        if (known := _size(load_tokenizer(config.tokenizer))) < size and config.vocab_size is None:
            told = f"has tokens up to {known - 1}, and --data holds {size - 1}; give the one that wrote --data"
            raise InputError(f"--tokenizer {config.tokenizer} {told}, or --vocab-size")
        size = max(size, known)
    return train, val, size, None


def _map_tokens(file: Path) -> tuple[NDArray[Any], int]:
    """Returns the tokens in a file, memory-mapped, and the largest one."""
    try:
        # not `np.load`, which opens a zip archive of several arrays, too
        row: Any = np.lib.format.open_memmap(file, "r") if file.suffix == ".npy" else np.memmap(file, np.uint16, "r")
    except Exception as error:  # numpy evaluates the header of a damaged file, which can fail in any way
        raise InputError(f"--data {file}: not a token file: {first_line(error)}") from None
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise InputError(f"--data {file}: wanted one row of integers, got {row.dtype} of shape {row.shape}")
    least, most = int(row.min(initial=0)), int(row.max(initial=0))
    if least < 0 or most > MOST_TOKEN:
        raise InputError(f"--data {file}: holds numbers from {least} to {most}; tokens go from 0 to {MOST_TOKEN}")
    return row, most


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


# Conversations are lines of JSON with `messages`. The tokenizer's template renders them; only answers are targets. A
# token that is only context is stored as its complement, -1 - token (`~token`), so that a row of tokens says both.


class Chat(bytes):
    """A conversation: its messages as JSON."""


def parse(messages: Any) -> Chat | None:
    """Returns the conversation; None if this is not a list of messages with `role` and `content`, or has images."""
    if not messages or not isinstance(messages, list):
        return None
    found = []
    for each in messages:
        if not (isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each):
            return None
        if isinstance(content := each["content"], list):  # parts, which a template for text would print as a list
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                return None
            each = {**each, "content": "".join(part["text"] for part in content)}
        found.append(each)
    return Chat(json.dumps(found).encode())


def encode_chats(chats: Sequence[bytes], tokenizer: Any, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the tokens of `Chat`s in a row, and where windows begin: at each conversation, then every `length`."""
    if not getattr(tokenizer, "chat_template", None) or not getattr(tokenizer, "is_fast", False):
        remedy = "give --model or --tokenizer of a chat model (chat_template.jinja in its folder), or lines with text"
        raise InputError(f"--data has the messages of chats, and the tokenizer has no chat template for them; {remedy}")
    rows, starts, begin = [np.empty(0, np.int64)], list[int](), 0
    for chat in chats:
        for text, answers in _render(json.loads(chat), tokenizer):
            found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            row, offsets = np.array(found["input_ids"], np.int64), np.array(found["offset_mapping"]).reshape(-1, 2)
            target = np.zeros(len(row), bool)
            for first, last in answers:
                target |= (offsets[:, 0] >= first) & (offsets[:, 1] <= last) & (offsets[:, 0] < offsets[:, 1])
            rows.append(np.where(target, row, ~row))
            starts += range(begin, begin + len(row), length)
            begin += len(row)
    return np.concatenate(rows), np.array(starts, np.int64)


def read_once(starts: NDArray[np.int64], end: int, length: int) -> NDArray[np.int64]:
    """Returns the starts of an epoch's windows: each begins with the first part that the one before has cut or lacks.

    `end`: of the row. A part reaches to the next start, whose token is also its target if the conversation goes on.
    """
    ends, found, part = np.append(starts[1:], end - 1), list[int](), 0
    while part < len(starts):
        found.append(starts[part])
        part = max(part + 1, int(np.searchsorted(ends, starts[part] + length)))
    return np.array(found, np.int64)


def _render(messages: list[dict[str, Any]], tokenizer: Any) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yields the conversation with its answers; before it, each answer that it does not repeat in full.

    Some templates drop the reasoning from all answers but the last: such an answer is trained in a text of its own.
    """

    def text(count: int, ask: bool = False) -> str:
        if not count:
            return ""
        try:
            found = str(tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=ask))
            return found.encode("utf-8", "replace").decode()  # JSON may have half a character, which no tokenizer takes
        except Exception as error:  # a template is a program
            told = f"refuses the conversation that begins {messages[0]}: {first_line(error)}"
            raise InputError(f"--data: the tokenizer's chat template {told}") from None

    whole, answers = text(len(messages)), []
    for number, message in enumerate(messages):
        if message["role"] != ANSWERER:
            continue
        asked, answered = text(number, ask=True), text(number + 1)
        if not answered.startswith(asked):  # the prompt for an answer has more than the start of answers
            asked = text(number)
        span = (len(asked), len(answered))
        if whole.startswith(answered):
            answers.append(span)
        else:
            yield answered, [span]
    if answers:
        yield whole, answers

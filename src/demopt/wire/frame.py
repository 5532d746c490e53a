"""A message: a header of 64 bytes, then the body that the layout describes. docs/wire-format.md is the specification.

Shapes: W ranks, B bytes in a message.
"""

import itertools
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demopt.errors import MessageError
from demopt.wire.checksum import checksum

MAGIC = b"DeMo"
VERSION = 1
HEADER_BYTES = 64
NONFINITE = 1  # flag: the sender's gradient held NaN or Inf, and its body is all zeros
FINGERPRINT = 8  # flag: the fingerprint field holds the fingerprint of the sender's parameters
REFUSED = 4  # flag: the sender, an owner, refused a message of the rank that the fingerprint field names
NEW_LAYOUT = 2  # flag: the sender's layout changed and it requests a handshake; its body is all zeros

_HEADER = struct.Struct("<4sHHQIIQQQQQ")  # the last field is the checksum
_FLAGS = 6  # offset of the low byte of the flags
_SETTINGS = slice(32, 40)
_CHECKSUM = slice(56, 64)
_BYTES_AT_ONCE = 1 << 20  # of messages that are copied together, for their checksums


@dataclass(frozen=True)
class Header:
    """Who sent a message, when, and under which settings. Digests, fingerprint and checksum are 64-bit numbers.

    Examples:
        >>> Header(step=3, rank=0, world_size=2, layout=1, settings=2).flags
        0
    """

    step: int
    rank: int
    world_size: int
    layout: int
    settings: int
    flags: int = 0
    fingerprint: int = 0


def build(header: Header, body: Tensor) -> Tensor:
    """Builds the message uint8 [64 + n] of a body uint8 [n], n a multiple of 8, on the body's device.

    Examples:
        >>> header = Header(step=3, rank=0, world_size=1, layout=1, settings=2)
        >>> message = build(header, torch.zeros(8, dtype=torch.uint8))
        >>> message.shape, bytes(message[:4].tolist())
        (torch.Size([72]), b'DeMo')
    """
    fields = _HEADER.pack(
        MAGIC,
        VERSION,
        header.flags,
        header.step,
        header.rank,
        header.world_size,
        header.layout,
        header.settings,
        header.fingerprint,
        body.numel(),
        0,
    )
    head = torch.frombuffer(bytearray(fields), dtype=torch.uint8).to(body.device)
    message = torch.cat((head, body))
    message[_CHECKSUM] = checksum(message).reshape(1).view(torch.uint8)
    return message


def check(messages: Tensor, expected: Header, body_bytes: int, answers: bool = False) -> list[Header]:
    """Returns the headers of messages [W, B], row r of rank r; MessageError names the first bad rank.

    `expected` holds this rank's step, world, layout and settings. Only `answers` of owners may be refusals. The body is
    checked by its checksum alone.

    Examples:
        >>> mine = Header(step=3, rank=0, world_size=1, layout=1, settings=2)
        >>> message = build(mine, torch.zeros(16, dtype=torch.uint8))
        >>> check(message.unsqueeze(0), mine, body_bytes=16) == [mine]
        True
    """
    if messages.dtype != torch.uint8 or messages.dim() != 2 or messages.shape[0] != expected.world_size:
        raise MessageError(
            f"got {messages.dtype} {list(messages.shape)} where uint8 "
            f"[{expected.world_size}, {HEADER_BYTES + body_bytes}] (one row a rank) was expected"
        )
    if messages.shape[1] != HEADER_BYTES + body_bytes:
        raise MessageError(
            f"messages have {messages.shape[1]} bytes, this layout's have {HEADER_BYTES + body_bytes}: "
            "truncated, or from a rank with other settings"
        )
    heads = bytes(messages[:, :HEADER_BYTES].flatten().tolist())
    headers: list[Header] = []
    for fields, total in zip(_HEADER.iter_unpack(heads), _expected_checksums(messages), strict=True):
        headers.append(_parse(fields, len(headers), total, expected, body_bytes, answers))
    return headers


def announced(messages: Tensor) -> bool:
    """Whether a handshake is due: one of messages [W, B] announces a new layout, or settings differ from row 0's.

    Only rows with a valid checksum count: ranks that received other bytes must not go other ways. Nothing else is
    checked.

    Examples:
        >>> header = Header(step=3, rank=0, world_size=1, layout=1, settings=2, flags=NEW_LAYOUT | NONFINITE)
        >>> announced(build(header, torch.zeros(8, dtype=torch.uint8)).unsqueeze(0))
        True
    """
    announcing = (messages[:, _FLAGS] & NEW_LAYOUT).tolist()
    if any(map(_is_whole, itertools.compress(messages, announcing))):
        return True
    differing = (messages[:, _SETTINGS] != messages[:1, _SETTINGS]).any(1).tolist()
    return any(map(_is_whole, itertools.compress(messages, differing))) and _is_whole(messages[0])


def _is_whole(row: Tensor) -> bool:
    *_, size, claimed = _HEADER.unpack(bytes(row[:HEADER_BYTES].tolist()))
    if size % 8 or HEADER_BYTES + size > row.numel():
        return False
    return bool(_expected_checksums(row[: HEADER_BYTES + size].unsqueeze(0))[0] == claimed)


def _expected_checksums(messages: Tensor) -> list[int]:
    """Returns the checksum of each message. Copies one message at a time, or several if they are short."""
    sums = []
    for rows in messages.split(max(1, _BYTES_AT_ONCE // messages.shape[1])):
        copies = rows.clone(memory_format=torch.contiguous_format)
        copies[:, _CHECKSUM].zero_()
        sums.append(checksum(copies))
    return [total % 2**64 for total in torch.cat(sums).tolist()]


def _parse(fields: tuple[Any, ...], rank: int, total: int, expected: Header, body_bytes: int, answers: bool) -> Header:
    """Checks the fields of a header and returns it; `total` is the message's checksum."""
    magic, version, flags, step, sender, world_size, layout_digest, settings, mark, size, claimed = fields
    if magic != MAGIC:
        raise MessageError(f"begins with {magic!r}, not {MAGIC!r}: not a message of demopt", rank)
    if version != VERSION:
        raise MessageError(f"wire version {version}, this rank speaks {VERSION}: install the same demopt", rank)
    if claimed != total:
        raise MessageError("checksum does not match: corrupted on the way", rank)
    for what, came, wanted in (
        ("rank", sender, rank),
        ("world size", world_size, expected.world_size),
        ("step", step, expected.step),
        ("body size", size, body_bytes),
        ("layout digest", layout_digest, expected.layout),
        ("settings digest", settings, expected.settings),
    ):
        if came != wanted:
            raise MessageError(f"{what} {came}, expected {wanted}", rank)
    if flags & ~(NONFINITE | NEW_LAYOUT | REFUSED | FINGERPRINT):
        raise MessageError(f"unknown flags {flags:#x}", rank)
    if flags & REFUSED and not answers:
        raise MessageError(f"flags {flags:#x} refuse something, but only owners do", rank)
    if flags & NEW_LAYOUT and not flags & NONFINITE:
        raise MessageError(f"flags {flags:#x} announce a new layout, but not an empty body", rank)
    return Header(step, sender, world_size, layout_digest, settings, flags, mark)

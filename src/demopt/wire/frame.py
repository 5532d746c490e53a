"""A message: a header of 64 bytes, then the body that the layout describes. docs/wire-format.md is the specification.

Shapes: W ranks, B bytes in a message.
"""

import struct
from dataclasses import dataclass

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
_CHECKSUM = slice(56, 64)


@dataclass(frozen=True)
class Header:
    """Who sent a message, when, and under which settings. Digests, fingerprint and checksum are 64-bit numbers.

    Example:
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

    Example:
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

    Example:
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
    heads = messages[:, :HEADER_BYTES].cpu()
    sums = _expected_checksums(messages)
    headers = [_parse(bytes(head.tolist()), rank, sums[rank], expected, body_bytes) for rank, head in enumerate(heads)]
    for header in headers:
        _check_flags(header, answers)
    return headers


def announced(messages: Tensor) -> bool:
    """Whether one of messages [W, B] announces a new layout and has a valid checksum. Nothing else is checked.

    Example:
        >>> header = Header(step=3, rank=0, world_size=1, layout=1, settings=2, flags=NEW_LAYOUT | NONFINITE)
        >>> announced(build(header, torch.zeros(8, dtype=torch.uint8)).unsqueeze(0))
        True
    """
    if not any_flag(messages, NEW_LAYOUT):
        return False
    rows = [row for row in messages if int(row[_FLAGS]) & NEW_LAYOUT]
    return any(_is_whole(row) for row in rows)


def _is_whole(row: Tensor) -> bool:
    *_, size, claimed = _HEADER.unpack(bytes(row[:HEADER_BYTES].tolist()))
    whole = size % 8 == 0 and HEADER_BYTES + size <= row.numel()
    return bool(whole) and bool(_expected_checksums(row[: HEADER_BYTES + size].unsqueeze(0))[0] == claimed)


def any_flag(messages: Tensor, flag: int) -> bool:
    """Whether one of messages [W, B] has a flag. The messages need not have been checked.

    Example:
        >>> header = Header(step=3, rank=0, world_size=1, layout=1, settings=2, flags=NONFINITE)
        >>> any_flag(build(header, torch.zeros(8, dtype=torch.uint8)).unsqueeze(0), NONFINITE)
        True
    """
    return bool((messages[:, _FLAGS] & flag).any())


def _expected_checksums(messages: Tensor) -> list[int]:
    """Works row by row, so that only one message is copied at a time."""
    zero = torch.zeros((), dtype=torch.uint8, device=messages.device)
    sums = []
    for row in messages:
        message = row.clone()
        message[_CHECKSUM] = zero
        sums.append(checksum(message))
    return [int(total) % 2**64 for total in torch.stack(sums).cpu()]


def _parse(head: bytes, rank: int, total: int, expected: Header, body_bytes: int) -> Header:
    magic, version, flags, step, sender, world_size, layout_digest, settings, mark, size, claimed = _HEADER.unpack(head)
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
    return Header(step, sender, world_size, layout_digest, settings, flags, mark)


def _check_flags(header: Header, answers: bool) -> None:
    if header.flags & ~(NONFINITE | NEW_LAYOUT | REFUSED | FINGERPRINT):
        raise MessageError(f"unknown flags {header.flags:#x}", header.rank)
    if header.flags & REFUSED and not answers:
        raise MessageError(f"flags {header.flags:#x} refuse something, but only owners do", header.rank)
    if header.flags & NEW_LAYOUT and not header.flags & NONFINITE:
        raise MessageError(f"flags {header.flags:#x} announce a new layout, but not an empty body", header.rank)

"""A message: a header of 64 bytes, then the body that the layout describes. docs/wire-format.md specifies it."""

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from demopt.core.constants import constant
from demopt.errors import MessageError
from demopt.wire.checksum import BLOCK, block_sums, combined

MAGIC = b"DeMo"
VERSION = 2
HEADER_BYTES = 64
MOST_SAMPLES = (1 << 32) - 1
OPTIMIZER = 0xFFFF  # bits of a settings digest: `Session.optimizer_number`
NONFINITE = 1  # flag: the body is all zeros, because the sender's gradient could not be used; owners pass it on
NEW_LAYOUT = 2  # flag: the sender's layout changed and it requests a handshake; its body is all zeros
REFUSED = 4  # flag: the sender, an owner, refused a message of the rank that the fingerprint field names
FINGERPRINT = 8  # flag: the fingerprint field holds the fingerprint of the sender's parameters

_HEADER = struct.Struct("<4sHHQIIQQQIIQ")  # the last field is the checksum
_CHECKSUM = slice(56, 64)
_BYTES_AT_ONCE = 1 << 20  # of messages whose checksums are computed together, which takes as much memory again
_DEVICE_BYTES_AT_ONCE = 1 << 26  # an accelerator pays for each operation


@dataclass(frozen=True)
class Header:
    """The sender of a message, its round's number, and its settings. Digests and fingerprint are 64-bit numbers."""

    round_number: int
    rank: int
    world_size: int
    layout: int
    settings: int
    flags: int = 0
    fingerprint: int = 0
    samples: int = 1  # the weight of the message in the mean over the ranks


class RawHeader(NamedTuple):
    """The fields of a received header, unchecked; `checksum` and `length` are those of the bytes that arrived."""

    magic: bytes
    version: int
    flags: int
    round_number: int
    rank: int
    world_size: int
    layout: int
    settings: int
    fingerprint: int
    body_bytes: int
    samples: int
    claimed: int
    checksum: int
    length: int
    has_faults: bool  # as found on the device; on a CPU, bodies are checked later

    @property
    def is_whole(self) -> bool:
        """Whether the message arrived as it was sent."""
        return self.claimed == self.checksum and self.length == HEADER_BYTES + self.body_bytes


def pack_message(header: Header, *parts: Tensor, size: int | None = None, device: torch.device | None = None) -> Tensor:
    """Builds the message uint8 [64 + n] from a body's parts; zeros pad it to n = `size`, a multiple of 8, if given."""
    here = torch.device("cpu") if device is None else device
    moved, given = [part.to(here) for part in parts], sum(part.numel() for part in parts)
    length = given if size is None else size
    fields = header.flags, header.round_number, header.rank, header.world_size, header.layout, header.settings
    packed = _HEADER.pack(MAGIC, VERSION, *fields, header.fingerprint, length, header.samples, 0)
    head = torch.frombuffer(bytearray(packed) + bytes(length - given), dtype=torch.uint8).to(here, non_blocking=True)
    words = (HEADER_BYTES + length) // 8
    spare = -words % BLOCK if words > BLOCK else 0  # up to whole blocks, whose checksum needs no copy
    end = constant((0,), torch.uint8, here).expand(8 * spare)
    whole = torch.cat((head[:HEADER_BYTES], *moved, head[HEADER_BYTES:], end))
    message = whole[: HEADER_BYTES + length]
    message[_CHECKSUM] = combined(block_sums(whole.view(torch.int64))).reshape(1).view(torch.uint8)
    return message


def read_headers(messages: Tensor, faults_W: Tensor | None = None) -> list[RawHeader]:
    """Reads headers and checksums of messages uint8 [W, B], and `faults_W` of bodies, in one copy to the host."""
    if messages.dtype != torch.uint8 or messages.dim() != 2 or messages.shape[1] < HEADER_BYTES:
        raise MessageError(f"got {messages.dtype} {list(messages.shape)}, not rows of at least {HEADER_BYTES} bytes")
    if messages.shape[1] % 8:
        raise MessageError(f"messages have {messages.shape[1]} bytes, not a multiple of 8: truncated")
    aligned = messages.is_contiguous() and messages.storage_offset() % 8 == 0
    words = (messages if aligned else messages.clone(memory_format=torch.contiguous_format)).view(torch.int64)
    at_once = _BYTES_AT_ONCE if messages.is_cpu else _DEVICE_BYTES_AT_ONCE
    sums = [block_sums(rows) for rows in words.split(max(1, at_once // messages.shape[1]))]
    sums_Wn = torch.cat(sums) if len(sums) > 1 else sums[0]
    faults_W = words.new_zeros(len(words)) if faults_W is None else faults_W
    found = torch.cat((words[:, : HEADER_BYTES // 8], sums_Wn, faults_W.unsqueeze(1)), dim=1).cpu()
    heads, claimed = found[:, : HEADER_BYTES // 8].tolist(), found[:, _CHECKSUM.start // 8]
    totals = combined(found[:, HEADER_BYTES // 8 : -1], without=(_CHECKSUM.start // 8, claimed)).tolist()
    headers = []
    for head, total, faults in zip(heads, totals, found[:, -1].tolist(), strict=True):
        fields = _HEADER.unpack(struct.pack("<8q", *head))
        headers.append(RawHeader._make((*fields, total % 2**64, messages.shape[1], faults > 0)))
    return headers


def handshake_due(received: list[RawHeader]) -> bool:
    """Whether a sender announces a layout or has other settings, by whole messages: ranks may get different bytes."""
    whole = [header for header in received if header.is_whole]
    differ = whole[:1] == received[:1] and not _alike({header.settings for header in whole})
    return differ or any(header.flags & NEW_LAYOUT for header in whole)


def _alike(settings: set[int]) -> bool:
    """Whether settings digests are equal. One without an optimizer number predates the handshake, or is a replay's."""
    return len({each & ~OPTIMIZER for each in settings}) == 1 and len({each & OPTIMIZER for each in settings} - {0}) < 2


def check_headers(received: list[RawHeader], expected: Header, body_bytes: int, answers: bool = False) -> int:
    """Checks the headers of messages, row r of rank r; returns the union of their flags.

    `expected` holds this rank's round number, world size, layout and settings. Bodies are checked by their checksums.
    Raises MessageError, which names the first bad rank or, among owners' `answers`, the rank that one refused.
    """
    if len(received) != expected.world_size:
        raise MessageError(f"got {len(received)} messages where {expected.world_size}, one per rank, were expected")
    flags = 0
    for rank, raw in enumerate(received):
        if raw.length != HEADER_BYTES + body_bytes:
            told = f"messages have {raw.length} bytes, this layout's have {HEADER_BYTES + body_bytes}"
            raise MessageError(f"{told}: truncated, or from a rank with other settings")
        if raw.magic != MAGIC:
            told = "not a message of demopt, or the rank left out a step, and is in another collective"
            raise MessageError(f"begins with {raw.magic!r}, not {MAGIC!r}: {told}", rank)
        if raw.version != VERSION:
            raise MessageError(f"wire version {raw.version}, this rank speaks {VERSION}: install the same demopt", rank)
        if raw.claimed != raw.checksum:
            told = "checksum does not match: corrupted on the way"
            if raw.body_bytes != body_bytes:
                told += f"; its header has {raw.body_bytes} bytes, as of another optimizer whose step a rank left out"
            raise MessageError(told, rank)
        settings = raw.settings if _alike({raw.settings, expected.settings}) else expected.settings
        for name, came, wanted in (
            ("rank", raw.rank, rank),
            ("world size", raw.world_size, expected.world_size),
            ("step", raw.round_number, expected.round_number),
            ("body size", raw.body_bytes, body_bytes),
            ("layout digest", raw.layout, expected.layout),
            ("settings digest", raw.settings, settings),
        ):
            if came != wanted:
                raise MessageError(f"{name} {came}, expected {wanted}", rank)
        if raw.flags & ~(NONFINITE | NEW_LAYOUT | REFUSED | FINGERPRINT):
            raise MessageError(f"unknown flags {raw.flags:#x}", rank)
        if raw.flags & REFUSED and not answers:
            raise MessageError(f"flags {raw.flags:#x} refuse something, but only owners do", rank)
        if raw.flags & NEW_LAYOUT and not raw.flags & NONFINITE:
            raise MessageError(f"flags {raw.flags:#x} announce a new layout, but not an empty body", rank)
        if raw.samples < 1:
            raise MessageError("a weight of 0 samples", rank)
        flags |= raw.flags
    for owner, raw in enumerate(received):
        if raw.flags & REFUSED:
            blamed = raw.fingerprint if raw.fingerprint < raw.world_size else None
            raise MessageError(f"refused by rank {owner}, the owner of these chunks", blamed)
    return flags

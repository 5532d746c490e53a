"""An exchange among ranks that share a key: each proves that it has it, and each message that it is whose it claims.

A message grows by a tag: keyed BLAKE2b (RFC 7693) over the session, the collective's number, sender, recipient and
body. The session is derived from the key and a random number of every rank, so nothing of an earlier run is valid.

Shapes: W ranks, B bytes in a message.
"""

import ctypes
import hmac
import secrets
import struct
from hashlib import blake2b

import torch
from torch import Tensor

from demopt.errors import MessageError, SettingsError
from demopt.exchange.hierarchical import Hierarchical, reduce_in_parts
from demopt.exchange.interface import Exchange
from demopt.exchange.process_group import resolve
from demopt.exchange.wrappers import Wrapper

TAG_BYTES = 16
KEY_BYTES = 32  # of a key that `demopt key` makes
_LEAST_KEY_BYTES, _MOST_KEY_BYTES = 16, 64
_NONCE_BYTES = 32
_SEALED, _OPEN = b"demopt+1", b"demopt-1"  # begin the first message of ranks with a key, and without
_ALL = 0xFFFFFFFF  # in place of a recipient
_SMALL = 1 << 12  # bytes of values that are summed in one round: larger sums are shared among the ranks


def seal(process_group: object, key: bytes) -> Exchange:
    """Returns an exchange over a process group, mesh or exchange in which every rank has to know `key`.

    Give it to an optimizer as `process_group`. `key` has 16 to 64 bytes, the same on all ranks.

    Raises:
        SettingsError: at the first exchange, a rank does not have the key. MessageError: a message was forged,
            changed or replayed; it names the rank in whose place it came. docs/security.md says what is not covered.

    Examples:
        >>> from demopt.exchange import SingleRank
        >>> exchange = seal(SingleRank(), key=bytes(32))  # better: secrets.token_bytes(32), once
        >>> exchange.all_gather(torch.zeros(3, dtype=torch.uint8)).shape
        torch.Size([1, 3])
    """
    inner = resolve(process_group)
    if isinstance(inner, Hierarchical):
        return Hierarchical(Sealed(inner.inter_node, key), Sealed(inner.intra_node, key))
    return Sealed(inner, key)


class Sealed(Wrapper):
    """An exchange whose messages carry tags under a common key; see `seal`.

    Examples:
        >>> from demopt.exchange import SingleRank
        >>> Sealed(SingleRank(), key=bytes(32)).tag_bytes
        16
    """

    def __init__(self, inner: Exchange, key: bytes) -> None:
        super().__init__(inner)
        if inner.intra_node is not None:
            raise ValueError("the two levels of an exchange are sealed apart: use seal()")
        self.tag_bytes = TAG_BYTES
        if not _LEAST_KEY_BYTES <= len(key) <= _MOST_KEY_BYTES:
            raise ValueError(
                f"the key has {len(key)} bytes, wanted {_LEAST_KEY_BYTES} to {_MOST_KEY_BYTES}; make one with "
                f"secrets.token_bytes({KEY_BYTES})"
            )
        self._key = bytes(key)
        self._session = b""
        self._calls = 0

    def all_gather(self, message_B: Tensor) -> Tensor:
        self._begin(message_B.device)
        rows = self.inner.all_gather(self._tagged(message_B.reshape(-1).view(torch.uint8), _ALL))
        return self._opened(rows, _ALL)

    def all_to_all(self, parts_WB: Tensor) -> Tensor:
        self._begin(parts_WB.device)
        device = parts_WB.device
        rows = torch.stack([self._tagged(part, recipient) for recipient, part in enumerate(parts_WB.cpu())])
        return self._opened(self.inner.all_to_all(rows.to(device)), self.rank)

    def all_reduce(self, values: Tensor) -> None:
        """Sums in the order of ranks: small values on every rank, large ones each rank a part."""
        if self.world_size == 1:
            return
        flat = values.detach().reshape(-1)
        if values.nbytes <= _SMALL:
            total = _sum(self.all_gather(flat.view(torch.uint8)).view(values.dtype))
        else:
            total = reduce_in_parts(flat, self, _sum)
        values.detach().copy_(total.view(values.shape))

    def broadcast(self, data_B: Tensor, src: int) -> None:
        """Overwrites the data only after its tag has been checked."""
        self._begin(data_B.device)
        message = self._tagged(data_B, _ALL) if self.rank == src else data_B.new_empty(data_B.numel() + TAG_BYTES)
        self.inner.broadcast(message, src)
        if self.rank != src:
            self._check(message, src, _ALL)
            data_B.copy_(message[:-TAG_BYTES])

    def gather(self, message_B: Tensor, dst: int) -> Tensor | None:
        self._begin(message_B.device)
        rows = self.inner.gather(self._tagged(message_B.reshape(-1).view(torch.uint8), dst), dst)
        return None if rows is None else self._opened(rows, dst)

    def duplicate(self, device: torch.device) -> Exchange:
        """Returns a sealed exchange with a session of its own."""
        return Sealed(self.inner.duplicate(device), self._key)

    def _begin(self, device: torch.device) -> None:
        """Counts a collective; before the first, challenges every rank and checks the answers."""
        if not self._session:
            self._session = self._meet(device)
        self._calls += 1

    def _meet(self, device: torch.device) -> bytes:
        """Challenges every rank and answers its challenge; returns the session, if all have the key."""
        nonces = greet(self.inner, _SEALED + secrets.token_bytes(_NONCE_BYTES), device)
        mine = b"".join(self._answer(nonces, self.rank, challenger) for challenger in range(self.world_size))
        answers = torch.frombuffer(bytearray(mine), dtype=torch.uint8).view(self.world_size, -1)
        told = [bytes(row.tolist()) for row in self.inner.all_to_all(answers.to(device)).cpu()]
        wrong = [
            rank
            for rank, answer in enumerate(told)
            if not hmac.compare_digest(answer, self._answer(nonces, rank, self.rank))
        ]
        if wrong:
            raise SettingsError(_unlike(wrong, self.rank, self.world_size))
        return blake2b(b"".join(nonces), key=self._key, digest_size=32, person=b"demopt session").digest()

    def _answer(self, nonces: list[bytes], rank: int, challenger: int) -> bytes:
        """Returns what only a holder of the key can answer, only `rank`, and only to this number of its challenger."""
        text = struct.pack("<II", rank, challenger) + nonces[rank] + nonces[challenger]
        return blake2b(text, key=self._key, digest_size=32, person=b"demopt answer").digest()

    def _tagged(self, body_B: Tensor, recipient: int) -> Tensor:
        tag = torch.frombuffer(bytearray(self._tag(body_B, self.rank, recipient)), dtype=torch.uint8)
        return torch.cat((body_B, tag.to(body_B.device)))

    def _tag(self, body_B: Tensor, sender: int, recipient: int) -> bytes:
        where = struct.pack("<QIIQ", self._calls, sender, recipient, body_B.numel())
        mac = blake2b(where, key=self._session, digest_size=TAG_BYTES, person=b"demopt message")
        body = body_B.detach().cpu().contiguous()
        if body.numel():
            mac.update((ctypes.c_char * body.numel()).from_address(body.data_ptr()))
        return mac.digest()

    def _opened(self, rows_WB: Tensor, recipient: int) -> Tensor:
        if rows_WB.dim() != 2 or rows_WB.shape[0] != self.world_size or rows_WB.shape[1] < TAG_BYTES:
            raise MessageError(f"got {list(rows_WB.shape)} bytes where {self.world_size} sealed messages were expected")
        for rank, row in enumerate(rows_WB.cpu()):  # one copy, not one for each rank
            if rank != self.rank:
                self._check(row, rank, recipient)
        return rows_WB[:, :-TAG_BYTES].contiguous()

    def _check(self, message_B: Tensor, sender: int, recipient: int) -> None:
        claimed = bytes(message_B[-TAG_BYTES:].tolist())
        if not hmac.compare_digest(claimed, self._tag(message_B[:-TAG_BYTES], sender, recipient)):
            raise MessageError("its tag does not match: forged, changed, replayed, or sent without the key", sender)


def greet(
    exchange: Exchange, hello: bytes = _OPEN + bytes(_NONCE_BYTES), device: torch.device | None = None
) -> list[bytes]:
    """Exchanges the first message, which says whether a rank has a key; SettingsError if some have and some do not.

    Examples:
        >>> from demopt.exchange import SingleRank
        >>> [len(hello) for hello in greet(SingleRank())]
        [40]
    """
    row = torch.frombuffer(bytearray(hello), dtype=torch.uint8).to(device or "cpu")
    hellos = [bytes(row.tolist()) for row in exchange.all_gather(row).cpu()]
    size = len(_OPEN)
    unlike = [rank for rank, other in enumerate(hellos) if other[:size] != hello[:size]]
    if unlike:
        who = ", ".join(map(str, unlike))
        has = "has no key, and this rank has one" if hello[:size] == _SEALED else "has a key, and this rank has none"
        raise SettingsError(f"rank {who} {has}; give the same key to all ranks")
    return hellos


def _unlike(wrong: list[int], rank: int, world_size: int) -> str:
    if len(wrong) == world_size - 1 > 1:
        return f"no other rank has the key of rank {rank}; give the same key to all ranks"
    who = ", ".join(map(str, wrong))
    return f"rank {who} does not have the key of rank {rank}: it is refused; give the same key to all ranks"


def _sum(rows: Tensor) -> Tensor:
    """Adds rows one after the other: the same order on every machine."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total

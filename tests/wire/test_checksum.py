"""The checksum, against plain Python; and fingerprints made of it."""

import random
import struct

import pytest
import torch

from demopt.wire.checksum import checksum, fingerprint, padded
from oracles import wire as literal


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize("words", [1, 2, 7, 100, 3000, 2**16 + 5])
def test_checksum_of_each_row_equals_literal_sum(words: int) -> None:
    """Sums of blocks of 2**16 words are summed likewise; the last block is filled with zeros."""
    rows = [random.Random(n).randbytes(8 * words) for n in range(3)]
    sums = checksum(torch.stack([_tensor(row) for row in rows])).tolist()
    assert [total % 2**64 for total in sums] == [literal.checksum(row) for row in rows]
    assert int(checksum(_tensor(rows[0]))) == sums[0]


def test_checksum_first_weights_are_splitmix64() -> None:
    """Of splitmix64 seeded with zero, as published, made odd."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    words = [1 << 8 * 8 * place for place in range(3)]
    sums = [int(checksum(_tensor(word.to_bytes(24, "little")))) % 2**64 for word in words]
    assert sums == [number | 1 for number in published]


def test_fingerprint_sees_bits_order_and_borders() -> None:
    tensors = [torch.arange(5.0), torch.zeros(3), torch.ones(9, dtype=torch.bfloat16)]
    tensors += [torch.ones(3, dtype=dtype) for dtype in (torch.float16, torch.float64)]
    seen = [fingerprint(tensors), fingerprint(tensors[::-1]), fingerprint(tensors[:2]), fingerprint([])]
    for number, tensor in enumerate(tensors):
        for place in range(-1, len(tensor)):
            changed = [t.clone() for t in tensors]
            changed[number][place] = tensor[place] + 1 if place >= 0 else -tensor[-1]
            seen.append(fingerprint(changed))
    assert len(set(seen)) == len(seen) == 4 + 5 + 23
    assert fingerprint([torch.arange(6.0).view(2, 3).T]) == fingerprint([torch.arange(6.0).view(2, 3).T.contiguous()])


def test_fingerprint_is_made_of_tensor_checksums() -> None:
    data = [struct.pack("<4f", 1, 2, 3, 4), struct.pack("<2f", 5, 6)]
    expected = literal.word_sum([literal.mixed(literal.checksum(part)) for part in data])
    assert fingerprint([torch.tensor([1.0, 2, 3, 4]), torch.tensor([5.0, 6])]) == expected
    assert padded(torch.ones(9, dtype=torch.uint8)).tolist() == [1] * 9 + [0] * 7

"""Messages as literal bytes, one per quantizer; every field of the header refused; and checksums and fingerprints."""

import random
import struct
from dataclasses import replace

import pytest
import torch

from demopt.errors import MessageError
from demopt.wire import message as flag
from demopt.wire.checksum import checksum, fingerprint
from demopt.wire.coefficients import Strongest
from demopt.wire.layout import Layout, Section
from demopt.wire.message import Header, check_headers, handshake_due, pack_message, read_headers
from demopt.wire.quantizers import QUANTIZERS
from oracles import wire as literal

#: Of round 258, and of rank 1 of 3.
HEADER = Header(258, 1, 3, layout=0x0807060504030201, settings=0x1817161514131211, fingerprint=5, samples=7)
POSITIONS = [[[1, 6, 7, 12], [0, 1, 2, 15]], [[0, 1, 2]]]  # as Elias-Fano; all of them
NUMBERS = [[[1.0, -2.0, 0.5, -0.5], [0.0, 8.0, -8.0, 4.0]], [[-3.0, 1.0, 2.0]]]
LENGTHS = [16, 3]

#: The whole messages of these coefficients. If one changes, the wire format has changed: raise message.VERSION.
HEAD = "44654d6f02000000 0201000000000000 0100000003000000 0102030405060708 1112131415161718 0500000000000000 "
GOLDEN = {
    "float64": HEAD
    + "6000000007000000 4f88a176e742b27a 39e4cd2300000000 0000f03f00000000 000000c000000000 0000e03f00000000 "
    + "0000e0bf00000000 0000000000000000 0000204000000000 000020c000000000 0000104000000000 000008c000000000 "
    + "0000f03f00000000 0000004000000000",
    "float32": HEAD
    + "3000000007000000 1ffe9f62992833a4 39e4cd230000803f 000000c00000003f 000000bf00000000 00000041000000c1 "
    + "00008040000040c0 0000803f00000040",
    "2-bit": HEAD + "1000000007000000 87196163bd28b324 39e4cd23e5b7804e 38f5072300000000",
    "sign": HEAD + "1000000007000000 ffd9253c7f9e3180 39e4cd23f047814a 0008010000000000",
}


@pytest.mark.parametrize("values", QUANTIZERS)
def test_golden_message_is_packed_follows_from_the_format_and_is_read_back(values):
    """Also against the format written in plain Python."""
    cases = [*zip(POSITIONS, NUMBERS, LENGTHS, strict=True)]
    literally = [literal.section(positions, numbers, length, values) for positions, numbers, length in cases]
    assert literal.message(literally, vars(HEADER)).hex(" ", 8) == GOLDEN[values]
    layout = Layout(tuple(Section(len(p), length, len(p[0]), values) for p, _, length in cases))
    parts = zip(layout.sections, POSITIONS, NUMBERS, strict=True)
    data = [torch.cat(section.encode(torch.tensor(p), torch.tensor(n, dtype=torch.float64))) for section, p, n in parts]
    message = pack_message(HEADER, *data, size=layout.size)
    assert bytes(message.tolist()).hex(" ", 8) == GOLDEN[values]
    messages = torch.stack([pack_message(replace(HEADER, rank=rank), message[64:]) for rank in range(3)])
    headers = read_headers(messages)
    assert check_headers(headers, replace(HEADER, rank=0), layout.size) == HEADER.flags
    assert vars(HEADER).items() <= headers[1]._asdict().items()
    bodies = layout.bodies(messages[:, 64:])
    for section, body, positions, numbers in zip(layout.sections, bodies, POSITIONS, NUMBERS, strict=True):
        found = section.checked(body).chunks(0, section.chunks)
        if isinstance(found, Strongest):
            assert found.positions[1].tolist() == positions
            assert values in ("sign", "2-bit") or found.values[1].tolist() == numbers
        else:
            assert torch.equal(found.values[1].sign(), torch.tensor(numbers).sign())


def test_message_of_another_optimizer_that_was_cut_is_told_apart_from_a_corrupted_one():
    message = _tensor(bytes.fromhex(GOLDEN["float32"]))[: flag.HEADER_BYTES + 16]
    with pytest.raises(MessageError, match="its header has 48 bytes, as of another optimizer"):
        check_headers(read_headers(message[None]), replace(HEADER, rank=0, world_size=1), 16)


BODY = 24


def _tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _resealed(message, at, form, value):
    """The message with one field changed and its checksum made right."""
    data = bytearray(bytes(message.tolist()))
    struct.pack_into("<" + form, data, at, value)
    struct.pack_into("<Q", data, 56, 0)
    struct.pack_into("<Q", data, 56, literal.checksum(bytes(data)))
    return _tensor(data)


FIELDS = {
    "magic": (0, "4s", b"demo", "b'demo', not b'DeMo'"),
    "version": (4, "H", 1, "version 1"),
    "an unknown flag": (6, "H", 0x8010, "unknown flags 0x8010"),
    "a refusal by no owner": (6, "H", flag.REFUSED, "flags 0x4 refuse"),
    "a layout with a body": (6, "H", flag.NEW_LAYOUT, "flags 0x2 announce"),
    "a refusal and no body": (6, "H", flag.REFUSED | flag.NONFINITE, "flags 0x5 refuse"),
    "step": (8, "Q", 259, "step 259, expected 258"),
    "a huge step": (8, "Q", 2**64 - 1, "step 18446744073709551615"),
    "rank": (16, "I", 2, "rank 2, expected 1"),
    "world_size": (20, "I", 4, "world size 4, expected 3"),
    "layout": (24, "Q", 0, "layout digest 0"),
    "settings": (32, "Q", 0, "settings digest 0"),
    "body size": (48, "I", 16, "body size 16, expected 24"),
    "samples": (52, "I", 0, "a weight of 0 samples"),
}


def _three():
    bodies = [torch.full((BODY,), rank, dtype=torch.uint8) for rank in range(3)]
    return torch.stack([pack_message(replace(HEADER, rank=rank), body) for rank, body in enumerate(bodies)])


def _check(messages, answers=False):
    headers = read_headers(messages)
    check_headers(headers, HEADER, BODY, answers)
    return headers


def _refused(messages, says):
    with pytest.raises(MessageError, match=says) as caught:
        _check(messages)
    return caught.value


@pytest.mark.parametrize("field", FIELDS)
def test_check_refuses_each_bad_field(field):
    at, form, value, says = FIELDS[field]
    messages = _three()
    messages[1] = _resealed(messages[1], at, form, value)
    error = _refused(messages, says)
    assert error.rank == 1
    assert "message of rank 1" in str(error)


def test_check_passes_on_fingerprints_and_known_flags():
    messages = _three()
    messages[1] = _resealed(messages[1], 40, "Q", 2**64 - 1)
    assert [header.fingerprint for header in _check(messages)] == [5, 2**64 - 1, 5]
    for flags in (flag.NONFINITE, flag.NEW_LAYOUT | flag.NONFINITE, flag.FINGERPRINT):
        messages[1] = _resealed(messages[1], 6, "H", flags)
        assert [header.flags for header in _check(messages)] == [0, flags, 0]
        assert check_headers(read_headers(messages), HEADER, BODY) == flags


@pytest.mark.parametrize(("named", "blamed"), [(2, 2), (3, None), (2**64 - 1, None)])
def test_check_of_answers_names_the_rank_that_an_owner_refused(named, blamed):
    messages = _three()
    messages[1] = pack_message(replace(HEADER, flags=flag.REFUSED, fingerprint=named), messages[1, 64:])
    with pytest.raises(MessageError, match="refused by rank 1") as caught:
        _check(messages, answers=True)
    assert caught.value.rank == blamed


def test_check_refuses_every_flipped_bit():
    messages = _three()
    for place in range(8 * messages.shape[1]):
        damaged = messages.clone()
        damaged[1, place // 8] ^= 1 << place % 8
        assert _refused(damaged, ".").rank == 1


CUTS = {
    "a byte short": lambda m: m[:, :-1],
    "a byte long": lambda m: torch.cat((m, m[:, :1]), 1),
    "a header": lambda m: m[:, :64],
    "nothing": lambda m: m[:, :0],
    "a rank short": lambda m: m[:2],
    "a rank long": lambda m: torch.cat((m, m[:1])),
    "no rank": lambda m: m[:0],
    "another type": lambda m: m.to(torch.int16),
    "flat": lambda m: m.flatten(),
    "deep": lambda m: m.unsqueeze(0),
}


@pytest.mark.parametrize("cut", CUTS)
def test_check_refuses_other_shapes(cut):
    _refused(CUTS[cut](_three()), "bytes|expected")


@pytest.mark.parametrize("at_once", [1, 2 * (64 + BODY), 1 << 20])
def test_check_ignores_how_many_are_checked_at_once(at_once, monkeypatch):
    monkeypatch.setattr("demopt.wire.message._BYTES_AT_ONCE", at_once)
    messages = _three()
    before = messages.clone()
    assert [header.rank for header in _check(messages)] == [0, 1, 2]
    assert torch.equal(messages, before)
    wide = torch.cat((messages, messages), 1)[:, : 64 + BODY]  # rows that are not contiguous
    assert [header.rank for header in _check(wide)] == [0, 1, 2]
    messages[2, 70] ^= 1
    assert _refused(messages, "checksum").rank == 2


def test_handshake_is_due_where_known_numbers_of_optimizers_or_settings_differ_but_not_if_corrupted():
    alike = {}, {"settings": HEADER.settings & ~flag.OPTIMIZER}  # the number 0: not known
    other_settings = {"settings": 1}, {"settings": HEADER.settings ^ 1}
    for changed in (*alike, *other_settings, {"flags": flag.NEW_LAYOUT | flag.NONFINITE}):
        messages = _three()
        messages[2] = pack_message(replace(HEADER, rank=2, **changed), messages[2, 64:])
        assert handshake_due(read_headers(messages)) == (changed not in alike)
        if changed in other_settings:
            _refused(messages, "settings digest")
        else:
            _check(messages)
        messages[2, 70] ^= 1
        assert not handshake_due(read_headers(messages))


def test_check_names_the_first_bad_rank_whatever_is_wrong():
    messages = _three()
    messages[1:, 70] ^= 1
    assert _refused(messages, "checksum").rank == 1
    messages[0] = _resealed(messages[0], 6, "H", 16)
    assert _refused(messages, "unknown flags").rank == 0


@pytest.mark.parametrize("words", [1, 2, 7, 100, 3000, 2**16 + 5])
def test_checksum_of_each_row_equals_literal_sum(words):
    """Sums of blocks of 2**16 words are summed likewise; the last block is filled with zeros."""
    rows = [random.Random(n).randbytes(8 * words) for n in range(3)]
    sums = checksum(torch.stack([_tensor(row) for row in rows])).tolist()
    assert [total % 2**64 for total in sums] == [literal.checksum(row) for row in rows]
    assert int(checksum(_tensor(rows[0]))) == sums[0]


def test_fingerprint_sees_bits_order_and_borders():
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
    assert fingerprint([torch.zeros(0, 2)[:, 0]]) == fingerprint([torch.zeros(0)]), "a column of no rows"
    views = [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag]  # other bits than in memory
    assert fingerprint(views) == fingerprint([torch.tensor([1 - 2j]), torch.tensor([-2.0])])


def test_fingerprint_is_made_of_tensor_checksums():
    data = [struct.pack("<4f", 1, 2, 3, 4), struct.pack("<2f", 5, 6), bytes([1] * 9 + [0] * 7)]  # padded
    expected = literal.word_sum([literal.mixed(literal.checksum(part)) for part in data])
    assert fingerprint([torch.tensor([1.0, 2, 3, 4]), torch.tensor([5.0, 6]), torch.ones(9).byte()]) == expected

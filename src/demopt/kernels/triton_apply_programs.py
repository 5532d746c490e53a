"""The GPU programs of `triton_apply.apply`: one program per chunk, or per several chunks of one row.

Needs Triton. All sums are sums of integers whose partial sums stay below 2**24, see core/exact.py.
Shapes: W ranks, C chunks, K kept; T chunks per program; r, c sides of a chunk, in a power-of-two block [BR, BC].
"""

import triton
import triton.language as tl

from demopt.core import exact
from demopt.kernels.triton_chunks import addresses, basis, field, place, read, write

_MANTISSA_BITS = tl.constexpr(exact.MANTISSA_BITS)
_IMPLICIT = tl.constexpr(1 << exact.MANTISSA_BITS)
_RANKS = tl.constexpr(32)  # ranks whose codes are loaded at once
_COEFFICIENTS = tl.constexpr(32)  # coefficients in one product
_ROUNDER = tl.constexpr(1.5 * 2**23)  # adding and subtracting it rounds to the nearest integer, halves to even
_RUNTIME = ["world_size", "keep", "guard", "chunks", "first_chunk"]  # else Triton recompiles for 1 and multiples of 16


@triton.jit(do_not_specialize=_RUNTIME)
def apply_chunks(
    table, member_of_chunk, positions, levels, codes, rows_rr, columns_cc,
    world_size, keep, guard, chunks, first_chunk, decay, rate,
    r: tl.constexpr, c: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    CODE: tl.constexpr, ALIGNED: tl.constexpr, MEAN: tl.constexpr, WIDE: tl.constexpr,
    BITS_R: tl.constexpr, BITS_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Coefficients of all ranks -> sum -> inverse -> sign -> parameter chunk, with nothing in between in memory."""
    chunk = tl.program_id(0)
    top, sent = _strongest_exponent(codes, chunk, world_size, chunks)
    reduced = _sums_of_chunk(positions, levels, codes, chunk, top, world_size, keep, guard, chunks,
                            c, BR, BC, MEAN, WIDE)  # fmt: skip
    tall = _scaled(reduced, tl.max(tl.abs(reduced)), BITS_R)
    between = tl.dot(basis(rows_rr, r, BR, True), tall, input_precision=PRECISION)
    wide = _scaled(between, tl.max(tl.abs(between)), BITS_C)
    update = tl.dot(wide, basis(columns_cc, c, BC, False), input_precision=PRECISION)
    i, j = tl.arange(0, BR)[:, None], tl.arange(0, BC)[None, :]
    member, row, column = place(table, member_of_chunk, first_chunk + chunk, r, c)
    offsets, real = addresses(table, member, row + i, column + j, ALIGNED)
    real = real & (i < r) & (j < c)
    address, code = field(table, member, 0), field(table, member, 7)
    before = read(address, offsets, code, real, CODE, ALIGNED)
    write(address, offsets, _stepped(before, update, sent, decay, rate), code, real, CODE, ALIGNED)


@triton.jit(do_not_specialize=_RUNTIME)
def apply_rows(
    table, member_of_chunk, positions, levels, codes, rows_rr, columns_cc,
    world_size, keep, guard, chunks, first_chunk, decay, rate,
    c: tl.constexpr, T: tl.constexpr, BC: tl.constexpr,
    CODE: tl.constexpr, MEAN: tl.constexpr, BITS_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Does the same as `apply_chunks` for T chunks of one row; each row of the block is a chunk."""
    chunk = (tl.program_id(0) * T + tl.arange(0, T))[:, None]
    j = tl.arange(0, BC)[None, :]
    inside = (chunk < chunks) & (j < c)
    chunk = tl.minimum(chunk, chunks - 1)  # rows beyond the last chunk repeat it, and write nothing
    top, sent = chunk * 0, chunk * 0
    rank = world_size * 0  # loops with `while`, because `range` in the interpreter needs Python numbers
    while rank < world_size:
        step = tl.load(codes + _at(rank, chunk, chunks)).to(tl.int32)
        top, sent = tl.maximum(top, step >> _MANTISSA_BITS), sent | (step != 0).to(tl.int32)
        rank += 1
    sums = tl.zeros([T, BC], tl.int32)
    senders = tl.zeros([T, BC], tl.int32)
    entry = world_size * 0
    while entry < world_size * keep:
        rank = entry // keep
        message = _at(rank, chunk, chunks)
        unit = _unit(tl.load(codes + message).to(tl.int32), top, guard)
        kept = message * keep + (entry - rank * keep)
        here = tl.load(positions + kept).to(tl.int32) == j
        sums += tl.where(here, tl.load(levels + kept).to(tl.int32) * unit, 0)
        senders += here.to(tl.int32)
        entry += 1
    divisor = tl.zeros([T, BC], tl.int32) + world_size if MEAN else tl.maximum(senders, 1)
    reduced = tl.math.div_rn(sums.to(tl.float32), divisor.to(tl.float32)) * tl.load(rows_rr)
    wide = _scaled(reduced, tl.max(tl.abs(reduced), axis=1)[:, None], BITS_C)
    update = tl.dot(wide, basis(columns_cc, c, BC, False), input_precision=PRECISION)
    member, row, column = place(table, member_of_chunk, first_chunk + chunk, 1, c)
    offsets, real = addresses(table, member, row, column + j, False)
    address, code = field(table, member, 0), field(table, member, 7)
    before = read(address, offsets, code, real & inside, CODE, False)
    after = _stepped(before, update, sent, decay, rate)
    write(address, offsets, after, code, real & inside, CODE, False)


@triton.jit
def _at(rank, chunk, chunks):
    """Returns the index of a rank's chunk among the chunks of all ranks."""
    return chunks.to(tl.int64) * rank + chunk


@triton.jit
def _strongest_exponent(codes, chunk, world_size, chunks):
    """Returns the largest exponent of a chunk's steps over the ranks, and whether any step is nonzero."""
    lanes = tl.arange(0, _RANKS)
    codes_W = tl.zeros([_RANKS], tl.int32)
    first = world_size * 0
    while first < world_size:
        rank = first + lanes
        step = tl.load(codes + _at(rank, chunk, chunks), mask=rank < world_size, other=0).to(tl.int32)
        codes_W = tl.maximum(codes_W, step)  # the largest code has the largest exponent, and is zero only if all are
        first += _RANKS
    largest = tl.max(codes_W)
    return largest >> _MANTISSA_BITS, (largest != 0).to(tl.int32)


@triton.jit
def _unit(step, top, guard):
    """Returns a step as an integer aligned to the exponent `top`, rounded as in exact.aggregate_steps."""
    exponent = step >> _MANTISSA_BITS
    mantissa = step % _IMPLICIT + _IMPLICIT
    below = tl.minimum(top - exponent, 30)
    one = step * 0 + 1
    unit = ((mantissa << guard) + ((one << below) >> 1)) >> below
    return tl.where(exponent == 0, 0, unit)


@triton.jit
def _sums_of_chunk(
    positions, levels, codes, chunk, top, world_size, keep, guard, chunks,
    c: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, MEAN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Returns the reduced coefficients [BR, BC]. Products of one-hot matrices sum them, exactly in any order.

    Operands are float16, which is exact for integers up to 2**11. WIDE splits larger amounts into two parts.
    """
    i, j = tl.arange(0, BR)[:, None], tl.arange(0, BC)[None, :]
    low_sums = tl.zeros([BR, BC], tl.float32)
    high_sums = tl.zeros([BR, BC], tl.float32)
    senders = tl.zeros([BR, BC], tl.float32)
    first = world_size * 0
    while first < world_size * keep:
        entry = first + tl.arange(0, _COEFFICIENTS)
        live = entry < world_size * keep
        rank = entry // keep
        message = _at(rank, chunk, chunks)
        kept = message * keep + (entry - rank * keep)
        position = tl.load(positions + kept, mask=live, other=0).to(tl.int32)
        level = tl.load(levels + kept, mask=live, other=0).to(tl.int32)
        amount = level * _unit(tl.load(codes + message, mask=live, other=0).to(tl.int32), top, guard)
        row = position // c
        in_row = (i == row[None, :]).to(tl.float16)
        in_column = ((position - row * c)[:, None] == j) & live[:, None]
        low = amount & 0xFF if WIDE else amount
        low_sums = tl.dot(in_row, tl.where(in_column, low[:, None], 0).to(tl.float16), low_sums)
        if WIDE:
            high_sums = tl.dot(in_row, tl.where(in_column, (amount >> 8)[:, None], 0).to(tl.float16), high_sums)
        if not MEAN:
            senders = tl.dot(in_row, in_column.to(tl.float16), senders)
        first += _COEFFICIENTS
    sums = low_sums + 256 * high_sums if WIDE else low_sums
    divisor = tl.zeros([BR, BC], tl.float32) + world_size if MEAN else tl.maximum(senders, 1.0)
    return tl.math.div_rn(sums, divisor)


@triton.jit
def _scaled(numbers, largest, bits: tl.constexpr):
    """Scales numbers by a power of two and rounds them to integers of `bits` bits."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 126  # magnitudes are below 2**exponent
    power = tl.minimum(tl.maximum(bits - exponent, -126), 127)
    scaled = numbers * ((power + 127) << 23).to(tl.float32, bitcast=True)
    return (scaled + _ROUNDER) - _ROUNDER


@triton.jit
def _stepped(before, update, sent, decay, rate):
    """Applies weight decay, then a step against the sign: two roundings, which must not be fused into one.

    A zero counts as +1; a chunk for which no rank sent anything is only decayed.
    """
    decayed = before * decay
    return tl.where(sent != 0, decayed + tl.where(update >= 0, -rate, rate), decayed)

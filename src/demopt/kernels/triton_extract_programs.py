"""The GPU programs of `triton_extract.extract`: one program per chunk, or per several chunks of one row.

Needs Triton. Shapes: T chunks per program; r, c sides of a chunk, in a power-of-two block [BR, BC].
"""

import triton
import triton.language as tl

from demopt.kernels.triton_chunks import addresses, basis, field, place, read

_RUNTIME = ["chunks", "keep"]  # else Triton recompiles for 1 and for multiples of 16


@triton.jit(do_not_specialize=_RUNTIME)
def extract_chunks(
    table, member_of_chunk, momentum, rows_rr, columns_cc, positions, values, decay, scale, keep,
    r: tl.constexpr, c: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    CODE: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient chunk -> A G B^T -> momentum -> its strongest coefficients, with no intermediate results in memory."""
    chunk = tl.program_id(0)
    member, row, column = place(table, member_of_chunk, chunk, r, c)
    i, j = tl.arange(0, BR)[:, None], tl.arange(0, BC)[None, :]
    inside = (i < r) & (j < c)
    offsets, real = addresses(table, member, row + i, column + j, ALIGNED)
    address, code = field(table, member, 0), field(table, member, 7)
    gradient = read(address, offsets, code, real & inside, CODE, ALIGNED)
    own = momentum + chunk.to(tl.int64) * (r * c) + i * c + j
    before = tl.load(own, mask=inside, other=0.0)
    half = tl.dot(basis(rows_rr, r, BR, False), gradient, input_precision=PRECISION)
    transformed = tl.dot(half, basis(columns_cc, c, BC, True), input_precision=PRECISION)
    after = decay * before + scale * transformed
    tl.store(own, after, mask=inside)
    bits = tl.where(inside, _magnitude_bits(after), -1)
    threshold = _kth_of_chunk(bits, keep, j < c, c)
    chosen, order = _chosen_of_chunk(bits, threshold, keep)
    out = chunk.to(tl.int64) * keep + order
    tl.store(positions + out, (i * c + j).to(tl.int64), mask=chosen)
    tl.store(values + out, after, mask=chosen)


@triton.jit(do_not_specialize=_RUNTIME)
def extract_rows(
    table, member_of_chunk, momentum, rows_rr, columns_cc, positions, values, decay, scale, keep, chunks,
    c: tl.constexpr, T: tl.constexpr, BC: tl.constexpr, CODE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Does the same as `extract_chunks` for T chunks of one row; each row of the block is a chunk."""
    chunk = (tl.program_id(0) * T + tl.arange(0, T))[:, None]
    j = tl.arange(0, BC)[None, :]
    inside = (chunk < chunks) & (j < c)
    chunk = tl.minimum(chunk, chunks - 1)  # rows beyond the last chunk repeat it, and write nothing
    member, row, column = place(table, member_of_chunk, chunk, 1, c)
    offsets, real = addresses(table, member, row, column + j, False)
    address, code = field(table, member, 0), field(table, member, 7)
    gradient = read(address, offsets, code, real & inside, CODE, False)
    own = momentum + chunk.to(tl.int64) * c + j
    before = tl.load(own, mask=inside, other=0.0)
    transformed = tl.dot(gradient * tl.load(rows_rr), basis(columns_cc, c, BC, True), input_precision=PRECISION)
    after = decay * before + scale * transformed
    tl.store(own, after, mask=inside)
    bits = tl.where(inside, _magnitude_bits(after), -1)
    threshold = _kth_of_rows(bits, keep)
    chosen, order = _chosen_of_rows(bits, threshold, keep)
    out = chunk.to(tl.int64) * keep + order
    tl.store(positions + out, j.to(tl.int64) + chunk.to(tl.int64) * 0, mask=chosen & inside)
    tl.store(values + out, after, mask=chosen & inside)


@triton.jit
def _magnitude_bits(numbers):
    """Returns int32 keys in the order of the magnitudes; NaN is the largest, as in torch.topk."""
    return numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _kth_of_chunk(bits, keep, real_columns, c: tl.constexpr):
    """Finds the `keep`-th largest by bisection; at every step at least `keep` are >= low, and fewer than `keep` > high.

    If `keep` is at most c, `low` starts at the smallest column maximum, which c elements reach. A count of exactly
    `keep` ends the search: after about 10 steps for random numbers, 31 at most.
    """
    maxima = tl.max(bits, axis=0)[None, :]
    high = tl.max(maxima)
    low = tl.where(keep <= c, tl.min(tl.where(real_columns, maxima, high)), 0)
    while low < high:
        middle = high - ((high - low) >> 1)
        count = tl.sum((bits >= middle).to(tl.int32))
        low = tl.where(count >= keep, middle, low)
        high = tl.where(count > keep, high, tl.where(count == keep, middle, middle - 1))
    return low


@triton.jit
def _kth_of_rows(bits, keep):
    """Does the same for each row [T, 1]; chunks of one row are few, so it always takes 31 steps."""
    high = tl.max(bits, axis=1)[:, None]
    low = high * 0
    for _ in range(31):
        middle = high - ((high - low) >> 1)
        count = tl.sum((bits >= middle).to(tl.int32), axis=1)[:, None]
        low = tl.where(count >= keep, middle, low)
        high = tl.where(count >= keep, high, middle - 1)
    return low


@triton.jit
def _chosen_of_chunk(bits, threshold, keep):
    """Returns which elements are chosen, the first among equals, and the rank of each in row-major order."""
    # Two counts in one integer: above the threshold in the upper half, equal to it in the lower.
    both = tl.where(bits > threshold, 1 << 16, (bits == threshold).to(tl.int32))
    of_row = tl.sum(both, axis=1)
    before = tl.cumsum(of_row, axis=0) - of_row
    running = tl.cumsum(both, axis=1) + before[:, None]
    return _order(bits, threshold, running, keep - (tl.sum(of_row) >> 16))


@triton.jit
def _chosen_of_rows(bits, threshold, keep):
    both = tl.where(bits > threshold, 1 << 16, (bits == threshold).to(tl.int32))
    above = tl.sum(both, axis=1)[:, None] >> 16
    return _order(bits, threshold, tl.cumsum(both, axis=1), keep - above)


@triton.jit
def _order(bits, threshold, running, wanted):
    """Returns the mask and the places; `wanted` of the elements equal to the threshold are chosen."""
    equals = running & 0xFFFF
    chosen = (bits > threshold) | ((bits == threshold) & (equals <= wanted))
    return chosen, (running >> 16) + tl.minimum(equals, wanted) - 1

"""Triton functions that locate, read and write a chunk of a member. Needs Triton; triton_table makes the tables.

Shapes: r, c rows and columns of a chunk, in a power-of-two block [BR, BC]; T chunks per program.
"""

import triton
import triton.language as tl

from demopt.kernels.triton_table import FIELDS

_FIELDS = tl.constexpr(FIELDS)


@triton.jit
def field(table, member, number: tl.constexpr):
    """Loads a column of the members' table, for one member or several."""
    return tl.load(table + member * _FIELDS + number)


@triton.jit
def place(table, member_of_chunk, chunk, r: tl.constexpr, c: tl.constexpr):
    """Returns the member of each chunk, and the row and column of the member's matrix where the chunk begins."""
    member = tl.load(member_of_chunk + chunk)
    across = field(table, member, 5).to(tl.int32)
    within = chunk - field(table, member, 6).to(tl.int32)
    down = within // across
    return member, down * r, (within - down * across) * c


@triton.jit
def addresses(table, member, row, column, ALIGNED: tl.constexpr):
    """Returns offsets, in elements, of rows [BR, 1] and columns [1, BC], and which lie inside the member's matrix."""
    rows, columns = field(table, member, 3), field(table, member, 4)
    row_stride, column_stride = field(table, member, 1), field(table, member, 2)
    if ALIGNED:  # tells the compiler that accesses can be wide
        columns, row_stride, column_stride = tl.multiple_of(columns, 8), tl.multiple_of(row_stride, 8), 1
    return row.to(tl.int64) * row_stride + column * column_stride, (row < rows) & (column < columns)


@triton.jit
def read(address, offsets, code, real, CODE: tl.constexpr, ALIGNED: tl.constexpr):
    """Loads elements at an address (int64) as float32, zero where not real; CODE is all members' code, 0 if mixed."""
    if CODE == 1:
        values = _floats(address, offsets, real & (code == 1), ALIGNED)
    elif CODE == 2:
        values = _bfloats(address, offsets, real & (code == 2), ALIGNED)
    elif CODE == 3:
        values = _halves(address, offsets, real & (code == 3), ALIGNED)
    else:
        values = _floats(address, offsets, real & (code == 1), ALIGNED)
        values = tl.where(code == 2, _bfloats(address, offsets, real & (code == 2), ALIGNED), values)
        values = tl.where(code == 3, _halves(address, offsets, real & (code == 3), ALIGNED), values)
    return values


@triton.jit
def write(address, offsets, values, code, real, CODE: tl.constexpr, ALIGNED: tl.constexpr):
    """Stores float32 values in the member's dtype, rounded to nearest, halves to even."""
    if CODE == 0 or CODE == 1:
        tl.store(_pointers(address, offsets, tl.float32, ALIGNED), values, mask=real & (code == 1))
    if CODE == 0 or CODE == 2:
        tl.store(_pointers(address, offsets, tl.int16, ALIGNED), _upper_half(values), mask=real & (code == 2))
    if CODE == 0 or CODE == 3:
        tl.store(_pointers(address, offsets, tl.float16, ALIGNED), values.to(tl.float16), mask=real & (code == 3))


@triton.jit
def _pointers(address, offsets, kind: tl.constexpr, ALIGNED: tl.constexpr):
    base = address.to(tl.pointer_type(kind))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return base + offsets


@triton.jit
def _floats(address, offsets, real, ALIGNED: tl.constexpr):
    return tl.load(_pointers(address, offsets, tl.float32, ALIGNED), mask=real, other=0.0)


@triton.jit
def _halves(address, offsets, real, ALIGNED: tl.constexpr):
    return tl.load(_pointers(address, offsets, tl.float16, ALIGNED), mask=real, other=0.0).to(tl.float32)


@triton.jit
def _bfloats(address, offsets, real, ALIGNED: tl.constexpr):
    """Converts by bits, as `_upper_half` does: the interpreter truncates to bfloat16 where a GPU rounds."""
    bits = tl.load(_pointers(address, offsets, tl.int16, ALIGNED), mask=real, other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _upper_half(values):
    """Returns the bits of the nearest bfloat16, halves to even."""
    bits = values.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, nearest, 0x7FC0).to(tl.int16)


@triton.jit
def basis(pointer, side: tl.constexpr, SIDE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Loads a basis [side, side], or its transpose, zero-padded to [SIDE, SIDE]."""
    i, j = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    offsets = j * side + i if TRANSPOSED else i * side + j
    return tl.load(pointer + offsets, mask=(i < side) & (j < side), other=0.0, eviction_policy="evict_last")

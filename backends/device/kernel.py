"""The kernel in Triton: a program goes through the rows of its group, as `tables` describes them.

Runs on GPUs by Triton's compiler and on CPUs, for tests, by its interpreter (TRITON_INTERPRET=1). Since
Triton 3.9 flags are loaded and stored: one fence comes after all that an instruction waits for, one before
all that it raises. Before, a flag is polled by an atomic addition of 0 and raised by an atomic exchange, each
with a fence.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NUMBERS = ("given", "result", "rank", "ranks", "pieces", "depth", "lanes", "ring")
"""Arguments whose values make no other kernel: ranks compile, and load, the same one."""

_PLAIN = tl.constexpr(hasattr(tl, "atomic_store") and not triton.knobs.runtime.interpret)
"""Whether flags are loaded and stored. The compiler makes of an ordered load a load and then a fence, and of
a store a fence and then the store, so that one fence orders what else the thread has loaded or stores
(`tests/device/test_compiled.py` reads it); the interpreter's have no order."""

_EACH = tl.constexpr("relaxed" if _PLAIN else "acquire")
_OTHERS = tl.constexpr("relaxed" if _PLAIN else "release")
"""The order of a poll, and of each flag but the first that an instruction raises."""


@triton.jit
def _wait(own, items, first, end, number, lanes, lane):
    """Until all flags have come to their goals, modulo 2^32, or the host aborts; the abort word."""
    aborted = _seen(own + lane, "relaxed")
    for at in range(first, end):
        flag = own + tl.load(items + at * 3) * lanes + lane
        goal = number + 1 - tl.load(items + at * 3 + 1).to(tl.int32)
        seen = _seen(flag, _EACH)
        while (seen - goal < 0) & (aborted == 0):
            aborted = _seen(own + lane, "relaxed")
            seen = _seen(flag, _EACH)
    if _PLAIN and first < end:
        aborted = _seen(own + lane, "acquire")  # for its fence, behind all that was seen
    return aborted


@triton.jit
def _seen(flag, ORDER: tl.constexpr):
    if _PLAIN:
        return tl.atomic_load(flag, sem=ORDER, scope="sys")
    else:
        return tl.atomic_add(flag, 0, sem=ORDER, scope="sys")


@triton.jit
def _raise(item, flags, number, lanes, lane, ORDER: tl.constexpr):
    """Raise a flag, which no other program writes."""
    theirs = tl.load(flags + tl.load(item)).to(tl.pointer_type(tl.int32)) + tl.load(item + 1) * lanes + lane
    if _PLAIN:
        tl.atomic_store(theirs, number, sem=ORDER, scope="sys")
    else:
        tl.atomic_xchg(theirs, number, sem=ORDER, scope="sys")


@triton.jit
def _cut(length, part, parts, VECTOR: tl.constexpr):
    """Where a part of a chunk begins: at a whole vector, but for the end. The same on all ranks."""
    at = length * part // parts
    return tl.where(part == parts, at, at // VECTOR * VECTOR)


@triton.jit
def _place(item, given, result, addresses, start, slot, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """The first element of a source or target: in the caller's memory, or in one slot of a ring."""
    buffer, stride = tl.load(item), tl.load(item + 2)
    offset = tl.load(item + 1) + tl.where(stride > 0, slot * stride, start)
    staging = tl.load(addresses + tl.maximum(buffer - 2, 0))
    base = tl.where(buffer == 0, given, tl.where(buffer == 1, result, staging)).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(base, 16) + tl.multiple_of(offset, ALIGN)


@triton.jit
def _value(element, SUM: tl.constexpr, FRACTION: tl.constexpr):
    """What an element adds to a sum: itself, or the float32 of 8 bits whose last `FRACTION` are its fraction.

    By way of float16. No GPU's own conversions: sm_80 lacks a type, others saturate where torch does not.
    """
    if FRACTION == 0:
        return element.to(SUM)
    else:
        code = element.to(tl.int32)
        half = ((code & 0x80) << 8) | ((code & 0x7F) << (10 - FRACTION))
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        if FRACTION == 3:  # it has another bias, and one NaN in place of what is not finite
            value = tl.where((code & 0x7F) == 0x7F, float("nan"), value * 256)
        return value


@triton.jit
def _element(total, DTYPE: tl.constexpr, FRACTION: tl.constexpr, LARGEST: tl.constexpr):
    """A sum as an element, rounded to the nearest, to the even one of two."""
    if FRACTION == 0:
        return total.to(DTYPE)
    else:
        word = total.to(tl.int32, bitcast=True)
        size = word & 0x7FFFFFFF
        shift: tl.constexpr = 23 - FRACTION
        least: tl.constexpr = (129 - 2 ** (6 - FRACTION)) << 23  # of what has its whole fraction, in float32
        code = (size + ((1 << 23) + (1 << (shift - 1)) - 1 - least) + ((size >> shift) & 1)) >> shift
        unit: tl.constexpr = 2.0 ** (2 + shift - 2 ** (6 - FRACTION))  # whose last bit is the least element
        small = (size.to(tl.float32, bitcast=True) + unit).to(tl.int32, bitcast=True)
        code = tl.where(size < least, small - (least + (shift << 23)), code)
        code = tl.where(size > 0x7F800000, 0x7F, tl.minimum(code, LARGEST))
        return (code | ((word >> 24) & 0x80)).to(DTYPE)


@triton.jit
def _combine(one, other, OP: tl.constexpr):
    if OP == "max":
        return tl.maximum(one, other)
    elif OP == "min":
        return tl.minimum(one, other)
    else:
        return one + other


@triton.jit
def _block(row, items, given, result, addresses, start, slot, span, mask, DTYPE: tl.constexpr,
           SUM: tl.constexpr, FRACTION: tl.constexpr, LARGEST: tl.constexpr, OP: tl.constexpr,
           ALIGN: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """All targets become the sum of all sources; whole blocks without a mask, so that accesses are wide."""
    first = tl.load(row + 4)
    pointers = _place(items + first * 3, given, result, addresses, start, slot, DTYPE, ALIGN) + span
    total = _value(tl.load(pointers) if WHOLE else tl.load(pointers, mask, 0), SUM, FRACTION)
    for at in range(first + 1, tl.load(row + 5)):
        pointers = _place(items + at * 3, given, result, addresses, start, slot, DTYPE, ALIGN) + span
        more = _value(tl.load(pointers) if WHOLE else tl.load(pointers, mask, 0), SUM, FRACTION)
        total = _combine(total, more, OP)
    rounded = _element(total, DTYPE, FRACTION, LARGEST)
    for at in range(tl.load(row + 6), tl.load(row + 7)):
        pointers = _place(items + at * 3, given, result, addresses, start, slot, DTYPE, ALIGN) + span
        if WHOLE:
            tl.store(pointers, rounded)
        else:
            tl.store(pointers, rounded, mask)


@triton.jit(do_not_specialize=_NUMBERS)
def run_schedule(rows, items, groups, given, result, addresses, counters, rank, ranks, pieces, depth,
                 lanes, ring, DTYPE: tl.constexpr, SUM: tl.constexpr, FRACTION: tl.constexpr,
                 LARGEST: tl.constexpr, OP: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
                 ALIGN: tl.constexpr):  # fmt: skip
    """Program `group * lanes + lane` does its lane of the chunks of its group.

    Args:
        rows: of `tables.Tables`, as the next two.
        items: what rows name.
        groups: where the rows of each begin.
        given: the address of the input, as a number; in no table, so that graphs may be captured.
        result: that of the output.
        addresses: of the staging of each rank, then of the flags of each rank.
        counters: pieces that each program has done in all calls; in device memory, so that graphs
            may replay.
        rank: this one.
        ranks: their number.
        pieces: `Tables.pieces`.
        depth: of `tables.Shape`, as the next two.
        lanes: programs of a group.
        ring: slots of a message.
        DTYPE: of elements.
        SUM: what they are added up in.
        FRACTION: bits of the fraction of elements that are floating-point numbers of 8 bits, else 0.
        LARGEST: the bits of such an element that stands for what is too large.
        OP: "sum", "max" or "min".
        BLOCK: elements that are moved at once, a power of two.
        VECTOR: elements of 16 bytes.
        ALIGN: VECTOR where all places of this rank allow it, else 1.
    """
    program = tl.program_id(0)
    group, lane = program // lanes, program % lanes
    first, end = tl.load(groups + group), tl.load(groups + group + 1)
    begun = tl.load(counters + program)
    span = tl.arange(0, BLOCK)
    flags = addresses + ranks
    given, result = given.to(tl.int64), result.to(tl.int64)
    own = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    for time in range(0, pieces + depth):
        for index in range(first, end):
            row = rows + index * 10
            piece = time - tl.load(row).to(tl.int32)
            if (piece >= 0) & (piece < pieces):
                number = begun + piece
                slot = (number & (ring - 1)) * lanes + lane
                aborted = _wait(own, items, tl.load(row + 2), tl.load(row + 3), number, lanes, lane)
                tl.debug_barrier()  # all threads follow the one that has seen the flags
                if aborted == 0:
                    length = tl.load(row + 1)
                    start = _cut(length, lane * pieces + piece, lanes * pieces, VECTOR)
                    size = (_cut(length, lane * pieces + piece + 1, lanes * pieces, VECTOR) - start).to(
                        tl.int32
                    )
                    whole = size // BLOCK * BLOCK
                    for at in range(0, whole, BLOCK):
                        _block(row, items, given, result, addresses, start, slot, at + span, span < BLOCK,
                               DTYPE, SUM, FRACTION, LARGEST, OP, ALIGN, True)  # fmt: skip
                    if whole < size:
                        _block(row, items, given, result, addresses, start, slot, whole + span,
                               span < size - whole, DTYPE, SUM, FRACTION, LARGEST, OP, ALIGN,
                               False)  # fmt: skip
                    tl.debug_barrier()  # what all threads wrote comes before the flags that one raises
                    signal, last = tl.load(row + 8), tl.load(row + 9)
                    if signal < last:  # one fence, by the first
                        _raise(items + signal * 3, flags, number + 1, lanes, lane, "release")
                    for at in range(signal + 1, last):
                        _raise(items + at * 3, flags, number + 1, lanes, lane, _OTHERS)
    tl.store(counters + program, begun + pieces)

"""The library combines elements to the bits of torch: every type, operation and length, wherever they lie.

But for which NaN comes of one, and which zero is the extreme of two with different signs.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from arborcast.backends.dataflow.task_graph import Act
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.native import library
from arborcast.backends.native.library import OPERATORS, TYPES, at_once, combiner
from arborcast.backends.tensors.torch_reduction import operator_of

OPERATIONS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
GUARD = 16  # bytes around a result that must stay as they are


def combine(name: str, a: Tensor, b: Tensor, *, offset: int = 0, in_place: bool = False) -> Tensor:
    """By the library, on memory that begins `offset` bytes behind where it would be aligned.

    What any processor runs must give the same bits as what this one does, but for what NaN says.
    """
    found, plain = (_combine(is_plain, name, a, b, offset, in_place) for is_plain in (False, True))
    assert same(found, plain)
    return found


def _combine(is_plain: bool, name: str, a: Tensor, b: Tensor, offset: int, in_place: bool) -> Tensor:
    size, number = a.numel() * a.itemsize, OPERATORS[name]
    copies = [np.zeros(size + offset + GUARD, np.uint8) for _ in range(3)]
    for copy, given_ in zip(copies, (a, b), strict=False):
        copy[offset : offset + size] = given_.view(torch.uint8).numpy()
    out = copies[0] if in_place else copies[2]
    addresses = [copy.ctypes.data + offset for copy in (out, *copies[:2])]
    assert at_once.combine_once(is_plain, TYPES.index(a.dtype), number, *addresses, a.numel())
    assert not out[:offset].any() and not out[offset + size :].any(), "written beside the result"
    found = torch.empty_like(a)
    found.view(torch.uint8).numpy()[:] = out[offset : offset + size]
    return found


def numbers(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Bits of all kinds: overflow in integers; infinities, NaNs, subnormals and both zeros in floats."""
    chance = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 256, (count * dtype.itemsize,), generator=chance, dtype=torch.uint8).view(dtype)
    if dtype.is_floating_point and count:
        info = torch.finfo(dtype)
        special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, info.max, info.tiny, 1.0, 1.5])
        where = torch.rand(count, generator=chance) < 0.4
        chosen = special[torch.randint(0, len(special), (count,), generator=chance)]
        found = torch.where(where, chosen.to(dtype), found)
    return found.contiguous()


def same(found: Tensor, wanted: Tensor) -> bool:
    """To the bit, but for what NaN says, and for the sign of a zero that is the extreme of both zeros."""
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    is_nan = wanted.isnan()
    if not torch.equal(found.isnan(), is_nan):
        return False
    bits, meant = (tensor[~is_nan].contiguous().view(torch.uint8) for tensor in (found, wanted))
    return torch.equal(bits, meant)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(0, 300), seed=st.integers(0, 10**6), offset=st.integers(0, 7), in_place=st.booleans()
)
def test_bits_of_torch(
    name: str, dtype: torch.dtype, count: int, seed: int, offset: int, in_place: bool
) -> None:
    operator = operator_of(getattr(dist.ReduceOp, name), dtype)
    if operator is None:
        assert not combiner(name.lower(), dtype)
        return
    a, b = numbers(dtype, count, seed), numbers(dtype, count, seed + 1)
    if name in {"MIN", "MAX"} and dtype.is_floating_point:
        # Of two zeros with different signs torch takes the one or the other, as their place in memory is.
        b = torch.where((a == 0) & (b == 0), a, b)
    wanted = torch.empty_like(a)
    operator.combine(a, b, wanted)
    assert same(combine(name.lower(), a, b, offset=offset, in_place=in_place), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["SUM", "PRODUCT"])
def test_every_half_number_is_rounded_as_torch_does(name: str, dtype: torch.dtype) -> None:
    """All of one operand's bits with some of the other's: ties, subnormals and overflow among them."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    operator = operator_of(getattr(dist.ReduceOp, name), dtype)
    assert operator is not None
    for value in (0.0, 1.0, -1.0, 1.001, 3e-5, 6e-8, 0.5, 2048.0, 60000.0):
        other = torch.full_like(every, value)
        wanted = torch.empty_like(every)
        operator.combine(every, other, wanted)
        assert same(combine(name.lower(), every, other), wanted), value


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="a processor that knows no such mode")
@pytest.mark.parametrize("name", ["SUM", "PRODUCT", "MIN", "MAX"])
def test_small_halves_are_no_zeros_where_small_floats_are(name: str) -> None:
    """Every float16 is a number that float32 holds as a normal one."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    other = torch.full_like(every, 6e-8)
    wanted = combine(name.lower(), every, other)
    torch.set_flush_denormal(True)
    try:
        found = combine(name.lower(), every, other)
    finally:
        torch.set_flush_denormal(False)
    assert same(found, wanted)


def test_of_two_zeros_the_second_is_the_extreme() -> None:
    """Whatever the length: sums do not depend on how a buffer was cut."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        zero = torch.zeros(67, dtype=dtype)
        for name in ("min", "max"):
            assert combine(name, zero, -zero).signbit().all()
            assert not combine(name, -zero, zero).signbit().any()


def test_all_that_schedules_reduce_is_known() -> None:
    every = {it for it in vars(torch).values() if isinstance(it, torch.dtype)}
    served = {it for it in every if operator_of(dist.ReduceOp.SUM, it) is not None}
    assert served == {*TYPES, torch.bool}  # truth values as bytes
    assert combiner("sum", torch.float32) == combiner("avg", torch.float32) != 0
    assert combiner("band", torch.float32) == 0
    asked: Callable[..., Any] = at_once.find_combine
    assert asked(len(TYPES), 0) is None and asked(0, 7) is None and asked(-1, 0) is None
    assert not at_once.combine_once(0, 99, 0, None, None, None, 0)


def test_the_library_says_of_which_sources_it_was_built() -> None:
    """Old C under new Python would be wrong in silence: whoever changes the sources writes their digest."""
    digest = hashlib.sha256()
    for file in sorted(Path(library.__file__).parent.glob("*.[ch]")):
        lines = file.read_text().splitlines()
        digest.update("\n".join(line for line in lines if not line.startswith("#define SOURCES")).encode())
    meant = f"0x{digest.hexdigest()[:7]}"
    said = (Path(library.__file__).parent / "native.h").read_text()
    assert f"#define SOURCES {meant}\n" in said, f"native.h and library.py: SOURCES must be {meant}"
    assert int(meant, 16) == library.SOURCES, f"native.h and library.py: SOURCES must be {meant}"


def test_long_runs_of_elements() -> None:
    """Vectors and what is left behind them."""
    for count in (1 << 16, (1 << 16) + 13):
        a, b = numbers(torch.float32, count, 1), numbers(torch.float32, count, 2)
        assert same(combine("sum", a, b), a + b)
    assert ctypes.sizeof(ctypes.c_float) == a.itemsize


def test_actions_and_buffers_are_numbered_as_in_the_header() -> None:
    """The loop takes them by number; what is added on one side alone would be another one there."""
    assert {act.name: act.value for act in Act} == {
        act.name: act.value for act in library._enumeration("act")
    }
    assert library.RunState.memory.size == len(Buffer) * ctypes.sizeof(ctypes.c_void_p)

"""What a program of `collective_permute` does, read from StableHLO's text as a schedule: ours, or anybody's.

    jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"))).lower(x).as_text()

All ranks go through the text side by side. Whole numbers, by which a rank finds what is its own, are worked
out; of floating-point data each element is a value of which it is known whose contributions are in it and
which messages brought them (`whereabouts`). What is not understood is refused by name and line.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from arborcast.backends.programs.as_schedule import put_together
from arborcast.backends.programs.checking.memory import UNDEFINED, given, undivided, wanted
from arborcast.backends.programs.program import (
    GlobalProgram,
    ProgramError,
    RankPart,
    WrongProgramError,
    root_of_file,
)
from arborcast.backends.programs.whereabouts import Versions
from arborcast.synth.collective import Kind
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology

MOST_ELEMENTS = 1 << 20
"""Of a tensor on all ranks together."""

MOST_STATEMENTS = 1 << 15
"""That are gone through, those of a function as often as it is called."""

Lines: TypeAlias = Sequence[tuple[int, str]]
"""Each with its number."""

Ints: TypeAlias = npt.NDArray[np.int64]


class _Tensor(NamedTuple):
    """A tensor on all ranks, along the first axis: numbers of values where it is data, else whole numbers."""

    of_ranks: Ints
    is_data: bool


class _Elements(Versions):
    """Of data, where what nobody gave are zeros."""

    def sum(self, first: int, second: int) -> int:
        """The number of what adding two values gives."""
        return first + second if UNDEFINED in {first, second} else super().sum(first, second)


_TYPE = re.compile(r"tensor<((?:\d+x)*)([a-z]+\d+\w*)>")
_HEAD = re.compile(r'\s*(?:%(\w+) = )?"?(?:stablehlo\.)?([a-z_]+(?:\.[a-z_]+)?)\b')

_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": lambda one, other: np.sign(one) * np.sign(other) * (abs(one) // abs(other)),
    "remainder": np.fmod,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": operator.and_,
    "or": operator.or_,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
"""What is worked out of whole numbers, and of truth values, which are 0 and 1."""


def read(
    text: str,
    place: str = "program",
    *,
    topology: Topology | None = None,
    kind: Kind | None = None,
    root: int | None = None,
) -> Schedule:
    """The schedule of a program.

    Args:
        text: StableHLO of one function under `shard_map`, over one axis whose devices are the ranks.
        place: what errors begin with.
        topology: on which it runs; the text does not say it.
        kind: what it does, which the text does not say either.
        root: of which root; 0 where None.

    Raises:
        WrongProgramError: it does something else.
        ProgramError: no such text, an operation that is not understood, or what no schedule can say.
    """
    try:
        if topology is None or kind is None:
            raise ProgramError("does not say where it runs or what it does; --topology and --collective do")
        ranks = topology.ranks
        run = _Run(text, ranks)
        root = root_of_file(kind, root, ranks)
        whole = math.prod(run.shape) * (ranks if kind.gathers else 1)
        program = GlobalProgram("StableHLO", kind, root, whole, (RankPart((), 0, 0),) * ranks)
        if wrong := undivided(program):
            raise ProgramError(wrong)
        results = run.results([given(program, rank) for rank in range(ranks)])
        for rank, numbers in enumerate(results.tolist()):
            should = wanted(program, rank)
            if should and len(should) != len(numbers):
                what = f"rank {rank}: the result must have {len(should)} elements, has {len(numbers)}"
                raise WrongProgramError(what)
            for element, value in enumerate(should):
                if wrong := run.elements.unlike(rank, value, numbers[element]):
                    raise WrongProgramError(f"rank {rank}: element {element} of the result {wrong}")
        return put_together(program, topology, run.elements.transfers())
    except ProgramError as error:
        raise type(error)(f"{place}: {error}") from error


def _statements(lines: Lines) -> Iterator[Lines]:
    """What stands one behind the other, each with all lines of what is in its braces."""
    held: list[tuple[int, str]] = []
    depth = 0
    for number, line in lines:
        plain = re.sub(r'"[^"]*"', "", line)
        depth += plain.count("{") - plain.count("}")
        held.append((number, line))
        if depth <= 0:
            yield held
            held = []


class _Run:
    """A run of a text on all ranks; errors are those of `read`."""

    def __init__(self, text: str, ranks: int) -> None:
        self.elements = _Elements(ranks)
        self._ranks = ranks
        self._left = MOST_STATEMENTS
        self._functions: dict[str, Lines] = {}
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.startswith(" ")]
        for statement in _statements(lines):
            number, head = statement[0]
            if named := re.match(r"\s*func\.func .*?@([\w.]+)\(", head):
                self._functions[named[1]] = statement
            elif not re.match(rf'\s*sdy\.mesh @\w+ = <\["\w+"={ranks}\]>', head):
                what = f"a function, or a mesh of one axis of {ranks} devices in their order"
                raise ProgramError(f"line {number}: must be {what}, got {shorten(head.strip())}")
        if "main" not in self._functions:
            raise ProgramError("must have a function @main, got none")
        inner = [line for _, line in self._functions["main"] if "sdy.manual_computation" in line]
        data = [it for it in (inner and _TYPE.findall(inner[0].rpartition("(")[2])) if _is_data(it[1])]
        if len(inner) != 1 or len(data) != 1:
            raise ProgramError(
                "@main must call one shard_map (sdy.manual_computation) on one tensor of floats"
            )
        self.shape = _sizes(data[0][0])
        if math.prod(self.shape) * ranks > MOST_ELEMENTS:
            raise ProgramError(f"tensors of all ranks together have at most {MOST_ELEMENTS} elements")

    def results(self, start: Sequence[Sequence[tuple[int, int] | None]]) -> Ints:
        """The numbers of the values that each rank has at the end.

        Args:
            start: for each rank those that it has at first: the part, and whose contributions as bits.
        """
        held = np.full((self._ranks, math.prod(self.shape)), self.elements.unknown)
        for rank, values in enumerate(start):
            for at, value in enumerate(values):
                if value is not None:
                    held[rank, at] = self.elements.given(rank, value)
        tensor = _Tensor(held.reshape(self._ranks, *self.shape), True)
        try:
            (result,) = self._call(self._functions["main"], [tensor], 0)
        except ProgramError:
            raise
        except ValueError as error:
            raise ProgramError("@main must have one argument and one result") from error
        return result.of_ranks.reshape(self._ranks, -1)

    def _call(self, function: Lines, operands: Sequence[_Tensor], depth: int) -> list[_Tensor]:
        """What a function returns, or what stands in the braces of an operation."""
        first = function[0][1]
        arguments = first[first.rfind(" (") :] if "manual_computation" in first else first.split("->")[0]
        env = dict(zip(re.findall(r"%(\w+): ", arguments), operands, strict=True))
        for statement in _statements(function[1:-1]):
            number, text = statement[0]
            self._left -= 1
            if self._left < 0 or depth > 32:
                raise ProgramError(
                    f"line {number}: more than {MOST_STATEMENTS} statements, or calls too deep"
                )
            try:
                head = _HEAD.match(text)
                name = head[2] if head else ""
                used = text[head.end() if head else 0 :]
                if "manual_computation" in name:
                    used = used.split(")")[0]
                own = [env[it] for it in re.findall(r"%(\w+)", used)]
                if name.endswith("return"):
                    return own
                if name.endswith("call"):
                    made = self._call(self._functions[used.split("(")[0].strip(" @")], own, depth + 1)
                elif name == "sdy.manual_computation":
                    made = self._call(statement, own, depth + 1)
                else:
                    made = [self._do(name, text, statement, own)]
                if head is not None and head[1]:
                    (env[head[1]],) = made
            except ProgramError as error:
                told = str(error)
                raise ProgramError(told if told.startswith("line ") else f"line {number}: {told}") from error
            except (LookupError, ValueError, TypeError, ArithmeticError) as error:
                raise ProgramError(f"line {number}: is not understood: {shorten(text.strip())}") from error
        raise ProgramError(f"line {function[0][0]}: must end with a return")

    def _do(self, name: str, text: str, statement: Lines, operands: Sequence[_Tensor]) -> _Tensor:
        """What one operation gives."""
        sizes, element = _TYPE.findall(statement[-1][1])[-1]
        shape, is_data = _sizes(sizes), _is_data(element)
        if math.prod(shape) * self._ranks > MOST_ELEMENTS:
            raise ProgramError(f"{name}: all ranks together have more than {MOST_ELEMENTS} elements")
        arrays = [it.of_ranks for it in operands]
        of_data = is_data or any(it.is_data for it in operands)
        if name == "collective_permute" and is_data:
            result = self._permute(arrays[0], _pairs(text, self._ranks))
        elif name == "constant":
            result = np.broadcast_to(_constant(text, element, shape), (self._ranks, *shape))
        elif name == "partition_id":
            result = np.arange(self._ranks)
        elif name == "add" and is_data:
            result = self._sum(*arrays)
        elif name == "scatter":
            body = [line for _, line in statement[1:-1] if "stablehlo.return" not in line and "^" not in line]
            if body and not (len(body) == 1 and "stablehlo.add " in body[0]):
                raise ProgramError("scatter: its body must add or replace")
            adding = self._sum if is_data else operator.add
            result = _scattered(text, adding if body else lambda _, new: new, *arrays)
        elif name in _MOVES and (name != "convert" or is_data >= operands[0].is_data):
            result = _MOVES[name](text, shape, *arrays)
            if name == "convert" and is_data and not operands[0].is_data and result.any():
                raise ProgramError("convert: numbers other than 0 are no data")
        elif not of_data and (name == "compare" or name in _ARITHMETIC):
            way = re.findall(r"compare +(\w+)", text)[0] if name == "compare" else name
            result = np.asarray(_ARITHMETIC[way](*arrays)).astype(np.int64)
        else:
            raise ProgramError(f"{name}: is not understood of {'data' if of_data else 'whole numbers'}")
        return _Tensor(result.reshape(self._ranks, *shape), is_data)

    def _sum(self, one: Ints, other: Ints) -> Ints:
        flat = map(self.elements.sum, one.ravel().tolist(), other.ravel().tolist())
        return np.array([*flat], dtype=np.int64).reshape(one.shape)

    def _permute(self, array: Ints, pairs: Sequence[tuple[int, int]]) -> Ints:
        result = np.zeros_like(array)
        for src, dst in pairs:
            numbers, back = np.unique(array[src], return_inverse=True)
            numbers = np.array(self.elements.sent(src, numbers.tolist()), dtype=np.int64)
            result[dst] = numbers[back].reshape(array[src].shape)
        return result


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")[:-1]))


def _is_data(element: str) -> bool:
    return not element.startswith(("i", "ui", "si"))


def _said(text: str, key: str) -> list[int]:
    """The numbers of an attribute."""
    found = re.search(rf"\b{key} = (?:array<i64)?[\[:]?([-\d, ]*)", text)
    return [] if found is None else [int(each) for each in found[1].replace(",", " ").split()]


def _pairs(text: str, ranks: int) -> list[tuple[int, int]]:
    ends = [
        int(each) for each in re.findall(r"\d+", re.findall(r"source_target_pairs = dense<([^>]*)>", text)[0])
    ]
    for side, does in ((ends[::2], "sends"), (ends[1::2], "receives")):
        for rank in side:
            if rank >= ranks or side.count(rank) > 1:
                raise ProgramError(f"collective_permute: rank {rank} {does} twice, or is beyond {ranks - 1}")
    return [*zip(ends[::2], ends[1::2], strict=True)]


def _constant(text: str, element: str, shape: tuple[int, ...]) -> Ints:
    ((raw, listed),) = re.findall(r'dense<(?:"0x([0-9A-F]*)"|([^>]*))>', text)
    if raw:
        kind = f"<{element.replace('ui', 'u')[0]}{int(re.sub(r'[a-z]', '', element)) // 8}"
        values = np.frombuffer(bytes.fromhex(raw), kind).astype(np.int64)
    else:
        words = (
            listed.replace("true", "1").replace("false", "0").translate(str.maketrans("[],", "   ")).split()
        )
        values = np.array(
            [int(word) if word.lstrip("-").isdecimal() else bool(float(word)) for word in words]
        )
    if _is_data(element) and values.any():
        raise ProgramError("constant: of data must be 0")
    return np.broadcast_to(values.reshape(shape if values.size > 1 else ()), shape).astype(np.int64)


def _wide(array: Ints, dimensions: int) -> Ints:
    """A scalar on each rank, with axes of length 1."""
    return array.reshape(len(array), *[1] * dimensions)


def _broadcast(text: str, shape: tuple[int, ...], array: Ints) -> Ints:
    sizes = [1] * len(shape)
    for axis, size in zip(_said(text, "dims"), array.shape[1:], strict=True):
        sizes[axis] = size
    return np.broadcast_to(array.reshape(len(array), *sizes), (len(array), *shape))


def _slice(text: str, _: tuple[int, ...], array: Ints) -> Ints:
    parts = re.findall(r"\[([\d:, ]+)\]", text)[0].split(",")
    return array[(slice(None), *(slice(*map(int, part.split(":"))) for part in parts))]


def _pad(text: str, shape: tuple[int, ...], array: Ints, value: Ints) -> Ints:
    low = _said(text, "low")
    if any(_said(text, "interior")) or min(low + _said(text, "high"), default=0) < 0:
        raise ProgramError("pad: must add at the ends alone")
    result = np.broadcast_to(_wide(value, len(shape)), (len(array), *shape)).copy()
    result[(slice(None), *(slice(at, at + size) for at, size in zip(low, array.shape[1:], strict=True)))] = (
        array
    )
    return result


def _window(array: Ints, starts: Sequence[Ints], sizes: Sequence[int], rank: int) -> tuple[int | slice, ...]:
    """Where a window lies on a rank, moved so that it is within."""
    ends = zip(starts, sizes, array.shape[1:], strict=True)
    first = [min(max(int(start[rank]), 0), most - size) for start, size, most in ends]
    return rank, *(slice(at, at + size) for at, size in zip(first, sizes, strict=True))


def _dynamic_slice(_: str, shape: tuple[int, ...], array: Ints, *starts: Ints) -> Ints:
    return np.stack([array[_window(array, starts, shape, rank)] for rank in range(len(array))])


def _dynamic_update(_: str, __: tuple[int, ...], array: Ints, update: Ints, *starts: Ints) -> Ints:
    result = array.copy()
    for rank, new in enumerate(update):
        result[_window(array, starts, new.shape, rank)] = new
    return result


def _select(_: str, shape: tuple[int, ...], which: Ints, one: Ints, other: Ints) -> Ints:
    return np.where(which if which.ndim > 1 else _wide(which, len(shape)), one, other)


def _gather(text: str, shape: tuple[int, ...], array: Ints, indices: Ints) -> Ints:
    """Rows of each rank's array."""
    whole = [1, *array.shape[2:]]
    behind = [*range(len(shape) + 1 - len(whole), len(shape))]
    ways = [
        _said(text, key) for key in ("start_index_map", "collapsed_slice_dims", "slice_sizes", "offset_dims")
    ]
    if ways != [[0], [0], whole, behind]:
        raise ProgramError("gather: must take whole rows")
    rows = np.clip(indices.reshape(len(array), -1), 0, array.shape[1] - 1)
    return array[np.arange(len(array))[:, None], rows]


def _scattered(
    text: str, combined: Callable[[Ints, Ints], Ints], array: Ints, indices: Ints, updates: Ints
) -> Ints:
    """Each rank's array with some rows combined with new ones; indices beyond it are passed over."""
    ways = [_said(text, key) for key in ("scatter_dims_to_operand_dims", "inserted_window_dims")]
    behind = [*range(updates.ndim + 1 - array.ndim, updates.ndim - 1)]
    if ways != [[0], [0]] or _said(text, "update_window_dims") != behind:
        raise ProgramError("scatter: must change whole rows")
    result = array.copy()
    for own, at, rows in zip(result, indices.reshape(len(array), -1), updates, strict=True):
        for row, new in zip(at.tolist(), rows.reshape(len(at), *own.shape[1:]), strict=True):
            if 0 <= row < len(own):
                own[row] = combined(own[row], new)
    return result


_MOVES: Mapping[str, Callable[..., Ints]] = {
    "reshape": lambda _, shape, array: array,
    "convert": lambda _, shape, array: array,
    "broadcast_in_dim": _broadcast,
    "transpose": lambda text, _, array: array.transpose(0, *(1 + axis for axis in _said(text, "dims"))),
    "concatenate": lambda text, _, *arrays: np.concatenate(arrays, axis=1 + _said(text, "dim")[0]),
    "slice": _slice,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "select": _select,
    "gather": _gather,
}
"""What moves data and whole numbers alike: of the text, the shape of the result, the operands."""

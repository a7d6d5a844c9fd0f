"""Which part of the data is where while a program runs, told as transfers in steps.

A rank has its own value of a part, whose *versions* follow each other: what it was given, then each sum or
copy that it made of messages. What others read of it is a version; what stands in their memory is a message
until they add it, pass it on or give it out, and only then a transfer. All of a step start from the state
before it, so that a version may still be sent in the step in which the next one comes about.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, TypeAlias

from arborcast.backends.programs.checking.memory import UNDEFINED, Values
from arborcast.backends.programs.checking.memory import Value as Contributions
from arborcast.backends.programs.program import ProgramError
from arborcast.synth.topology import Vertex

Version: TypeAlias = tuple[Vertex, int]
"""A vertex, and which of its versions of a part."""

Made: TypeAlias = tuple[tuple[Vertex, tuple[tuple["Arrival", ...], ...]], ...]
"""All of a part: vertices, and what each of their versions was made of."""


@dataclass(frozen=True, slots=True)
class Value:
    """What stands in a chunk of memory.

    Attributes:
        part: of the data.
        own: the version of the rank that is in it; None where it is made of messages alone.
        come: versions of others that are added to it, or that it is the sum of.
    """

    part: int
    own: int | None
    come: tuple[Version, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A version of another vertex that goes into one here: added, or in place of what there was."""

    origin: Version
    adds: bool


@dataclass(frozen=True, slots=True, order=True)
class Moved:
    """A transfer of a part."""

    step: int
    src: Vertex
    dst: Vertex
    adds: bool


class Versions(Values):
    """Of what stands in memory both: whose contributions are in it, and of which versions it is made.

    Errors of all that makes versions are that a value is not made of the newest version there.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.unknown = self.number("no sum of one part")
        self._versions: dict[int, dict[Vertex, list[tuple[Arrival, ...]]]] = defaultdict(dict)
        self._settled: dict[tuple[Vertex, Value], int] = {}

    def given(self, rank: int, value: Contributions | None) -> int:
        """The first version of a rank; none where nothing is given, the same in each call."""
        if value is None:
            return UNDEFINED
        self._versions[value[0]].setdefault(rank, [()])
        return self.number((Value(value[0], 0), value[1]))

    def unlike(self, rank: int, value: Contributions | None, found: int) -> str:
        """What is wrong with a part of a rank's result, which is taken for it where nothing is."""
        known, mask = self._made_of(found)
        if value is None:
            return ""
        if known is not None and (known.part, mask) == value:
            self._version(rank, known)
            return ""
        got = "no sum of one part" if known is None else f"part {known.part} of ranks {members(mask)}"
        return f"must be part {value[0]} of ranks {members(value[1])}, got {got}"

    def sent(self, rank: int, sums: list[int]) -> list[int]:
        """Versions of the rank."""
        return [self.left(rank, each) for each in sums]

    def added(self, first: int, second: int) -> Any:
        """The sum of two values of one rank."""
        (one, mask), (other, more) = self._made_of(first), self._made_of(second)
        own = [value.own for value in (one, other) if value is not None and value.own is not None]
        if one is None or other is None or one.part != other.part or mask & more or len(own) > 1:
            return self._values[self.unknown]
        return Value(one.part, own[0] if own else None, one.come + other.come), mask | more

    def left(self, vertex: Vertex, number: int) -> int:
        """What others get when they read a value of a vertex."""
        value, mask = self._made_of(number)
        if value is None:
            return number
        return self.number((Value(value.part, None, ((vertex, self._version(vertex, value)),)), mask))

    def settle(self, vertex: Vertex, number: int) -> None:
        """A vertex has a value whether anybody reads it or not."""
        value, _ = self._made_of(number)
        if value is not None:
            self._version(vertex, value)

    def transfers(self) -> dict[int, tuple[Moved, ...]]:
        """Of each part that moves, in the earliest steps.

        Raises:
            ProgramError: no steps keep the order in which versions are sent and replaced.
        """
        known: dict[Made, tuple[Moved, ...]] = {}
        found = {}
        for part, versions in sorted(self._versions.items()):
            made = tuple((vertex, tuple(of_vertex)) for vertex, of_vertex in sorted(versions.items()))
            if made not in known:
                known[made] = _in_steps(made)
            if known[made]:
                found[part] = known[made]
        return found

    def _made_of(self, number: int) -> tuple[Value | None, int]:
        held = self._values[number]
        return (None, 0) if isinstance(held, str) else held

    def _version(self, vertex: Vertex, value: Value) -> int:
        """The version that a value is, a new one where messages are in it."""
        if value.own is not None and not value.come:
            return value.own
        if (vertex, value) not in self._settled:
            self._settled[vertex, value] = self._new(vertex, self._rebased(vertex, value))
        return self._settled[vertex, value]

    def _rebased(self, vertex: Vertex, value: Value) -> Value:
        """The same value, said by the newest version that its first messages have made already."""
        for count in range(len(value.come) - 1, 0, -1):
            own = self._settled.get((vertex, Value(value.part, value.own, value.come[:count])))
            if own is not None:
                return Value(value.part, own, value.come[count:])
        return value

    def _new(self, vertex: Vertex, value: Value) -> int:
        versions = self._versions[value.part].setdefault(vertex, [])
        if value.own is not None and value.own != len(versions) - 1:
            raise ProgramError(
                f"the program is no set of trees or steps: rank {vertex} keeps several sums of one chunk"
            )
        keeps = value.own is not None or (len(value.come) > 1 and not versions)
        versions.append(tuple(Arrival(origin, keeps or at > 0) for at, origin in enumerate(value.come)))
        return len(versions) - 1


def _in_steps(made: Made) -> tuple[Moved, ...]:
    """The least steps: a version is sent after it came about, and not after the next one did."""
    arrivals = [
        (vertex, number, arrival)
        for vertex, versions in made
        for number, version in enumerate(versions)
        for arrival in version
    ]
    came: dict[Version, list[int]] = defaultdict(list)
    sent: dict[Version, list[int]] = defaultdict(list)
    for index, (vertex, number, arrival) in enumerate(arrivals):
        came[vertex, number].append(index)
        sent[arrival.origin].append(index)
    later: list[tuple[int, int, int]] = []  # before, after, by how many steps at least
    for index, (vertex, number, arrival) in enumerate(arrivals):
        later += [(index, send, 1) for send in sent[vertex, number]]
        later += [(send, index, 0) for send in sent[vertex, number - 1]]
        later += [
            (other, index, 0 if arrivals[other][2].adds and arrival.adds else 1)
            for other in came[vertex, number - 1]
        ]
        first = came[vertex, number][0]
        if index != first and not arrivals[first][2].adds:
            later.append((first, index, 1))
    steps = [0] * len(arrivals)
    changed = True
    while changed:
        changed = False
        for before, after, apart in later:
            if steps[after] < steps[before] + apart:
                steps[after] = steps[before] + apart
                changed = True
                if steps[after] > len(arrivals):
                    raise ProgramError("the program is no set of trees or steps: no steps keep its order")
    return tuple(
        sorted(
            Moved(step, arrival.origin[0], vertex, arrival.adds)
            for step, (vertex, _, arrival) in zip(steps, arrivals, strict=True)
        )
    )


def members(mask: int) -> str:
    """The ranks whose bits are set."""
    return ", ".join(str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1)

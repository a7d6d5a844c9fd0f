"""The transfers of a schedule: values to be read, and columns to compute with.

A schedule of a thousand ranks has millions of transfers. `Transfers` holds them as arrays; objects are made
when somebody looks at them.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from arborcast.synth.topology import Hop, Vertex

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints: TypeAlias = NDArray[np.int64]
    Flags: TypeAlias = NDArray[np.bool_]

Way: TypeAlias = tuple[Vertex, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One chunk from one rank to another, through the switches of `via`, in one step.

    Either end may be a switch that reduces or multicasts: it holds what it is sent as a rank does, nothing at
    the start, and is asked for no more than `Switch` says that it can. With `reduce` the receiver adds the
    sender's contributions to its own, otherwise its copy becomes the sender's. All transfers of a step start
    from the state before it.
    """

    chunk: int
    src: int
    dst: int
    step: int
    reduce: bool = False
    via: Way = ()

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The links it passes, as pairs of vertices."""
        path = (self.src, *self.via, self.dst)
        return tuple(pairwise(path))


class Transfers(Sequence[Transfer]):
    """Transfers as columns of equal length; equal to a tuple of the same transfers.

    Attributes:
        chunk: the number of each one's chunk.
        src: its sender.
        dst: its receiver.
        step: its step.
        reduce: whether it adds.
        way: which of `ways` it takes.
        ways: what is passed between sender and receiver, each way once.
    """

    def __init__(
        self, chunk: Ints, src: Ints, dst: Ints, step: Ints, reduce: Flags, way: Ints, ways: Sequence[Way]
    ) -> None:
        self.chunk, self.src, self.dst, self.step = chunk, src, dst, step
        self.reduce, self.way, self.ways = reduce, way, tuple(ways)

    @classmethod
    def of(cls, transfers: Sequence[Transfer]) -> Transfers:
        """The columns of transfers; of columns themselves."""
        if isinstance(transfers, Transfers):
            return transfers
        import numpy as np

        count = len(transfers)

        def column(name: str) -> Ints:
            return np.fromiter(map(attrgetter(name), transfers), dtype=np.int64, count=count)

        reduce = np.fromiter(map(attrgetter("reduce"), transfers), dtype=np.bool_, count=count)
        number: dict[Way, int] = {}
        via = map(attrgetter("via"), transfers)
        way = np.fromiter((number.setdefault(each, len(number)) for each in via), dtype=np.int64, count=count)
        ends = column("src"), column("dst")
        found = cls(column("chunk"), *ends, column("step"), reduce, way, tuple(number))
        found.__dict__["_objects"] = tuple(transfers)
        return found

    def taken(self, rows: Ints) -> Transfers:
        """Some of them, in this order."""
        ends = self.src[rows], self.dst[rows]
        reduce, way = self.reduce[rows], self.way[rows]
        return Transfers(self.chunk[rows], *ends, self.step[rows], reduce, way, self.ways)

    @property
    def turned(self) -> Transfers:
        """The same from receiver to sender, through what is passed the other way round."""
        ways = tuple(way[::-1] for way in self.ways)
        return Transfers(self.chunk, self.dst, self.src, self.step, self.reduce, self.way, ways)

    @cached_property
    def paths(self) -> tuple[Ints, Ints]:
        """The vertices that each one passes, its ends included.

        Returns:
            `(starts, path)`: those of row i are `path[starts[i]:starts[i + 1]]`.
        """
        import numpy as np

        sizes = np.array([len(way) for way in self.ways], dtype=np.int64)
        inner = np.fromiter(chain.from_iterable(self.ways), dtype=np.int64, count=int(sizes.sum()))
        firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))[:-1]
        between = sizes[self.way]
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(between + 2)))
        path = np.empty(int(starts[-1]), dtype=np.int64)
        path[starts[:-1]], path[starts[1:] - 1] = self.src, self.dst
        before = np.cumsum(between) - between
        offset = np.arange(int(between.sum())) - np.repeat(before, between)
        path[np.repeat(starts[:-1] + 1, between) + offset] = inner[
            np.repeat(firsts[self.way], between) + offset
        ]
        return starts, path

    def hops_in(self, size: int) -> tuple[Ints, Ints]:
        """The links that each one passes, as numbers `src * size + dst`.

        Returns:
            `(firsts, hops)`: those of row i are `hops[firsts[i]:firsts[i + 1]]`.
        """
        import numpy as np

        starts, path = self.paths
        # A hop leads on from all but the last of a path.
        tails = np.delete(np.arange(len(path)), starts[1:] - 1)
        return starts - np.arange(len(starts)), size * path[tails] + path[tails + 1]

    @cached_property
    def _objects(self) -> tuple[Transfer, ...]:
        """All of them, made once somebody looks at them: a third of the time of making them one by one."""
        columns: dict[str, Sequence[Any]] = {
            name: getattr(self, name).tolist() for name in ("chunk", "src", "dst", "step", "reduce")
        }
        columns["via"] = [self.ways[number] for number in self.way.tolist()]
        collects = gc.isenabled()
        gc.disable()  # it would walk all that is made again and again, and find nothing to free
        try:
            made = list(map(object.__new__, repeat(Transfer, len(self.chunk))))
            for name, values in columns.items():
                # Nobody has seen them yet, so that writing to the slots breaks no promise.
                deque(map(getattr(Transfer, name).__set__, made, values), maxlen=0)
        finally:
            if collects:
                gc.enable()
        return tuple(made)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.chunk)

    @overload
    def __getitem__(self, place: int) -> Transfer: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Transfer, ...]: ...

    def __getitem__(self, place: int | slice) -> Transfer | tuple[Transfer, ...]:
        """One of them, or some."""
        return self._objects[place]

    def __iter__(self) -> Iterator[Transfer]:
        """All, in order."""
        return iter(self._objects)

    def __eq__(self, other: object) -> bool:
        """Whether the same transfers stand in the same order."""
        if isinstance(other, (Transfers, tuple)):
            return len(self) == len(other) and self._objects == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        """As of the tuple."""
        return hash(self._objects)

    def __repr__(self) -> str:
        """As of the tuple."""
        return repr(self._objects)

    def __reduce__(self) -> tuple[Any, ...]:
        """Columns alone are kept in files and sent to processes."""
        columns = (self.chunk, self.src, self.dst, self.step, self.reduce, self.way)
        return Transfers, (*columns, self.ways)


@overload
def in_order(transfers: Transfers) -> Transfers: ...


@overload
def in_order(transfers: Iterable[Transfer]) -> Sequence[Transfer]: ...


def in_order(transfers: Iterable[Transfer]) -> Sequence[Transfer]:
    """Transfers in the order of schedules: by step, chunk, sender and receiver."""
    if isinstance(transfers, Transfers):
        import numpy as np

        return transfers.taken(
            np.lexsort((transfers.dst, transfers.src, transfers.chunk, transfers.step)).astype(np.int64)
        )
    return tuple(sorted(transfers, key=attrgetter("step", "chunk", "src", "dst")))

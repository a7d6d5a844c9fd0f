"""Where one of several candidates becomes faster than another, as the size of the buffer grows.

A time is known at the sizes at which it was simulated. Between two of them it is bounded, since all that a
larger buffer changes is that every transfer takes longer, and that chunks may be cut into more pieces:

    with the same pieces       it grows, and as a straight line where the order on the links stays the same
    with more of them          it falls, by no more than the pieces grow: several can always go as one
    for each byte              it falls, since latencies stay what they are, but for what messages cost

So a range is settled where these bounds say so, or where nothing is cut more finely within it and times are
on a line at both ends and between. Any other range is parted, first where a candidate gets more pieces: there
its time jumps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

NEAR = 0.01
"""Part of its time by which no other candidate is faster than the one that serves a size."""

KEPT = NEAR / 2
"""The same at the sizes that are looked at, so that bounds have the other half."""

STEADY = 50
"""Pieces of which one more makes no difference that counts."""

Bytes = int


class Prices(ABC):
    """What each of several candidates takes at a size, in microseconds; each is asked once."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many candidates there are."""

    @abstractmethod
    def _time_us(self, at: int, size: Bytes) -> float:
        """The time of a candidate."""

    @abstractmethod
    def _pieces(self, at: int, size: Bytes) -> int:
        """Into how many pieces it may cut its chunks; no fewer at larger sizes."""

    @abstractmethod
    def _work_us(self, at: int, size: Bytes) -> float:
        """The part of the time that grows with the pieces alone; it takes no less."""

    def _carried_us(self, at: int, size: Bytes) -> float:
        """What it takes at least, by what is easily known."""
        return 0.0

    def _any_us(self, size: Bytes) -> float:
        """What every candidate takes at least; per byte no more at a larger size."""
        return 0.0

    def _proven_us(self, at: int, size: Bytes) -> float:
        """What it takes at least, by more work than `_carried_us` but without its time."""
        return self._carried_us(at, size)

    def _pace(self, at: int, size: Bytes, time_us: float) -> float:
        """What a byte takes at least at this and all smaller sizes."""
        work_us = self._work_us(at, size)
        if self.work_adds:
            return (time_us - work_us) / size
        return time_us / size if time_us > work_us else 0.0

    work_adds: ClassVar[bool] = False
    """Whether the work adds to the rest of the time; otherwise the longer of the two counts."""

    tolerated: float = 0.0
    """Part of the least time that `best` may take more, for other reasons than time."""

    def _effort(self, at: int) -> int:
        """By what it is to work out its time, beside other candidates."""
        return 0

    def best(self, size: Bytes, candidates: Iterable[int] | None = None, *, near: float = 0.0) -> int:
        """Which of these (by default of all) is to serve a size: the fastest, the first of equals.

        Args:
            size: of the buffer.
            candidates: their numbers.
            near: part of its time by which another one may be faster whose time is not worked out.
        """
        # What may be fastest is looked at first, so that much of the rest need not be run.
        asked = range(self.count) if candidates is None else candidates
        least = {at: self.least_us(at, size) for at in asked}
        limit = (1 + near) * min(least.values())
        first = [at for at in asked if least[at] <= limit]
        rest = [at for at in asked if least[at] > limit]
        first.sort(key=lambda at: (size not in self._known[at], self._effort(at)))
        rest.sort(key=least.__getitem__)
        best, best_us = first[0], self.time_us(first[0], size)
        any_us = self._any_us(size) if near else 0.0
        place = {at: place for place, at in enumerate(asked)}
        for at in (*first[1:], *rest):
            if least[at] > best_us or (near and (1 + near) * max(least[at], any_us) >= best_us):
                continue
            time_us = self.time_us(at, size)
            if (time_us, place[at]) < (best_us, place[best]):
                best, best_us = at, time_us
        return best

    def best_known(self, size: Bytes) -> int:
        """The fastest of those whose time at a size is known, the first of all where none is."""
        return min(range(self.count), key=lambda at: (self._known[at].get(size, math.inf), at))

    def time_us(self, at: int, size: Bytes) -> float:
        """The time of a candidate."""
        known = self._known[at]
        if size not in known:
            known[size] = self._time_us(at, size)
        return known[size]

    def pieces(self, at: int, size: Bytes) -> int:
        """Into how many pieces it may cut its chunks."""
        known = self._cut[at]
        if size not in known:
            known[size] = self._pieces(at, size)
        return known[size]

    def proven_us(self, at: int, size: Bytes) -> float:
        """What a candidate takes at least, by its own structure."""
        known = self._proven[at]
        if size not in known:
            known[size] = self._proven_us(at, size)
        return known[size]

    def least_us(self, at: int, size: Bytes) -> float:
        """What a candidate takes at least, by the sizes at which its time is known."""
        if size in (known := self._known[at]):
            return known[size]
        least = max(self.proven_us(at, size), self._carried_us(at, size), self._work_us(at, size))
        pieces = self.pieces(at, size)
        for other, time_us in known.items():
            if other < size:
                least = max(least, time_us * self.pieces(at, other) / pieces)
            else:
                least = max(least, self._pace(at, other, time_us) * size)
        return (1 - 1e-9) * least

    def keeps(self, server: int, rival: int, first: Bytes, last: Bytes) -> bool:
        """Whether a rival is nowhere in a range of sizes `NEAR` faster than the one that serves it."""
        allowed = 1 + NEAR + self.tolerated
        if self._is_least(server, first, last, allowed):
            return True
        work_us, growth = self._work_us(server, last), self.time_us(server, first) / first

        def most_us(size: float) -> float:
            own_us = work_us - self._work_us(server, first)
            most = size * growth + own_us if self.work_adds else max(size * growth, work_us)
            return min(most, self.time_us(server, last)) if self.is_steady(server, first, last) else most

        def bounded() -> bool:
            flat = self.least_us(rival, first) * self.pieces(rival, first) / self.pieces(rival, last)
            slope = self._pace(rival, last, self.least_us(rival, last))
            # The bounds cross where the rival's is the least beside the other's.
            crossing = min(max(flat / slope if slope > 0 else last, first), last)
            least = max(flat, slope * crossing, self._carried_us(rival, math.floor(crossing)))
            return most_us(crossing) <= allowed * least

        if bounded():
            return True
        for size in (last, first):
            if self.least_us(rival, size) > allowed * self.time_us(server, size):
                return False  # within a part of the range bounds will do
            self.time_us(rival, size)
            if bounded():
                return True
        if all(self._is_alike(server, rival, size) for size in (first, last)):
            return True
        return all(self.is_steady(at, first, last) for at in (server, rival)) and self._on_lines(
            server, rival, first, last
        )

    def _is_least(self, server: int, first: Bytes, last: Bytes, allowed: float) -> bool:
        """Whether in a range of sizes no candidate at all could be much faster than this one."""
        if self.time_us(server, first) * last <= allowed * self._any_us(last) * first:
            return True  # per byte it takes no more than at the first size
        return self.is_steady(server, first, last) and all(
            self.time_us(server, size) <= allowed * self._any_us(size)
            for size in (first, last, between(first, last))
        )

    def _is_alike(self, server: int, rival: int, size: Bytes) -> bool:
        """Whether two candidates, cut alike, take the same time: most often one schedule, found twice."""
        same = math.isclose(self.time_us(server, size), self.time_us(rival, size), rel_tol=1e-9)
        return same and self.pieces(server, size) == self.pieces(rival, size)

    def _on_lines(self, server: int, rival: int, first: Bytes, last: Bytes) -> bool:
        """Whether two times are on lines, and the rival's nowhere `KEPT` below the other's."""
        middle = between(first, last)
        part = (middle - first) / max(1, last - first)
        for at in (server, rival):
            start, end = self.time_us(at, first), self.time_us(at, last)
            if abs(self.time_us(at, middle) / (start + part * (end - start)) - 1) > NEAR / 4:
                return False
        return all(
            self.time_us(server, size) <= (1 + KEPT + self.tolerated) * self.time_us(rival, size)
            for size in (first, middle, last)
        )

    def is_steady(self, at: int, first: Bytes, last: Bytes) -> bool:
        """Whether a candidate cuts alike from one size to another."""
        fewest = self.pieces(at, first)
        return (self.pieces(at, last) - fewest) * STEADY <= fewest

    def jumps(self, candidates: Iterable[int], size: Bytes) -> bool:
        """Whether one of these is cut more finely at a size than at one byte less."""
        return any(self.pieces(at, size) > self.pieces(at, size - 1) for at in candidates)

    def cut(self, candidates: Iterable[int], first: Bytes, last: Bytes) -> Bytes:
        """Where to part a range: near the middle, where one of these gets more pieces if any does."""
        middle = between(first, last)
        for at in candidates:
            if not self.is_steady(at, first, last):
                here = self.pieces(at, middle)
                wanted = here if here > self.pieces(at, first) else here + 1
                sizes = range(first + 1, last + 1)
                return sizes[bisect_left(sizes, wanted, key=lambda size: self.pieces(at, size))]
        return max(middle, first + 1)

    @cached_property
    def _known(self) -> list[dict[Bytes, float]]:
        return [{} for _ in range(self.count)]

    @cached_property
    def _proven(self) -> list[dict[Bytes, float]]:
        return [{} for _ in range(self.count)]

    @cached_property
    def _cut(self) -> list[dict[Bytes, int]]:
        return [{} for _ in range(self.count)]


def between(first: Bytes, last: Bytes) -> Bytes:
    """The size in the middle of two, by their ratio."""
    return math.isqrt(first * last)


def crossings(prices: Prices, sizes: Sequence[Bytes]) -> list[tuple[Bytes, int]]:
    """Which candidate serves from which size on, up to the next one or to the last of the sizes.

    Args:
        prices: of the candidates.
        sizes: ascending; at each of them one serves than which none is half of `KEPT` faster, by `prices`.
    """
    # What is slow at a size is so below, too.
    best = {size: prices.best(size, near=KEPT / 2) for size in reversed(sizes)}
    found = [(sizes[0], best[sizes[0]])]
    for first, last in pairwise(sizes):
        todo = [(first, last - 1, list(range(prices.count)))]
        while todo:
            start, end, rivals = todo.pop()
            server = found[-1][1]
            if start > first:
                faster = prices.best(start, [server, *rivals], near=KEPT / 2)
                allowed = (1 + KEPT + prices.tolerated) * prices.time_us(faster, start)
                if prices.time_us(server, start) > allowed:
                    rivals, server = [*rivals, server], faster
                    found.append((start, server))
            rivals = [at for at in rivals if at != server and not prices.keeps(server, at, start, end)]
            if rivals and start < end:
                middle = prices.cut([server, *rivals], start, end)
                rivals.append(server)
                below = middle - 1 if middle == end or prices.jumps(rivals, middle) else middle
                todo += [(middle, end, rivals), (start, below, rivals)]
        if best[last] != found[-1][1]:
            found.append((last, best[last]))
    return found

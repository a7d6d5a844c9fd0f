"""Which schedule serves which message size: build those that apply, simulate each, take the fastest.

Large messages want the highest rate, small ones the fewest hops; the simulator's cost model (latency and
bandwidth of every link) decides between trees, the frontier of chunk schedules and the baselines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from arborcast.synth.collective import Kind
from arborcast.synth.crossings import Prices, crossings
from arborcast.synth.deadline import NO_DEADLINE, Deadline, run_until, running
from arborcast.synth.errors import TimedOutError
from arborcast.synth.formats.words import every_schedule
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.schedule import Schedule
from arborcast.synth.solve_options import MIN_PIECE_BYTES

if TYPE_CHECKING:
    from arborcast.synth.bounds.time_limits import TimeLimit
    from arborcast.synth.simulation.pieces import PieceRule
    from arborcast.synth.simulation.simulator import Runs

ENOUGH_FRAMES = 256
"""Of a chunk in comparisons: a time is off by less than a quarter of a percent per switch on the way."""

NEAR_ENOUGH = Fraction(1, 500)
"""Part of the least time (`synth.bounds.time_limits`) by which a schedule may miss it where a search for a
faster one at that size ends: what is left to gain is not worth a second."""

SIZES = tuple(takewhile(lambda size: size <= 1 << 30, (1 << power for power in count(10))))
"""The sizes at which candidates are compared to see where the choice changes: 1 KiB to 1 GiB."""


@dataclass(frozen=True)
class Choice:
    """A schedule and the size from which on it serves, up to the next one."""

    from_bytes: int
    schedule: AnySchedule


@dataclass(frozen=True)
class Selection:
    """All schedules worth comparing.

    Attributes:
        schedules: the candidates, the one of the highest rate first (a custom collective: last).
        out_of_time: why some may be missing; None where the deadline did not pass.
        deadline: of the question, which simulating them keeps, too.
        priced: whether links count as they are measured, where that is known; else at their own rates.
        least_piece: in bytes, or the rule of an engine.
        left_out: why methods are not among the candidates.
        enough: why no more were made than the first ones, for the one size that was asked for; empty where
            candidates were made for every size.
    """

    schedules: tuple[AnySchedule, ...]
    out_of_time: TimedOutError | None = None
    deadline: Deadline = NO_DEADLINE
    priced: bool = True
    least_piece: int | PieceRule = MIN_PIECE_BYTES
    left_out: Mapping[str, str] = field(default_factory=dict)
    enough: str = ""

    def fastest(self, size_bytes: int) -> AnySchedule:
        """The one with the least simulated time; the first of equals.

        Raises:
            TimedOutError: the deadline passed; carries the fastest of those that were simulated.
        """
        try:
            with run_until(self.deadline):
                return self.schedules[self.prices.best(size_bytes)]
        except TimedOutError as late:
            best = self.schedules[self.prices.best_known(size_bytes)]
            raise TimedOutError(str(self.out_of_time or late), best) from late

    def fastest_in_time(self, size_bytes: int) -> AnySchedule:
        """`fastest`, where the deadline left all candidates their time.

        Raises:
            TimedOutError: it did not; carries the fastest of those simulated until then.
        """
        best = self.fastest(size_bytes)
        if self.out_of_time is not None:
            raise TimedOutError(str(self.out_of_time), best) from self.out_of_time
        return best

    def choices(self, sizes: Sequence[int] = SIZES, *, stride: int = 2) -> tuple[Choice, ...]:
        """Which schedule serves which size, from the first of ascending sizes to the last.

        At every second of them (`stride`: every third, ...) none is a quarter of `NEAR` faster; between two,
        the table is refined until none is `NEAR` faster than the one that serves (`synth.crossings`).

        Raises:
            TimedOutError: the deadline passed.
        """
        looked_at = [sizes[place] for place in sorted({*range(0, len(sizes), stride), len(sizes) - 1})]
        with run_until(self.deadline):
            found = crossings(self.prices, looked_at)
        return tuple(Choice(size, self.schedules[at]) for size, at in found)

    @cached_property
    def prices(self) -> Prices:
        """What each candidate takes at each size, as far as it was asked."""
        return Simulated(self.schedules, self.priced, self.least_piece)


@dataclass(frozen=True)
class Simulated(Prices):
    """Times of schedules by simulation, on links as they are measured where anything is known of them."""

    schedules: tuple[AnySchedule, ...]
    priced: bool
    least_piece: int | PieceRule

    @property
    def count(self) -> int:
        return len(self.schedules)

    def _time_us(self, at: int, size: int) -> float:
        return self._runs[at].choice(size)[1]

    def _pieces(self, at: int, size: int) -> int:
        return self._runs[at].most_pieces(size)

    def _work_us(self, at: int, size: int) -> float:
        return self._runs[at].work_us * self.pieces(at, size)

    def _carried_us(self, at: int, size: int) -> float:
        return _carried_us(self._runs[at].schedule, size)

    def _proven_us(self, at: int, size: int) -> float:
        running().check("the comparison of schedules")
        return self._runs[at].least_us(size)

    def _any_us(self, size: int) -> float:
        return (1 - 1e-9) * self._least.at(size)  # a little less for what a simulation rounds

    def _effort(self, at: int) -> int:
        return self._runs[at].effort

    @cached_property
    def _least(self) -> PricedLimit:
        return PricedLimit.of(self.schedules[0], self.priced)

    @cached_property
    def _runs(self) -> list[Runs]:
        from arborcast.synth.simulation.simulator import Runs

        least = self.least_piece
        limits: dict[str, Any] = {"min_piece_bytes": least} if isinstance(least, int) else {"rule": least}
        make: Callable[..., Runs] = Runs.priced if self.priced else Runs
        return [make(each, max_frames=ENOUGH_FRAMES, **limits) for each in self.schedules]


@dataclass(frozen=True)
class PricedLimit:
    """What every schedule takes at least on links as they are priced, in microseconds."""

    limit: TimeLimit
    call_us: float

    @classmethod
    def of(cls, schedule: AnySchedule, priced: bool = True) -> PricedLimit:
        """For the fabric and collective of this one."""
        from arborcast.synth.bounds.time_limits import time_limit
        from arborcast.synth.simulation.prices import CALL_US, effective

        # Links carry no schedule faster than those that only forward: their limit is one of all prices.
        topology = effective(schedule.topology) if priced else schedule.topology
        limit = time_limit(topology, schedule.collective, schedule.bound)
        return cls(limit, 0.0 if topology is schedule.topology else float(CALL_US))

    def at(self, size_bytes: int, *, more: Fraction = Fraction(0)) -> float:
        """For a buffer of so many bytes, and on links this part of it more."""
        return float((1 + more) * self.limit.at(size_bytes)) + self.call_us


def _carried_us(schedule: AnySchedule, size_bytes: int) -> float:
    """What the busiest link takes for its bytes alone, a little less for what a simulation rounds.

    The rate of a schedule in rounds counts every step to its end; in a simulation steps overlap.
    """
    if isinstance(schedule, Schedule) and schedule.rounds is not None:
        bandwidth = schedule.topology.bandwidth
        busy = max((share / bandwidth[hop] for hop, share in schedule.load.items()), default=Fraction(0))
    else:
        busy = 1 / schedule.rate if schedule.rate else Fraction(0)  # of links at their own rates
    return (1 - 1e-9) * size_bytes * float(busy) / 1000


def compared(
    found: Iterator[AnySchedule],
    kind: Kind,
    *,
    size_bytes: int | None = None,
    deadline: Deadline = NO_DEADLINE,
    least_piece: int = MIN_PIECE_BYTES,
    left_out: dict[str, str] | None = None,
) -> Selection:
    """All candidates of a collective of this kind that could be built.

    Args:
        found: the candidates as they are built, which may end with any of the errors below.
        kind: named by the message where there is none.
        size_bytes: where only this size is asked about: no more are built once one of them takes the least
            time of any schedule but for `NEAR_ENOUGH`.
        deadline: of the question.
        least_piece: in bytes.
        left_out: what whoever makes the candidates fills.

    Raises:
        InfeasibleError: no method has a schedule (the first method's own error, with its proof).
        TimedOutError: the deadline, one for all methods together, passed before there was any schedule; or
            the effort that a comparison is worth was spent without finding one.
        TooManyRoutesError: only chunk schedules apply, and the topology is beyond them.
    """
    schedules: list[AnySchedule] = []
    left_out = {} if left_out is None else left_out
    late: TimedOutError | None = None
    enough, enough_us = "", 0.0
    try:
        with run_until(deadline):
            for schedule in found:
                schedules.append(schedule)
                if size_bytes is not None:
                    enough_us = enough_us or PricedLimit.of(schedule).at(size_bytes, more=NEAR_ENOUGH)
                    if _takes_at_most(schedule, size_bytes, enough_us, least_piece):
                        enough = (
                            f"{schedule.method.name} takes the least time of "
                            f"{every_schedule(schedule.bound)}, within {float(100 * NEAR_ENOUGH):g} %"
                        )
                        break
    except TimedOutError as error:
        schedules += [] if error.best is None else [error.best]
        if not schedules:
            raise
        late = error
    if not schedules:
        raise TimedOutError(
            f"{kind}: no schedule was found with the effort of a comparison; without a size more is spent"
        )
    return Selection(
        tuple(schedules), late, deadline, least_piece=least_piece, left_out=left_out, enough=enough
    )


def _takes_at_most(schedule: AnySchedule, size_bytes: int, time_us: float, least_piece: int) -> bool:
    from arborcast.synth.simulation.simulator import Runs

    if _carried_us(schedule, size_bytes) > time_us:
        return False
    runs = Runs.priced(schedule, min_piece_bytes=least_piece)
    return runs.least_us(size_bytes) <= time_us and runs.choice(size_bytes)[1] <= time_us

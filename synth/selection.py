"""Which schedule serves which message size: build those that apply, simulate each, take the fastest.

Large messages want the highest rate, small ones the fewest hops; the simulator's cost model (latency and
bandwidth of every link) decides between trees, the frontier of chunk schedules and the baselines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from arborcast.synth.baselines import BASELINES
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.crossings import Prices, crossings
from arborcast.synth.deadline import NO_DEADLINE, Deadline, run_until
from arborcast.synth.errors import CollectiveError, InfeasibleError, TimedOutError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.methods import (
    IMPLICIT_KINDS,
    MOST_ORBITS,
    implicit_method_for,
    method_for,
    natural_method,
)
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from arborcast.synth.solve_options import MIN_PIECE_BYTES, SolveOptions
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology

if TYPE_CHECKING:
    from arborcast.synth.bounds.time_limits import TimeLimit
    from arborcast.synth.simulation.pieces import PieceRule
    from arborcast.synth.simulation.simulator import Runs

FEW_TREES = (1, 2)
"""Tree counts that are tried besides the full packing: few trees are shallow and start fast."""

LARGEST_SHALLOW = 16
"""Ranks up to which packings of lower trees of any shape are among the candidates: seconds. Above it, those
that are alike under the symmetries of the fabric."""

LARGEST_FRONTIER = 16
"""Ranks up to which the frontier of chunk schedules is among the candidates: seconds."""

ENOUGH_FRAMES = 256
"""Of a chunk in comparisons: a time is off by less than a quarter of a percent per switch on the way."""

FEWEST_PLACED = 16
"""Ranks from which on trees placed in time are compared: on fewer, chunk schedules are as fast or faster."""

EXTRA_STEPS = 2
"""How many steps beyond the latency its candidates may take; more of them serve large messages only, where
trees are as fast and pipelined."""

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
    """

    schedules: tuple[AnySchedule, ...]
    out_of_time: TimedOutError | None = None
    deadline: Deadline = NO_DEADLINE
    priced: bool = True
    least_piece: int | PieceRule = MIN_PIECE_BYTES

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

        At every second of them (`stride`: every third, ...) it is the fastest; between two, the table is
        refined until none is `NEAR` faster than the one that serves (`synth.crossings`).

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
    priced: bool = True
    least_piece: int | PieceRule = MIN_PIECE_BYTES

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
) -> Selection:
    """All candidates of a collective of this kind that could be built.

    Args:
        found: the candidates as they are built, which may end with any of the errors below.
        kind: named by the message where there is none.
        size_bytes: where only this size is asked about: no more are built once one of them takes the least
            time of any schedule but for `NEAR_ENOUGH`.
        deadline: of the question.
        least_piece: in bytes.

    Raises:
        InfeasibleError: no method has a schedule (the first method's own error, with its proof).
        TimedOutError: the deadline, one for all methods together, passed before there was any schedule; or
            the effort that a comparison is worth was spent without finding one.
        TooManyRoutesError: only chunk schedules apply, and the topology is beyond them.
    """
    schedules: list[AnySchedule] = []
    enough_us = 0.0
    try:
        with run_until(deadline):
            for schedule in found:
                schedules.append(schedule)
                if size_bytes is not None:
                    enough_us = enough_us or PricedLimit.of(schedule).at(size_bytes, more=NEAR_ENOUGH)
                    if _takes_at_most(schedule, size_bytes, enough_us, least_piece):
                        break
    except TimedOutError as error:
        schedules += [] if error.best is None else [error.best]
        if not schedules:
            raise
        return Selection(tuple(schedules), error, deadline, least_piece=least_piece)
    if not schedules:
        raise TimedOutError(
            f"{kind}: no schedule was found with the effort of a comparison; without a size more is spent"
        )
    return Selection(tuple(schedules), None, deadline, least_piece=least_piece)


def _takes_at_most(schedule: AnySchedule, size_bytes: int, time_us: float, least_piece: int) -> bool:
    from arborcast.synth.simulation.simulator import Runs

    if _carried_us(schedule, size_bytes) > time_us:
        return False
    runs = Runs.priced(schedule, min_piece_bytes=least_piece)
    return runs.least_us(size_bytes) <= time_us and runs.choice(size_bytes)[1] <= time_us


def candidates(
    topology: Topology, collective: Collective, options: SolveOptions, of_best_rate: Callable[[], AnySchedule]
) -> Iterator[AnySchedule]:
    """Every schedule worth comparing, the one of the highest rate first (a custom collective: last).

    Where something is asked of trees, only those that keep to it are compared: other schedules have none.

    Args:
        topology: the fabric.
        collective: what to do on it.
        options: its knobs are handed to every method.
        of_best_rate: makes the first one.

    Raises:
        InfeasibleError: the first one, which reaches the bound wherever anything can, does not exist.
        TimedOutError: the deadline, one for all of them, passed.
        TooManyRoutesError: see `compared`.
    """
    from arborcast.synth.baselines.bidirectional_rings import both_ways

    deadline = Deadline.after(options.deadline_s)
    natural = natural_method(collective)
    height, only_forward = 0, False
    if collective.kind is not Kind.CUSTOM:
        fastest_rate = of_best_rate()
        height = fastest_rate.height
        yield fastest_rate
        if topology.forwarding is not topology and natural == "trees":
            deadline.check("the comparison of methods")
            if fastest_rate.uses_switches:
                solve = method_for(natural, topology, collective, only_forward=True)
                yield solve(topology, collective, replace(options, deadline_s=deadline))
            only_forward = _need_no_able_switch(topology, collective, fastest_rate.bound, deadline)
    wanted = [] if options.is_about_trees else [(name, options) for name in BASELINES if name != "levels"]
    if natural == "trees" and options.tolerance is None:
        counts = [few for few in FEW_TREES if options.max_trees is None or few < options.max_trees]
        wanted += [("trees", replace(options, max_trees=few)) for few in counts]
    made: set[tuple[tuple[Chunk, ...], tuple[Transfer, ...]]] = set()  # parts of one rank are the whole
    for name, its_request in wanted:
        try:
            deadline.check("the comparison of methods")
            left = replace(its_request, deadline_s=deadline)
            solve = method_for(name, topology, collective, only_forward=only_forward)
            found = solve(topology, collective, left)
            if (same := (found.chunks, tuple(found.transfers))) in made:
                continue
            made.add(same)
            yield found
            if name == "multiring" and (joined := both_ways(found)) is not None:
                yield joined
        except (InfeasibleError, CollectiveError):
            continue  # this pattern does not fit this graph or this collective; the others still may
    if _may_be_low(topology, collective, options) and topology.ranks > LARGEST_SHALLOW:
        yield from shallow_by_symmetry(topology, collective, options, deadline)
    more = _more_candidates(topology.forwarding, collective, options, deadline, height)
    yield from more if topology.forwarding is topology else _on(topology, collective, more)
    if not options.is_about_trees:
        yield from exchanges_written_out(topology, collective, options, deadline)
        yield from by_levels(topology, collective, None, deadline)


def _need_no_able_switch(
    topology: Topology, collective: Collective, limit: Bound, deadline: Deadline
) -> bool:
    """Whether few trees through able switches are not looked for: many ranks, others reach the limit."""
    from arborcast.synth.bounds import bound
    from arborcast.synth.in_network.switch_schedules import LARGEST_STEINER

    if topology.ranks <= LARGEST_STEINER:
        return False
    return bound(topology.forwarding, collective, deadline).rate == limit.rate


def _on(topology: Topology, collective: Collective, found: Iterator[Schedule]) -> Iterator[Schedule]:
    """The same schedules, also the one of an error, where switches may do more than they ask of them."""
    from arborcast.synth.bounds import bound
    from arborcast.synth.in_network.switch_schedules import lifted, on_able_switches

    limit = bound(topology, collective)
    return lifted(found, lambda schedule: on_able_switches(schedule, topology, limit))


def _may_be_low(topology: Topology, collective: Collective, options: SolveOptions) -> bool:
    """Whether packings of lower trees are worth comparing: no number is asked for, no rank relays."""
    is_free = options.max_trees is None and options.tolerance is None
    return natural_method(collective) == "trees" and is_free and len(collective.ranks) == topology.ranks


def _more_candidates(
    topology: Topology, collective: Collective, options: SolveOptions, deadline: Deadline, height: int
) -> Iterator[Schedule]:
    """What only asks switches to forward: lower trees than of `height`, placed ones, and chunk schedules."""
    if _may_be_low(topology, collective, options) and topology.ranks <= LARGEST_SHALLOW:
        yield from _shallow(topology, collective, options, deadline, height)
    if options.is_about_trees:
        return
    if topology.ranks >= FEWEST_PLACED:
        from arborcast.synth.baselines.placed_trees import placed_schedules

        yield from placed_schedules(topology, collective, deadline)
    if collective.kind is Kind.CUSTOM or topology.ranks <= LARGEST_FRONTIER:
        yield from _frontier(topology, collective, options, deadline)


def implicit_candidates(
    topology: Topology, collective: Collective, translations: Translations, options: SolveOptions
) -> Iterator[AnySchedule]:
    """Every schedule worth comparing on many ranks, the one of the highest rate first; raises the same.

    All are in implicit form but for a few trees by levels, which no translation maps to each other.
    """
    deadline = Deadline.after(options.deadline_s)
    solve_implicitly = implicit_method_for(topology, collective)
    best = solve_implicitly(topology, collective, options, translations=translations)
    yield best
    if collective.kind is Kind.ALLTOALL or options.is_about_trees:
        return
    from arborcast.synth.packing.symmetric.height_frontier import symmetric_frontier

    deadline.check("the comparison of methods")
    left = replace(options, deadline_s=deadline)
    for lower in symmetric_frontier(topology.forwarding, collective, left, translations=translations):
        yield replace(lower, topology=topology, bound=best.bound)
    from arborcast.synth.baselines.bidirectional_rings import implicit_two_way_rings
    from arborcast.synth.baselines.mixed_radix_butterfly import exchange_schedules
    from arborcast.synth.baselines.square_rings import implicit_square_rings

    yield from exchange_schedules(topology, collective, best.bound, translations, deadline)
    yield from by_levels(topology, collective, best.bound, deadline)
    for along_rings in (implicit_square_rings, implicit_two_way_rings):
        if (rings := along_rings(topology, collective, best.bound, translations)) is not None:
            yield rings


def exchanges_written_out(
    topology: Topology, collective: Collective, options: SolveOptions, deadline: Deadline
) -> Iterator[Schedule]:
    """Exchanges by digits on few ranks, where switches join them; raises TimedOutError after the deadline."""
    if collective.kind not in IMPLICIT_KINDS or len(collective.ranks) < topology.ranks:
        return
    from arborcast.synth.baselines.mixed_radix_butterfly import exchange_schedules
    from arborcast.synth.bounds import bound
    from arborcast.synth.symmetry.translation_search import translations_of

    limit, translations = bound(topology, collective), translations_of(topology, seed=options.seed)
    for found in exchange_schedules(topology, collective, limit, translations, deadline):
        yield found if isinstance(found, Schedule) else found.expand()


def by_levels(
    topology: Topology, collective: Collective, limit: Bound | None, deadline: Deadline
) -> Iterator[Schedule]:
    """Trees by levels of several shapes.

    Args:
        topology: the fabric.
        collective: what to do on it; nothing is found where trees by levels do not do it.
        limit: its bound; None works it out.
        deadline: when to stop.

    Raises:
        TimedOutError: the deadline passed.
    """
    if collective.kind not in BASELINES["levels"].kinds:
        return
    from arborcast.synth.baselines.hierarchical_trees import level_schedules
    from arborcast.synth.bounds import bound

    try:
        yield from level_schedules(topology, collective, limit or bound(topology, collective), deadline)
    except InfeasibleError:
        return  # no boxes that are joined rank by rank


def _shallow(
    topology: Topology, collective: Collective, options: SolveOptions, deadline: Deadline, below: int
) -> Iterator[Schedule]:
    """Packings of lower trees than the ones found first, near their rate."""
    from arborcast.synth.packing.tree_solver import shallow_schedules

    deadline.check("the comparison of methods")
    yield from shallow_schedules(topology, collective, below=below, seed=options.seed, deadline=deadline)


def shallow_by_symmetry(
    topology: Topology, collective: Collective, options: SolveOptions, deadline: Deadline
) -> Iterator[Schedule]:
    """Few and low trees that the fabric's translations map to each other, written out.

    Args:
        topology: the fabric, all of whose ranks take part.
        collective: nothing is found for one with a root.
        options: seed and `max_height`.
        deadline: when to stop.

    Raises:
        TimedOutError: the deadline passed.
    """
    if collective.kind not in IMPLICIT_KINDS:
        return
    from arborcast.synth.bounds import bound
    from arborcast.synth.in_network.switch_schedules import on_able_switches
    from arborcast.synth.packing.symmetric.height_frontier import symmetric_frontier
    from arborcast.synth.symmetry.translation_search import translations_of

    deadline.check("the comparison of methods")
    translations = translations_of(topology, seed=options.seed)
    if translations.order == 1 or len(translations.representatives) > MOST_ORBITS:
        return
    left = replace(options, deadline_s=deadline)
    able = topology.forwarding is not topology
    limit = bound(topology, collective, deadline) if able else None
    for found in symmetric_frontier(topology.forwarding, collective, left, translations=translations):
        if options.max_height is None or found.height <= options.max_height:
            # Whose form it was expanded from is what it is simulated by, so that it is changed before.
            yield (found if limit is None else on_able_switches(found, topology, limit)).expand()


def _frontier(
    topology: Topology, collective: Collective, options: SolveOptions, deadline: Deadline
) -> Iterator[Schedule]:
    """Chunk schedules of few steps, found with little effort and therefore unproved."""
    from arborcast.synth.chunks.allreduce.halves import latency_of_parts
    from arborcast.synth.chunks.frontier import pareto
    from arborcast.synth.chunks.problem.instance import TooManyRoutesError

    deadline.check("the comparison of methods")
    try:
        most = (latency_of_parts(topology, collective) or 0) + EXTRA_STEPS
        frontier = pareto(
            topology,
            collective,
            max_steps=most,
            rate_tolerance=options.rate_tolerance,
            deadline_s=deadline,
            seed=options.seed,
            cache=options.cache,
            proofs=False,
        )
    except TooManyRoutesError:
        if collective.kind is Kind.CUSTOM:
            raise
        return  # trees serve such a fabric; `synth pareto` says so when it is asked
    yield from (point.schedule for point in frontier.points)
    if frontier.timed_out:
        raise deadline.missed_by("the comparison of methods")

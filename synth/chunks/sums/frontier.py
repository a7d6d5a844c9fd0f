"""The frontier of an allreduce: searched as it is, and composed where that finds nothing better.

Limits and proofs are over every schedule. Compositions of a reduce-scatter and an allgather are worked out
when the first number of steps stays open, and stand where they beat what else was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

from arborcast.synth.certificate import Bound, Scope
from arborcast.synth.chunks.bounds.certificate import StaticLimit, StepBound
from arborcast.synth.chunks.curve import FrontierOptions, why_enough
from arborcast.synth.chunks.optimum import StepOptimum
from arborcast.synth.chunks.solvers.cache import ChunkCache
from arborcast.synth.chunks.solvers.worker import SolverProcess
from arborcast.synth.chunks.step_optimum import is_large
from arborcast.synth.chunks.sums.compositions import Composition, compositions, meetings, static_ratio
from arborcast.synth.chunks.sums.instance import SumPlan, sum_problem, sum_schedule
from arborcast.synth.chunks.sums.meeting import Meetings
from arborcast.synth.chunks.sums.optimum import SumOptimum, cached_optimum
from arborcast.synth.chunks.sums.points import (
    COMPOSITIONS,
    EVERY_SCHEDULE,
    MEETINGS,
    Point,
    TracedPoints,
    point_method,
    point_of,
)
from arborcast.synth.chunks.sums.searcher import SumSearcher
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import TimedOutError
from arborcast.synth.progress import report
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology

STEPS_WITHOUT_PROOFS = 2
"""Steps beyond the latency up to which an allreduce is searched as it is with little effort."""


def trace_allreduce(
    topology: Topology,
    collective: Collective,
    limit: Bound,
    last: int,
    options: FrontierOptions,
    deadline: Deadline,
) -> TracedPoints:
    """The points of an allreduce from its latency to at most `last` steps.

    Args:
        topology: the fabric.
        collective: an allreduce that can be done.
        limit: of its rate.
        last: the largest S looked at, at least the latency.
        options: how to go about it.
        deadline: what is found by then is returned.
    """
    with SolverProcess() as child:
        child.start()
        return _Tracing(topology, collective, limit, last, options, deadline, child).run()


class _Tracing:
    """The points so far.

    Attributes:
        points: in order of steps.
        open_steps: numbers of steps at which something is left to prove.
        limits: of each number of steps that was looked at, where one is known.
    """

    def __init__(
        self,
        topology: Topology,
        collective: Collective,
        limit: Bound,
        last: int,
        options: FrontierOptions,
        deadline: Deadline,
        child: SolverProcess,
    ) -> None:
        self.points: list[Point] = []
        self.open_steps: list[int] = []
        self.limits: dict[int, StepBound] = {}
        self._topology = topology
        self._collective = collective
        self._limit = limit
        self._last = last
        self._options = options
        self._deadline = deadline
        self._problem = sum_problem(topology, collective)
        cache = ChunkCache() if options.cache else None
        self._searcher = SumSearcher(self._problem, options.seed, deadline, child, cache)
        self._ratio = static_ratio(topology, collective, limit)
        self._composed: Sequence[Composition] | None = None
        self._met: list[Composition] = []
        self._flows: dict[int, StepBound] = {}
        self._cut_short = False

    def run(self) -> TracedPoints:
        """Number of steps by number of steps, until there is nothing to gain."""
        latency = self._problem.latency
        assert latency is not None, "a collective with a rate above zero reaches everybody"
        why = f"no more than {self._last} steps were looked at"
        timed_out = False
        if is_large(self._problem):
            self._meet(range(latency, self._last + 1))  # before what may take all of the time
            self._composition(self._last)
            self._searcher.deadline = self._deadline.share(2)
            self._add_limits(range(latency, self._last + 1))  # those for which there was no time before
        for steps in range(latency, self._last + 1):
            optimum = self._optimum(steps)
            if optimum.limit is not None and optimum.least >= self._least(steps):
                self.limits[steps] = optimum.limit
            point = self._better(steps, optimum)
            if point is not None:
                self.points.append(point)
            best = self._best
            if not point.is_proved if point else best is None or optimum.least < best:
                self.open_steps.append(steps)
            if self._deadline.has_passed:
                why, timed_out = f"{self._deadline} passed at {steps} steps", True
                break
            if enough := why_enough(best, self._ratio, self._options.tolerance):
                why = enough
                break
        if timed_out:
            self._add_later_compositions()
        complete = not self.open_steps and self._best == self._ratio
        complete = complete and self._limit.scope is Scope.EVERY_SCHEDULE
        return TracedPoints(tuple(self.points), complete, why, tuple(self.open_steps), timed_out, self.limits)

    @property
    def _best(self) -> Fraction | None:
        return self.points[-1].ratio if self.points else None

    def _optimum(self, steps: int) -> SumOptimum:
        """What is known of so many steps; most of the time is left for compositions and more steps."""
        self._searcher.deadline = self._deadline.share(3)
        static = None
        if self._limit.scope is Scope.EVERY_SCHEDULE:
            static = StepBound(steps, self._ratio, StaticLimit(self._limit))
        latency = self._problem.latency
        assert latency is not None, "see `run`"
        if not self._options.proofs and steps > latency + STEPS_WITHOUT_PROOFS:
            return SumOptimum(static)

        def known() -> Fraction | None:
            composed = self._composition(steps)
            if self._cut_short:  # what is found then depends on the machine, and must not be kept
                raise TimedOutError("compositions were cut short")
            return None if composed is None else composed.ratio

        return cached_optimum(self._searcher, steps, static, self._best, known, proofs=self._options.proofs)

    def _meet(self, every: Sequence[int]) -> None:
        """Limits, in a quarter of the time, and schedules that meet in cores of each number of steps."""
        self._searcher.deadline = self._deadline.share(4)
        self._add_limits(every)
        meeting = Meetings(self._problem)
        best: Fraction | None = None
        for index, steps in enumerate(every):
            if steps < meeting.fewest_steps:
                continue
            if self._met and self._deadline.has_passed:
                self._cut_short = True
                break
            share = self._deadline.share(2 * (len(every) - index))
            mixture = meeting.mixture(steps, self._ratio, share)
            assert mixture is not None, "so many steps are enough"
            if best is not None and mixture.ratio >= best:
                continue
            chunks, plan = meeting.plan(mixture, steps, deadline=share)
            self._cut_short |= share.has_passed
            ratio = Fraction(sum(plan.rounds), chunks)
            if best is None or ratio < best:
                best = ratio
                schedule = self._schedule(chunks, plan)
                self._met.append(Composition(schedule, ratio, False, f"found among {MEETINGS}", (), MEETINGS))
                self._tell(steps, ratio)
            if best == self._ratio:
                break

    def _tell(self, steps: int, ratio: Fraction) -> None:
        least = max(self._least(steps), Fraction(0))
        gap = f", gap {float(ratio / least - 1):.2%}" if least else ""
        report(f"{steps} steps: R/C {float(ratio):.5g}, at least {float(least):.5g}{gap}", 0, 0)

    def _add_limits(self, every: Sequence[int]) -> None:
        """Those of some numbers of steps, until the deadline of the searcher."""
        for steps in every:
            if steps in self._flows:
                continue
            static = StepBound(steps, self._ratio, StaticLimit(self._limit))
            known = [static] if self._limit.scope is Scope.EVERY_SCHEDULE else []
            # More steps never raise the limit by flows.
            fewer = [limit.ratio for other, limit in self._flows.items() if other < steps]
            if not known or min(fewer, default=self._ratio + 1) > self._ratio:
                with suppress(TimedOutError):
                    flows = self._searcher.flow_limit(steps)
                    if flows is not None:
                        self._flows[steps] = flows
                        known.append(flows)
            if known:
                self.limits[steps] = max(known, key=lambda limit: limit.ratio)

    def _least(self, steps: int) -> Fraction:
        return self.limits[steps].ratio if steps in self.limits else Fraction(0)

    def _better(self, steps: int, optimum: SumOptimum) -> Point | None:
        """The best schedule of so many steps, if it has a smaller R/C than those of fewer."""
        if not optimum.is_settled and (self._best is None or optimum.least < self._best):
            composed, below = self._composition(steps), optimum.ratio or self._best
            if composed is not None and (below is None or composed.ratio < below):
                return self._composed_point(composed, optimum)
        if optimum.plan is None:
            return None
        return self._found_point(optimum)

    def _composition(self, steps: int) -> Composition | None:
        """The best composition of no more steps."""
        if self._composed is None:
            asked = self._topology, self._collective, self._limit, self._last, self._options
            first, second = self._deadline.share(4), self._deadline.share(3 if self._met else 2)
            self._composed = [*meetings(*asked, first), *compositions(*asked, second, self._met_in)]
            self._cut_short |= first.has_passed or second.has_passed
        in_time = [each for each in (*self._met, *self._composed) if each.schedule.steps <= steps]
        return min(in_time, key=lambda each: each.ratio, default=None)

    def _met_in(self, steps: int) -> Fraction | None:
        """The least R/C of what meets in cores in no more steps."""
        return min((each.ratio for each in self._met if each.schedule.steps <= steps), default=None)

    def _add_later_compositions(self) -> None:
        """Compositions of more steps than there was time to look at."""
        for each in sorted(
            [*self._met, *(self._composed or ())], key=lambda each: (each.schedule.steps, each.ratio)
        ):
            if self._best is None or each.ratio < self._best:
                limit = self.limits.get(each.schedule.steps)
                if limit is None and self._limit.scope is Scope.EVERY_SCHEDULE:
                    limit = StepBound(each.schedule.steps, self._ratio, StaticLimit(self._limit))
                self.points.append(self._composed_point(each, SumOptimum(limit)))

    def _found_point(self, optimum: SumOptimum) -> Point:
        assert optimum.plan is not None, "found"
        return point_of(optimum, self._schedule(optimum.chunks, optimum.plan))

    def _schedule(self, chunks: int, plan: SumPlan) -> Schedule:
        return sum_schedule(
            self._topology,
            self._collective,
            self._problem,
            chunks,
            plan,
            method=point_method(chunks, plan.rounds, self._options.seed),
            bound=self._limit,
        )

    def _composed_point(self, composed: Composition, optimum: SumOptimum) -> Point:
        schedule = composed.schedule
        assert schedule.rounds is not None, "step-synchronous"
        attained = StepOptimum(optimum.limit, schedule.chunk_count, SumPlan(schedule.rounds, ()))
        point = point_of(attained, schedule)
        return replace(
            point,
            proof=f"over every schedule {point.proof}; {composed.proof}"
            if composed.halves
            else f"{composed.proof}; {point.proof}",
            scope=COMPOSITIONS if composed.is_least else EVERY_SCHEDULE,
            halves=composed.halves,
            restriction=composed.restriction,
        )

"""The frontier of an allreduce: searched as it is, and hierarchical where that finds nothing better.

Limits and proofs are over every schedule. Allreduces that meet on links and in cores are worked out when the
first number of steps stays open, of many ranks before anything else, and stand where they beat what else was
found.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

from arborcast.synth.certificate import Bound, Scope
from arborcast.synth.chunks.allreduce.allreduce_solver import SumOptimum, cached_optimum
from arborcast.synth.chunks.allreduce.halves import static_ratio
from arborcast.synth.chunks.allreduce.hierarchical import MOST_SENDS, NEAR, HierarchicalAllreduces
from arborcast.synth.chunks.allreduce.meeting_on_links import met_on_links
from arborcast.synth.chunks.allreduce.partial_sums import SumPlan, sum_problem, sum_schedule
from arborcast.synth.chunks.allreduce.points import (
    MEETINGS,
    Point,
    RestrictedSchedule,
    point_method,
    point_of,
)
from arborcast.synth.chunks.allreduce.searcher import SumSearcher
from arborcast.synth.chunks.bounds.step_certificate import StaticLimit, StepBound
from arborcast.synth.chunks.curve import Curve, FrontierOptions, why_enough
from arborcast.synth.chunks.solvers.cache import ChunkCache
from arborcast.synth.chunks.solvers.solver_child import SolverProcess
from arborcast.synth.chunks.step_result import StepOptimum
from arborcast.synth.chunks.step_solver import ROUGHLY, is_large
from arborcast.synth.chunks.trees.tree_schedule import MOST_NEAR
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
) -> Curve[Point]:
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
        self._met: list[RestrictedSchedule] | None = None
        self._flows: dict[int, StepBound] = {}
        self._cut_short = False

    def run(self) -> Curve[Point]:
        """Number of steps by number of steps, until there is nothing to gain."""
        latency = self._problem.latency
        assert latency is not None, "a collective with a rate above zero reaches everybody"
        why = f"no more than {self._last} steps were looked at"
        timed_out = False
        if is_large(self._problem):
            self._searcher.deadline = self._deadline.share(4)
            self._add_limits(range(latency, self._last + 1))
            self._met = self._meet()  # before what may take all of the time
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
            self._add_later()
        complete = not self.open_steps and self._best == self._ratio
        complete = complete and self._limit.scope is Scope.EVERY_SCHEDULE
        return Curve(tuple(self.points), complete, why, tuple(self.open_steps), timed_out, self.limits)

    @property
    def _best(self) -> Fraction | None:
        return self.points[-1].ratio if self.points else None

    def _optimum(self, steps: int) -> SumOptimum:
        """What is known of so many steps; most of the time is left for meetings and more steps."""
        self._searcher.deadline = self._deadline.share(3)
        static = None
        if self._limit.scope is Scope.EVERY_SCHEDULE:
            static = StepBound(steps, self._ratio, StaticLimit(self._limit))
        latency = self._problem.latency
        assert latency is not None, "see `run`"
        if not self._options.proofs and steps > latency + STEPS_WITHOUT_PROOFS:
            return SumOptimum(static)

        def known() -> Fraction | None:
            met = self._met_in(steps)
            if self._cut_short:  # what is found then depends on the machine, and must not be kept
                raise TimedOutError("the search for meetings was cut short")
            return None if met is None else met.ratio

        return cached_optimum(self._searcher, steps, static, self._best, known, proofs=self._options.proofs)

    def _meet(self) -> list[RestrictedSchedule]:
        """Schedules that meet on links and in cores, of each number of steps that brings a smaller R/C."""
        on_links = self._deadline.share(4)
        asked = self._topology, self._collective, self._limit, self._last, self._options
        found = met_on_links(*asked, on_links)
        self._cut_short |= on_links.has_passed
        meeting = HierarchicalAllreduces(self._problem)
        every = range(meeting.fewest_steps, self._last + 1)
        for index, steps in enumerate(every):
            best = min((each.ratio for each in found if each.schedule.steps <= steps), default=None)
            if best == self._ratio:
                break
            if found and self._deadline.has_passed:
                self._cut_short = True
                break
            share = self._deadline.share(2 * (len(every) - index))
            mixture = meeting.mixture(steps, self._ratio, share)
            assert mixture is not None, "so many steps are enough"
            if best is None or mixture.ratio < best:
                near = ROUGHLY if self._options.compares else NEAR
                chunks, plan = meeting.plan(mixture, steps, self._most_sends, near, share)
                ratio = Fraction(sum(plan.rounds), chunks)
                if best is None or ratio < best:
                    found.append(RestrictedSchedule(self._schedule(chunks, plan), ratio, MEETINGS))
                    self._tell(steps, ratio)
            self._cut_short |= share.has_passed
        return found

    @property
    def _most_sends(self) -> int:
        """Of a schedule that meets in cores: of few ranks, and where nothing is proved, it shall be short."""
        if is_large(self._problem) and self._options.proofs:
            return MOST_SENDS
        return MOST_NEAR * 2 * len(self._collective.ranks) ** 2

    def _tell(self, steps: int, ratio: Fraction) -> None:
        least = max(self._least(steps), Fraction(0))
        gap = f", gap {float(ratio / least - 1):.2%}" if least else ""
        report(f"{steps} steps: R/C {float(ratio):.5g}, at least {float(least):.5g}{gap}", 0, 0)

    def _add_limits(self, every: Sequence[int]) -> None:
        """Those of some numbers of steps, until the deadline of the searcher."""
        if self._options.compares:
            return  # candidates are compared by their times
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
            met, below = self._met_in(steps), optimum.ratio or self._best
            if met is not None and (below is None or met.ratio < below):
                return self._met_point(met, optimum)
        if optimum.plan is None:
            return None
        return self._found_point(optimum)

    def _met_in(self, steps: int) -> RestrictedSchedule | None:
        """The best that meets on links or in cores, in no more steps."""
        if self._met is None:
            self._met = self._meet()
        in_time = [each for each in self._met if each.schedule.steps <= steps]
        return min(in_time, key=lambda each: each.ratio, default=None)

    def _add_later(self) -> None:
        """What meets in more steps than there was time to look at."""
        for each in sorted(self._met or (), key=lambda each: (each.schedule.steps, each.ratio)):
            if self._best is None or each.ratio < self._best:
                limit = self.limits.get(each.schedule.steps)
                if limit is None and self._limit.scope is Scope.EVERY_SCHEDULE:
                    limit = StepBound(each.schedule.steps, self._ratio, StaticLimit(self._limit))
                self.points.append(self._met_point(each, SumOptimum(limit)))

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

    def _met_point(self, met: RestrictedSchedule, optimum: SumOptimum) -> Point:
        schedule = met.schedule
        assert schedule.rounds is not None, "step-synchronous"
        attained = StepOptimum(optimum.limit, schedule.chunk_count, SumPlan(schedule.rounds, ()))
        point = point_of(attained, schedule)
        return replace(
            point, proof=f"found among {met.restriction}; {point.proof}", restriction=met.restriction
        )

"""The least rounds per chunk of a given number of steps, over every number of chunks, and who attains it.

A lower limit rho that holds for every C comes from linear programs: a packing of trees, which is exact and a
schedule itself, or flows, which are weaker but quick, where trees have many targets. One search at the
smallest C for which rho * C is whole usually attains it, and then nothing needs to be refuted: rho in lowest
terms has no smaller C. Otherwise the C in between are searched or refuted one by one. Feasibility is never
assumed to be monotonic in C.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

from arborcast.synth.chunks.bounds.flow_bound import flow_bound
from arborcast.synth.chunks.bounds.step_certificate import StepBound
from arborcast.synth.chunks.bounds.step_check import MOST_TREE_TARGETS, can_check_trees
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import Group
from arborcast.synth.chunks.problem.outcome import Infeasible, Unknown
from arborcast.synth.chunks.problem.prune import ChunkPlan
from arborcast.synth.chunks.problem.symmetry import problem_group
from arborcast.synth.chunks.solvers.search import Answer, Searcher
from arborcast.synth.chunks.step_result import StepOptimum, StepSearch
from arborcast.synth.chunks.trees.column_generation import TreeBound, tree_bound
from arborcast.synth.chunks.trees.pricing import TimedTree
from arborcast.synth.chunks.trees.tree_schedule import (
    MOST_CHUNKS,
    NoPlanError,
    chunks_of,
    few_chunks_near,
    plan_as_it_stands,
    plan_near_it,
    plan_of,
)
from arborcast.synth.chunks.trees.whole_trees import admissible_chunk_counts


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """How much is done for a number of steps; counted, so that it is the same on every machine.

    Attributes:
        proofs: whether a large problem's packing is made a plan as it stands.
        first_slices: effort of a search that may well fail, because its limit may be loose.
        last_slices: effort of a search whose answer matters.
        most_sends: possible sends (chunks, routes and steps multiplied) up to which a solver is asked.
        largest_guess: chunks up to which a ratio is looked for where no limit is attained.
        most_guesses: how many such searches there may be.
        most_chunks: chunks of a block up to which packings become plans, and a solver is asked.
        slack: the part of its R/C that a packing of more may lose to have fewer, and then nothing is searched
            that has a packing; None where it must lose nothing.
        gap: of a large problem (`is_large`), the part of the limit within which packings and plans do.
    """

    proofs: bool
    first_slices: int
    last_slices: int
    most_sends: int
    largest_guess: int
    most_guesses: int
    most_chunks: int = MOST_CHUNKS
    slack: Fraction | None = None
    gap: Fraction = Fraction(0)


THOROUGH = SearchBudget(True, 3, 6, 400_000, 8, 40)
"""To prove: up to two minutes of each of two cores for a search."""

QUICK = SearchBudget(False, 2, 2, 8_000, 2, 6)
"""To have a candidate: half a second for a search."""

ROUNDED = replace(QUICK, most_sends=60_000, most_chunks=16)
"""Where rates are rounded: plans of few chunks."""

DRAFT = replace(THOROUGH, gap=Fraction(1, 50), most_sends=140_000)
"""Of a large problem, to have a limit and a plan of every number of steps before any is made better."""

ROUGHLY = Fraction(1, 20)
"""The part of its R/C that a candidate of a large problem may lose to have few chunks."""

SKETCH = replace(DRAFT, proofs=False, gap=ROUGHLY, most_sends=0)
"""Of a large problem, to have a candidate: a packing's weights rounded to few chunks, without a search."""

FEW_SENDS = 20_000
"""Possible sends up to which a solver is asked before a packing is looked for that proves its limit, too."""

MOST_SENDS = 130_000
"""Sends of a plan of a large problem: a schedule of seconds and of tens of megabytes."""

NEAR = Fraction(1, 200)
"""The part of its limit within which a plan of a large problem has the fewest chunks."""

TO_PACKINGS = Fraction(1, 5)
"""The part of such a gap that a packing of trees may use up; rounding has the rest."""

_CLOSE = Fraction(1, 10**6)  # of a gap, a smaller part is a matter of rounding

MOST_PACKED = 240
"""Blocks for one rank each from which on their problem is large."""


def is_large(problem: ChunkProblem) -> bool:
    """Whether there are so many ranks that limits and plans are those of packings, and solvers left alone."""
    if problem.is_routing:
        return len(problem.demands) > MOST_PACKED
    return problem.is_spanning and problem.ranks - 1 > MOST_TREE_TARGETS


Seeds: TypeAlias = dict[tuple[int, TimedTree], None]
"""Trees of demands, for whoever looks at one more step."""


def step_optimum(
    searcher: Searcher,
    steps: int,
    static: StepBound,
    below: Fraction | None,
    budget: SearchBudget = THOROUGH,
    seeds: Seeds | None = None,
) -> StepOptimum[ChunkPlan]:
    """The least R/C in so many steps.

    S is at least the latency of the problem; only a smaller R/C than `below` is of interest. Of a large
    problem, `seeds` are the trees of the packing of one step fewer, and those of this one take their place.

    Returns:
        The best found; `out_of_time` says whether the deadline of the searcher came first.
    """
    return _CopySearch(searcher, steps, replace(static, steps=steps), below, budget, seeds).run()


class _CopySearch(StepSearch[ChunkPlan, Searcher]):
    """A search for copies."""

    def __init__(
        self,
        searcher: Searcher,
        steps: int,
        limit: StepBound,
        below: Fraction | None,
        budget: SearchBudget,
        seeds: Seeds | None,
    ) -> None:
        super().__init__(searcher, steps, limit, below)
        self._budget = budget
        self._seeds = {} if seeds is None else seeds
        self._spent: dict[tuple[Fraction, int], int] = {}  # slices of the search for (R/C, C)
        self._trees: TreeBound | None = None
        self._group: Group | None = None

    def settle(self) -> None:
        """Raise the limit and search at it, until they meet or there is nothing more to try."""
        if is_large(self._problem):
            self._settle_large()
            return
        by_trees = can_check_trees(self._problem)
        if by_trees:
            self._by_trees()
        else:
            self._by_flows()
        if not self._is_of_interest(self.result.least):
            return
        # Several demands make large integer programs of trees: there a search is faster, if it is small.
        several = self._budget.slack is None and len(self._problem.demands) > 1
        if (not by_trees or (several and self._is_quick)) and self._attempt():
            return
        if by_trees:
            self._take_packing()
            if self._budget.slack is None:
                self._shrink()
            elif self.result.ratio == self.result.least:
                self.result = self._with_reason(self.result)
        if self.result.plan is None:
            self._look_around()

    def _settle_large(self) -> None:
        """Pack, and make a plan of the packing; solvers are asked for the fewest chunks alone."""
        group = problem_group(self._problem)
        is_routing, drafts = self._problem.is_routing, bool(self._budget.gap)
        can_check = can_check_trees(self._problem)
        if not can_check:
            self._in_part(2, self._by_flows)
        if drafts and (self._is_quick or not can_check) and self._attempt_in_time():
            return
        trees = self._packed_large(group)
        if not self._is_of_interest(self.result.least):
            return
        if drafts and can_check and not is_routing and self._attempt_in_time():
            return
        deadline = self._searcher.deadline
        slack = self._budget.gap or NEAR
        if not is_routing:  # counted from the limit, which the packing comes near
            slack = max(slack * TO_PACKINGS, self.result.least * (1 + slack) / sum(trees.durations) - 1)
        one = sum(len(demand.targets) for demand in self._problem.demands)
        plans = []
        proofs = self._budget.proofs
        if proofs and all(trees.durations) and trees.is_exact and chunks_of(trees) * one <= MOST_SENDS:
            plans.append((chunks_of(trees), plan_as_it_stands(self._problem, trees)))
        elif near := plan_near_it(
            self._problem,
            trees,
            slack,
            most_chunks=max(1, MOST_SENDS // one),
            deadline=deadline,
        ):
            plans.append(near)
        best = min((Fraction(sum(plan.rounds), chunks) for chunks, plan in plans), default=None)
        if proofs and (best is None or best > self.result.least or plans[0][0] > best.denominator):
            few = few_chunks_near(
                self._problem,
                self._steps,
                trees,
                group,
                gap=Fraction(0) if best == self.result.least else self._budget.gap or NEAR,
                most_sends=MOST_SENDS if best != self.result.least else plans[0][0] * one - 1,
                deadline=deadline,
            )
            plans += [few] if few else []
        if plans:
            found = min(plans, key=lambda each: (Fraction(sum(each[1].rounds), each[0]), each[0]))
            if self._is_of_interest(Fraction(sum(found[1].rounds), found[0])):
                self._take_plan(*found)
        if not drafts and not self.result.is_settled and not self._attempt_in_time():
            self._in_part(2, self._shrink)
        deadline.check("the plan of trees")  # more time might have found a better one: this is not final

    def _attempt_in_time(self) -> bool:
        """`_attempt` in a third of the time; whether that settled it."""
        return bool(self._in_part(3, self._attempt))

    @property
    def _is_quick(self) -> bool:
        """Whether a search at the limit has few possible sends."""
        chunks = next(admissible_chunk_counts(self.result.least, self._steps))
        sends = chunks * len(self._problem.demands) * len(self._problem.routes) * self._steps
        return sends <= FEW_SENDS

    def _packed_large(self, group: Group) -> TreeBound:
        """The packing and the best limit known, in half of the time."""
        problem, steps = self._problem, self._steps
        gap = self._budget.gap * (1 if problem.is_routing else TO_PACKINGS)
        self._report("trees")
        trees = tree_bound(
            problem,
            steps,
            deadline=self._searcher.deadline.share(2),
            group=group,
            gap=gap,
            seeds=[*self._seeds],
            known=self.result.limit,
        )
        self._raise_to(trees.bound)
        gap_left = sum(trees.durations) / self.result.least - 1
        if gap_left > gap + _CLOSE and not problem.is_routing and can_check_trees(problem):
            self._in_part(2, self._by_flows)
        self._seeds.clear()
        self._seeds |= {(tree.demand, tree.sends): None for tree in trees.trees}
        assert self.result.limit is not None, "that of any number of steps at least"
        return replace(trees, bound=self.result.limit)

    def _by_flows(self) -> None:
        self._report("limit by flows")
        self._raise_to(flow_bound(self._problem, self._steps, deadline=self._searcher.deadline))

    def _by_trees(self) -> None:
        self._report("limit by trees")
        self._group = problem_group(self._problem)
        deadline = self._searcher.deadline
        self._trees = tree_bound(self._problem, self._steps, deadline=deadline, group=self._group)
        self._raise_to(self._trees.bound)
        deadline.check("the packing of trees")

    def _attempt(self) -> bool:
        """Search at the smallest C that could attain the limit; whether that settled it."""
        ratio = self.result.least
        return self._take(ratio, next(admissible_chunk_counts(ratio, self._steps)), self._budget.first_slices)

    def _take_packing(self) -> None:
        """The packing of trees is a plan already, mostly with few chunks."""
        assert self._trees is not None
        if self._trees.bound.ratio != self.result.least:
            return
        deadline = self._searcher.deadline
        try:
            chunks, plan = plan_of(
                self._problem,
                self._steps,
                self._trees,
                group=self._group,
                deadline=deadline,
                most_chunks=self._budget.most_chunks,
            )
        except NoPlanError:
            deadline.check("the plan of trees")
            slack = self._budget.slack
            near = (
                None if slack is None else plan_near_it(self._problem, self._trees, slack, deadline=deadline)
            )
            if near is None:
                return  # too many chunks, or a step left empty: then the search decides
            chunks, plan = near
        # Where the packing has a gap to the limit, it may not even beat what was asked.
        if self._is_of_interest(Fraction(sum(plan.rounds), chunks)):
            self.result = replace(self.result, chunks=chunks, plan=plan)
        deadline.check("the plan of trees")  # more time might have found fewer chunks: this is not final

    def _shrink(self) -> None:
        """Search every smaller C at the limit, in ascending order, until one is found or stays unknown."""
        ratio = self.result.least
        known = self.result.chunks if self.result.ratio == ratio else None
        for chunks in admissible_chunk_counts(ratio, self._steps):
            if chunks == known:
                self.result = self._with_reason(self.result)
                return
            if self._take(ratio, chunks, self._budget.last_slices) or (ratio, chunks) not in self._refuted:
                return  # not knowing of this C, nothing could be said of the smallest any more

    def _look_around(self) -> None:
        """No plan attains a limit yet: the least R/C from there on that is found with few chunks."""
        for ratio, chunks in self._guesses()[: self._budget.most_guesses]:
            if self._take(ratio, chunks, self._budget.last_slices):
                return

    def _take(self, ratio: Fraction, chunks: int, slices: int) -> bool:
        """Search at one C unless that was done, and note what comes of it; whether a plan was found."""
        if self._is_proved(ratio, chunks) or self._spent.get((ratio, chunks), 0) >= slices:
            return False
        self._spent[ratio, chunks] = slices
        answer = self._search(chunks, ratio, slices)
        if isinstance(answer, Infeasible):
            self._refuted[ratio, chunks] = answer
        if not isinstance(answer, ChunkPlan):
            return False
        self._take_plan(chunks, answer)
        return True

    def _is_proved(self, ratio: Fraction, chunks: int) -> bool:
        answer = self._refuted.get((ratio, chunks))
        return answer is not None and answer.is_proof

    def _guesses(self) -> list[tuple[Fraction, int]]:
        """Pairs of R/C and C with few chunks, the best first; for the limit at least its smallest C."""
        limit = self.result.least
        worst = self._below or 2 * max(limit, Fraction(self._steps))
        pairs = {(limit, next(admissible_chunk_counts(limit, self._steps)))}
        for chunks in range(1, self._budget.largest_guess + 1):
            rounds = max(self._steps, -(-limit.numerator * chunks // limit.denominator))
            while Fraction(rounds, chunks) < worst:
                pairs.add((Fraction(rounds, chunks), chunks))
                rounds += 1
        return sorted(pairs)

    def _search(self, chunks: int, ratio: Fraction, slices: int) -> Answer:
        """Ask the solvers, unless the instance is larger than they should be asked."""
        rounds = int(ratio * chunks)
        sends = chunks * len(self._problem.demands) * len(self._problem.routes) * self._steps
        if sends > self._budget.most_sends or chunks > self._budget.most_chunks:
            return Unknown()
        return self._asked(
            chunks,
            rounds,
            lambda: self._searcher.search(chunks, self._steps, rounds, slices=slices),
        )

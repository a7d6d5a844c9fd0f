"""From the best packing of trees to a schedule: an optimum found by linear programs, without any search.

The packing as it stands is a schedule with as many chunks as make all weights and durations whole. Vertices
of linear programs can have huge denominators, so that fewer chunks are tried first
(`synth.chunks.trees.whole_trees`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, takewhile

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits, Group
from arborcast.synth.chunks.problem.prune import ChunkPlan
from arborcast.synth.chunks.trees.column_generation import TreeBound
from arborcast.synth.chunks.trees.rounding import RoundedTrees
from arborcast.synth.chunks.trees.whole_trees import Candidate, admissible_chunk_counts, whole_plan
from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.progress import report

TRIES = 2
"""Numbers of chunks, from the smallest that can be, that are tried before the packing as it stands."""

MOST_CHUNKS = 2000
"""Chunks of each demand up to which a plan is made of a packing."""


MOST_NEAR = 64
"""Chunks of each demand of a plan that only comes near a packing."""


FEW_CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Chunks of each demand with which plans near a packing are looked for."""

MOST_BESIDE = 200
"""Trees beside those of a packing that such a plan may be made of."""


class NoPlanError(Exception):
    """A packing is no schedule of so many steps with a sensible number of chunks; the message says why."""


def plan_of(
    problem: ChunkProblem,
    steps: int,
    bound: TreeBound,
    *,
    group: Group | None = None,
    deadline: Deadline | None = None,
    most_chunks: int = MOST_CHUNKS,
) -> tuple[int, ChunkPlan]:
    """A schedule that attains the bound, with few chunks.

    Where the packing leaves a gap to what is proved, its own R/C is attained. Plans that the group keeps are
    tried first; the deadline ends the search for fewer chunks, of which each demand has at most so many.

    Returns:
        C and the plan. No smaller C can attain the bound if C is the first of `admissible_chunk_counts`.

    Raises:
        NoPlanError: the packing needs more than `most_chunks`, or leaves a step empty, which a schedule of S
            steps must not do; and no whole one was found.
    """
    deadline = deadline or Deadline()
    ratio = sum(bound.durations, Fraction(0))
    needed = chunks_of(bound) if all(bound.durations) else None
    first = next(admissible_chunk_counts(ratio, steps))
    if needed != first and bound.is_exact:
        found = _few_chunks(problem, steps, bound, group, deadline, most_chunks)
        if found is not None and (needed is None or found[0] <= needed):
            return found
    if needed is None:
        empty = bound.durations.index(0) + 1
        raise NoPlanError(f"the packing for {steps} steps leaves step {empty} empty: fewer steps do as well")
    if needed > most_chunks:
        raise NoPlanError(f"the packing for {steps} steps needs {needed} chunks, more than {most_chunks}")
    return needed, plan_as_it_stands(problem, bound)


def chunks_of(bound: TreeBound) -> int:
    """The smallest C for which all weights and durations of the packing are whole numbers of chunks."""
    return math.lcm(
        *(tree.weight.denominator for tree in bound.trees),
        *(duration.denominator for duration in bound.durations),
    )


def plan_as_it_stands(problem: ChunkProblem, bound: TreeBound) -> ChunkPlan:
    """The packing with `chunks_of` chunks; every duration must be positive."""
    return RoundedTrees(problem, bound).plan(chunks_of(bound))  # nothing is left to round


def plan_near_it(
    problem: ChunkProblem,
    bound: TreeBound,
    slack: Fraction,
    *,
    most_chunks: int = MOST_NEAR,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[int, ChunkPlan] | None:
    """The packing with its weights rounded to whole chunks, and steps as long as their loads need.

    The fewest chunks with which R/C is within `slack`, a part of the packing's, or else those of the least
    R/C with up to `most_chunks`, or up to what was looked at by the deadline. None where
    the packing leaves a step empty.
    """
    if not all(bound.durations):
        return None
    good_enough = sum(bound.durations, Fraction(0)) * (1 + slack)
    rounded = RoundedTrees(problem, bound)
    best: tuple[Fraction, int] | None = None
    for chunks in range(1, most_chunks + 1):
        ratio = Fraction(sum(rounded.rounds(chunks)), chunks)
        if best is None or ratio < best[0]:
            best = ratio, chunks
        if ratio <= good_enough or deadline.has_passed:
            break
    assert best is not None, "there is a number of chunks"
    return best[1], rounded.plan(best[1])


def few_chunks_near(
    problem: ChunkProblem,
    steps: int,
    bound: TreeBound,
    group: Group,
    *,
    gap: Fraction,
    most_sends: int,
    deadline: Deadline,
) -> tuple[int, ChunkPlan] | None:
    """Of plans with few chunks along the trees of a packing, by integer programs, the one of the least R/C.

    Args:
        problem: what there is to send.
        steps: S.
        bound: the packing; and the limit, which nothing falls below.
        group: keeps the problem and every plan.
        gap: the part of the limit within which the first plan ends the search.
        most_sends: sends of all chunks up to which a plan is made.
        deadline: when to stop.

    Returns:
        C and the plan; None where none was found.
    """
    one = sum(len(demand.targets) for demand in problem.demands)
    candidates = _Candidates.of(problem, steps, bound, group)
    best: tuple[Fraction, int, ChunkPlan] | None = None
    exactly = takewhile(
        lambda chunks: chunks * one <= most_sends, admissible_chunk_counts(bound.bound.ratio, steps)
    )
    if bound.is_exact:
        for chunks in islice(filter(candidates.fit, exactly), TRIES):
            report(f"{steps} steps: {chunks} chunks that attain the limit", 0, 0)
            plan = candidates.plan(chunks, int(bound.bound.ratio * chunks), deadline.share(3))
            if plan is not None:
                return chunks, plan
    for chunks in FEW_CHUNKS:
        if chunks * one > most_sends or deadline.has_passed:
            break
        report(f"{steps} steps: {chunks} chunks along {len(candidates.trees)} trees", 0, 0)
        plan = candidates.plan(chunks, None, deadline)
        if plan is not None and (best is None or Fraction(sum(plan.rounds), chunks) < best[0]):
            best = Fraction(sum(plan.rounds), chunks), chunks, plan
        if best is not None and best[0] <= bound.bound.ratio * (1 + gap):
            break
    return best and best[1:]


def _few_chunks(
    problem: ChunkProblem,
    steps: int,
    bound: TreeBound,
    group: Group | None,
    deadline: Deadline,
    most_chunks: int,
) -> tuple[int, ChunkPlan] | None:
    """A plan with one of the first `TRIES` numbers of chunks, kept by the group, or one demand's by none."""
    alone: Group = (tuple(range(problem.topology.size)),)
    groups = [group or alone]
    if len(groups[0]) > 1 and len(problem.demands) == 1:
        groups.append(alone)  # with more demands that takes minutes, and a search is as good
    candidates = [_Candidates.of(problem, steps, bound, elements) for elements in groups]
    for chunks in islice(admissible_chunk_counts(bound.bound.ratio, steps), TRIES):
        if chunks > most_chunks:
            break
        for each in candidates:
            plan = each.plan(chunks, int(bound.bound.ratio * chunks), deadline)
            if plan is not None:
                return chunks, plan
    return None


@dataclass(frozen=True, eq=False)
class _Candidates:
    """Trees that a plan which a group keeps may be made of.

    Attributes:
        problem: what there is to send.
        steps: S.
        group: keeps the problem and every plan.
        trees: those of a packing, of one demand of each orbit, then others that cost as little.
        common: chunks come in multiples of it: symmetries that keep a demand permute its chunks freely.
    """

    problem: ChunkProblem
    steps: int
    group: Group
    trees: tuple[Candidate, ...]
    common: int

    @classmethod
    def of(cls, problem: ChunkProblem, steps: int, bound: TreeBound, group: Group) -> _Candidates:
        """Those of a packing."""
        classes = ChunkOrbits(problem, len(group), group).classes
        position = {members.demand: index for index, members in enumerate(classes)}
        weighed = {(position[tree.demand], tree.sends) for tree in bound.trees if tree.demand in position}
        cheap = ((position[demand], tree) for demand, tree in bound.candidates if demand in position)
        trees = list(dict.fromkeys([*sorted(weighed), *cheap]))[: len(weighed) + MOST_BESIDE]
        common = math.lcm(*(len(group) // members.count for members in classes))
        return cls(problem, steps, group, tuple(trees), common)

    def fit(self, chunks: int) -> bool:
        """Whether a demand may have so many."""
        return chunks % self.common == 0

    def plan(self, chunks: int, rounds: int | None, deadline: Deadline) -> ChunkPlan | None:
        """A plan of so many chunks in so many rounds, or in as few as are found; None where none is."""
        if not self.fit(chunks):
            return None
        orbits = ChunkOrbits(self.problem, chunks, self.group)
        return whole_plan(orbits, self.steps, rounds, self.trees, deadline=deadline)

"""What else could be done with the same costs, links and memory: the published methods, each as a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.model.balance import balanced_cuts
from arborcast.pipeline.planning.pipedream import pipedream
from arborcast.pipeline.planning.planning_problem import Planner, PlanningProblem
from arborcast.pipeline.planning.rannc import rannc
from arborcast.pipeline.planning.spp import spp
from arborcast.pipeline.stages import Plan


def data_parallel(problem: PlanningProblem) -> Plan:
    """One stage on all ranks; gradients of the microbatches add up. It recomputes only where memory asks.

    Raises:
        PlanError: memory does not hold it (by how much), or the ranks are not connected.
        BatchError: a microbatch would have fewer samples than there are ranks.
    """
    if not problem.network.allreduce_rate(problem.ranks):
        name = problem.network.topology.name
        raise PlanError(f"data-parallel: the ranks of {name} must be connected for an allreduce")
    plan = problem.plan([(0, problem.profile.depth, problem.ranks)], "1f1b", "data-parallel")
    return problem.recomputing_where_needed(plan)


def straight_gpipe(problem: PlanningProblem) -> Plan:
    """As many stages as ranks (or as layers, if those are fewer), in the order of the ranks' numbers.

    The largest time of a stage, forward and backward of one microbatch, is the least possible; messages
    play no part. GPipe recomputes always; this recomputes only where memory asks for it, in its favour.

    Raises:
        PlanError: memory does not hold it even with recomputation (by how much).
        BatchError: there are fewer samples than microbatches.
    """
    depth = problem.profile.depth
    cuts = balanced_cuts(problem.layer_us, min(len(problem.ranks), depth))
    stages = [(start, end, (rank,)) for rank, (start, end) in enumerate(pairwise((0, *cuts, depth)))]
    return problem.recomputing_where_needed(problem.plan(stages, "gpipe", "gpipe"))


@dataclass(frozen=True, slots=True)
class PublishedMethod:
    """A published way to train.

    Attributes:
        plan: the plan for a problem.
        remark: how the plan differs from what was published; "" where it does not.
    """

    plan: Planner
    remark: str = ""


METHODS: Mapping[str, PublishedMethod] = {
    "data-parallel": PublishedMethod(data_parallel),
    "gpipe": PublishedMethod(straight_gpipe),
    "pipedream": PublishedMethod(pipedream, "with a flush after every batch; published without"),
    "rannc": PublishedMethod(rannc),
    "spp": PublishedMethod(spp),
}
"""The alternatives by name."""


def alternatives(
    problems: Sequence[PlanningProblem], methods: Iterable[str] = tuple(METHODS)
) -> dict[str, Plan | PlanError]:
    """The plan of each alternative, or why it has none.

    Args:
        problems: that differ in their numbers of microbatches alone, ascending: each alternative takes the
            one by which it is predicted to be fastest.
        methods: of `METHODS`.
    """

    def best(planner: Planner) -> Plan | PlanError:
        plans: list[Plan] = []
        refusals: list[PlanError | BatchError] = []
        for problem in problems:
            try:
                plans.append(planner(problem))
            except (PlanError, BatchError) as error:
                refusals.append(error)
        if plans:
            return problems[0].fastest(plans)
        # What the plan of the most microbatches that the batch has samples for lacks.
        short = [it for it in refusals if isinstance(it, PlanError)]
        return short[-1] if short else PlanError(str(refusals[-1]))

    return {name: best(METHODS[name].plan) for name in methods}

"""Few and low trees against rate: what a choice by message size chooses from.

Small messages want few steps and few chunks, large ones the best rate. The trees of every height that is
worth it are generated, then weighed up to each height, all of them or only the best one or two per root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from arborcast.synth.collective import Collective
from arborcast.synth.errors import TimedOutError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.packing.symmetric.generation import Generation, with_best_rate
from arborcast.synth.packing.symmetric.orbit_problem import OrbitTree, least_height
from arborcast.synth.packing.symmetric.orbit_weights import Chosen, few_trees, weigh_exactly
from arborcast.synth.packing.symmetric.symmetric_solver import (
    PackingQuestion,
    generated,
    question_of,
    simplest,
)
from arborcast.synth.schedule import Settings
from arborcast.synth.solve_options import DEFAULTS, SolveOptions
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology

_MOST_HEIGHTS = 4  # below that of the optimum
_FEW = (1, 2)  # trees per root that are tried at each height

FINE_UP_TO = 64
"""Ranks up to which every height is tried, with more numbers of trees: a search in seconds there. In between
lies what is fastest at middle sizes, where neither height nor rate decides alone."""

_MORE = (1, 2, 3, 4)


def symmetric_frontier(
    topology: Topology,
    collective: Collective,
    options: SolveOptions = DEFAULTS,
    *,
    translations: Translations | None = None,
) -> tuple[ImplicitSchedule, ...]:
    """Schedules of which none is as low, of as few trees and as fast as another, lowest first.

    Args:
        topology: as in `solve_symmetric`, like all others.
        collective: see there.
        options: seed and deadline; after it what there is is returned.
        translations: see there.

    Returns:
        Schedules in order of height, then trees per root; the last has the best rate.

    Raises:
        CollectiveError: see `solve_symmetric`.
        InfeasibleError: some ranks are cut off.
        TimedOutError: the deadline passed before the first schedule was found.
    """
    question = question_of(topology, collective, options, translations)
    deadline = question.deadline
    generation, settings = generated(question, None)
    best = simplest(generation)
    found: list[tuple[Chosen, Settings]] = [(best, settings)]
    try:
        for columns in _by_height(question, generation, best.height):
            every = weigh_exactly(question.problem, columns, deadline)
            for number in _MORE if topology.ranks <= FINE_UP_TO else _FEW:
                if any(
                    few.height <= every.height and _most_trees(few) <= number and few.rate >= every.rate
                    for few, _ in found
                ):
                    break  # lower ones reach all that these could
                few, facts = few_trees(question.problem, columns, SolveOptions(max_trees=number), deadline)
                found.append((weigh_exactly(question.problem, few, deadline), (*settings, *facts)))
            found.append((every, settings))
            deadline.check("the frontier of symmetric trees")
    except TimedOutError:
        pass  # what is missing is some choice, which the caller knows by the time that has passed
    return tuple(question.answer(chosen, facts) for chosen, facts in _undominated(found))


def _by_height(question: PackingQuestion, generation: Generation, highest: int) -> list[list[OrbitTree]]:
    """The trees up to each of a few heights, the last of which has the best rate."""
    problem = question.problem
    least = least_height(problem)
    is_fine = problem.topology.ranks <= FINE_UP_TO
    stride = 1 if is_fine else max(1, -(-(highest - least) // _MOST_HEIGHTS))
    wanted = sorted(range(highest, least - 1, -stride))
    for height in wanted[:-1]:
        low = Generation(problem, question.tight, question.deadline, height)
        low.run()
        for column in low.master.columns:
            generation.master.add(column)
    groups = set(range(len(problem.groups)))
    choices = [generation.up_to(height) for height in wanted]
    return [
        with_best_rate(problem, columns)
        for columns in choices
        if {column.group for column in columns} == groups
    ]


def _undominated(found: Sequence[tuple[Chosen, Settings]]) -> list[tuple[Chosen, Settings]]:
    """Those that no other one beats in height, trees per root and rate together, each once."""
    ranked = sorted(found, key=lambda entry: (entry[0].height, _most_trees(entry[0]), -entry[0].rate))
    kept: list[tuple[Chosen, Settings]] = []
    for entry in ranked:
        chosen = entry[0]
        if not any(
            other.height <= chosen.height
            and _most_trees(other) <= _most_trees(chosen)
            and other.rate >= chosen.rate
            for other, _ in kept
        ):
            kept.append(entry)
    return kept


def _most_trees(chosen: Chosen) -> int:
    return max(Counter(column.group for column in chosen.columns).values())

"""The entry of symmetric solving: trees of a few representatives, found orbit by orbit, do for all ranks.

The limit, then column generation over orbits, then the lowest trees that keep the rate, then exact weights
with a small denominator, then a schedule in implicit form.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError, Prover, TimedOutError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.tree_program import CLOSE, TreeProgram, whole_prices
from arborcast.synth.packing.relays import relays_as_switches
from arborcast.synth.packing.symmetric.generation import COARSE, FINE, Generation, with_best_rate
from arborcast.synth.packing.symmetric.orbit_problem import Problem, carriers_of, least_height, problem_of
from arborcast.synth.packing.symmetric.orbit_weights import (
    Chosen,
    denominators,
    exact_rate,
    few_trees,
    in_fewer_parts,
    small_denominators,
    weigh_exactly,
)
from arborcast.synth.packing.symmetric.symmetric_limits import symmetric_bound, tight_lengths_of
from arborcast.synth.packing.to_schedule import lifted, transfers_of
from arborcast.synth.schedule import Chunk, Method, Settings
from arborcast.synth.solve_options import DEFAULTS, SolveOptions
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology

SYMMETRIC_KINDS = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE)
"""The kinds of collective that trees without a distinguished root serve."""

_EFFORT_FOR_LOW = 1 << 18  # links that are contracted for each height that is tried, in all rounds
_ROUNDS_FOR_LOW = 60  # of weighing and pricing, at most


@dataclass(frozen=True, eq=False)
class PackingQuestion:
    """What is asked, made ready: relays are switches, the limit is known.

    Attributes:
        topology: as it was given.
        collective: likewise.
        translations: of the topology.
        limit: of the rate.
        problem: on the topology without relays.
        tight: lengths of the link orbits under which the trees of an optimum are cheapest, if known.
        seed: kept in the schedule; ties are broken without chance.
        deadline: when to stop.
    """

    topology: Topology
    collective: Collective
    translations: Translations
    limit: Bound
    problem: Problem
    tight: Ints | None
    seed: int
    deadline: Deadline

    def answer(self, chosen: Chosen, settings: Settings) -> ImplicitSchedule:
        """The schedule in which every rank has the images of the trees of its orbit's first rank."""
        found = lifted(
            self.topology, self.collective.kind, carriers_of(self.problem, chosen.columns, chosen.weights)
        )
        total = sum((one.weight for one in found), Fraction(0)) * self.translations.order
        chunks = [Chunk(one.weight / total, one.root) for one in found]
        facts: Settings = (("parts", chosen.parts), *settings)
        if chosen.rate < 1:
            facts = (*facts, ("loss", str(1 - chosen.rate)))
        return ImplicitSchedule.build(
            self.topology,
            self.collective,
            Method("symmetric", self.seed, facts),
            self.limit,
            self.translations,
            chunks,
            transfers_of(found),
        )


def solve_symmetric(
    topology: Topology,
    collective: Collective,
    options: SolveOptions = DEFAULTS,
    *,
    translations: Translations | None = None,
) -> ImplicitSchedule:
    """An allgather, reduce-scatter or allreduce along trees that translations map to each other.

    Without `max_trees`, `max_height` and `tolerance` the rate is the bound wherever trees reach it; averaging
    over the translations shows that no better trees are lost. Time and memory grow with the links and with
    the trees of one rank per orbit.

    Args:
        topology: the fabric; ranks that take no part come after those that do and forward.
        collective: what is to be done.
        options: `max_trees` counts per root and direction: where an allreduce gathers along other trees than
            it spreads along, twice as many pairs less one may come of them. With `max_height` the rate is the
            best that was found. The seed is for the search for translations; trees are found without chance.
        translations: automorphisms of the topology; None for those that can be found.

    Returns:
        The schedule; its settings say the common denominator of the trees' `parts`, and the `loss` against
        the bound if there is any.

    Raises:
        CollectiveError: another kind, relays that are numbered before ranks or that translations move among
            ranks, or translations that do not fit.
        InputError: a number out of its range.
        InfeasibleError: some ranks are cut off, or no trees are as low.
        TimedOutError: the deadline passed; carries a schedule if there was one.
    """
    _check_numbers(options)
    question = question_of(topology, collective, options, translations)  # the limit, and what orbits share
    generation, settings = generated(question, options.max_height)  # trees that help, until none does
    if options.tolerance is None and options.max_trees is None:
        chosen = simplest(generation)  # the lowest of them, with weights of a small denominator
    else:
        chosen, few = _few(question, generation, options)
        settings = (*settings, *few)
    schedule = question.answer(chosen, settings)
    if question.deadline.has_passed:
        raise TimedOutError(f"{collective.kind}: {question.deadline} passed", schedule)
    return schedule


def _few(question: PackingQuestion, generation: Generation, options: SolveOptions) -> tuple[Chosen, Settings]:
    """As few trees as are asked for, and what is known of them."""
    problem, deadline = question.problem, question.deadline
    columns, settings = few_trees(
        problem, with_best_rate(problem, generation.master.columns), options, deadline
    )
    chosen = weigh_exactly(problem, columns, deadline)
    if options.tolerance is not None and options.max_trees is None:
        chosen = in_fewer_parts(
            problem, chosen, exact_rate(problem, generation.master.columns) * (1 - options.tolerance)
        )
    return chosen, settings


def question_of(
    topology: Topology,
    collective: Collective,
    options: SolveOptions,
    translations: Translations | None,
) -> PackingQuestion:
    """Check the question and find its limit; see `solve_symmetric` for what is raised."""
    if collective.kind not in SYMMETRIC_KINDS:
        kinds = ", ".join(kind.value for kind in SYMMETRIC_KINDS)
        raise CollectiveError(f"{collective.kind}: symmetric trees serve {kinds} only")
    deadline = Deadline.after(options.deadline_s)
    collective.check(topology)
    flat, among = relays_as_switches(topology, collective)
    if translations is None:
        from arborcast.synth.symmetry.translation_search import translations_of

        translations = translations_of(topology, seed=options.seed)
    translations.check_automorphisms(topology)
    moved = Translations(flat.ranks, translations.generators, translations.orders, flat.size)
    limit = symmetric_bound(flat, among, moved)
    problem = problem_of(flat, among, moved, limit.rate)
    tight = tight_lengths_of(problem, limit)
    return PackingQuestion(topology, collective, translations, limit, problem, tight, options.seed, deadline)


def _check_numbers(options: SolveOptions) -> None:
    if options.max_trees is not None and options.max_trees < 1:
        raise InputError(f"max-trees: must be at least 1, got {options.max_trees}")
    if options.max_height is not None and options.max_height < 1:
        raise InputError(f"max-height: must be at least 1, got {options.max_height}")
    if options.tolerance is not None and not 0 <= options.tolerance < 1:
        raise InputError(f"tolerance: must be at least 0 and below 1, got {options.tolerance}")


def generated(question: PackingQuestion, max_height: int | None) -> tuple[Generation, Settings]:
    problem = question.problem
    if max_height is not None:
        least = least_height(problem)
        if max_height < least:
            raise InfeasibleError(
                f"max-height {max_height}: some rank is {least} edges away from a root, no tree is lower",
                proved_by=[Prover.LIMIT],
            )
    generation = Generation(problem, question.tight, question.deadline, max_height)
    weighed = generation.run()
    if question.deadline.has_passed:
        if not generation.master.columns:
            raise question.deadline.missed_by("the search for symmetric trees")
        best = question.answer(weigh_exactly(problem, generation.master.columns, question.deadline), ())
        raise TimedOutError(str(question.deadline.missed_by("the search for symmetric trees")), best)
    facts: Settings = (("columns", len(generation.master.columns)),)
    if weighed.rate < 1 - CLOSE:
        is_best = exact_rate(problem, generation.master.columns) == generation.limit
        facts = (*facts, ("best_trees", "proved" if is_best else "found"))
    elif max_height is None:
        _lower(question, generation)
    return generation, facts


def _lower(question: PackingQuestion, generation: Generation) -> None:
    """Put lower trees that reach the target into the pool, if a bounded search finds some.

    By bisection: between a height that is too low for any tree and one that is known to do.
    """
    problem = question.problem
    enough = max(column.height for column in with_best_rate(problem, generation.master.columns))
    too_low = least_height(problem) - 1
    tight = generation.tight
    if tight is None:
        tight = whole_prices(TreeProgram(problem.rows, generation.master.columns).solve().prices, COARSE)
    effort = len(problem.groups) * len(problem.topology.links)
    rounds = max(4, min(_ROUNDS_FOR_LOW, _EFFORT_FOR_LOW // effort))
    while enough - too_low > 1:
        height = (enough + too_low) // 2
        low = Generation(problem, tight, question.deadline, height, rounds=rounds)
        if low.run().rate < 1 - CLOSE:
            too_low = height
            continue
        for column in low.master.columns:
            generation.master.add(column)
        enough = max(column.height for column in with_best_rate(problem, low.master.columns))


def simplest(generation: Generation) -> Chosen:
    """The best rate of the trees that were met, by the lowest of them, in the fewest parts."""
    problem = generation.problem
    columns = with_best_rate(problem, generation.master.columns)
    weighed = TreeProgram(problem.rows, columns).solve()
    if weighed.rate >= 1 - CLOSE:
        lengths = [whole_prices(weighed.prices, finest) for finest in (COARSE, FINE)]
        if generation.tight is not None:
            lengths.insert(0, generation.tight)
        height = max(column.height for column in columns)
        with suppress(TimedOutError):  # then any exact weights do
            chosen = small_denominators(
                generation, lengths, columns, weighed, denominators(problem, weighed), height
            )
            if chosen is not None:
                return chosen
        columns = generation.up_to(height)
    return weigh_exactly(problem, columns, generation.deadline)

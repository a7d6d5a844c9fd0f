"""The tree method where switches reduce or multicast: trees that join and fork at switches, made a schedule.

`program` packs the trees; here few of them are chosen, no more than switches hold, and each becomes
a chunk: gathered level by level up to the root, then spread. Trees of the graph whose switches only forward
are the other candidate, and what is left for kinds that gain nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TypeVar

from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import TimedOutError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.in_network.column_moves import moves_of
from arborcast.synth.in_network.steiner_program import SteinerProgram, solved_steiner_program
from arborcast.synth.in_network.steiner_tree import SteinerColumn
from arborcast.synth.lp.sparsify import few_as_asked
from arborcast.synth.lp.tree_program import CLOSE
from arborcast.synth.schedule import Chunk, Method, Schedule, Settings, Transfer
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Topology, Vertex

CLAIMS = ("within_height", "proved")
"""Settings in which a method says how its trees compare with others of the fabric that it was given."""

OneForm = TypeVar("OneForm", Schedule, ImplicitSchedule)

_MANY = 200  # trees, of which the lowest alone are looked at: dropping one by one takes seconds

LARGEST_STEINER = 32
"""Ranks up to which trees through switches are looked for where others reach the bound, for being lower."""

SMALLEST_REGULAR = 17
"""Ranks from which a regular fabric is answered by images of few trees; of fewer the program over all trees
takes a second or so, and may need fewer of them."""


def forwarding_answer(
    solve: Callable[[Topology, Collective, SolveOptions], Schedule],
    topology: Topology,
    collective: Collective,
    options: SolveOptions,
    limit: Bound,
) -> Schedule:
    """What a method finds where switches only forward, as a schedule of the fabric as it is.

    Raises:
        InfeasibleError: there is none.
        TimedOutError: the deadline passed; carries the best until then.
    """
    found = (solve(topology.forwarding, collective, options) for _ in range(1))
    return next(lifted(found, lambda schedule: on_able_switches(schedule, topology, limit)))


def lifted(found: Iterable[Schedule], lift: Callable[[Schedule], Schedule]) -> Iterator[Schedule]:
    """What is found on another graph, as schedules of the one that was asked about.

    Raises:
        TimedOutError: the deadline passed; carries the best until then, lifted as well.
    """
    try:
        yield from map(lift, found)
    except TimedOutError as error:
        if isinstance(error.best, Schedule):
            raise TimedOutError(str(error), lift(error.best)) from error
        raise


def on_able_switches(found: OneForm, topology: Topology, limit: Bound) -> OneForm:
    """A schedule of the fabric whose switches only forward, as one of the fabric as it is, in the same form.

    What it says of all trees holds of those that only pass switches; others may be better.
    """
    settings = (
        (name, f"{value} where switches only forward" if name in CLAIMS else value)
        for name, value in found.method.settings
    )
    method = found.method if found.rate == limit.rate else replace(found.method, settings=tuple(settings))
    return replace(found, topology=topology, bound=limit, method=method)


def solve_in_network(
    topology: Topology,
    collective: Collective,
    options: SolveOptions,
    limit: Bound,
    forwarding: Callable[[Topology, Collective, SolveOptions], Schedule],
) -> Schedule:
    """The better of trees that join and fork at switches and of trees that only pass them.

    Args:
        topology: the fabric, some of whose switches are able.
        collective: a kind that trees can do.
        options: as for `synth.packing.tree_solver.solve_by_trees`.
        limit: of the rate.
        forwarding: what finds the other trees.

    Returns:
        The schedule of the higher rate; of equal ones the one with fewer chunks and levels. With a height the
        trees through switches are those of the best packing that are as low.

    Raises:
        As `solve_by_trees`.
    """
    deadline = Deadline.after(options.deadline_s)
    regular = _by_symmetries(topology, collective, options, limit, deadline)
    if regular is not None and regular.is_optimal:
        return regular
    half = replace(options, deadline_s=deadline.share(2))
    try:
        first = forwarding_answer(forwarding, topology, collective, half, limit)
    except TimedOutError as error:  # trees through switches may still be found in time
        assert isinstance(error.best, Schedule), "trees that only pass switches always leave one"
        first = error.best
    each_root = collective.kind in {Kind.ALLGATHER, Kind.REDUCE_SCATTER}
    if first.is_optimal and (each_root or topology.ranks > LARGEST_STEINER):
        return first
    best = first
    if not deadline.has_passed:
        program = solved_steiner_program(topology, collective, deadline)  # trees, and their best rate
        if program.rate >= first.rate:
            found = _through_switches(topology, collective, program, options, limit, deadline)
            best = min((first, *found), key=_merit)
    if deadline.has_passed:
        raise TimedOutError(f"{collective.kind}: {deadline} passed", best)
    return best


def _by_symmetries(
    topology: Topology, collective: Collective, options: SolveOptions, limit: Bound, deadline: Deadline
) -> Schedule | None:
    """Images of few trees under the declared symmetries, where these move each of many ranks everywhere.

    None where fewer trees or lower ones are asked for, or where switches hold few.
    """
    from arborcast.synth.in_network.symmetric import images_of_trees
    from arborcast.synth.symmetry.translation_search import translations_of

    wishes = [options.max_trees, options.tolerance, options.max_height]
    wishes += [switch.trees for switch in topology.switches]
    is_large = SMALLEST_REGULAR <= topology.ranks == len(collective.ranks)
    if collective.kind is not Kind.ALLREDUCE or set(wishes) != {None} or not is_large:
        return None
    translations = translations_of(topology, effort=0)
    if translations.order < topology.ranks:
        return None
    found = images_of_trees(topology, collective, options, limit, translations, deadline)
    if found is None:
        return None
    method = Method("trees", options.seed, (("through", "able switches"),))
    return replace(found.expand(), method=method)


def _merit(schedule: Schedule) -> tuple[Fraction, int, int]:
    return -schedule.rate, schedule.chunk_count + schedule.steps, schedule.transfer_count


def _through_switches(
    topology: Topology,
    collective: Collective,
    program: SteinerProgram,
    options: SolveOptions,
    limit: Bound,
    deadline: Deadline,
) -> Iterator[Schedule]:
    """Schedules along the best packing; none where no trees keep to what was asked."""
    for some in _low_first(program, _allowed(topology, collective, program, options, deadline)):
        held = _held(topology, program, some)  # no more at any switch than it holds
        chosen, settings = _few(program, held, options, deadline)  # few of them
        if chosen:
            method = Method("trees", options.seed, (("through", "able switches"), *settings))
            yield lift_columns(topology, collective, method, limit, chosen)


def _low_first(
    program: SteinerProgram, columns: Sequence[SteinerColumn]
) -> Iterator[Sequence[SteinerColumn]]:
    """The lowest trees that reach as much as all; then all of them, where those may be fewer trees."""
    rate = program.choice(columns).best.rate
    for most in sorted({column.height for column in columns})[:-1]:
        low = [column for column in columns if column.height <= most]
        if program.choice(low).best.rate >= rate * (1 - CLOSE):
            yield low
            if len(columns) > _MANY:
                return
            break
    yield columns


def _allowed(
    topology: Topology,
    collective: Collective,
    program: SteinerProgram,
    options: SolveOptions,
    deadline: Deadline,
) -> list[SteinerColumn]:
    """The trees to choose from: low enough; those that need no switch, too, where switches hold few."""
    columns = program.candidates
    if any(switch.trees is not None for switch in topology.switches):
        columns += solved_steiner_program(topology.forwarding, collective, deadline).candidates
    return [
        column
        for column in columns
        if options.max_height is None or all(tree.height <= options.max_height for tree in column.trees)
    ]


def _held(
    topology: Topology, program: SteinerProgram, columns: Sequence[SteinerColumn]
) -> Sequence[SteinerColumn]:
    """Those of the trees that carry most, at no switch more than it holds."""
    limits = {v: s.trees for v, s in enumerate(topology.switches, topology.ranks) if s.trees is not None}
    while columns and limits:
        weights = program.choice(columns).best.weights.round(9).tolist()
        used: dict[Vertex, list[int]] = defaultdict(list)
        for place, weight in enumerate(weights):
            for switch in columns[place].switches(topology.ranks) & limits.keys() if weight else ():
                used[switch].append(place)
        over = [switch for switch, places in used.items() if len(places) > limits[switch]]
        if not over:
            return [column for column, weight in zip(columns, weights, strict=True) if weight]
        switch = max(over, key=lambda switch: (len(used[switch]) - limits[switch], switch))
        heaviest = sorted(used[switch], key=lambda place: (-weights[place], place))[: limits[switch]]
        columns = [
            column
            for place, column in enumerate(columns)
            if place in heaviest or switch not in column.switches(topology.ranks)
        ]
    return columns


def _few(
    program: SteinerProgram, columns: Sequence[SteinerColumn], options: SolveOptions, deadline: Deadline
) -> tuple[tuple[SteinerColumn, ...], Settings]:
    """As few as reach the best rate, or as few as the options say."""
    choice = program.choice(columns)
    if not choice.is_complete:
        return (), ()
    carrying = {column.key for column in program.columns}
    known = [index for index, column in enumerate(columns) if column.key in carrying]
    found, settings = few_as_asked(choice, known, options, deadline, quickly=True)
    target = program.rate / program.groups
    chosen = tuple(replace(columns[place], weight=weight * target) for place, weight in found.items())
    return chosen, settings


def lift_columns(
    topology: Topology, collective: Collective, method: Method, limit: Bound, columns: Sequence[SteinerColumn]
) -> Schedule:
    """A schedule along trees that join and fork at switches.

    Each column is a chunk. Who sends to its parent does so once it has all that its children sent; a rank
    below which a switch with loopback adds sends it its part then, and gets the sum. What is spread goes a
    level a step, and a switch with loopback sends it back to the rank that it came from.

    Args:
        topology: the fabric.
        collective: what it does.
        method: what made the trees.
        limit: of the rate.
        columns: each root's carry its block in proportion to their weights.
    """
    groups = len({column.group for column in columns})
    carried: dict[int, Fraction] = defaultdict(Fraction)
    for column in columns:
        carried[column.group] += column.weight
    chunks, transfers = [], []
    for index, column in enumerate(columns):
        root = column.trees[0].root
        owner = root if root < topology.ranks else collective.ranks[0]
        chunks.append(Chunk(column.weight / carried[column.group] / groups, owner))
        transfers += [Transfer(index, *move) for move in moves_of(column)]
    return Schedule.build(topology, collective, method, limit, chunks, transfers)

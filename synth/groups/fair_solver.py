"""Several groups at once, shared fairly: the slowest as fast as possible, then the next slowest, and so on.

Progressive filling: a linear program finds the largest rate that all groups reach together; those whose
links are priced at that rate can go no further and keep it, and the program is asked again for the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from fractions import Fraction

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline, Limit
from arborcast.synth.errors import CollectiveError, InfeasibleError, InputError, Prover
from arborcast.synth.features import check_features
from arborcast.synth.groups.problem import GroupsProblem
from arborcast.synth.groups.realization import alone_topology, schedules_of
from arborcast.synth.groups.result import GroupSchedule, GroupSchedules
from arborcast.synth.groups.sharing_certificate import JointCertificate, Level, level_bound
from arborcast.synth.groups.sharing_lp import JointProgram, LevelRates
from arborcast.synth.routes.reachability import who_is_cut_off
from arborcast.synth.topology import Topology

log = logging.getLogger(__name__)

_LARGEST = 2**58
"""Lengths in whole units, added up over all links and ranks, stay below it, else they are rounded."""

_ROUNDED = 2**30
"""Parts of the longest link to which they are then rounded."""


def solve_groups(
    topology: Topology,
    groups: Sequence[Collective],
    *,
    weights: Sequence[Fraction | int] | None = None,
    relays: bool = True,
    seed: int = 0,
    deadline_s: Limit = None,
) -> GroupSchedules:
    """Schedules for several collectives that run at the same time, with the links shared fairly.

    Rates are max-min fair: no group's rate / weight can be raised without lowering that of one which is no
    higher (Bertsekas and Gallager 1992, section 6.5). A rank may be in several groups.

    Args:
        topology: the fabric.
        groups: what each group does, among which ranks of the fabric; any kind but a custom one.
        weights: positive, one for each group; rates are fair in proportion to them. None for equal ones.
        relays: whether ranks outside a group may forward for it, like switches (they neither copy nor
            reduce); otherwise a group uses links between its own ranks and switches only.
        seed: breaks ties; the same seed gives the same schedules on any machine.
        deadline_s: seconds from now.

    Returns:
        For each group its rate among the others, the one it would reach alone, and its schedule; and the
        certificate that nothing is fairer: among schedules along trees for an allreduce, see
        `synth.bounds.bound`, and among those that pass other ranks as `relays` says.

    Raises:
        InputError: no group, other numbers of weights, a weight that is not positive.
        CollectiveError: a group that does not fit the fabric, or a custom one; names it.
        InfeasibleError: a group's ranks cannot reach each other; names it.
        TimedOutError: the deadline passed.
        ArithmeticError: HiGHS fails, or the best shares have too many digits for exact int64 flows.

    The size of the linear program is the number of groups times that of links, over the number of declared
    symmetries of the fabric that permute the groups. Of groups that they take to each other the schedule of
    the first is found and kept, with what takes it to those of the others.

    Examples:
        >>> fabric = topologies.load("torus:2x2")
        >>> found = groups.solve_groups(fabric, groups.along(fabric, (2, 2), 0, "allreduce"))
        >>> [group.rate for group in found.groups]
        [Fraction(1, 1), Fraction(1, 1)]
    """
    check_features(topology, "groups")
    deadline = Deadline.after(deadline_s)
    weighed = _checked_weights(groups, weights)
    for number, group in enumerate(groups):
        _check_group(topology, number, group)
    problem = GroupsProblem(topology, groups, weighed, relays=relays)
    alone = _alone_rates(problem, relays, deadline)
    levels, shares = _fill(problem, min(alone), deadline)
    rates = {group: level.rate * weighed[group] for level in levels for group in level.groups}
    schedules = schedules_of(problem, shares, seed=seed, deadline=deadline)
    return GroupSchedules(
        topology,
        tuple(
            GroupSchedule(
                weighed[group],
                rates[group],
                alone[group],
                problem.collectives[group],
                schedules[first],
                None if group == first else tuple(images.tolist()),
            )
            for group, (first, images) in enumerate(problem.origin)
        ),
        JointCertificate(tuple(levels), relays),
    )


def _checked_weights(
    groups: Sequence[Collective], weights: Sequence[Fraction | int] | None
) -> tuple[Fraction, ...]:
    if not groups:
        raise InputError("groups: needs at least one group, got none")
    if weights is None:
        return (Fraction(1),) * len(groups)
    if len(weights) != len(groups):
        raise InputError(f"weights: must be one for each of the {len(groups)} groups, got {len(weights)}")
    for number, weight in enumerate(weights):
        if weight <= 0:
            raise InputError(f"group {number}: weight must be positive, got {weight}")
    return tuple(map(Fraction, weights))


def _check_group(topology: Topology, number: int, group: Collective) -> None:
    try:
        group.check(topology)
        if group.kind is Kind.CUSTOM:
            raise CollectiveError("custom: groups share links in the named kinds only")
    except CollectiveError as error:
        raise CollectiveError(f"group {number}: {error}") from error


def _alone_rates(problem: GroupsProblem, relays: bool, deadline: Deadline) -> tuple[Fraction, ...]:
    """The best rate of each group with the fabric to itself.

    Raises:
        InfeasibleError: it is 0 for some group.
    """
    rates: dict[int, Fraction] = {}
    for group in problem.representatives:
        collective = problem.collectives[group]
        fabric = problem.topology if relays else alone_topology(problem.topology, collective)
        single = GroupsProblem(problem.topology, [collective], [Fraction(1)], relays=relays)
        widest = max((link.bandwidth for link in fabric.links), default=Fraction(1))
        rates[group] = JointProgram(single, deadline).solve({}, widest).rate
        if rates[group] == 0:
            words = f"group {group}: {who_is_cut_off(fabric, collective)}"
            raise InfeasibleError(words, proved_by=[Prover.LIMIT])
    return tuple(rates[first] for first, _ in problem.origin)


def _fill(problem: GroupsProblem, slowest: Fraction, deadline: Deadline) -> tuple[list[Level], LevelRates]:
    """The levels in ascending order, and shares of the links that reach all of them."""
    program = JointProgram(problem, deadline)
    given: dict[int, Fraction] = {}
    levels: list[Level] = []
    while True:
        first = {group: rate for group, rate in given.items() if problem.origin[group][0] == group}
        shares = program.solve(first, slowest)
        lengths = _countable(problem.topology, shares.lengths)
        bound, groups = level_bound(
            problem.topology, problem.collectives, problem.weights, given, lengths, relays=problem.relays
        )
        levels.append(Level(shares.rate, bound, groups, lengths))
        given |= {group: shares.rate * problem.weights[group] for group in groups}
        log.info("level %d: %s GB/s per unit of weight for %d groups", len(levels), shares.rate, len(groups))
        if len(given) == len(problem.collectives):
            return levels, shares


def _countable(topology: Topology, lengths: tuple[Fraction, ...]) -> tuple[Fraction, ...]:
    """The lengths, rounded where distances under them would not fit int64."""
    common = math.lcm(*(length.denominator for length in lengths))
    if sum(lengths) * common * max(2, topology.ranks) < _LARGEST:
        return lengths
    log.warning("%s: lengths of the joint certificate are rounded, it proves a little less", topology.name)
    return tuple(Fraction(round(length * _ROUNDED), _ROUNDED) for length in lengths)

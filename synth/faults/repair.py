"""A schedule for what is left of a fabric after faults, from the schedule of the fabric before.

Trees that use nothing that failed stay, those that do lose an edge or two and are grown again, and only
what no cut allows any more is packed anew: the result is as exact as that of solving from nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from arborcast.synth.collective import TREE_KINDS, Collective, Demand, Kind
from arborcast.synth.deadline import Deadline, Limit
from arborcast.synth.errors import CollectiveError, InputError
from arborcast.synth.faults.faulty import Faulty, without
from arborcast.synth.features import check_features
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Schedule
from arborcast.synth.solve_options import DEFAULTS, SolveOptions
from arborcast.synth.topology import Hop

if TYPE_CHECKING:
    from arborcast.synth.faults.old_trees import OldTrees


log = logging.getLogger(__name__)


def repair(
    schedule: Schedule | ImplicitSchedule,
    *,
    without_links: Sequence[Hop | str] = (),
    without_ranks: Sequence[int] = (),
    slower_links: Mapping[Hop, Fraction] | None = None,
    seed: int = 0,
    deadline_s: Limit = None,
) -> Schedule:
    """A schedule of the same collective on the topology with faults.

    Args:
        schedule: of the healthy topology.
        without_links: links that are gone in both directions, as pairs of vertices or as "A-B".
        without_ranks: ranks that are gone; the others are renumbered 0, 1, 2... in their order. They are gone
            from the collective too.
        slower_links: what links of one direction still carry, GB/s.
        seed: breaks ties; the same seed gives the same schedule on any machine.
        deadline_s: seconds from now.

    Returns:
        The schedule, with the exact bound of what is left. Its method's settings say under "repaired" what
        was done: of trees, how much of the rate stays on old ones and on patched ones; where the old schedule
        is no packing of trees, that it was solved anew, and why.

    Raises:
        InputError: no such link or rank, a root that is gone, or nothing is named.
        InfeasibleError: what is left is not connected; names the ranks that are cut off.
        TimedOutError: the deadline passed; carries the best schedule found.

    Examples:
        >>> schedule = synth.solve(topologies.load("full:4"), "allreduce")
        >>> schedule.rate, synth.repair(schedule, without_links=["0-1"]).rate
        (Fraction(2, 1), Fraction(5, 3))
    """
    if not without_links and not without_ranks and not slower_links:
        raise InputError("repair: needs a link or rank that is gone or slower, got none")
    faulty = without(schedule.topology, links=without_links, ranks=without_ranks, slower=slower_links)
    return repaired(schedule, faulty, SolveOptions(seed=seed, deadline_s=deadline_s))


def repaired(
    schedule: Schedule | ImplicitSchedule, faulty: Faulty, options: SolveOptions = DEFAULTS
) -> Schedule:
    """`repair` where the topology with faults is known already; raises the same."""
    from arborcast.synth.faults.old_trees import OldTrees

    check_features(faulty.healthy, "repair")
    if schedule.topology != faulty.healthy:
        raise InputError(
            f"repair: the schedule is for {schedule.topology.name}, the faults are of {faulty.healthy.name}"
        )
    collective = collective_left(schedule.collective, faulty)
    kind = collective.kind
    if kind not in TREE_KINDS or faulty.healthy.streams:
        why = "its ranks have streams" if faulty.healthy.streams else f"{kind} is not done along trees"
        return _anew(faulty, collective, why, options)
    if schedule.rounds is not None:
        return _anew(faulty, collective, "steps with rounds are searched for", options)
    if schedule.collective.relays(schedule.topology):
        return _anew(faulty, collective, "relays take part in its trees", options)
    if schedule.uses_switches:
        return _anew(faulty, collective, "its trees have switches that reduce or multicast", options)
    old = OldTrees.of(schedule)
    if old is None:
        return _anew(faulty, collective, "its chunks do not move along trees", options)
    return _from_trees(old, faulty, collective, options)


def collective_left(collective: Collective, faulty: Faulty) -> Collective:
    """The collective among the ranks that are left, in their new numbers.

    Raises:
        CollectiveError: its root is gone, fewer than two ranks are left, or a custom one loses a rank.
    """
    collective.check_is_even()
    number, root = faulty.number, collective.root
    if root is not None and root not in number:
        raise CollectiveError(f"{collective.kind}: its root {root} is among the ranks that are gone")
    ranks = tuple(number[rank] for rank in collective.ranks if rank in number)
    if collective.kind is Kind.CUSTOM and len(ranks) < len(collective.ranks):
        gone = min(set(collective.ranks) - set(number))
        raise CollectiveError(f"custom: rank {gone} is gone, which holds or must get a block")
    left = Collective(
        collective.kind,
        ranks,
        None if root is None else number[root],
        tuple(
            Demand(
                frozenset(number[rank] for rank in demand.sources),
                frozenset(number[rank] for rank in demand.targets),
            )
            for demand in collective.demands
        ),
    )
    left.check(faulty.topology)
    return left


def _from_trees(old: OldTrees, faulty: Faulty, collective: Collective, options: SolveOptions) -> Schedule:
    import numpy as np

    from arborcast.synth.kernels.arborescence import LogicalGraph
    from arborcast.synth.packing.tree_solver import solve_by_trees
    from arborcast.synth.packing.warm_start import StartingTrees

    number = np.full(faulty.healthy.size, -1, dtype=np.int64)
    number[list(faulty.kept)] = np.arange(len(faulty.kept))
    left = faulty.topology
    mirrored = collective.kind is Kind.ALLREDUCE and old.are_mirrored
    if not collective.kind.reduces:
        known = StartingTrees(old.over(LogicalGraph(left), number))
    elif collective.kind is not Kind.ALLREDUCE:
        known = StartingTrees(old.over(LogicalGraph(left.reversed()), number, gathering=True))
    else:
        out = old.over(LogicalGraph(left), number, free=mirrored)
        turned = None if left.is_symmetric else LogicalGraph(left.reversed())
        into = () if turned is None else old.over(turned, number, gathering=True, free=mirrored)
        known = StartingTrees(out, into)
    return solve_by_trees(left, collective, options, known=known)


def _anew(faulty: Faulty, collective: Collective, why: str, options: SolveOptions) -> Schedule:
    """What solving from nothing gives, and that it did."""
    from arborcast.synth.methods import method_for

    log.info("repair of %s: solved anew, %s", faulty.healthy.name, why)
    found = method_for("auto", faulty.topology, collective)(faulty.topology, collective, options)
    settings = (*found.method.settings, ("repaired", f"solved anew: {why}"))
    return replace(found, method=replace(found.method, settings=settings))


SERVED = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE)
"""The kinds that are solved by orbits and along trees."""


def solve_partly_symmetric(faulty: Faulty, kind: Kind | str, options: SolveOptions = DEFAULTS) -> Schedule:
    """A schedule among all ranks that are left of a fabric with translations.

    Args:
        faulty: what `synth.faults.faulty.without` made of the healthy fabric.
        kind: an allgather, reduce-scatter or allreduce.
        options: seed and deadline.

    Returns:
        The schedule, exact for what is left; its method's settings say how much of the rate stays on
        translates of the healthy fabric's trees.

    Raises:
        InputError: another kind, or the healthy fabric has no translations to solve it by.
        InfeasibleError: what is left is not connected; names the ranks that are cut off.
        TimedOutError: the deadline passed.
    """
    deadline = Deadline.after(options.deadline_s)
    healthy = healthy_schedule(faulty, kind, replace(options, deadline_s=deadline))
    deadline.check(f"the schedule of the healthy {faulty.healthy.name}")
    return repaired(healthy, faulty, replace(options, deadline_s=deadline))


def healthy_schedule(faulty: Faulty, kind: Kind | str, options: SolveOptions = DEFAULTS) -> ImplicitSchedule:
    """The schedule of the healthy fabric, by orbits; raises as `solve_partly_symmetric` does."""
    from arborcast.synth.packing.symmetric.symmetric_solver import solve_symmetric
    from arborcast.synth.symmetry.translation_search import translations_of

    collective = Collective.on(faulty.healthy, kind)
    if collective.kind not in SERVED:
        served = ", ".join(served.value for served in SERVED)
        raise CollectiveError(f"{collective.kind}: by orbits and repair are solved {served}")
    translations = translations_of(faulty.healthy, seed=options.seed)
    if translations.order == 1:
        raise InputError(f"topology {faulty.healthy.name}: has no translations, so that nothing is repeated")
    return solve_symmetric(faulty.healthy, collective, options, translations=translations)

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
from arborcast.synth.errors import CollectiveError, InputError
from arborcast.synth.faults.faulty import Faulty, without
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Schedule
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
    deadline_s: float | None = None,
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
    """
    if not without_links and not without_ranks and not slower_links:
        raise InputError("repair: needs a link or rank that is gone or slower, got none")
    faulty = without(schedule.topology, links=without_links, ranks=without_ranks, slower=slower_links)
    return repaired(schedule, faulty, seed=seed, deadline_s=deadline_s)


def repaired(
    schedule: Schedule | ImplicitSchedule, faulty: Faulty, *, seed: int = 0, deadline_s: float | None = None
) -> Schedule:
    """`repair` where the topology with faults is known already; raises the same."""
    from arborcast.synth.faults.old_trees import OldTrees

    if schedule.topology != faulty.healthy:
        raise InputError(
            f"repair: the schedule is for {schedule.topology.name}, the faults are of {faulty.healthy.name}"
        )
    collective = collective_left(schedule.collective, faulty)
    kind = collective.kind
    if kind not in TREE_KINDS:
        return _anew(faulty, collective, f"{kind} is not done along trees", seed, deadline_s)
    if schedule.rounds is not None:
        return _anew(faulty, collective, "steps with rounds are searched for", seed, deadline_s)
    if schedule.collective.relays(schedule.topology):
        return _anew(faulty, collective, "relays take part in its trees", seed, deadline_s)
    old = OldTrees.of(schedule)
    if old is None:
        return _anew(faulty, collective, "its chunks do not move along trees", seed, deadline_s)
    return _from_trees(old, faulty, collective, seed, deadline_s)


def collective_left(collective: Collective, faulty: Faulty) -> Collective:
    """The collective among the ranks that are left, in their new numbers.

    Raises:
        CollectiveError: its root is gone, fewer than two ranks are left, or a custom one loses a rank.
    """
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


def _from_trees(
    old: OldTrees, faulty: Faulty, collective: Collective, seed: int, deadline_s: float | None
) -> Schedule:
    import numpy as np

    from arborcast.synth.kernels.arborescence import LogicalGraph
    from arborcast.synth.packing.solver import Known, solve_by_trees

    number = np.full(faulty.healthy.size, -1, dtype=np.int64)
    number[list(faulty.kept)] = np.arange(len(faulty.kept))
    left = faulty.topology
    mirrored = collective.kind is Kind.ALLREDUCE and old.are_mirrored
    if not collective.kind.reduces:
        known = Known(old.outward(LogicalGraph(left), number, free=False))
    elif collective.kind is not Kind.ALLREDUCE:
        known = Known(old.inward(LogicalGraph(left.reversed()), number, free=False))
    else:
        known = Known(
            old.outward(LogicalGraph(left), number, free=mirrored),
            () if left.is_symmetric else old.inward(LogicalGraph(left.reversed()), number, free=mirrored),
        )
    return solve_by_trees(left, collective, seed=seed, deadline_s=deadline_s, known=known)


def _anew(faulty: Faulty, collective: Collective, why: str, seed: int, deadline_s: float | None) -> Schedule:
    """What solving from nothing gives, and that it did."""
    from arborcast.synth.methods import Request, solve_by_method

    log.info("repair of %s: solved anew, %s", faulty.healthy.name, why)
    request = Request(seed=seed, deadline_s=deadline_s)
    found = solve_by_method(faulty.topology, collective, "auto", request)
    settings = (*found.method.settings, ("repaired", f"solved anew: {why}"))
    return replace(found, method=replace(found.method, settings=settings))

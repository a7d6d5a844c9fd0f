"""All-to-all at scale: the blocks of one rank of each orbit on shortest ways, the rest are translates.

The limit and an optimal flow come from one small linear program over orbits (`synth.bounds.routing_trees`);
the flow becomes few ways per block with small shares, at exactly the limit where the program was solved
exactly. Ranks forward on the way: a way through ranks is several transfers in consecutive steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from arborcast.synth.bounds import bound
from arborcast.synth.bounds.routing_lp import lengths_of_links
from arborcast.synth.bounds.routing_trees import BestRouting, OrbitPartition, RoutingProgram
from arborcast.synth.certificate import Bound
from arborcast.synth.certification import dual_of
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import CollectiveError, InfeasibleError, TimedOutError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.routes.alltoall_options import options_of, shares_of_trees
from arborcast.synth.routes.alltoall_parts import divide
from arborcast.synth.routes.paths import PathShare, lift_routes
from arborcast.synth.routes.reachability import who_is_cut_off
from arborcast.synth.schedule import Method
from arborcast.synth.solve_options import DEFAULTS, SolveOptions
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology


def solve_symmetric_alltoall(
    topology: Topology,
    collective: Collective,
    options: SolveOptions = DEFAULTS,
    *,
    translations: Translations | None = None,
) -> ImplicitSchedule:
    """An alltoall at the limit of the fabric, as the ways of one rank of each orbit.

    Args:
        topology: the fabric; every vertex may forward, ranks that take no part too.
        collective: an alltoall; the translations must map its ranks to each other.
        options: seed (of HiGHS's own ties) and deadline.
        translations: automorphisms to make use of; found where None. The rate does not depend on them.

    Raises:
        CollectiveError: another kind of collective.
        InfeasibleError: some rank cannot reach another one.
        TimedOutError: the deadline passed; carries every block whole on a shortest way.
    """
    if collective.kind is not Kind.ALLTOALL:
        raise CollectiveError(f"{collective.kind}: routes by orbits serve alltoall; use trees")
    collective.check(topology)
    deadline = Deadline.after(options.deadline_s)
    if translations is None:
        from arborcast.synth.symmetry.translation_search import translations_of

        translations = translations_of(topology, ranks=collective.ranks, seed=options.seed)
    alike = OrbitPartition.under(topology, collective, translations.generators)
    program = RoutingProgram(topology, collective, alike)
    if not program.connected:
        limit = bound(topology, collective, Deadline.after(0))
        raise InfeasibleError(who_is_cut_off(topology, collective), limit)
    method = Method("routes", options.seed)
    try:
        best = program.solve(deadline)
    except TimedOutError as late:
        shortest = program.shortest()
        limit = _limit(topology, collective, alike, shortest)
        parts = shares_of_trees(topology, collective, alike, shortest)
        message = f"{collective.kind}: {deadline} passed"
        raise TimedOutError(
            message, _lift(topology, collective, method, limit, translations, parts)
        ) from late
    limit = _limit(topology, collective, alike, best)
    room = _room(topology, alike, translations, limit.rate / len(collective.ranks))
    paths = list(options_of(topology, collective, alike, best))
    divided = divide(paths, room, deadline, seed=options.seed)
    routes = shares_of_trees(topology, collective, alike, best) if divided is None else iter(divided)
    return _lift(topology, collective, method, limit, translations, routes)


def _limit(topology: Topology, collective: Collective, alike: OrbitPartition, best: BestRouting) -> Bound:
    """What the lengths prove; `dual_of` works it out from them alone."""
    dual = dual_of(topology, collective, lengths_of_links(alike, best.lengths))
    return Bound(dual.capacity / dual.distance, dual)


def _room(
    topology: Topology, alike: OrbitPartition, translations: Translations, rate: Fraction
) -> list[Fraction]:
    """How many blocks of the representatives each orbit of links can take, at so many GB/s of each block."""
    sizes = np.bincount(alike.link_orbits).tolist()
    room = [Fraction(0)] * len(sizes)
    for orbit, link in zip(alike.link_orbits.tolist(), topology.links, strict=True):
        room[orbit] = link.bandwidth * sizes[orbit] / (translations.order * rate)
    return room


def _lift(
    topology: Topology,
    collective: Collective,
    method: Method,
    limit: Bound,
    translations: Translations,
    routes: Iterable[PathShare],
) -> ImplicitSchedule:
    """One chunk per part; each hop from rank to rank is a transfer of its own step.

    Blocks with the most hops come first and all arrive in the last step: what still has far to go is served
    first on every link, and the last blocks to move are those that need one hop. On an 8x8 torus simulated
    with 1 us of latency, in one piece, 16 MiB then take 1.0001 of the least time; 1.06 in this order with
    all starting in step 0, 1.13 in the order of targets besides.
    """
    longest_first = sorted(routes, key=lambda route: -sum(vertex < topology.ranks for vertex in route.path))
    lifted = lift_routes(topology, collective, longest_first, together=True)
    return ImplicitSchedule.build(topology, collective, method, limit, translations, *lifted)

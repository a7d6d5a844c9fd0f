"""The best single ring: the Hamiltonian cycle whose narrowest link is as wide as possible.

Among n ranks the rate of a ring of width w is n/(n-1) w for allgather and reduce-scatter, half of it for
allreduce, and w for broadcast and reduce (the ring without one edge, as NCCL does it).
"""

from __future__ import annotations

import math
from fractions import Fraction
from random import Random

from arborcast.synth.baselines.budget import BudgetError
from arborcast.synth.baselines.hamiltonian import Fabric, Ring, find_ring
from arborcast.synth.baselines.paths import Paths, switch_paths
from arborcast.synth.baselines.rings import no_ring, ring_schedule
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.schedule import Method, Schedule
from arborcast.synth.topology import Hop, Topology


def solve_ring(
    topology: Topology, collective: Collective, bound: Bound, seed: int, deadline: Deadline
) -> Schedule:
    """The schedule over the widest ring.

    `Method.settings` holds `proved_widest`: "yes" where no other ring (of direct links and of the ways
    through switches that `paths` lists) is wider, "no" where a search ran out of its budget.

    Raises:
        InfeasibleError: there is no ring, or none was found within the budget.
        TimedOutError: the deadline passed.
    """
    paths = switch_paths(topology, collective.ranks)
    widths = _widths(topology, collective.ranks, paths)
    best: Ring | None = None
    unsure = False
    low, high = 0, len(widths)  # every width from `high` on is feasible, every one before `low` is not
    while low < high:
        middle = (low + high) // 2
        try:
            ring = _ring_of_width(topology, collective, paths, widths[middle], seed, deadline)
        except BudgetError:
            ring, unsure = None, True
        if ring is None:
            low = middle + 1
        else:
            best, high = ring, middle
    if best is None:
        if unsure:
            raise InfeasibleError(
                f"ring: none found through the {len(collective.ranks)} ranks of {topology.name} within the "
                "budget of the search; method trees needs none"
            )
        raise no_ring("ring", topology, collective)
    method = Method("ring", seed, (("proved_widest", "no" if unsure else "yes"),))
    return ring_schedule(topology, collective, method, bound, [(best, 1)])


def _ring_of_width(
    topology: Topology, collective: Collective, paths: Paths, width: Fraction, seed: int, deadline: Deadline
) -> Ring | None:
    capacity = {hop: math.floor(bandwidth / width) for hop, bandwidth in topology.bandwidth.items()}
    fabric = Fabric(collective.ranks, paths, capacity).restricted(capacity)
    return find_ring(fabric, start=collective.ranks[0], rng=Random(seed), deadline=deadline)


def _widths(topology: Topology, ranks: tuple[int, ...], paths: Paths) -> list[Fraction]:
    """The widths that a ring can have, the largest first: a trunk may serve several of its edges."""
    used: set[Hop] = {hop for ways in paths.values() for way in ways for hop in way.hops}
    widths: set[Fraction] = set()
    for src, dst in used:
        # A rank has one edge out and one in; only a link between two switches can serve more.
        most = len(ranks) if topology.is_switch(src) and topology.is_switch(dst) else 1
        widths.update(topology.bandwidth[src, dst] / times for times in range(1, most + 1))
    widest_out = {rank: Fraction(0) for rank in ranks}
    widest_in = dict(widest_out)
    for (src, dst), ways in paths.items():
        widest_out[src] = max(widest_out[src], ways[0].width)
        widest_in[dst] = max(widest_in[dst], ways[0].width)
    limit = min((*widest_out.values(), *widest_in.values()))
    return sorted((width for width in widths if width <= limit), reverse=True)

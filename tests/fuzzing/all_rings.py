"""Every ring through some ranks: the widest one, and whether link-disjoint ones could be more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise, permutations, product

import highspy

from arborcast.synth.topology import Topology
from tests.fuzzing.exact_lp import Program
from tests.fuzzing.limits import Way, ways

Ring = tuple[tuple[tuple[int, int], int], ...]


def rings(topology: Topology, ranks: Sequence[int], most: int = 20_000) -> set[Ring] | None:
    """How often each closed way through all the ranks passes each link; None where there are too many."""
    between: dict[tuple[int, int], list[Way]] = {}
    for way in ways(topology, ranks, range(topology.ranks, topology.size)):
        between.setdefault((way[0], way[-1]), []).append(way)
    found: set[Ring] = set()
    first, *others = ranks
    for order in permutations(others):
        for ring in product(*(between.get(pair, ()) for pair in pairwise((first, *order, first)))):
            found.add(tuple(sorted(Counter(hop for way in ring for hop in pairwise(way)).items())))
            if len(found) > most:
                return None
    return found


def widest(topology: Topology, found: set[Ring]) -> Fraction:
    """The largest width of a ring, GB/s."""
    return max(min(topology.bandwidth[hop] / passes for hop, passes in ring) for ring in found)


def more_than(topology: Topology, found: set[Ring], count: int) -> bool | None:
    """Whether more than so many rings fit in whole units of bandwidth; None where that is not found out.

    No, where even fractions of rings do not; yes, where whole ones were found, which are counted here.
    """
    room = dict(zip(topology.bandwidth, topology.capacities, strict=True))
    ordered = sorted(found)
    program = Program()
    program.at_most({"all": 1, **dict.fromkeys(ordered, -1)})
    for hop, units in room.items():
        users = {ring: dict(ring)[hop] for ring in ordered if hop in dict(ring)}
        if users:
            program.at_most(users, units)
    if program.maximum("all") < count + 1:
        return False
    if max(room.values()) > 1 << 30:
        return None
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("mip_max_nodes", 200)
    model.setOptionValue("mip_rel_gap", 0.0)
    times = {ring: model.addIntegral() for ring in ordered}
    for hop, units in room.items():
        users = [dict(ring)[hop] * times[ring] for ring in ordered if hop in dict(ring)]
        if users:
            model.addConstr(sum(users) <= float(units))
    model.maximize(sum(times.values()))
    chosen = [round(model.val(times[ring])) for ring in ordered]
    load: Counter[tuple[int, int]] = Counter()
    for ring, count_of_ring in zip(ordered, chosen, strict=True):
        for hop, passes in ring:
            load[hop] += passes * count_of_ring
    fits = all(units >= load[hop] for hop, units in room.items())
    return True if fits and sum(chosen) > count else None


def has_hypercube(topology: Topology) -> bool:
    """Whether the ranks can stand at the corners of a hypercube with a way along each edge, both ways."""
    found = ways(topology, range(topology.ranks), range(topology.ranks, topology.size))
    joined = {(way[0], way[-1]) for way in found}
    corners = range(topology.ranks)
    edges = [(a, b) for a in corners for b in corners if (a ^ b).bit_count() == 1]
    return any(joined.issuperset((at[a], at[b]) for a, b in edges) for at in permutations(corners))

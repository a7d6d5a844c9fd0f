"""The largest set of link-disjoint rings: what a library of rings can get out of a graph at most.

Bandwidth is counted in units of the greatest common divisor; a ring uses one unit of each link that it
passes, once per passing. Rings are collected greedily, or all of them are listed on small graphs, and an
integer program picks how often to use each (HiGHS).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random

from arborcast.synth.baselines.budget import Budget, BudgetError
from arborcast.synth.baselines.hamiltonian import Ring, RingFabric, find_ring, links_of, rings_of
from arborcast.synth.baselines.rings import no_ring, ring_schedule
from arborcast.synth.baselines.square_rings import square_rings
from arborcast.synth.baselines.switch_paths import Path, switch_paths
from arborcast.synth.bounds.cuts import tightest_cut
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.lp.highs import new_model, run
from arborcast.synth.schedule import Method, Schedule
from arborcast.synth.symmetry.translation_search import translations_of
from arborcast.synth.topology import Hop, Topology

GREEDY_TRIES = 16
HASTY_TRIES = 3
PATIENT_RANKS = 16
"""Up to so many ranks, a last ring that hides is worth an integer program and several tries."""
LISTED_RANKS = 12
LISTED_RINGS = 6_000
LISTING_STEPS = 1_000_000
PICKING_CASES = 200
PRICE_PARTS = 1 << 40
"""Into how many parts prices are rounded: of 2**40 units of bandwidth a ring less would be told apart."""
FLOW_RANKS = 64
BY_HIGHS = "HiGHS, floating point"


def solve_multiring(
    topology: Topology, collective: Collective, bound: Bound, seed: int, deadline: Deadline
) -> Schedule:
    """The schedule over the largest set of link-disjoint rings.

    `Method.settings` holds `rings` (how many, in units), `rings_at_most` (what the cuts allow) and
    `proved_largest`: "yes" where the cuts are met, or where all rings of a graph without switches were listed
    and prices of its links show that no more fit; `BY_HIGHS` where only HiGHS's integer program says so;
    "no" where the set is only the largest that was found.

    Raises:
        InfeasibleError: there is no ring, or none was found within the budget.
        TimedOutError: the deadline passed.
    """
    fabric = RingFabric(
        collective.ranks,
        switch_paths(topology, collective.ranks),
        dict(zip(topology.bandwidth, topology.capacities, strict=True)),
    )
    at_most = _rings_at_most(topology, fabric)
    chosen = _known(topology, fabric, seed)
    proved = "yes"
    if _size(chosen) < at_most:
        chosen, proved = _largest_set(
            fabric,
            at_most,
            seed,
            deadline,
            listable=not topology.switches and len(collective.ranks) <= LISTED_RANKS,
        )
    if not chosen:
        if proved == "yes":
            raise no_ring("multiring", topology, collective)
        raise InfeasibleError(
            f"multiring: no ring found through the {len(collective.ranks)} ranks of {topology.name} within "
            "the budget of the search; method trees needs none"
        )
    settings = (
        ("rings", sum(times for _, times in chosen)),
        ("rings_at_most", at_most),
        ("proved_largest", proved),
    )
    return ring_schedule(topology, collective, Method("multiring", seed, settings), bound, chosen)


def _known(topology: Topology, fabric: RingFabric, seed: int) -> list[tuple[Ring, int]]:
    """The rings of a square torus of more ranks than are searched with patience; else none."""
    if len(fabric.ranks) < topology.ranks or topology.ranks <= PATIENT_RANKS or topology.switches:
        return []
    rings = square_rings(topology, translations_of(topology, seed=seed, effort=0))
    return [(ring, topology.capacities[0]) for ring in rings]


def _largest_set(
    fabric: RingFabric, at_most: int, seed: int, deadline: Deadline, *, listable: bool
) -> tuple[list[tuple[Ring, int]], str]:
    """Rings with their multiplicities, and how it is known that no other set is larger."""
    found: dict[tuple[Hop, ...], Ring] = {}
    best: list[tuple[Ring, int]] = []
    none_exists = False
    patient = len(fabric.ranks) <= PATIENT_RANKS
    for attempt in range(GREEDY_TRIES if patient else HASTY_TRIES):
        # Pairs of opposite rings are found in half of the time, but there may be room for an odd number.
        rings, exhausted = _greedy(
            fabric, Random(seed + attempt), attempt, deadline, both_ways=attempt % 2 == 0
        )
        found.update((_key(ring), ring) for ring, _ in rings)
        best = max(best, rings, key=_size)
        none_exists |= exhausted and not rings
        if _size(best) >= at_most or none_exists:
            return best, "yes"
    complete = False
    if listable:
        try:
            found |= {_key(ring): ring for ring in _all_rings(fabric, seed, deadline)}
            complete = True
        except BudgetError:
            pass
    if not found:
        return [], "yes" if complete else "no"
    picked, most, closed = _pick(fabric, list(found.values()), deadline)
    best = max(best, picked, key=_size)
    if _size(best) >= min(at_most, most if complete else at_most):
        return best, "yes"
    return best, BY_HIGHS if complete and closed and _size(picked) == _size(best) else "no"


def _size(rings: Iterable[tuple[Ring, int]]) -> int:
    return sum(times for _, times in rings)


def _key(ring: Ring) -> tuple[Hop, ...]:
    return tuple(sorted(links_of(ring).elements()))


def _greedy(
    fabric: RingFabric, rng: Random, first: int, deadline: Deadline, *, both_ways: bool
) -> tuple[list[tuple[Ring, int]], bool]:
    """Rings one after the other, each as often as it fits; and whether none is left for certain."""
    left = dict(fabric.capacity)
    rings: list[tuple[Ring, int]] = []
    while True:
        patient = not rings or len(fabric.ranks) <= PATIENT_RANKS
        # Another start for each ring: a search tends to close where it began, over the same scarce links.
        start = fabric.ranks[(first + len(rings)) % len(fabric.ranks)]
        try:
            ring = find_ring(
                fabric.restricted(left), start=start, rng=rng, deadline=deadline, program=patient
            )
        except BudgetError:
            return rings, False
        if ring is None:
            return rings, True
        for each in (ring, *(_reverse(fabric, ring) if both_ways else ())):
            links = links_of(each)
            times = min(left[hop] // passes for hop, passes in links.items())
            if times:
                rings.append((each, times))
                for hop, passes in links.items():
                    left[hop] -= passes * times


def _reverse(fabric: RingFabric, ring: Ring) -> list[Ring]:
    """The ring the other way round, where each of its ways can be gone backwards."""
    backwards: list[Path] = []
    for way in reversed(ring):
        twins = [
            twin for twin in fabric.paths.get((way.dst, way.src), ()) if twin.via == tuple(reversed(way.via))
        ]
        if not twins:
            return []
        backwards.append(twins[0])
    return [tuple(backwards)]


def _all_rings(fabric: RingFabric, seed: int, deadline: Deadline) -> Iterator[Ring]:
    budget = Budget(LISTING_STEPS, deadline)
    rings = rings_of(fabric, start=fabric.ranks[0], budget=budget, rng=Random(seed))
    for count, ring in enumerate(rings):
        if count == LISTED_RINGS:
            raise BudgetError
        yield ring


def _pick(
    fabric: RingFabric, rings: Sequence[Ring], deadline: Deadline
) -> tuple[list[tuple[Ring, int]], int, bool]:
    """How often to use each ring, how many rings there can be at most, and whether HiGHS says these are most.

    Raises:
        TimedOutError: the deadline passed.
    """
    import highspy

    # Rings are counted in whole numbers: a gap below one is none.
    model = new_model(mip_max_nodes=PICKING_CASES, mip_rel_gap=0.0, mip_abs_gap=0.999)
    what = "the choice of link-disjoint rings"
    through: dict[Hop, list[tuple[int, int]]] = {}
    for column, ring in enumerate(rings):
        links = links_of(ring)
        model.addVar(0.0, highspy.kHighsInf)  # the links limit it; a limit of its own would take their prices
        model.changeColCost(column, -1.0)
        for hop, passes in links.items():
            through.setdefault(hop, []).append((column, passes))
    for hop, entries in through.items():
        columns = [column for column, _ in entries]
        passes_of = [float(passes) for _, passes in entries]
        model.addRow(0.0, float(fabric.capacity[hop]), len(entries), columns, passes_of)
    run(model, deadline, what=what)
    most = _most_at(fabric, rings, dict(zip(through, model.getSolution().row_dual, strict=False)))
    for column in range(len(rings)):
        model.changeColIntegrality(column, highspy.HighsVarType.kInteger)
    closed = run(model, deadline, what=what) == "Optimal"
    values = model.getSolution().col_value
    # Rounding a fraction of a unit up may overfill a link, so that whole numbers are counted out again.
    left = dict(fabric.capacity)
    picked: list[tuple[Ring, int]] = []
    for ring, value in zip(rings, values, strict=False):
        links = links_of(ring)
        times = min(round(value), *(left[hop] // passes for hop, passes in links.items()))
        if times > 0:
            picked.append((ring, times))
            for hop, passes in links.items():
                left[hop] -= passes * times
    return picked, most, closed


def _most_at(fabric: RingFabric, rings: Sequence[Ring], duals: Mapping[Hop, float]) -> int:
    """The number of rings that prices of the links allow, exactly: none costs less than the cheapest."""
    prices = {hop: round(abs(dual) * PRICE_PARTS) for hop, dual in duals.items()}
    costs = (sum(prices.get(hop, 0) * times for hop, times in links_of(ring).items()) for ring in rings)
    cheapest = min(costs)
    offered = sum(fabric.capacity[hop] * price for hop, price in prices.items())
    return offered // cheapest if cheapest else sum(fabric.capacity.values())


def _rings_at_most(topology: Topology, fabric: RingFabric) -> int:
    """Every ring leaves and enters each rank, and crosses every cut between two ranks both ways."""
    taking_part = {*fabric.ranks, *range(topology.ranks, topology.size)}
    units = {hop: room for hop, room in fabric.capacity.items() if taking_part.issuperset(hop)}
    leaving = dict.fromkeys(taking_part, 0)
    entering = dict.fromkeys(taking_part, 0)
    for (src, dst), room in units.items():
        leaving[src] += room
        entering[dst] += room
    limit = min(min(leaving[rank], entering[rank]) for rank in fabric.ranks)
    if len(fabric.ranks) > FLOW_RANKS:
        return limit
    whole = len(fabric.ranks) == topology.ranks
    part = topology if whole else topology.subset(fabric.ranks)
    first, *others = range(part.ranks)
    for graph in (part, part.reversed()):
        crossing = tightest_cut(graph, {first: 1}, others).cut.capacity
        limit = min(limit, int(crossing / topology.bandwidth_unit))
    return limit

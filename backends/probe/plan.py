"""What to measure: pairs in rounds, then loads, then pairs of flows that tell who shares with whom.

Pure: the plan depends on the number of ranks and, for the targeted pairs, on what was measured before, so
that all ranks that know the same numbers make the same plan. Of 4 ranks the matchings are

    0-3 1-2    1-3 0-2    2-3 0-1         every pair once; in a load both directions of each run
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from arborcast.backends.probe.measurements import Flow, Load, Spread


def matchings(ranks: int) -> list[tuple[Flow, ...]]:
    """Rounds of disjoint pairs that hold each pair once (the circle method); n - 1 rounds, n for odd n."""
    places = list(range(ranks)) if ranks % 2 == 0 else [*range(ranks), -1]
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append(tuple(sorted((min(pair), max(pair)) for pair in pairs if -1 not in pair)))
        # All places but the last move on by one, which gives each a new partner.
        places = [places[-2], *places[:-2], places[-1]]
    return rounds


def solo_rounds(ranks: int, *, parallel: bool) -> list[tuple[Flow, ...]]:
    """Flows to be measured together: each one alone, or with `parallel` those of disjoint pairs."""
    if not parallel:
        return [(flow,) for flow in permutations(range(ranks), 2)]
    rounds = matchings(ranks)
    return [*rounds, *(tuple((second, first) for first, second in pairs) for pairs in rounds)]


def broad_loads(ranks: int) -> list[tuple[Flow, ...]]:
    """All flows out of a rank, all flows into a rank, all flows of a matching both ways."""
    others = {rank: [other for other in range(ranks) if other != rank] for rank in range(ranks)}
    loads = [tuple((rank, other) for other in others[rank]) for rank in range(ranks)]
    loads += [tuple((other, rank) for other in others[rank]) for rank in range(ranks)]
    loads += [(*pairs, *((second, first) for first, second in pairs)) for pairs in matchings(ranks)]
    return _new(loads, known=())


def concurrent_loads(ranks: int) -> list[tuple[Flow, ...]]:
    """Two and more flows out of a rank to those after it, and into it: how many go well at once."""
    loads = []
    for rank in range(ranks):
        others = [(rank + distance) % ranks for distance in range(1, ranks)]
        for count in range(2, ranks):
            loads.append(tuple((rank, other) for other in others[:count]))
            loads.append(tuple((other, rank) for other in others[:count]))
    return _new(loads, known=())


def cable_loads(flows: Sequence[Flow], ranks: int) -> list[tuple[Flow, ...]]:
    """All flows out of a rank, all flows into a rank, all flows at once; a shared slot makes them slower.

    Args:
        flows: along cables, with the numbers of lanes where two ranks have several.
        ranks: their number.
    """
    loads = [
        tuple(flow for flow in flows if flow[end] % ranks == rank)
        for end in (0, 1)
        for rank in sorted({flow[end] % ranks for flow in flows})
    ]
    return _new([*loads, tuple(flows)], known=())


def targeted_loads(
    solo: Mapping[Flow, Spread], loads: Sequence[Load], *, slowed: float
) -> list[tuple[Flow, ...]]:
    """Pairs of flows that may share a link: those that one of `loads` slowed both.

    In each load the slowed flows are sorted, and each runs with the next one and with the one after it.

    Args:
        solo: rates of flows alone.
        loads: what was measured of the loads.
        slowed: a flow counts as slowed below its solo rate divided by 1 + this.
    """
    pairs: list[tuple[Flow, ...]] = []
    for load in loads:
        hit = [flow for flow in load.flows if load.rates[flow].median * (1 + slowed) < solo[flow].median]
        pairs += [
            (first, second)
            for distance in (1, 2)
            for first, second in zip(hit, [*hit[distance:], *hit[:distance]], strict=True)
            if first != second
        ]
    return _new(pairs, known=[load.flows for load in loads])


def _new(loads: Sequence[tuple[Flow, ...]], known: Sequence[tuple[Flow, ...]]) -> list[tuple[Flow, ...]]:
    """Loads of at least two flows, each once and in ascending order."""
    seen = set(known)
    kept = []
    for load in loads:
        flows = tuple(sorted(load))
        if len(flows) > 1 and flows not in seen:
            seen.add(flows)
            kept.append(flows)
    return kept

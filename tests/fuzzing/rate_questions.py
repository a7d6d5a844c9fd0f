"""Questions of rates: bounds and their certificates, relays, weights, faults, symmetries, units."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from random import Random
from typing import Any

from arborcast import synth
from arborcast.synth.certificate import Bound, Cut, Dual, Partition, Scope
from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.faults.faulty import without
from arborcast.synth.faults.repair import repair
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology
from tests.fuzzing import all_trees, chunk_search, limits
from tests.fuzzing.fabrics import fabric, times
from tests.fuzzing.tally import CLOSE, FLOWS, ROUNDED, TREES, Tally, draw_collective, spreading
from tests.support import able_limits
from tests.support.able_fabrics import drawn


def ask_bound(rng: Random, tally: Tally) -> None:
    """The limit is what the best schedule reaches, its certificate proves it, exact methods reach it."""
    topology = tally.draw(fabric(rng, switches=3))
    hubs = len(topology.switches)
    # Reductions that choose their roots double the program, and ways through switches grow fast.
    large = topology.ranks * (1 + hubs) > 14
    collective = draw_collective(rng, topology, (*TREES[:4], *FLOWS) if large else (*TREES, *FLOWS))
    with tally.no_crash("bound", collective):
        bound = synth.bound(topology, collective)
    check_certificate(tally, topology, collective, bound)
    cut = limits.least_cut(topology, collective)
    is_cut = collective.kind in {Kind.GATHER, Kind.SCATTER} or (collective.kind in TREES[:4] and not hubs)
    best = cut if is_cut else limits.best_rate(topology, collective)
    exact = bound.rate == best
    if not exact and isinstance(bound.certificate, Dual) and best < bound.rate <= best * ROUNDED:
        tally.label("bound (of rounded prices) holds", True)
    else:
        tally.label(f"bound of {collective.kind} is exact", exact, collective, bound.rate, best)
    answer = tally.solve(topology, collective)
    if isinstance(answer, InfeasibleError):
        tally.label("infeasible: cut off", best == 0, collective, answer)
    elif answer is not None:
        tally.rate(answer, best, collective)
        if exact and collective.kind is not Kind.ALLTOALL:
            tally.label("exact methods reach the limit", answer.is_optimal, collective, answer.rate, best)


def ask_relays(rng: Random, tally: Tally) -> None:
    """With relays the limit holds: trees through relays are not above it, and no cut is below it."""
    topology = tally.draw(fabric(rng, ranks=(3, 5), switches=1))
    collective = draw_collective(rng, topology, relays=True)
    with tally.no_crash("bound", collective):
        bound = synth.bound(topology, collective)
    check_certificate(tally, topology, collective, bound)
    cut, reached = limits.least_cut(topology, collective), limits.best_rate(topology, collective)
    tally.label("bound with relays", reached <= bound.rate <= cut, collective, reached, bound.rate, cut)
    if collective.kind in FLOWS:
        exact = reached <= bound.rate <= reached * ROUNDED
        tally.label("bound of flows with relays", exact, collective, reached, bound.rate)
    elif not topology.switches:
        best = all_trees.best_with_relays(topology, collective)
        tally.label("bound with relays holds", best <= bound.rate, collective, best, bound.rate)
    answer = tally.solve(topology, collective)
    if isinstance(answer, InfeasibleError):
        tally.label("infeasible: cut off", cut == 0, collective, answer)
    elif answer is not None:
        known = answer.rate <= bound.rate == answer.bound.rate
        tally.label("rate is possible", known, collective, answer.rate, bound.rate)


def ask_able(rng: Random, tally: Tally) -> None:
    """Switches that reduce and multicast: the limit is that of all trees; nothing found is faster."""
    topology = tally.draw(drawn(rng.randrange(10**9), most=6))
    collective = draw_collective(rng, topology, TREES, relays=rng.random() < 0.2)
    with tally.no_crash("bound", collective):
        bound = synth.bound(topology, collective)
    cut = limits.least_cut(topology, collective)
    if not cut or not bound.rate:
        tally.label("able switches: cut off", cut == bound.rate, collective, cut, bound.rate)
        return
    best = able_limits.best_rate(topology, collective).rate
    exact = best == bound.rate or (bool(collective.relays(topology)) and best <= bound.rate <= cut)
    tally.label("bound with able switches", exact, collective, best, bound.rate, cut)
    if not topology.limited_adders:  # which the replay does not count
        answer = tally.solve(topology, collective)
        if isinstance(answer, Schedule):
            tally.rate(answer, best, collective)


def ask_custom(rng: Random, tally: Tally) -> None:
    """Blocks of one's own: nothing that trees with steps reach is above the limit; of flows it is exact."""
    topology = tally.draw(fabric(rng, ranks=(2, 4), switches=1 if rng.random() < 0.3 else 0))
    demands = []
    for _ in range(rng.randint(1, 3)):
        order = rng.sample(range(topology.ranks), topology.ranks)
        sources = rng.randint(1, topology.ranks - 1)
        targets = rng.randint(1, topology.ranks - sources) if rng.random() < 0.5 else 1
        demands.append(Demand(frozenset(order[:sources]), frozenset(order[sources : sources + targets])))
    collective = Collective.custom(topology, demands)
    with tally.no_crash("bound", collective):
        bound = synth.bound(topology, collective)
    best = chunk_search.best_rate(topology, collective)
    tally.label("custom: bound holds", bound.rate >= best, demands, bound.rate, best)
    tally.label("custom: cut off", (bound.rate == 0) == (best == 0), demands, bound.rate, best)
    if all(len(demand.targets) == 1 for demand in demands):
        tally.label("custom: bound of flows", best <= bound.rate <= best * ROUNDED, demands, bound.rate, best)


def check_certificate(tally: Tally, topology: Topology, collective: Collective, bound: Bound) -> None:
    """What the certificate says, counted again; and whether its scope is what it proves."""
    match bound.certificate:
        case Cut(side, capacity):
            counted = limits.leaving(topology, side)
            proved = capacity == counted == bound.rate * limits.must_leave(collective, side)
            tally.label("certificate: cut", proved, collective, bound)
        case Partition(blocks, capacity):
            between = sum((limits.leaving(topology, block) for block in blocks), Fraction(0)) / 2
            proved = sorted(v for block in blocks for v in block) == list(range(topology.size))
            proved &= between == capacity == bound.rate * (len(blocks) - 1)
            tally.label("certificate: partition", proved, collective, bound)
        case Dual(lengths, capacity, distance):
            pairs = zip(topology.links, lengths, strict=True)
            offered = sum((link.bandwidth * length for link, length in pairs), Fraction(0))
            tally.label("certificate: offered", offered == capacity == bound.rate * distance, bound)
            if topology.ranks <= 5 and not collective.relays(topology):
                needed = all_trees.distance(topology, collective, lengths)
                tally.label("certificate: needed", needed == distance, collective, needed, distance)
            if collective.kind is Kind.ALLREDUCE and bound.scope is Scope.EVERY_SCHEDULE:
                least = all_trees.crossings(topology, lengths)
                tally.label("scope: every schedule", least >= distance, collective, least, distance)


def ask_mwu(rng: Random, tally: Tally) -> None:
    """Multiplicative weights: the limit that they prove, and the part of the optimum that they promise."""
    topology = tally.draw(fabric(rng, ranks=(2, 6), switches=1))
    collective = draw_collective(rng, topology, TREES[:4] if topology.ranks > 5 else TREES)
    epsilon = rng.choice([Fraction(1, 10), Fraction(1, 20), Fraction(1, 50)])
    answer = tally.solve(topology, collective, method="mwu", epsilon=epsilon)
    best = limits.best_rate(topology, collective)
    if isinstance(answer, InfeasibleError):
        tally.label("infeasible: cut off", best == 0, collective, answer)
    if not isinstance(answer, Schedule):
        return
    tally.rate(answer, best, collective)
    facts = dict(answer.method.settings)
    roots = len(spreading(topology, collective)[1] or [0])
    if facts["limit"] is not None:
        limit = Fraction(str(facts["limit"])) * roots
        tally.label("mwu: limit", limit >= best, collective, limit, best)
    if facts["stopped"] in {"guarantee", "enough"}:
        kept = answer.rate >= best * (1 - epsilon)
        tally.label(f"mwu: {facts['stopped']}", kept, collective, epsilon, answer.rate, best)


def ask_repair(rng: Random, tally: Tally) -> None:
    """What is repaired is as fast as anything on what is left."""
    topology = tally.draw(fabric(rng, ranks=(3, 6), switches=1))
    collective = draw_collective(rng, topology, TREES if topology.ranks <= 5 else TREES[:4])
    answer = tally.solve(topology, collective)
    if not isinstance(answer, Schedule):
        return
    link = rng.choice(topology.links)
    hop = (link.src, link.dst)
    faults: dict[str, Any] = rng.choice(
        [
            {"without_links": [hop]},
            {"slower_links": {hop: link.bandwidth * Fraction(rng.randint(1, 9), 10)}},
            {"without_ranks": [rng.choice([rank for rank in collective.ranks if rank != collective.root])]},
        ]
    )
    with tally.no_crash("repair", collective, faults):
        try:
            repaired = repair(answer, **faults)
        except InfeasibleError as error:
            left = {
                name.removeprefix("without_").removesuffix("_links"): each for name, each in faults.items()
            }
            kept = [rank for rank in collective.ranks if rank not in faults.get("without_ranks", ())]
            number = {rank: place for place, rank in enumerate(sorted(kept))}
            root = None if collective.root is None else number[collective.root]
            among = Collective(collective.kind, tuple(number[rank] for rank in kept), root)
            cut = limits.least_cut(without(topology, **left).topology, among)
            tally.label("infeasible: repair", cut == 0, collective, faults, error)
            return
    best = limits.best_rate(repaired.topology, repaired.collective)
    tally.replay(repaired, collective, faults)
    tally.rate(repaired, best, collective, faults)
    exact = repaired.rate == best or best < repaired.bound.rate <= best * ROUNDED
    tally.label("repair: as exact as anew", exact, collective, faults, repaired.rate, best)


def ask_implicit(rng: Random, tally: Tally) -> None:
    """The implicit form reaches the same limit, with a height the best of all trees that are as low."""
    topology = tally.draw(fabric(rng, ranks=(2, 6), regular=True, switches=1))
    kinds = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE, Kind.ALLTOALL)
    if topology.ranks > 5 and topology.switches:
        kinds = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLTOALL, Kind.ALLTOALL)
    collective = Collective(rng.choice(kinds), tuple(range(topology.ranks)))
    small = topology.ranks <= (3 if topology.switches else 5)
    wishes: list[dict[str, Any]] = [{}, {"tolerance": Fraction(1, 10)}, {"max_trees": 1}, {"max_trees": 2}]
    wishes += [{"max_height": rng.randint(1, max(2, topology.ranks // 2))}] * (6 if small else 0)
    wish = {} if collective.kind is Kind.ALLTOALL else rng.choice(wishes)
    height = wish.get("max_height")
    graph, roots = spreading(topology, collective)
    lowest = None if height is None else all_trees.best_of_height(graph, roots, height)
    with tally.no_crash("implicit", collective, wish):
        try:
            found = synth.solve(topology, collective, form="implicit", **wish)
        except InfeasibleError as error:
            tally.label("infeasible: implicit", lowest == 0, collective, wish, error)
            return
        verdict = synth.verify(found, every_translate=True)
        written = found.expand()
    tally.label("verified (every translate)", verdict.correct, collective, verdict.errors[:2])
    tally.replay(written, collective, wish)
    best = limits.best_rate(topology, collective)
    same = best <= found.bound.rate <= best * ROUNDED
    tally.label("implicit: the same limit", same, collective, found.bound.rate, best)
    tally.rate(written, best, collective)
    if "tolerance" in wish:
        kept = found.rate >= best * (1 - wish["tolerance"]) * CLOSE
        tally.label("tolerance", kept, collective, wish, found.rate, best)
    if "max_trees" in wish and collective.kind is not Kind.ALLREDUCE:
        most = max(Counter(chunk.owner for chunk in written.chunks).values())
        tally.label("max trees", most <= wish["max_trees"], collective, wish, most)
    if lowest is not None:
        tally.label("rate is possible", found.rate <= lowest, collective, height, found.rate, lowest)
        if dict(found.method.settings).get("best_trees") == "proved":
            reached = found.rate >= lowest * CLOSE
            tally.label("implicit: best trees proved", reached, collective, height, found.rate, lowest)


def ask_units(rng: Random, tally: Tally) -> None:
    """All bandwidths a power of ten larger: the same labels and shares, and every rate as much larger."""
    topology = tally.draw(fabric(rng, ranks=(2, 6), switches=1, decimals=4))
    collective = draw_collective(rng, topology)
    factor = Fraction(10) ** rng.randint(-9, 9)
    wishes: list[dict[str, Any]] = [
        {},
        {"method": "trees", "max_height": rng.randint(1, 3)},
        {"method": "trees", "max_trees": rng.randint(1, 3)},
        {"method": "trees", "tolerance": Fraction(1, 20)},
        {"method": "mwu"},
        {"method": "multiring"},
    ]
    request = rng.choice(wishes) if collective.kind in TREES else {}
    with tally.no_crash(collective, request, factor):
        try:
            here = synth.solve(topology, collective, **request)
        except InfeasibleError:
            return
        there = synth.solve(times(topology, factor), collective, **request)
    asked = (collective, request, factor)
    tally.label("scaled: rate", there.rate == here.rate * factor, *asked, here.rate, there.rate)
    tally.label("scaled: bound", there.bound.rate == here.bound.rate * factor, *asked)
    same = there.chunks == here.chunks and there.transfers == here.transfers
    tally.label("scaled: shares", same, *asked)
    in_units = {"limit", "unit"}
    labels = [
        {key: value for key, value in each.method.settings if key not in in_units} for each in (here, there)
    ]
    tally.label("scaled: labels", labels[0] == labels[1], *asked, *labels)

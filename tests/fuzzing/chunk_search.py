"""Whether there is a schedule of C chunks, S steps and R rounds, and the least R/C of S steps over all C.

Of an allreduce, a rank holds one partial sum of each chunk, a set of contributors: what it sends is added to
the receiver's, which it must not overlap, or takes its place. A schedule can say no more. Ranks that keep
several sums and send any of them are searched besides: what is proved over every schedule must hold for them,
too. One formula for each division of the rounds among the steps, answered by Glucose with sequential
counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise, product
from typing import Any

from pysat.card import CardEnc, EncType
from pysat.formula import IDPool
from pysat.solvers import Glucose4

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Topology
from tests.fuzzing.exact_lp import Program
from tests.fuzzing.limits import Way, ways

CONFLICTS = 20_000
MIRRORED = {Kind.REDUCE: Kind.BROADCAST, Kind.REDUCE_SCATTER: Kind.ALLGATHER}
Demand = tuple[frozenset[int], frozenset[int]]


def turned(topology: Topology, collective: Collective) -> tuple[Topology, Collective]:
    """A reduction as the broadcast that it is backwards in time."""
    if collective.kind not in MIRRORED:
        return topology, collective
    return topology.reversed(), Collective(MIRRORED[collective.kind], collective.ranks, collective.root)


def demands(collective: Collective) -> list[Demand]:
    """Who holds each block and who must get it, of a collective that copies."""
    ranks, root = collective.ranks, collective.root
    if collective.kind is Kind.CUSTOM:
        return [(demand.sources, demand.targets) for demand in collective.demands]
    pairs: Any = {
        Kind.BROADCAST: [(root, ranks)],
        Kind.ALLGATHER: [(rank, ranks) for rank in ranks],
        Kind.GATHER: [(rank, (root,)) for rank in ranks if rank != root],
        Kind.SCATTER: [(root, (rank,)) for rank in ranks if rank != root],
        Kind.ALLTOALL: [(src, (dst,)) for src in ranks for dst in ranks if src != dst],
    }[collective.kind]
    return [(frozenset([src]), frozenset(dst) - {src}) for src, dst in pairs]


def divisions(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to divide so many rounds among the steps, each at least one."""
    for cuts in combinations(range(1, total), count - 1):
        yield tuple(end - start for start, end in pairwise((0, *cuts, total)))


def exists(
    topology: Topology, collective: Collective, chunks: int, steps: int, rounds: int, *, several: bool = False
) -> bool | None:
    """Whether a schedule exists; C of an allreduce is of the whole buffer. None: not found out.

    `several` lets ranks of an allreduce keep several partial sums of a chunk.
    """
    every = divisions(rounds, steps)
    answers = [_exists(topology, collective, chunks, division, several=several) for division in every]
    return True if True in answers else None if None in answers else False


def exists_in_long_steps(topology: Topology, collective: Collective, steps: int) -> bool | None:
    """Whether any allreduce takes so few steps, however long they are; a chunk is then as good as many."""
    everything = len(collective.ranks) * 2 ** len(collective.ranks)  # sends of a chunk in a step, at most
    return _exists(topology, collective, 1, [everything * len(topology.links)] * steps, several=True)


def _exists(
    topology: Topology,
    collective: Collective,
    chunks: int,
    rounds: Sequence[int],
    *,
    several: bool = False,
) -> bool | None:
    graph, asked = turned(topology, collective)
    routes = ways(graph, range(graph.ranks), range(graph.ranks, graph.size))
    pool, clauses = IDPool(), []
    sends: dict[tuple[int, tuple[int, int]], list[int]] = {}
    if asked.kind is Kind.ALLREDUCE and not several:
        for chunk in range(chunks):
            clauses += _one_sum(pool, chunk, asked.ranks, graph.ranks, routes, len(rounds), sends)
    else:
        for block, (sums, start, end) in enumerate(_blocks(asked)):
            for chunk in range(chunks):
                clauses += _moves(pool, (block, chunk), graph.ranks, routes, len(rounds), sums, start, sends)
                clauses += [[pool.id(("has", block, chunk, rank, what, len(rounds)))] for rank, what in end]
    for (step, hop), used in sends.items():
        room = int(graph.bandwidth[hop] / graph.bandwidth_unit) * rounds[step]
        if room < len(used):
            clauses += CardEnc.atmost(used, room, vpool=pool, encoding=EncType.seqcounter).clauses
    with Glucose4(bootstrap_with=clauses) as solver:
        solver.conf_budget(CONFLICTS)
        found: bool | None = solver.solve_limited()
        return found


def _one_sum(
    pool: IDPool,
    chunk: int,
    ranks: Sequence[int],
    everyone: int,
    routes: Sequence[Way],
    steps: int,
    sends: dict[tuple[int, tuple[int, int]], list[int]],
) -> list[list[int]]:
    """What a chunk of an allreduce may do: each rank or relay has the contributions of one set of ranks."""

    def has(rank: int, whose: int, step: int) -> int:
        return int(pool.id(("has", chunk, rank, whose, step)))

    clauses = [
        [has(rank, whose, 0) * (1 if rank == whose else -1)] for rank in range(everyone) for whose in ranks
    ]
    clauses += [[has(rank, whose, steps)] for rank in ranks for whose in ranks]
    for step, rank in product(range(steps), range(everyone)):
        arriving = [way for way in routes if way[-1] == rank]
        adds = {way: pool.id(("add", chunk, way, step)) for way in arriving}
        copies = {way: pool.id(("copy", chunk, way, step)) for way in arriving}
        for way in arriving:
            for hop in pairwise(way):
                sends.setdefault((step, hop), []).extend([adds[way], copies[way]])
            # Nothing else arrives where something takes the place of what was there.
            others = [*adds.values(), *(copies[other] for other in arriving if other != way)]
            clauses += [[-copies[way], -other] for other in others]
        for whose in ranks:
            before, after = has(rank, whose, step), has(rank, whose, step + 1)
            brought = []
            for way in arriving:
                sender, part = has(way[0], whose, step), pool.id(("part", chunk, way, whose, step))
                clauses += [[-part, adds[way]], [-part, sender], [part, -adds[way], -sender]]
                clauses += [[-part, -before], *([-part, -other] for other in brought), [-part, after]]
                clauses += [[-copies[way], -after, sender], [-copies[way], after, -sender]]
                brought.append(part)
            kept = list(copies.values())
            clauses += [[*kept, -before, after], [*kept, -after, before, *brought]]
    return clauses


Holding = tuple[int, frozenset[int]]


def _blocks(collective: Collective) -> Iterator[tuple[list[frozenset[int]], set[Holding], set[Holding]]]:
    """Of each block: its possible sums, who holds what before, and who must hold what after."""
    if collective.kind is Kind.ALLREDUCE:
        ranks = collective.ranks
        sums = [frozenset(some) for size in range(1, len(ranks) + 1) for some in combinations(ranks, size)]
        yield (
            sums,
            {(rank, frozenset([rank])) for rank in ranks},
            {(rank, frozenset(ranks)) for rank in ranks},
        )
        return
    for sources, targets in demands(collective):
        whole = frozenset([-1])
        yield [whole], {(rank, whole) for rank in sources}, {(rank, whole) for rank in targets}


def _moves(
    pool: IDPool,
    name: tuple[int, int],
    ranks: int,
    routes: Sequence[Way],
    steps: int,
    sums: Sequence[frozenset[int]],
    start: set[Holding],
    sends: dict[tuple[int, tuple[int, int]], list[int]],
) -> list[list[int]]:
    """What is held was held, arrived, or is a sum of two that are held; what is sent is held."""

    def has(rank: int, what: frozenset[int], step: int) -> int:
        return int(pool.id(("has", *name, rank, what, step)))

    clauses = []
    for rank, what in product(range(ranks), sums):
        for step in range(steps + 1):
            reasons = [] if step else [pool.id("true")] if (rank, what) in start else []
            if step:
                reasons = [has(rank, what, step - 1)]
                for way in routes:
                    if way[-1] == rank:
                        sent = pool.id(("send", *name, way, what, step - 1))
                        reasons.append(sent)
                        clauses.append([-sent, has(way[0], what, step - 1)])
                        for hop in pairwise(way):
                            sends.setdefault((step - 1, hop), []).append(sent)
            for part in sums:
                rest = what - part
                if part < what and min(part) == min(what):
                    both = pool.id(("both", *name, rank, what, part, step))
                    clauses += [[-both, has(rank, part, step)], [-both, has(rank, rest, step)]]
                    reasons.append(both)
            clauses.append([-has(rank, what, step), *reasons])
    return [*clauses, [pool.id("true")]]


def least_ratio(topology: Topology, collective: Collective, steps: int) -> Fraction | None:
    """The least R/C of so many steps over every number of chunks; None where some rank is too far.

    As many chunks as one likes are fractions, so that trees whose edges have steps share the rounds.
    """
    graph, asked = turned(topology, collective)
    routes = ways(graph, range(graph.ranks), range(graph.ranks, graph.size))
    unit = graph.bandwidth_unit
    program = Program()
    using: dict[tuple[int, tuple[int, int]], dict[object, int]] = {}
    for block, (sources, targets) in enumerate(demands(asked)):
        mine: dict[object, int] = {}
        for number, tree in enumerate(_timed(routes, sources, targets, steps)):
            mine[block, number] = -1
            for way, step in tree:
                for hop in pairwise(way):
                    row = using.setdefault((step, hop), {})
                    row[block, number] = row.get((block, number), 0) + 1
        if not mine:
            return None
        program.at_most({"chunks": 1, **mine})
    for (step, hop), users in using.items():
        program.at_most({**users, ("rounds", step): -graph.bandwidth[hop] / unit})
    program.at_most({("rounds", step): 1 for step in range(steps)}, 1)
    return 1 / program.maximum("chunks")


def best_rate(topology: Topology, collective: Collective) -> Fraction:
    """The best rate of blocks of one's own along trees, whatever steps they take."""
    routes = ways(topology, range(topology.ranks), range(topology.ranks, topology.size))
    program = Program()
    using: dict[tuple[int, int], dict[object, int]] = {}
    for block, (sources, targets) in enumerate(demands(collective)):
        trees = {
            frozenset(way for way, _ in tree) for tree in _timed(routes, sources, targets, topology.ranks)
        }
        program.at_most({"rate": 1, **{(block, tree): -1 for tree in trees}})
        for tree in trees:
            for way in tree:
                for hop in pairwise(way):
                    row = using.setdefault(hop, {})
                    row[block, tree] = row.get((block, tree), 0) + 1
    for hop, users in using.items():
        program.at_most(users, topology.bandwidth[hop])
    return program.maximum("rate") * len(collective.demands)


def _timed(
    routes: Sequence[Way], sources: frozenset[int], targets: frozenset[int], steps: int
) -> set[frozenset[tuple[Way, int]]]:
    """Every tree from the sources to the targets whose edges have steps, without useless leaves."""
    found: set[frozenset[tuple[Way, int]]] = set()
    seen: set[frozenset[tuple[Way, int]]] = set()
    stack = [(frozenset[tuple[Way, int]](), 0)]
    while stack:
        tree, step = stack.pop()
        reached = dict.fromkeys(sources, -1) | {way[-1]: when for way, when in tree}
        if (
            targets <= reached.keys()
            and {way[-1] for way, _ in tree} - {way[0] for way, _ in tree} <= targets
        ):
            found.add(tree)
            continue
        for when in range(step, steps):
            for way in routes:
                if way[-1] not in reached and reached.get(way[0], steps) < when:
                    larger = tree | {(way, when)}
                    if larger not in seen:
                        seen.add(larger)
                        stack.append((larger, when))
    return found

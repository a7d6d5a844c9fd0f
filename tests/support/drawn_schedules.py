"""Schedules for the tests of lowering and running: a few drawn by hand, and random ones of every kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from hypothesis import strategies as st

from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Hop, Link, Topology
from tests.support.strategies import custom_collectives


def full_mesh(ranks: int) -> Topology:
    return Topology.build(
        f"full-{ranks}",
        ranks,
        [Link(a, b, Fraction(1)) for a in range(ranks) for b in range(ranks) if a != b],
    )


def make(
    kind: Kind | str,
    chunks: Iterable[Chunk],
    transfers: Iterable[Transfer],
    *,
    total: int,
    ranks: Sequence[int] | None = None,
    root: int = 0,
) -> Schedule:
    """A schedule on a full mesh of `total` ranks; its bound is there for form's sake."""
    topology = full_mesh(total)
    return _made(topology, Collective.on(topology, kind, root=root, ranks=ranks), chunks, transfers)


def _made(
    topology: Topology, collective: Collective, chunks: Iterable[Chunk], transfers: Iterable[Transfer]
) -> Schedule:
    for_form = Bound(Fraction(topology.ranks), Cut(frozenset({0}), Fraction(topology.ranks)))
    return Schedule.build(topology, collective, Method("drawn"), for_form, chunks, transfers)


def ring_allreduce(ranks: int) -> Schedule:
    """Chunk c is summed along the ring up to rank c, then passed round once more."""
    transfers = [
        Transfer(chunk, (chunk + 1 + step) % ranks, (chunk + 2 + step) % ranks, step, step < ranks - 1)
        for chunk in range(ranks)
        for step in range(2 * (ranks - 1))
    ]
    return make("allreduce", [Chunk(Fraction(1, ranks), c) for c in range(ranks)], transfers, total=ranks)


def tree_broadcast() -> Schedule:
    """Three chunks of shares 1/2, 1/3, 1/6 down different trees of five ranks, root 1."""
    chunks = [Chunk(Fraction(1, share), 1) for share in (2, 3, 6)]
    #                 chunk 0: a chain       chunk 1: a star   chunk 2: two levels
    edges = [
        [(1, 0), (0, 2), (2, 3), (3, 4)],
        [(1, r) for r in (0, 2, 3, 4)],
        [(1, 4), (1, 2), (4, 0), (2, 3)],
    ]
    steps = [[0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 1, 1]]
    transfers = [
        Transfer(chunk, src, dst, step)
        for chunk in range(3)
        for (src, dst), step in zip(edges[chunk], steps[chunk], strict=True)
    ]
    return make("broadcast", chunks, transfers, total=5, root=1)


def recursive_doubling() -> Schedule:
    """Four ranks; in each step partners exchange the whole buffer and both add: sends read the old state."""
    transfers = [Transfer(0, rank, rank ^ (1 << step), step, True) for step in range(2) for rank in range(4)]
    return make("allreduce", [Chunk(Fraction(1), 0)], transfers, total=4)


def uneven_allreduce() -> Schedule:
    """Many chunks whose shares have nothing in common, each over a star with its own centre."""
    weights = [Fraction(1, prime) for prime in (7, 11, 13, 17, 19, 23, 29, 31)]
    weights.append(1 - sum(weights))
    chunks = [Chunk(weight, index % 3) for index, weight in enumerate(weights)]
    transfers = []
    for index, chunk in enumerate(chunks):
        leaves = [rank for rank in range(3) if rank != chunk.owner]
        transfers += [Transfer(index, leaf, chunk.owner, 0, True) for leaf in leaves]
        transfers += [Transfer(index, chunk.owner, leaf, 1) for leaf in leaves]
    return make("allreduce", chunks, transfers, total=3)


def allgather_over_relay() -> Schedule:
    """Ranks 2 and 0 (in this order of blocks) gather through rank 1, which takes no part."""
    chunks = [Chunk(Fraction(1, 2), 2), Chunk(Fraction(1, 2), 0)]
    transfers = [Transfer(0, 2, 1, 0), Transfer(0, 1, 0, 1), Transfer(1, 0, 1, 0), Transfer(1, 1, 2, 1)]
    return make("allgather", chunks, transfers, total=3, ranks=[2, 0])


def direct(kind: Kind | str, ranks: int, root: int = 0) -> Schedule:
    """Gather, scatter or alltoall in one step, every block straight to its target."""
    collective = Collective.on(full_mesh(ranks), kind, root=root)
    chunks, transfers = [], []
    for index, ((owner, target, _), share) in enumerate(collective.blocks().items()):
        assert owner is not None and target is not None
        chunks.append(Chunk(share, owner, target))
        transfers.append(Transfer(index, owner, target, 0))
    return make(kind, chunks, transfers, total=ranks, root=root)


def custom_exchange() -> Schedule:
    """Four ranks and a relay: block 0 twice, block 1 through the relay, block 2 over a rank without it.

    block   held by   wanted by   chunks and their ways
    0       0, 1      2, 3        0>2 and 1>3 (chunk 0), 1>2>3 (chunk 1)
    1       3         0           3>4>0 (chunk 2), rank 4 is a relay
    2       2         1, 3        2>0>1 and 2>3 (chunk 3), and back to rank 2, which holds it already
    """
    topology = full_mesh(5)
    wanted = [({0, 1}, {2, 3}), ({3}, {0}), ({2}, {1, 3})]
    collective = Collective.custom(topology, [Demand(frozenset(at), frozenset(to)) for at, to in wanted])
    third = Fraction(1, 3)
    chunks = [
        Chunk(third / 4, 0, demand=0),
        Chunk(third * 3 / 4, 0, demand=0),
        Chunk(third, 3, demand=1),
        Chunk(third, 2, demand=2),
    ]
    transfers = [
        Transfer(0, 0, 2, 0),
        Transfer(0, 1, 3, 0),
        Transfer(1, 1, 2, 0),
        Transfer(1, 2, 3, 1),
        Transfer(2, 3, 4, 0),
        Transfer(2, 4, 0, 1),
        Transfer(3, 2, 0, 0),
        Transfer(3, 2, 3, 0),
        Transfer(3, 0, 1, 1),
        Transfer(3, 3, 2, 2),
    ]
    return _made(topology, collective, chunks, transfers)


def in_rounds(schedule: Schedule, bound: Bound | None = None) -> Schedule:
    """The same transfers step by step, each step as long as its busiest link needs; chunks of one size."""
    topology = schedule.topology
    count: dict[tuple[int, Hop], int] = {}
    for transfer in schedule.transfers:
        for hop in transfer.hops:
            count[transfer.step, hop] = count.get((transfer.step, hop), 0) + 1
    rounds = [1] * schedule.steps
    for (step, hop), chunks in count.items():
        rounds[step] = max(rounds[step], -(-chunks * topology.bandwidth_unit // topology.bandwidth[hop]))
    return Schedule.build(
        topology,
        schedule.collective,
        schedule.method,
        bound or schedule.bound,
        schedule.chunks,
        schedule.transfers,
        rounds,
    )


@st.composite
def schedules(draw: st.DrawFn, kinds: Sequence[Kind] = tuple(Kind), *, even: bool = False) -> Schedule:
    """Any kind on up to five ranks and two relays: random shares, trees, idle steps, exchanges.

    With `even` all chunks are of one size.
    """
    kind = draw(st.sampled_from(kinds))
    members = draw(st.integers(2, 5))
    topology = full_mesh(members + draw(st.integers(0, 2)))
    if kind is Kind.CUSTOM:
        collective = draw(custom_collectives(topology, max_blocks=3))
    else:
        ranks = draw(st.permutations(range(topology.ranks)))[:members]
        collective = Collective.on(topology, kind, root=draw(st.sampled_from(ranks)), ranks=ranks)
    divided = draw(st.integers(1, 3))
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for block, share in collective.blocks().items():
        weights = [1] * divided if even else draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
        for weight in weights:
            root = draw(st.sampled_from(collective.ranks)) if block.owner is None else block.owner
            chunk = Chunk(share * Fraction(weight, sum(weights)), root, block.target, block.demand)
            transfers += draw(_moves(collective, topology.ranks, len(chunks), chunk))
            chunks.append(chunk)
    return _made(topology, collective, chunks, transfers)


@st.composite
def _moves(draw: st.DrawFn, collective: Collective, total: int, index: int, chunk: Chunk) -> list[Transfer]:
    """The transfers of one chunk."""
    ranks = collective.ranks
    if collective.kind is Kind.ALLREDUCE and len(ranks) in {2, 4} and draw(st.booleans()):
        return _exchange(draw(st.permutations(ranks)), index, draw(st.integers(0, 2)))
    roots, reached = {chunk.owner}, set(ranks) if chunk.target is None else {chunk.target}
    if chunk.demand is not None:
        roots = set(collective.demands[chunk.demand].sources)
        reached = set(collective.demands[chunk.demand].targets)
    height = draw(st.integers(total, total + 2))
    edges = draw(_trees(roots, total, reached, height))
    down = [Transfer(index, src, dst, step) for src, dst, step in edges]
    if not collective.kind.reduces:
        return down
    into = draw(_trees(roots, total, reached, height))
    up = [Transfer(index, dst, src, height - 1 - step, True) for src, dst, step in into]
    if collective.kind is not Kind.ALLREDUCE:
        return up
    return up + [Transfer(index, src, dst, step + height) for src, dst, step in edges]


@st.composite
def _trees(
    draw: st.DrawFn, roots: set[int], total: int, reached: set[int], height: int
) -> list[tuple[int, int, int]]:
    """Edges away from the roots with steps that grow along every path, all below `height`.

    Ranks outside `reached` are only kept where they lead to one inside. Siblings may share a step.
    """
    steps: dict[int, int] = dict.fromkeys(sorted(roots), -1)
    edges = []
    for rank in draw(st.permutations(sorted(set(range(total)) - roots))):
        parent = draw(st.sampled_from([known for known in steps if steps[known] < height - 1]))
        steps[rank] = draw(st.integers(steps[parent] + 1, min(steps[parent] + 2, height - 1)))
        edges.append((parent, rank, steps[rank]))
    needed, kept = set(reached), []
    for parent, rank, step in reversed(edges):
        if rank in needed:
            needed.add(parent)
            kept.append((parent, rank, step))
    return kept


def _exchange(ranks: Sequence[int], chunk: int, first: int) -> list[Transfer]:
    return [
        Transfer(chunk, rank, ranks[position ^ bit], first + level, True)
        for level, bit in enumerate(bit for bit in (1, 2) if bit < len(ranks))
        for position, rank in enumerate(ranks)
    ]


def reductions_before_sends() -> Schedule:
    """An allreduce in which ranks still send what they hold in the step in which something reaches them."""
    #          step  0                            1             2            3
    words = "0>3+ 2>1+ 1>2+             | 3>1+      | 1>3 3>2+   | 3>0"
    transfers = [
        Transfer(0, int(word[0]), int(word[2]), step, word.endswith("+"))
        for step, of_step in enumerate(words.split("|"))
        for word in of_step.split()
    ]
    return make("allreduce", [Chunk(Fraction(1), 0)], transfers, total=4)


DRAWN = {
    "ring": ring_allreduce(4),
    "tree": tree_broadcast(),
    "exchange": recursive_doubling(),
    "uneven": uneven_allreduce(),
    "relay": allgather_over_relay(),
    "gather": direct("gather", 3, root=1),
    "scatter": direct("scatter", 3, root=2),
    "alltoall": direct("alltoall", 3),
    "custom": custom_exchange(),
}
"""One of each sort, by name: what every executor is tried on."""

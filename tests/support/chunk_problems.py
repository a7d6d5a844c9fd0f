"""Problems of chunks that tests name or draw, and what a tree in their time-expanded graphs must be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from arborcast.synth.chunks.allreduce.partial_sums import sum_problem
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import Group
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.fuzzing import chunk_search
from tests.support.strategies import collectives, custom_collectives, topologies

ROUTED = [Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL]
COPIES = [Kind.BROADCAST, Kind.ALLGATHER, *ROUTED]


def problem_of(fabric: str | Topology, kind: str = "allgather", root: int = 0) -> ChunkProblem:
    topology = load(fabric) if isinstance(fabric, str) else fabric
    return ChunkProblem.of(topology, Collective.on(topology, kind, root=root))


def drawn_prices(data: st.DataObject, latency: int, links: int) -> np.ndarray:
    """Of the links in each step, whole; from one step fewer than the latency to two more."""
    steps = data.draw(st.integers(max(1, latency - 1), latency + 2))
    drawn = st.lists(st.integers(0, 9), min_size=links, max_size=links)
    return np.array([data.draw(drawn) for _ in range(steps)], dtype=np.int64)


def sums_on(fabric: str | Topology, ranks: Sequence[int] | None = None) -> ChunkProblem:
    """Of an allreduce."""
    topology = load(fabric) if isinstance(fabric, str) else fabric
    return sum_problem(topology, Collective.on(topology, "allreduce", ranks=ranks))


def least_ratio(problem: ChunkProblem, steps: int) -> Fraction:
    """The least R/C of so many steps over every C, by all trees."""
    collective = Collective.custom(problem.topology, problem.demands)
    found = chunk_search.least_ratio(problem.topology, collective, steps)
    assert found is not None
    return found


def exists(problem: ChunkProblem, chunks: int, steps: int, rounds: int) -> bool:
    """Whether there is a schedule, by a formula that shares nothing with the encodings."""
    collective = Collective.custom(problem.topology, problem.demands)
    found = chunk_search.exists(problem.topology, collective, chunks, steps, rounds)
    assert found is not None
    return found


def rotations(ranks: int) -> Group:
    """Of a ring."""
    return tuple(tuple((rank + by) % ranks for rank in range(ranks)) for by in range(ranks))


def _copies(topology: Topology, kinds: Sequence[Kind], custom: bool) -> st.SearchStrategy[Collective]:
    named = collectives(topology, kinds=kinds, relays=True)
    return st.one_of(named, custom_collectives(topology)) if custom else named


@st.composite
def problems(
    draw: st.DrawFn, max_ranks: int, *, custom: bool = False, symmetric: bool | None = None
) -> ChunkProblem:
    """On fabrics with a switch or without; whose links are alike both ways, or not where that is not said."""
    alike = draw(st.booleans()) if symmetric is None else symmetric
    topology = draw(topologies(max_ranks=max_ranks, switches=1, max_bandwidth=2, symmetric=alike))
    return ChunkProblem.of(topology, draw(_copies(topology, COPIES, custom)))


@st.composite
def small_problems(
    draw: st.DrawFn, kinds: Sequence[Kind] = COPIES, custom: bool = True
) -> tuple[ChunkProblem, int]:
    """Few enough ranks and routes for all trees to be listed, in as few steps as possible or one more."""
    few = draw(st.integers(0, 1))
    topology = draw(topologies(max_ranks=3 if few else 4, switches=few, symmetric=draw(st.booleans())))
    problem = ChunkProblem.of(topology, draw(_copies(topology, kinds, custom)))
    assert problem.latency is not None
    spare = draw(st.integers(0, 1)) if problem.ranks < 4 or problem.latency < 3 else 0
    return problem, problem.latency + spare


def check_tree(problem: ChunkProblem, demand: int, steps: int, tree: Iterable[tuple[int, int]]) -> None:
    """Each send after its sender holds the block, each rank reached once, every target reached."""
    since = dict.fromkeys(problem.demands[demand].sources, 0)
    for route, step in tree:
        assert since[problem.routes[route].src] <= step < steps
        assert problem.routes[route].dst not in since
        since[problem.routes[route].dst] = step + 1
    assert problem.demands[demand].targets <= since.keys()

"""Compiles the kernels once, so that the first question a user asks is not the slow one.

`make install` runs `python -m arborcast.synth.compile_kernels`; two tiny topologies reach every kernel.
"""

from __future__ import annotations

import contextlib
import logging
from fractions import Fraction
from typing import get_args

import numpy as np

from arborcast.synth.alltoallv.block_planner import LARGEST_PROGRAM, AlltoallvPlanner
from arborcast.synth.api import Form, solve
from arborcast.synth.chunks.bounds.spanning_check import spanning_costs
from arborcast.synth.chunks.frontier import pareto
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.trees.insertion import InsertionSearch
from arborcast.synth.collective import NAMED_KINDS, Collective
from arborcast.synth.kernels.compiled import compile_all, kernel_folder
from arborcast.synth.methods import IMPLICIT_KINDS
from arborcast.synth.simulation.simulator import Runs
from arborcast.synth.topology import Link, Switch, Topology
from arborcast.synth.verification.verifier import verify

log = logging.getLogger(__name__)


def warm() -> None:
    """Run every compiled kernel: on a triangle, whose links all lie between ranks, and around a switch."""
    circle = _both_ways([(rank, (rank + 1) % 11) for rank in range(11)])  # more ranks than are exact at once
    solve(Topology.build("eleven", 11, circle), "broadcast", method="trees", max_height=6)
    triangle = _both_ways([(0, 1), (1, 2), (2, 0)])
    spokes = _both_ways([(0, 1), (0, 3), (1, 3), (2, 3)])
    for topology in (Topology.build("triangle", 3, triangle), Topology.build("spokes", 3, spokes, ["hub"])):
        for kind in NAMED_KINDS:
            runs = Runs(solve(topology, kind))
            runs.choice(1 << 20)
            runs.least_us(1 << 20)
        solve(topology, "allreduce", method="mwu", max_trees=1)
        solve(topology, "broadcast", method="trees", max_height=2)
        pareto(topology, "broadcast", max_steps=2, cache=False)
        # Searched so on many ranks only.
        problem = ChunkProblem.of(topology, Collective.on(topology, "broadcast"))
        InsertionSearch(problem, 0, 2).run(np.ones((2, len(topology.links))))
    spanning_costs(np.ones((2, 3, 3), dtype=np.int64), 99)
    star = Topology.build("star", 3, _both_ways([(0, 3), (1, 3), (2, 3)]), ["hub"])
    for topology in (Topology.build("triangle", 3, triangle), star):  # both with a symmetry that moves all
        for moved in IMPLICIT_KINDS:
            verify(solve(topology, moved, form="implicit"), every_translate=True)
    able = Topology.build(
        "able",
        3,
        _both_ways([(0, 3), (1, 3), (2, 3)]),
        [Switch("hub", reduces=True, multicasts=True, turns=True)],
        [(1, 2, 0, 3)],
    )
    for form in get_args(Form):
        solve(able, "allreduce", form=form)
    AlltoallvPlanner(star).plan([[0, 1, 2], [1, 0, 5], [0, 0, 0]]).schedule()
    sizes = [[(7 * source * target + source) % 13 for target in range(11)] for source in range(11)]
    for largest in (LARGEST_PROGRAM, 0):
        AlltoallvPlanner(Topology.build("eleven", 11, circle), largest_program=largest).plan(sizes)


def warm_once() -> None:
    """The same, but only where it has not been done for these kernels in this cache."""
    folder = kernel_folder()
    marker = None if folder is None else folder / "warm"
    if marker is None or marker.exists():
        return
    log.info("kernels are compiled, once; this takes about half a minute")
    compile_all()
    warm()
    with contextlib.suppress(OSError):
        marker.touch()


def _both_ways(pairs: list[tuple[int, int]]) -> list[Link]:
    return [Link(src, dst, Fraction(1)) for a, b in pairs for src, dst in ((a, b), (b, a))]


if __name__ == "__main__":
    warm_once()

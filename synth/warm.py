"""Compiles the kernels once, so that the first question a user asks is not the slow one.

`make install` runs `python -m synth.warm`; a solve of one tiny topology reaches every kernel.
"""

from __future__ import annotations

from fractions import Fraction

from synth.methods import solve
from synth.simulator import simulate
from synth.topology import Link, Topology


def warm() -> None:
    """Run every compiled kernel on a triangle around a switch."""
    spokes = ((rank, 3) for rank in range(3))
    pairs = [(0, 1), (1, 2), *spokes]
    links = [Link(*pair, Fraction(1)) for pair in pairs] + [Link(b, a, Fraction(1)) for a, b in pairs]
    topology = Topology.build("warm", 3, links, ["switch"])
    for kind in ("broadcast", "allgather", "allreduce", "gather", "alltoall"):
        simulate(solve(topology, kind), 1 << 20)
    solve(topology, "broadcast", method="mwu")


if __name__ == "__main__":
    warm()

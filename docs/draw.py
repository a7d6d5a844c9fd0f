"""Draws the pictures of this folder's pages: `python docs/draw.py` replaces those in docs/pictures."""

from __future__ import annotations

import sys
from pathlib import Path

from arborcast import synth, topologies
from arborcast.synth.baselines import comparison
from arborcast.synth.formats.sizes import size_range
from arborcast.synth.pictures import draw_frontier, draw_steps, draw_sweep, draw_topology, draw_trees

HERE = Path(__file__).resolve().parent / "pictures"


def draw(folder: Path = HERE) -> None:
    """Every picture, by the names that pages use."""
    six = topologies.load("dgx1").subset([0, 1, 2, 3, 4, 5])
    draw_topology(six, folder / "six-gpus.svg")
    schedule = synth.solve(six, "allreduce")
    draw_trees(schedule, folder / "trees.svg")
    timings = comparison.compare(schedule, size_range("64KiB:256MiB")).by_method
    title = "allreduce: simulated time and bus bandwidth over the size of the buffer"
    draw_sweep(timings, folder / "dgx1-fragment.svg", bound=schedule.bound, title=title)
    draw_topology(topologies.load("torus:4x4"), folder / "torus.svg")
    draw_topology(topologies.load("star:4"), folder / "star.svg")
    frontier = synth.pareto(topologies.load("dgx1"), "allgather")
    draw_frontier(frontier, folder / "frontier.svg", title="Allgather on a DGX-1")
    draw_steps(frontier.points[0].schedule, folder / "steps.svg")


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))

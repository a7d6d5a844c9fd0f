"""Pictures of topologies, trees, steps, frontiers, timings and links over time, as SVG or PNG by the suffix.

Needs matplotlib (the extra `viz`), which is imported when something is drawn and not before. Nothing here
decides anything: a picture shows what a `Topology`, a `Schedule` or the simulator says.
"""

from arborcast.synth.pictures.curves import draw_sweep
from arborcast.synth.pictures.fabric import draw_topology
from arborcast.synth.pictures.frontier_picture import draw_frontier
from arborcast.synth.pictures.steps import draw_steps
from arborcast.synth.pictures.timelines import draw_timeline
from arborcast.synth.pictures.tree_picture import draw_trees

__all__ = ["draw_frontier", "draw_steps", "draw_sweep", "draw_timeline", "draw_topology", "draw_trees"]

"""The trees of a schedule as small multiples, one chunk per panel, roots on top.

Switches that reduce or multicast are squares; what they loop back is not drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from arborcast.synth.errors import InputError
from arborcast.synth.pictures.canvas import INK, PALETTE, check_path, headline, picture
from arborcast.synth.schedule import Schedule, Transfer
from arborcast.synth.topology import Topology, Vertex

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PANELS = 12

_DOWN, _UP, _SWITCH = PALETTE[0], PALETTE[1], PALETTE[4]
_INCH = 0.42  # per width of a leaf
_WIDEST_PANEL = 6.0
_NARROWEST_PANEL = 2.4  # a title fits
_WIDEST_FIGURE = 12.0


@dataclass(frozen=True)
class _Tree:
    """One half of what a chunk does: down from the root, up to it, or both along the same edges.

    Attributes:
        root: the rank on top.
        children: of each rank that has some, in order.
        down: the transfers by child where they lead down.
        up: the transfers by child where they lead up.
    """

    root: int
    children: Mapping[int, Sequence[int]]
    down: Mapping[int, Transfer]
    up: Mapping[int, Transfer]

    @cached_property
    def points(self) -> dict[int, tuple[float, float]]:
        """Leaves side by side, every parent one above its children and over their middle."""
        points: dict[int, tuple[float, float]] = {}
        leaves = 0
        todo = [(self.root, 0, False)]
        while todo:
            rank, depth, children_are_placed = todo.pop()
            children = self.children.get(rank, ())
            if not children:
                points[rank] = (float(leaves), -float(depth))
                leaves += 1
            elif children_are_placed:
                x = (points[children[0]][0] + points[children[-1]][0]) / 2
                points[rank] = (x, -float(depth))
            else:
                todo.append((rank, depth, True))
                todo += [(child, depth + 1, False) for child in reversed(children)]
        return points

    @property
    def width(self) -> float:
        """Number of leaves."""
        return 1 + max(x for x, _ in self.points.values())

    @property
    def height(self) -> float:
        """Levels below the root."""
        return -min(y for _, y in self.points.values())


def draw_trees(schedule: Schedule, path: Path | str, *, max_panels: int = MAX_PANELS) -> None:
    """Draw the tree of each chunk, the largest shares first.

    Each chunk's reductions must form a tree and its copies too; beyond `max_panels` chunks are only counted.

    Raises:
        InputError: a chunk moves along no tree, an unknown suffix, no matplotlib, or the file cannot be
            written.
    """
    check_path(path)
    moved: dict[int, list[Transfer]] = {}
    for transfer in schedule.transfers:
        moved.setdefault(transfer.chunk, []).append(transfer)
    order = sorted(moved, key=lambda chunk: (-schedule.chunks[chunk].share, chunk))
    topology = schedule.topology
    shown = {chunk: _trees(chunk, _without_loops(moved[chunk], topology)) for chunk in order[:max_panels]}
    if not shown:
        raise InputError(f"picture {path}: the schedule has no transfers to draw")
    measure = _Measure.of(list(shown.values()))
    columns = max(1, min(len(shown), 4, int(_WIDEST_FIGURE / measure.panel[0])))
    rows = -(-len(shown) // columns)
    size = (columns * measure.panel[0] + 0.3, rows * measure.panel[1] + 0.75)
    with picture(path, *size, rows, columns) as (figure, axes):
        for panel_axes in axes:
            measure.set_up(panel_axes)
        for panel_axes, (chunk, trees) in zip(axes, shown.items(), strict=False):
            _draw_panel(panel_axes, trees, measure, topology)
            panel_axes.set_title(_weight(schedule, chunk), fontsize=8)
        more = f" (the {len(shown)} with the largest shares)" if len(order) > len(shown) else ""
        count = f"{len(order)} tree{'s' if len(order) > 1 else ''}"
        headline(
            figure,
            f"{schedule.collective.kind} on {schedule.topology.name}: "
            f"{count}, {float(schedule.rate):.4g} GB/s{more}",
            _explain([tree for trees in shown.values() for tree in trees]),
        )


@dataclass(frozen=True)
class _Measure:
    """How large things are, the same in all panels.

    Attributes:
        width: of a panel in widths of a leaf.
        height: of a panel in the same.
        level: from one level to the next in the same; more where trees are wide, so that flat edges
            pass above the siblings.
        scale: inches for the width of a leaf.
    """

    width: float
    height: float
    level: float
    scale: float

    @classmethod
    def of(cls, panels: Sequence[Sequence[_Tree]]) -> _Measure:
        """What makes all panels fit."""
        width = max(sum(tree.width for tree in trees) + len(trees) - 1 for trees in panels) + 0.4
        level = min(1.0 + 0.09 * max(tree.width for trees in panels for tree in trees), 4.0)
        height = level * max(tree.height for trees in panels for tree in trees) + 0.9
        scale = min(_INCH, _WIDEST_PANEL / width)
        return cls(max(width, _NARROWEST_PANEL / scale), height, level, scale)

    @property
    def panel(self) -> tuple[float, float]:
        """Inches of a panel, with its title."""
        return self.width * self.scale, self.height * self.scale + 0.5

    @property
    def zoom(self) -> float:
        """By how much lines and letters shrink."""
        return self.scale / _INCH

    @property
    def disc_points(self) -> float:
        """Diameter of a rank's disc, in typographic points."""
        return 0.6 * self.scale * 72

    def set_up(self, axes: Axes) -> None:
        """Give a panel its limits, with the root's disc just inside."""
        axes.set_axis_off()
        axes.set_aspect("equal")
        axes.set_xlim(-0.7, self.width - 0.7)
        axes.set_ylim(0.45 - self.height, 0.45)


def _weight(schedule: Schedule, chunk: int) -> str:
    share = schedule.chunks[chunk].share
    part = str(share) if share.denominator < 1000 else f"{100 * float(share):.3g} %"
    return f"{part} of the buffer, {float(share * schedule.rate):.3g} GB/s"


def _trees(chunk: int, transfers: Sequence[Transfer]) -> list[_Tree]:
    """The way up and the way down of a chunk, as one tree where both use the same edges."""
    up = {transfer.src: transfer for transfer in transfers if transfer.reduce}
    down = {transfer.dst: transfer for transfer in transfers if not transfer.reduce}
    if len(up) + len(down) < len(transfers):
        raise InputError(
            f"chunk {chunk}: cannot be drawn as a tree, a rank sends or receives it more than once"
        )
    parents_up = {child: transfer.dst for child, transfer in up.items()}
    parents_down = {child: transfer.src for child, transfer in down.items()}
    if parents_up == parents_down:
        return [_tree(chunk, parents_down, down, up)]
    halves = []
    if up:
        halves.append(_tree(chunk, parents_up, {}, up))
    if down:
        halves.append(_tree(chunk, parents_down, down, {}))
    return halves


def _tree(
    chunk: int, parents: Mapping[int, int], down: Mapping[int, Transfer], up: Mapping[int, Transfer]
) -> _Tree:
    roots = set(parents.values()) - parents.keys()
    if len(roots) != 1:
        raise InputError(f"chunk {chunk}: cannot be drawn as a tree, it has {len(roots)} roots")
    children: dict[int, list[int]] = {}
    for child, parent in sorted(parents.items()):
        children.setdefault(parent, []).append(child)
    tree = _Tree(roots.pop(), children, down, up)
    if len(tree.points) != len(parents) + 1:
        raise InputError(f"chunk {chunk}: cannot be drawn as a tree, some of its ranks go round in a circle")
    return tree


def _without_loops(transfers: Sequence[Transfer], topology: Topology) -> list[Transfer]:
    """The transfers without those by which a switch loops back, each sum that it gives as a reduction."""
    if topology.holders == topology.ranks:
        return list(transfers)
    kept: list[Transfer] = []
    inputs: dict[Vertex, list[Transfer]] = {}  # of what each switch holds
    for transfer in transfers:  # in order of step
        held = inputs.get(transfer.src, [])
        loops = topology.is_switch(transfer.src) and topology.switches[transfer.src - topology.ranks].loopback
        back = next((one for one in held if loops and one.src == transfer.dst), None)
        if back is not None and len(held) > 1:
            kept.remove(back)
            kept.append(replace(transfer, reduce=True))
        elif back is None:
            kept.append(transfer)
        if topology.is_switch(transfer.dst):
            before = inputs.get(transfer.dst, []) if transfer.reduce else []
            inputs[transfer.dst] = [*before, transfer]
    return kept


def _draw_panel(axes: Axes, trees: Sequence[_Tree], measure: _Measure, topology: Topology) -> None:
    left = 0.0
    for tree in trees:
        places = {rank: (left + x, measure.level * y) for rank, (x, y) in tree.points.items()}
        for child in {**tree.up, **tree.down}:
            _draw_edge(axes, tree, child, places, measure)
        for rank, (x, y) in places.items():
            is_root, name = rank == tree.root, str(topology.label(rank))
            axes.scatter(
                [x],
                [y],
                s=measure.disc_points**2,
                marker="s" if topology.is_switch(rank) else "o",
                facecolor=INK if is_root else "white",
                edgecolor=INK,
                linewidth=0.8 * measure.zoom,
                zorder=3,
            )
            axes.text(
                x,
                y - 0.02,
                name,
                ha="center",
                va="center",
                fontsize=8 * measure.zoom * (1 if len(name) < 3 else 2.25 / len(name)),
                color="white" if is_root else INK,
                zorder=4,
            )
        left += tree.width + 1


def _draw_edge(
    axes: Axes, tree: _Tree, child: int, places: Mapping[int, tuple[float, float]], measure: _Measure
) -> None:
    """An arrow the way the data goes; a small square where it passes switches."""
    from matplotlib.patches import FancyArrowPatch

    up, down = tree.up.get(child), tree.down.get(child)
    transfer = up or down
    assert transfer is not None
    start, end = places[transfer.dst if transfer.src == child else transfer.src], places[child]
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="<|-|>" if up and down else "-|>" if down else "<|-",
            mutation_scale=7 * measure.zoom,
            shrinkA=measure.disc_points / 2 + 1,
            shrinkB=measure.disc_points / 2 + 1,
            linewidth=1.1 * measure.zoom,
            color=INK if up and down else _DOWN if down else _UP,
            zorder=1,
        )
    )
    if (up and up.via) or (down and down.via):
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        axes.scatter(*middle, s=(0.16 * measure.scale * 72) ** 2, marker="s", color=_SWITCH, zorder=2)


def _explain(trees: Sequence[_Tree]) -> str:
    parts = ["The root is dark."]
    if any(tree.up and not tree.down for tree in trees):
        parts.append("Orange arrows up: reduce.")
    if any(tree.down and not tree.up for tree in trees):
        parts.append("Blue arrows down: copy.")
    if any(tree.down and tree.up for tree in trees):
        parts.append("Arrows both ways: reduce up, then copy down.")
    if any(transfer.via for tree in trees for transfer in (*tree.up.values(), *tree.down.values())):
        parts.append("A square on an edge: through switches.")
    return " ".join(parts)

"""The trees of a schedule as small multiples, one chunk per panel, roots on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from synth.errors import InputError
from synth.pictures.canvas import INK, PALETTE, check_path, headline, picture
from synth.schedule import Schedule, Transfer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PANELS = 12

_DOWN, _UP = PALETTE[0], PALETTE[1]
_LEVEL = 1.15  # height of a level in widths of a leaf
_INCH = 0.42  # per width of a leaf
_WIDEST_PANEL = 6.0
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
        """Leaves side by side, every parent above the middle of its children."""
        points: dict[int, tuple[float, float]] = {}
        leaves = 0
        todo = [(self.root, 0, False)]
        while todo:
            rank, depth, children_are_placed = todo.pop()
            children = self.children.get(rank, ())
            if not children:
                points[rank] = (float(leaves), -_LEVEL * depth)
                leaves += 1
            elif children_are_placed:
                x = (points[children[0]][0] + points[children[-1]][0]) / 2
                points[rank] = (x, -_LEVEL * depth)
            else:
                todo.append((rank, depth, True))
                todo += [(child, depth + 1, False) for child in reversed(children)]
        return points

    @property
    def width(self) -> float:
        """Number of leaves."""
        return 1 + max(x for x, _ in self.points.values())

    @property
    def depth(self) -> float:
        """Of the lowest rank."""
        return -min(y for _, y in self.points.values())


def draw_trees(schedule: Schedule, path: Path | str, *, max_panels: int = MAX_PANELS) -> None:
    """Draw the tree of each chunk, the largest shares first.

    Args:
        schedule: each chunk's reductions must form a tree and its copies too.
        path: an .svg or .png file.
        max_panels: the others are only counted.

    Raises:
        InputError: a chunk moves along no tree, an unknown suffix, no matplotlib, or the file cannot be
            written.
    """
    check_path(path)
    moved: dict[int, list[Transfer]] = {}
    for transfer in schedule.transfers:
        moved.setdefault(transfer.chunk, []).append(transfer)
    order = sorted(moved, key=lambda chunk: (-schedule.chunks[chunk].share, chunk))
    shown = {chunk: _trees(chunk, moved[chunk]) for chunk in order[:max_panels]}
    if not shown:
        raise InputError(f"picture {path}: the schedule has no transfers to draw")
    width = max(sum(tree.width for tree in trees) + len(trees) - 1 for trees in shown.values()) + 0.4
    depth = max(tree.depth for trees in shown.values() for tree in trees) + 0.9
    scale = min(_INCH, _WIDEST_PANEL / width)
    panel = max(width * scale, 1.9)
    columns = max(1, min(len(shown), 4, int(_WIDEST_FIGURE / panel)))
    rows = -(-len(shown) // columns)
    size = (columns * panel + 0.3, rows * (depth * scale + 0.5) + 0.75)
    with picture(path, *size, rows, columns) as (figure, axes):
        for panel_axes, (chunk, trees) in zip(axes, shown.items(), strict=False):
            _draw_panel(panel_axes, trees, scale)
            panel_axes.set_title(_weight(schedule, chunk), fontsize=8)
        for panel_axes in axes:
            panel_axes.set_axis_off()
            panel_axes.set_aspect("equal")
            panel_axes.set_xlim(-0.7, panel / scale - 0.7)
            panel_axes.set_ylim(-depth + 0.45, 0.45)
        more = f" (the {len(shown)} with the largest shares)" if len(order) > len(shown) else ""
        count = f"{len(order)} tree{'s' if len(order) > 1 else ''}"
        headline(
            figure,
            f"{schedule.collective.kind} on {schedule.topology.name}: "
            f"{count}, {float(schedule.rate):.4g} GB/s{more}",
            _explain([tree for trees in shown.values() for tree in trees]),
        )


def _weight(schedule: Schedule, chunk: int) -> str:
    share = schedule.chunks[chunk].share
    return f"{share} of the buffer, {float(share * schedule.rate):.4g} GB/s"


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


def _draw_panel(axes: Axes, trees: Sequence[_Tree], scale: float) -> None:
    left = 0.0
    for tree in trees:
        for child in {**tree.up, **tree.down}:
            _draw_edge(axes, tree, child, left, scale)
        for rank, (x, y) in tree.points.items():
            is_root = rank == tree.root
            axes.scatter(
                [left + x],
                [y],
                s=(0.6 * scale * 72) ** 2,
                facecolor=INK if is_root else "white",
                edgecolor=INK,
                linewidth=0.8 * scale / _INCH,
                zorder=3,
            )
            axes.text(
                left + x,
                y - 0.02,
                str(rank),
                ha="center",
                va="center",
                fontsize=8 * scale / _INCH * (1 if rank < 100 else 0.75),
                color="white" if is_root else INK,
                zorder=4,
            )
        left += tree.width + 1


def _draw_edge(axes: Axes, tree: _Tree, child: int, left: float, scale: float) -> None:
    """An arrow the way the data goes; a small square where it passes switches."""
    from matplotlib.patches import FancyArrowPatch

    (x, y) = tree.points[child]
    (parent_x, parent_y) = tree.points[(tree.down or tree.up)[child].src if tree.down else tree.up[child].dst]
    radius = 0.6 * scale * 72 / 2 + 1
    goes_up, goes_down = child in tree.up, child in tree.down
    axes.add_patch(
        FancyArrowPatch(
            (left + parent_x, parent_y),
            (left + x, y),
            arrowstyle="<|-|>" if goes_up and goes_down else "-|>" if goes_down else "<|-",
            mutation_scale=7 * scale / _INCH,
            shrinkA=radius,
            shrinkB=radius,
            linewidth=1.1 * scale / _INCH,
            color=INK if goes_up and goes_down else _DOWN if goes_down else _UP,
            zorder=1,
        )
    )
    if {**tree.up, **tree.down}[child].via:
        middle = ((left + parent_x + left + x) / 2, (parent_y + y) / 2)
        axes.scatter(*middle, s=(0.16 * scale * 72) ** 2, marker="s", color="#e69f00", zorder=2)


def _explain(trees: Sequence[_Tree]) -> str:
    parts = ["The root is the dark disc."]
    if any(tree.up and not tree.down for tree in trees):
        parts.append("Orange arrows up: reduce.")
    if any(tree.down and not tree.up for tree in trees):
        parts.append("Blue arrows down: copy.")
    if any(tree.down and tree.up for tree in trees):
        parts.append("Arrows both ways: reduce up, then copy down.")
    if any(transfer.via for tree in trees for transfer in (*tree.up.values(), *tree.down.values())):
        parts.append("A square on an edge: through switches.")
    return " ".join(parts)

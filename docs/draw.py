"""Draws the pictures of this folder's pages: `python docs/draw.py` replaces those in docs/pictures.

`--check` draws them elsewhere and ends with 1 where docs/pictures has others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import zip_longest
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
    carried = synth.verify(synth.solve(six, "allreduce", method="multiring")).loads
    draw_topology(six, folder / "idle-links.svg", idle=[hop for hop in six.bandwidth if not carried.get(hop)])
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


def differences(folder: Path, drawn: Path) -> list[str]:
    """Where pictures are not as drawn now: the first line of each, and those that nothing draws."""
    found = []
    for name in sorted({path.name for path in (*folder.iterdir(), *drawn.iterdir())}):
        pair = [path.read_text("utf-8") if path.exists() else None for path in (folder / name, drawn / name)]
        if None in pair:
            found.append(f"{folder / name}: {'is missing' if pair[0] is None else 'nothing draws it'}")
        elif pair[0] != pair[1]:
            lines = enumerate(zip_longest(*(str(text).splitlines() for text in pair)), 1)
            at = next((number for number, (has, wanted) in lines if has != wanted), 1)
            found.append(f"{folder / name}:{at}: is drawn otherwise today")
    return found


def main() -> int:
    """Draw, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?", default=HERE)
    parser.add_argument("--check", action="store_true", help="only say what differs")
    asked = parser.parse_args()
    if not asked.check:
        draw(asked.folder)
        return 0
    with tempfile.TemporaryDirectory() as elsewhere:
        draw(Path(elsewhere))
        found = differences(asked.folder, Path(elsewhere))
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print("pictures are not those of today: run make pages", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())

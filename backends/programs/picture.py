"""A counterexample drawn: who waits for whom, or which two steps nothing orders."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from arborcast.backends.programs.checking.verdict import ProgramVerdict
from arborcast.synth.errors import InputError
from arborcast.synth.pictures.canvas import INK, PALETTE, QUIET, check_path, headline, picture

MOST_BOXES = 12
"""Steps of a counterexample that are drawn."""


def draw_counterexample(verdict: ProgramVerdict, path: Path | str, *, name: str) -> None:
    """Draw the trace of a verdict: a box for each step, an arrow to the one that it waits for.

    `name` says of which program.

    Raises:
        InputError: there is nothing to draw, an unknown suffix, no matplotlib, or the file cannot be written.
    """
    check_path(path)
    if not verdict.trace:
        raise InputError(
            f"picture {path}: only a hang or a race has a picture, got {verdict.errors[:1] or 'none'}"
        )
    boxes = verdict.trace[:MOST_BOXES]
    left = len(verdict.trace) - len(boxes)
    with picture(path, 7.0, 1.0 + 0.95 * len(boxes)) as (figure, axes):
        (canvas,) = axes
        canvas.set_axis_off()
        canvas.set_xlim(0, 10)
        canvas.set_ylim(len(boxes) - 0.4, -0.6)
        for row, wait in enumerate(boxes):
            colour = PALETTE[wait.rank % len(PALETTE)]
            canvas.text(
                1.1,
                row,
                fill(wait.text, 78),
                va="center",
                color=INK,
                fontsize=8,
                bbox={
                    "boxstyle": "round,pad=0.5",
                    "facecolor": "white",
                    "edgecolor": colour,
                    "linewidth": 1.4,
                },
            )
            if row + 1 < len(boxes):
                style = "->" if "deadlock" in verdict.kinds else "<->"
                canvas.annotate(
                    "", (1.6, row + 0.72), (1.6, row + 0.28), arrowprops={"arrowstyle": style, "color": QUIET}
                )
        if verdict.circle and not left and len(boxes) > 1:
            canvas.annotate(
                "",
                (1.0, 0),
                (1.0, len(boxes) - 1),
                arrowprops={"arrowstyle": "->", "color": QUIET, "connectionstyle": "bar,fraction=-0.08"},
            )
        what = "Who waits for whom" if "deadlock" in verdict.kinds else "What nothing orders"
        note = f"; {left} more steps are not drawn" if left else ""
        headline(figure, what, f"{name}{note}")

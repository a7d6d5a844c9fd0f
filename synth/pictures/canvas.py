"""What all pictures share: one look, one palette, and files that are whole or not there."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
"""Told apart by colour-blind readers too (Okabe and Ito), the strongest first, yellow left out for paper."""

INK = "#222222"
FAINT = "#d9d9d9"
QUIET = "#6b6b6b"

LETTERS_PER_INCH = 16
"""Of the quieter line below a picture, for those that must break it."""

_LOOK: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "svg.hashsalt": "arborcast",  # the same picture is the same file
}


def check_path(path: Path | str) -> str:
    """The format that a path asks for, before any work is done.

    Raises:
        InputError: the suffix is neither .svg nor .png, or matplotlib is not installed.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in {".svg", ".png"}:
        raise InputError(f"picture {path}: the name must end in .svg or .png, got {suffix or 'no suffix'}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(
            f"picture {path}: pictures need matplotlib; install it with: pip install 'arborcast[viz]'"
        ) from error
    return suffix[1:]


@contextmanager
def picture(
    path: Path | str, width: float, height: float, rows: int = 1, columns: int = 1
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of so many inches with its axes, row by row; written to the path when the block ends.

    Raises:
        InputError: as `check_path`, or the file cannot be written.
    """
    form = check_path(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # A figure of its own instead of pyplot's: no window system, and the look is undone.
    with mpl.rc_context(_LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        yield figure, list(axes.flat)
        drawn = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(drawn, format=form, dpi=144, facecolor="white", metadata=metadata)
    write_atomically(path, drawn.getvalue())


def headline(figure: Figure, title: str, note: str = "") -> None:
    """What the whole picture shows, in a line above it, and a quieter line below it."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color=QUIET)

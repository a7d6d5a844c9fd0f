"""Values in Jupyter: topologies draw themselves, bounds and schedules say what they are, `view` plays.

`arborcast` registers these where it is imported inside IPython; `%load_ext arborcast` does so by hand.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborcast.synth.certificate import Bound
from arborcast.synth.formats.sizes import size_range
from arborcast.synth.formats.words import assumed, gigabytes, proof, share
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.simulation.timing import Timing
from arborcast.synth.topology import Topology
from arborcast.synth.viewer.page import page_of, write_page

if TYPE_CHECKING:
    from arborcast.synth.viewer.scene import Json

MOST_DRAWN = 128
"""Vertices of a topology that draws itself; a larger one is a smudge."""


@dataclass(frozen=True)
class View:
    """A page of the viewer: Jupyter shows it in a frame, `write` keeps it.

    Attributes:
        scenes: what it plays, see `synth.viewer.scene`.
        height: of the frame, pixels.
    """

    scenes: tuple[Json, ...]
    height: int = 820

    def write(self, path: Path | str) -> None:
        """Write the page to a file.

        Raises:
            InputError: it cannot be written.
        """
        write_page(self.scenes, path)

    def _repr_html_(self) -> str:
        page = escape(page_of(self.scenes), quote=True)
        style = f"width:100%;height:{self.height}px;border:0"
        return f'<iframe srcdoc="{page}" title="schedule" style="{style}"></iframe>'


def view(*schedules: AnySchedule, sizes: str | Sequence[int] = "1MiB", height: int = 820) -> View:
    """Play a schedule, or two side by side, on its topology.

    Args:
        schedules: one or two.
        sizes: of the whole buffer: bytes, or a size or range as `synth view --sizes` takes it.
        height: of the frame in Jupyter, pixels.

    Raises:
        ValueError: no schedule, or more than two.
        InputError: a wrong size, or an installation without the viewer's script.

    Examples:
        >>> schedule = synth.solve(topologies.load("ring:4"), "allreduce")
        >>> synth.view(schedule, sizes="64KiB").write("ring.html")
    """
    from arborcast.synth.viewer.scene import scene_of

    if not 1 <= len(schedules) <= 2:
        raise ValueError(f"one or two schedules are shown, got {len(schedules)}")
    asked = size_range(sizes) if isinstance(sizes, str) else tuple(sizes)
    facts = [[f"{name}: {value}" for name, value in _facts(schedule)] for schedule in schedules]
    shown = View(
        tuple(scene_of(schedule, asked, said) for schedule, said in zip(schedules, facts, strict=True)),
        height,
    )
    page_of(shown.scenes)  # says at once where the script is missing
    return shown


def register(ipython: Any) -> None:
    """Teach an IPython shell how our values look; nothing of ours is imported before one is shown."""
    formatters = ipython.display_formatter.formatters
    for form, module, name, show in (
        ("image/svg+xml", "arborcast.synth.topology", "Topology", topology_svg),
        ("text/html", "arborcast.synth.certificate", "Bound", bound_html),
        ("text/html", "arborcast.synth.schedule", "Schedule", schedule_html),
        ("text/html", "arborcast.synth.implicit_schedule", "ImplicitSchedule", schedule_html),
        ("text/html", "arborcast.synth.simulation.timing", "Timing", timing_html),
    ):
        formatters[form].for_type_by_name(module, name, show)


def topology_svg(topology: Topology) -> str | None:
    """The picture of a topology; None (its text is shown) where it is too large or matplotlib is absent."""
    if topology.size > MOST_DRAWN:
        return None
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        return None
    from arborcast.synth.pictures import draw_topology

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "topology.svg"
        draw_topology(topology, path)
        return path.read_text(encoding="utf-8")


def bound_html(bound: Bound) -> str:
    """The rate of a bound, and what proves it."""
    return _table([("bound", gigabytes(bound.rate)), ("proof", proof(bound)), ("scope", bound.scope.value)])


def schedule_html(schedule: AnySchedule) -> str:
    """What a schedule does, how fast, beside its bound."""
    return _table(_facts(schedule))


def timing_html(timing: Timing) -> str:
    """One simulated size."""
    return _table(
        [
            ("bytes", f"{timing.bytes:,}"),
            ("time", f"{timing.time_us:,.2f} us"),
            ("algbw", f"{timing.algbw:.2f} GB/s"),
            ("busbw", f"{timing.busbw:.2f} GB/s"),
        ]
    )


def _facts(schedule: AnySchedule) -> list[tuple[str, str]]:
    of_bound = share(schedule.rate, schedule.bound.rate)
    quality = "equal to the bound" if schedule.is_optimal else f"{of_bound} of the bound"
    facts = [
        ("schedule", f"{schedule.collective.kind} on {schedule.topology.name}"),
        ("method", schedule.method.name),
        ("rate", f"{gigabytes(schedule.rate)}, {quality} over {schedule.bound.scope.value}"),
        ("proof", proof(schedule.bound, schedule.topology)),
        ("shape", f"{schedule.chunk_count} chunks, height {schedule.height}, {schedule.steps} steps"),
    ]
    if isinstance(schedule, ImplicitSchedule):
        kept, order = len(schedule.chunks), schedule.translations.order
        facts.append(("form", f"implicit: {kept} representatives, moved by {order} translations"))
    told = [("rates", assumed("rate", schedule.topology)), ("waits", assumed("latency", schedule.topology))]
    return [*facts, *(fact for fact in told if fact[1])]


def _table(rows: Iterable[tuple[str, str]]) -> str:
    left = 'style="text-align:left"'
    cells = "".join(
        f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(value)}</td></tr>" for name, value in rows
    )
    return f"<table>{cells}</table>"

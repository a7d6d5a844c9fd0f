"""The picture of a survey, as BLINK draws it: for each allocation a pair of bars, trees beside NCCL's ring.

One panel per collective, allocations in groups by their size, the optimum as a line across its pair. It shows
what the rows of `bench.fragments.survey` say and works out nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from arborcast.bench.allocations.nccl import NCCL, NCCL_RELAYS, Over
from arborcast.synth.baselines.nccl_model import NOT_RUN
from arborcast.synth.errors import InputError
from arborcast.synth.pictures.canvas import FAINT, INK, LETTERS_PER_INCH, PALETTE, QUIET, headline, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR = 0.38
_GAP = 0.7  # between groups of a size
_INCHES_PER_FRAGMENT = 0.29
_LEAST_WIDTH = 14.5  # the title and the legend beside each other
_ROOM_ABOVE = 1.18
_TREES, _OPTIMUM = "trees", "proven optimum"
_DIRECT, _PCIE = "NCCL's rings (model)", "over PCIe: no ring of direct links (model)"
_RELAYED = "through another GPU, since NCCL 2.8.3 (model)"
_LEGEND = (_OPTIMUM, _TREES, _DIRECT, _PCIE, _RELAYED)
_NOTE = (
    "algbw of large messages at NCCL's own link rates. Trees and optimum are exact; rings are "
    f"{NOT_RUN}. Below each pair: the GPUs, one of the sets with these links; cut off: "
    "NVLinks do not join them."
)

Case = Mapping[str, Mapping[str, Any]]
"""The rows of one fragment and collective, by method."""


def draw_fragments(rows: Sequence[Mapping[str, Any]], path: Path | str) -> None:
    """Draw the rows of one box, in the order in which they come.

    Args:
        rows: of `bench.fragments.survey`.
        path: an .svg or .png file.

    Raises:
        InputError: no rows or those of several boxes, an unknown suffix, no matplotlib, or the file cannot be
            written.
    """
    boxes = {row["box"] for row in rows}
    if len(boxes) != 1:
        raise InputError(f"picture {path}: must show the fragments of one box, got {len(boxes)}")
    by_collective: dict[str, dict[str, dict[str, Mapping[str, Any]]]] = {}
    for row in rows:
        cases = by_collective.setdefault(row["collective"], {})
        cases.setdefault(row["gpus"], {})[row["method"]] = row
    fragments = max(map(len, by_collective.values()))
    width = max(_LEAST_WIDTH, _INCHES_PER_FRAGMENT * fragments + 1.2)
    height = 1.1 + 2.6 * len(by_collective)
    with picture(path, width, height, len(by_collective)) as (figure, panels):
        for axes, (collective, cases) in zip(panels, by_collective.items(), strict=True):
            _draw_panel(axes, collective, list(cases.values()))
        drawn: dict[str, Any] = {}
        for axes in panels:
            drawn |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        labels = [label for label in _LEGEND if label in drawn]
        handles = [drawn[label] for label in labels]
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize=8)
        headline(
            figure,
            f"What each allocation of {boxes.pop()} gives",
            fill(_NOTE, int(LETTERS_PER_INCH * width)),
        )


def _draw_panel(axes: Axes, collective: str, cases: Sequence[Case]) -> None:
    places = _places(cases)
    _draw_pairs(axes, cases, places)
    _draw_limits(axes, cases, places)
    highest = max(_rate(case, method) for case in cases for method in case)
    axes.set_ylim(0, max(highest, *(case["trees"]["optimum"] for case in cases)) * _ROOM_ABOVE)
    axes.set_xlim(places[0] - 0.8, places[-1] + 0.8)
    axes.set_xticks(places, [case["trees"]["gpus"].replace(",", " ") for case in cases])
    axes.tick_params(axis="x", labelrotation=90, labelsize=7, length=0, pad=2)
    axes.set_ylabel("GB/s")
    axes.set_title(collective)
    axes.grid(visible=True, axis="y")
    axes.set_axisbelow(True)
    _name_groups(axes, cases, places)


def _places(cases: Sequence[Case]) -> list[float]:
    """Where each pair stands: one after the other, with a gap where the size changes."""
    places: list[float] = []
    for index, case in enumerate(cases):
        gap = index > 0 and case["trees"]["ranks"] != cases[index - 1]["trees"]["ranks"]
        places.append(places[-1] + 1 + _GAP * gap if places else 0.0)
    return places


def _draw_pairs(axes: Axes, cases: Sequence[Case], places: Sequence[float]) -> None:
    axes.bar(
        [place - _BAR / 2 for place in places],
        [_rate(case, "trees") for case in cases],
        _BAR,
        color=PALETTE[0],
        label=_TREES,
    )
    for over, label, style in (
        (Over.NVLINK, _DIRECT, {"color": PALETTE[1]}),
        (
            Over.PCIE,
            _PCIE,
            {"color": "white", "edgecolor": PALETTE[1], "hatch": "//////", "linewidth": 0.8},
        ),
    ):
        chosen = [index for index, case in enumerate(cases) if case[NCCL]["nccl_over"] == over]
        if chosen:
            axes.bar(
                [places[index] + _BAR / 2 for index in chosen],
                [_rate(cases[index], NCCL) for index in chosen],
                _BAR,
                label=label,
                **style,
            )


def _draw_limits(axes: Axes, cases: Sequence[Case], places: Sequence[float]) -> None:
    relayed = [i for i, case in enumerate(cases) if case[NCCL_RELAYS]["nccl_over"] == Over.RELAY]
    if relayed:
        axes.plot(
            [places[index] + _BAR / 2 for index in relayed],
            [_rate(cases[index], NCCL_RELAYS) for index in relayed],
            linestyle="none",
            marker="D",
            markersize=4,
            markerfacecolor="white",
            markeredgecolor=PALETTE[1],
            label=_RELAYED,
        )
    joined = [index for index, case in enumerate(cases) if case["trees"]["optimum"]]
    axes.hlines(
        [cases[index]["trees"]["optimum"] for index in joined],
        [places[index] - _BAR - 0.06 for index in joined],
        [places[index] + _BAR + 0.06 for index in joined],
        color=INK,
        linewidth=1.4,
        label=_OPTIMUM,
    )
    for index, case in enumerate(cases):
        if not case["trees"]["optimum"]:
            axes.annotate(
                "cut off",
                (places[index] - _BAR / 2, 0),
                (0, 2),
                textcoords="offset points",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=6,
                color=QUIET,
            )


def _name_groups(axes: Axes, cases: Sequence[Case], places: Sequence[float]) -> None:
    for _, group in groupby(range(len(cases)), key=lambda index: cases[index]["trees"]["ranks"]):
        members = list(group)
        first, last = places[members[0]], places[members[-1]]
        size = cases[members[0]]["trees"]["ranks"]
        axes.annotate(
            f"{size} GPUs" if len(members) > 2 else str(size),
            ((first + last) / 2, 1.0),
            (0, -2),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
            color=QUIET,
        )
        if members[0]:
            axes.axvline(first - (1 + _GAP) / 2, color=FAINT, linewidth=0.8, zorder=0)


def _rate(case: Case, method: str) -> float:
    return case[method]["algbw"] or 0.0

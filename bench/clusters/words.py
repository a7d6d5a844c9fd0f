"""What is said of sweeps: their table, how often who wins, and the results file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arborcast.synth.baselines.nccl_model import NOT_RUN
from arborcast.synth.formats.results import Measure, document
from arborcast.synth.formats.sizes import format_size

EVEN = 0.005
"""Part by which two times may differ and still count as even in the summary."""

SELECTION, WITH_OVERHEAD = "selection", "selection-with-overhead"
KEYS = ("topology", "collective", "method", "bytes")
MEASURES = {
    "time_us": Measure("less"),
    "algbw": Measure("more"),
    "time_us_with_nccl_overhead": Measure("less"),
    "speed_up": Measure("more"),
}
UNITS = {
    "time_us": "simulated: bandwidth and latency of links only; of a model: its whole time",
    "time_us_with_nccl_overhead": "with what NCCL's model charges itself; of a model: the same as time_us",
    "protocol": "of NCCL, the best for the size",
    "speed_up": "the least time of any other method over ours, both with overhead; below 1 we lose",
    "speed_up_over_nccl": "the same against the faster of NCCL's models",
    "speed_up_over_nccl_links_only": "against time_us, which flatters us: links beside a whole library",
    "speed_up_over_baselines_links_only": "against the simulated baselines, links only on both sides",
    "least_us": "what any schedule takes at least by latencies and bandwidths of the links together",
    "share_of_optimum": "of the proven bound at the rates simulated",
}
NOTES = (
    "Nothing here is measured. Schedules are simulated; nccl-ring-model and nccl-tree-model are formulas of "
    "NCCL's tuner, without NVLS and CollNet: on H100 NCCL may do better than its models here.",
    "Links: NCCL's planning rates (NVLink 20 GB/s on A100, 20.6 on H100; NICs at the PCIe slot's 24 and 48 "
    "GB/s) for both sides. MI250 and tori have no plan by NCCL: the same formulas on their own links.",
    "Latencies of the catalog are those of the wire (0.7 us for NVLink, 1.7 us through a fabric); NCCL's are "
    "those of a step of its kernels (0.6 to 4.0 us inside a host, 2.7 to 14 us across) after 6.6 to 14 us of "
    "start. They are not comparable: speed-ups use time_us_with_nccl_overhead (bench/clusters/overhead.py).",
    "NCCL's corrections of its tree at medium sizes and of its ring's latency across hosts are left out, and "
    "its search is taken to find the best rings there can be: both favour NCCL.",
    "Above 64 ranks the baselines are no candidates of the selection, which is what `synth solve` compares.",
    "A schedule is charged the share of NCCL's tree where a rank adds several contributions in one step; all "
    "else that takes, adds and passes on is charged as NCCL's ring is. Results before 2026-11-23 charged the "
    "tree's share to all that is no ring.",
    "A schedule of more than a million hops runs in one piece per chunk (a limit of the simulator), so that "
    "full packings of 1,024 ranks lose at 1 GiB what their pipelines would gain.",
)


@dataclass(frozen=True)
class Sweep:
    """The rows of one topology and collective, and what is missing.

    Attributes:
        rows: DESIGN's keys; methods in a fixed order, sizes ascending.
        skipped: objects of topology, collective, method, sizes (None for all), reason.
    """

    rows: Sequence[Mapping[str, Any]]
    skipped: Sequence[Mapping[str, Any]]


def format_table(swept: Sweep) -> str:
    """A line per size: our time with overhead and who serves it, the times of the others, the speed-up."""
    if not swept.rows:
        return "\n".join(f"skipped: {_of_skipped(entry)}" for entry in swept.skipped)
    first = swept.rows[0]
    charged = any(row["method"] == WITH_OVERHEAD for row in swept.rows)  # only where NCCL has a plan
    choice, time = (WITH_OVERHEAD, "time_us_with_nccl_overhead") if charged else (SELECTION, "time_us")
    times = {(row["method"], row["bytes"]): row[time] for row in swept.rows}
    methods = [
        name for name in dict.fromkeys(method for method, _ in times) if name != SELECTION or not charged
    ]
    counted = "with NCCL's overhead" if charged else "of links only, without overhead"
    lines = [
        f"{first['topology']} {first['collective']} ({first['ranks']} ranks), us {counted}",
        f"{'bytes':>10}"
        + "".join(f"{'ours' if name == choice else name:>18}" for name in methods)
        + f"{'speed-up':>10}  served by",
    ]
    ours = {row["bytes"]: row for row in swept.rows if row["method"] == choice}
    for size in sorted({row["bytes"] for row in swept.rows}):
        cells = [times.get((method, size)) for method in methods]
        row = ours.get(size, {})
        ratio = row.get("speed_up" if charged else "speed_up_over_baselines_links_only")
        lines.append(
            f"{format_size(size):>10}"
            + "".join(f"{'-' if cell is None else format(cell, '.1f'):>18}" for cell in cells)
            + f"{'-' if ratio is None else format(ratio, '.2f'):>10}  {row.get('served_by', '-')}"
        )
    lines += [f"  nccl: {NOT_RUN}"] if any(name.startswith("nccl-") for name in methods) or charged else []
    lines.append("  speed-up: the fastest of the others over ours; below 1 ours is slower")
    return "\n".join([*lines, *(f"  skipped: {_of_skipped(entry)}" for entry in swept.skipped)])


def _of_skipped(entry: Mapping[str, Any]) -> str:
    sizes = entry["sizes"]
    at = "" if sizes is None else f" at {len(sizes)} sizes"
    return f"{entry['topology']} {entry['collective']} {entry['method']}{at}: {entry['reason']}"


def summary(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How often each selection wins, is even and loses, by topology and collective."""
    counts: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        ratio = row.get("speed_up")
        if row["method"] not in {SELECTION, WITH_OVERHEAD} or ratio is None:
            continue
        keys = {key: row[key] for key in ("topology", "collective", "method")}
        start = {**keys, "wins": 0, "even": 0, "losses": 0, "least_speed_up": ratio, "most_speed_up": ratio}
        entry = counts.setdefault((row["topology"], row["collective"], row["method"]), start)
        entry["losses" if ratio < 1 - EVEN else "wins" if ratio > 1 + EVEN else "even"] += 1
        entry["least_speed_up"] = min(entry["least_speed_up"], ratio)
        entry["most_speed_up"] = max(entry["most_speed_up"], ratio)
    return list(counts.values())


def format_summary(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines of `summary`."""
    return [
        f"{'topology':38}{'collective':12}{'method':26}{'wins':>6}{'even':>6}{'losses':>8}   speed-up",
        *(
            f"{entry['topology']:38}{entry['collective']:12}{entry['method']:26}"
            f"{entry['wins']:6}{entry['even']:6}{entry['losses']:8}"
            f"   {entry['least_speed_up']:.2f} to {entry['most_speed_up']:.2f}"
            for entry in found
        ),
    ]


def results_document(sweeps: Sequence[Sweep]) -> dict[str, Any]:
    """The results file of all that was swept."""
    rows = [row for swept in sweeps for row in swept.rows]
    return document(
        "At which sizes does our selection win, on which machine?",
        rows,
        keys=KEYS,
        measures=MEASURES,
        units=UNITS,
        packages=("arborcast", "numpy", "numba", "highspy"),
        notes=list(NOTES),
        summary=summary(rows),
        skipped=[entry for swept in sweeps for entry in swept.skipped],
    )

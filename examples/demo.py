"""The main job from end to end: six GPUs of a DGX-1, the best allreduce and broadcast that its links allow.

    python examples/demo.py [--out FOLDER]

Finds the bound with its certificate, packs trees that reach it, verifies and simulates them beside the
classical patterns, runs them on six local processes with real tensors, and leaves schedules, pictures and
a report in the folder.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arborcast import backends, synth, topologies
from arborcast.synth import Schedule, Verdict
from arborcast.synth.baselines.comparison import BaselineTimings, compare
from arborcast.synth.formats.sizes import format_size, size_range
from arborcast.synth.formats.words import gigabytes
from arborcast.synth.pictures import draw_sweep, draw_timeline, draw_topology, draw_trees

from demo_report import certificate_in_words, picture_name, write_report  # isort: skip  (lies beside this file)

GPUS = (0, 1, 2, 3, 4, 5)
KINDS = ("allreduce", "broadcast")
SIMULATED_SIZES = size_range("64KiB:256MiB")
SHOWN_SIZE = 64 << 20
TIMELINE_SIZE = 16 << 20
TIMELINE_PIECES = 32
RUN_SIZES = (4 << 10, 4 << 20)


@dataclass(frozen=True)
class Result:
    """All that the demo finds out about one collective."""

    schedule: Schedule
    seconds: float
    verdict: Verdict
    comparison: BaselineTimings
    rows: Sequence[backends.Row]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every stage and say one line about each."""
    parser = argparse.ArgumentParser(description="Six GPUs of a DGX-1, end to end.")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for what is left behind")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)

    box = topologies.load("dgx1")
    fabric = box.subset(GPUS)
    say("topology", f"{box.name}, ranks {GPUS[0]} to {GPUS[-1]}: {len(fabric.links)} directed NVLinks")
    results = [examine(fabric, kind, out) for kind in KINDS]
    draw(results, out)
    report = write_report(results, out)
    print(f"{'report':<11}{report.resolve()}")  # never wrapped: something to click on


def examine(fabric: synth.Topology, kind: str, out: Path) -> Result:
    """Everything about one collective; stops at the first thing that is not as it should be."""
    bound = synth.bound(fabric, kind, root=0)
    say(kind, f"at most {gigabytes(bound.rate)}, no schedule can be faster:")
    say("", certificate_in_words(bound, fabric))

    started = time.perf_counter()
    schedule = synth.solve(fabric, kind, form="explicit", root=0)
    seconds = time.perf_counter() - started
    synth.write_schedule(schedule, out / f"{kind}.json")
    part = "exactly" if schedule.is_optimal else f"{float(schedule.rate / bound.rate):.1%} of"
    rate = gigabytes(schedule.rate)
    say("trees", f"{len(schedule.chunks)}, together {rate}, {part} the bound ({seconds:.2f} s)")

    verdict = synth.verify(schedule)
    if not verdict.correct:
        sys.exit(f"{kind}: not correct: {'; '.join(verdict.errors)}")
    say("verified", f"every contribution once, fullest link {float(verdict.max_link_load):.0%} full")

    comparison = compare(schedule, SIMULATED_SIZES)
    say("simulated", f"{format_size(SHOWN_SIZE)}: {times_in_words(comparison)}")
    if comparison.unavailable:
        say("", f"none for {', '.join(comparison.unavailable)}; the report says why")

    rows = backends.run_schedule(schedule, size_bytes=RUN_SIZES, dtype="float32", iterations=3)
    if any(row.wrong for row in rows):
        sys.exit(f"{kind}: wrong elements: {[row.wrong for row in rows]}")
    sizes = " and ".join(format_size(row.bytes) for row in rows)
    say("ran", f"on {fabric.ranks} processes (gloo), {sizes} of float32, every element right")
    return Result(schedule, seconds, verdict, comparison, rows)


def times_in_words(comparison: BaselineTimings) -> str:
    """The simulated times at one size, each with how many times longer than the first."""
    times = {
        method: timing.time_us
        for method, timings in comparison.by_method.items()
        for timing in timings
        if timing.bytes == SHOWN_SIZE
    }
    first, *_ = times.values()
    words = [
        f"{method} {time_us:.0f} us" + (f" ({time_us / first:.2f}x)" if time_us != first else "")
        for method, time_us in times.items()
    ]
    return ", ".join(words)


def draw(results: Sequence[Result], out: Path) -> None:
    """The pictures that the report shows."""
    draw_topology(results[0].schedule.topology, out / picture_name("topology"))
    for result in results:
        kind = result.schedule.collective.kind
        draw_trees(result.schedule, out / picture_name("trees", kind))
        draw_sweep(
            result.comparison.by_method,
            out / picture_name("times", kind),
            bound=result.schedule.bound,
            title=f"{kind}: simulated time and bus bandwidth over the size of the buffer",
        )
        draw_timeline(
            result.schedule, TIMELINE_SIZE, out / picture_name("links", kind), pieces=TIMELINE_PIECES
        )
    say("pictures", f"{1 + 3 * len(results)} in {out}")


def say(stage: str, what: str) -> None:
    """One entry of the printout, at once even when piped."""
    print(textwrap.fill(what, 100, initial_indent=f"{stage:<11}", subsequent_indent=" " * 11), flush=True)


if __name__ == "__main__":
    try:
        main()
    except (synth.InputError, backends.RunError, OSError) as error:
        sys.exit(f"demo: {error}")

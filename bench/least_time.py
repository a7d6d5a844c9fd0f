"""How far the chosen schedule is above the least time, by lines alone and with tolls.

    python bench/least_time.py --machines dgx-a100,dgx1 --collectives allreduce,allgather

prints a row per machine, collective and size: simulated microseconds of the fastest schedule known, the two
limits, all gaps and the CPU seconds of the closer limit: the table of `docs/explanation/bounds.md`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from arborcast import topologies
from arborcast.synth.api import approach, as_collective
from arborcast.synth.bounds.layered_flows import with_least_time
from arborcast.synth.bounds.time_limits import time_limit
from arborcast.synth.formats.sizes import format_size
from arborcast.synth.simulation.simulator import simulate

SIZES = (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 24)
MACHINES = "dgx-a100,dgx-h100,mi300x,dgx1,mi250,dgx-a100:boxes=4,mi250:boxes=2"


def rows(machine: str, kind: str) -> list[str]:
    """The rows of a machine, as Markdown."""
    topology = topologies.load(machine)
    collective = as_collective(topology, kind)
    selection = replace(approach(topology, collective).selection(), priced=False)
    found = []
    for size in SIZES:
        schedule = selection.fastest(size)
        took_us = simulate(schedule, size).time_us
        rate_us = size / (1000 * float(schedule.bound.rate))
        lines = time_limit(topology, collective, schedule.bound)
        old_us = max(rate_us, *(float(line.at(size)) for line in lines.lines))
        lines_us = float(lines.at(size))
        begin = time.process_time()
        timed = with_least_time(topology, collective, schedule.bound, size)
        seconds = time.process_time() - begin
        least_us = float(time_limit(topology, collective, timed).at(size))
        gaps = " | ".join(f"{took_us / limit:.2f}" for limit in (old_us, lines_us, least_us))
        figures = f"{took_us:.2f} | {least_us:.2f} | {gaps} | {seconds:.1f}"
        found.append(f"| {machine} {kind} | {format_size(size)} | {figures} |")
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--machines", default=MACHINES)
    parser.add_argument("--collectives", default="allreduce,allgather")
    asked = parser.parse_args()
    print("| question | size | simulated us | least us | gap: rate and lines | window | tolls | CPU s |")
    print("|---|---|---|---|---|---|---|---|")
    for machine in asked.machines.split(","):
        for kind in asked.collectives.split(","):
            print("\n".join(rows(machine, kind)), flush=True)


if __name__ == "__main__":
    main()

"""What a large schedule costs: `python -m arborcast.bench.scaling.uses SPEC COLLECTIVE`, in one process.

Its file is written and read, one rank's program made, a run simulated; up to 1,024 ranks the program is also
made from the schedule written out, for comparison. The answer is one line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

SIZE = 64 << 20
ELEMENT_BYTES = 4
LARGEST_WRITTEN_OUT = 1024
Found = TypeVar("Found")


def main() -> None:
    """Warm up on a small fabric, answer, print."""
    spec, kind = sys.argv[1:]
    answer("dgx-a100:boxes=2", kind)
    print(json.dumps(answer(spec, kind)))


def answer(spec: str, kind: str) -> dict[str, Any]:
    """The figures of one schedule."""
    from arborcast import synth, topologies
    from arborcast.backends.lowering.lower import lower_rank

    schedule = synth.solve(topologies.load(spec), kind, form="implicit")
    ranks = schedule.topology.ranks
    elements = SIZE // ELEMENT_BYTES // ranks * ranks
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "schedule.json"
        _, write_seconds = _timed(lambda: synth.write_schedule(schedule, file))
        read, read_seconds = _timed(lambda: synth.read_schedule(file))
        file_bytes = file.stat().st_size
    rank = ranks // 2 + 1
    program, program_seconds = _timed(lambda: lower_rank(schedule, rank, elements))
    timing, simulate_seconds = _timed(lambda: synth.simulate(schedule, SIZE))
    found: dict[str, Any] = {
        "ranks": ranks,
        "transfers": schedule.transfer_count,
        "representative_transfers": len(schedule.transfers),
        "file_bytes": file_bytes,
        "write_seconds": write_seconds,
        "read_seconds": read_seconds,
        "program_seconds": program_seconds,
        "program_MB": _peak_MB(lambda: lower_rank(schedule, rank, elements)),
        "operations": len(program.operations),
        "simulate_seconds": simulate_seconds,
        "simulated_us": timing.time_us,
        "share_of_bound": timing.algbw / float(schedule.bound.rate),
    }
    if ranks <= LARGEST_WRITTEN_OUT:
        whole, seconds = _timed(schedule.expand)
        same, program_seconds = _timed(lambda: lower_rank(whole, rank, elements))
        found |= {
            "written_out_seconds": seconds,
            "written_out_program_seconds": program_seconds,
            "same_program": same == program,
        }
    assert read == schedule, "a file must give back what was written"
    return found


def _timed(work: Callable[[], Found]) -> tuple[Found, float]:
    start = time.perf_counter()
    found = work()
    return found, time.perf_counter() - start


def _peak_MB(work: Callable[[], object]) -> float:  # noqa: N802 - a unit
    """The most memory held at once on top of what is held already; runs the work slowly."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    main()

"""What a group costs beside gloo's: descriptors, threads, the time to make it, and the first step of a job.

Ranks are processes of this machine that meet at a TCP store. Counted is what a process holds beyond what it
held before; a job's first group, which brings what all share, is a row of its own. The first step is the time
from `init_process_group` to the end of an allreduce, where a folder of caches is empty and where tables are
kept. Results go to `bench/results/starting.json`.

    python bench/starting.py            # about four minutes, two of them for the tables that are to be kept
    python bench/starting.py --groups 20 --many 8 --json /tmp/starting.json
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from arborcast.bench.harness.document import RUNTIME
from arborcast.bench.harness.processes import run_ranks
from arborcast.bench.harness.script import KEPT, command_line, keep
from arborcast.synth.formats.results import Measure, Row, document

RESULTS = KEPT / "starting.json"
LEAST_RUNS = 5
RANKS = 4
DESCRIPTORS = 1024
"""That many systems let a process open unless it asks for more."""

PATIENCE_S = 600.0


def _held() -> dict[str, int]:
    """Open descriptors and threads of this process."""
    process = Path("/proc/self")
    return {
        "descriptors": sum(1 for _ in (process / "fd").iterdir()),
        "threads": sum(1 for _ in (process / "task").iterdir()),
    }


def _job(rank: int, ranks: int, port: int, backend: str, folder: str, wait: bool) -> None:
    """Begin a job of this backend in place of the group that the ranks were started with."""
    import torch.distributed as dist

    import arborcast.torch_backend  # noqa: F401 - makes "synth" known

    os.environ |= {"ARBORCAST_CACHE": folder, "ARBORCAST_START": "wait" if wait else "at once"}
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE_S)
    )


def step(rank: int, ranks: int, port: int, backend: str, folder: str, wait: bool) -> dict[str, Any]:
    """The time of a first step, and what the first group holds."""
    import torch
    import torch.distributed as dist

    dist.barrier()  # nobody leaves while others still connect
    dist.destroy_process_group()
    before, begin = _held(), time.perf_counter()
    _job(rank, ranks, port, backend, folder, wait)
    dist.all_reduce(torch.ones(1 << 18))
    seconds = time.perf_counter() - begin
    held = {name: count - before[name] for name, count in _held().items()}
    dist.barrier()
    return {"seconds": seconds, **held}


def more_groups(
    rank: int, ranks: int, port: int, backend: str, folder: str, count: int, most_descriptors: int = 0
) -> dict[str, Any]:
    """The time to make groups, and what each of them holds once it has done an allreduce.

    Where there is a number of `most_descriptors`, no process may open more (`ulimit -n`).
    """
    import torch
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
    if most_descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_descriptors, most_descriptors))
    _job(rank, ranks, port, backend, folder, wait=False)
    dist.all_reduce(torch.ones(1000))
    before = _held()
    dist.barrier()
    begin = time.perf_counter()
    made = [dist.new_group(backend=backend) for _ in range(count)]
    seconds = time.perf_counter() - begin
    for group in made:
        dist.all_reduce(torch.ones(1000), group=group)
    held = {name: (number - before[name]) / count for name, number in _held().items()}
    dist.barrier()
    return {"seconds": seconds, **held}


def _run(function: Any, ranks: int, *arguments: Any) -> dict[str, Any]:
    """The largest figures of all ranks but rank 0, whose process may hold what the job's store does not."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = run_ranks(ranks, function, ranks, store.port, *arguments, timeout_s=PATIENCE_S)
    return {name: max(each[name] for each in found) for name in found[0]}


def measure(arguments: argparse.Namespace) -> list[Row]:
    """The rows that the command line asks for; backends take turns."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as own, tempfile.TemporaryDirectory() as empty:
        kept = str(arguments.kept or own)
        _say("tables that are to be kept")
        _run(step, RANKS, "synth", kept, True)
        seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for turn in range(arguments.runs):
            _say(f"turn {turn + 1} of {arguments.runs}")
            cases: list[tuple[str, str, Any]] = [
                ("gloo", "first step", lambda: _run(step, RANKS, "gloo", kept, False)),
                ("synth", "first step, tables kept", lambda: _run(step, RANKS, "synth", kept, False)),
                (
                    "synth",
                    "first step, nothing kept",
                    lambda turn=turn: _run(step, RANKS, "synth", f"{empty}/{turn}", False),
                ),
            ]
            for backend in ("gloo", "synth"):
                again = lambda backend=backend: _run(more_groups, RANKS, backend, kept, arguments.groups)  # noqa: E731
                cases.append((backend, f"{arguments.groups} more groups", again))
            for backend, what, run in cases:
                seen.setdefault((backend, what), []).append(run())
        if arguments.groups_at_limit:  # gloo's groups, of 7 descriptors each, end there with an error
            what = f"{arguments.groups_at_limit} more groups, {DESCRIPTORS:,} descriptors"
            _say(what)
            runs = [_run(more_groups, RANKS, "synth", kept, arguments.groups_at_limit, DESCRIPTORS)]
            seen["synth", what] = runs
        rows += [_row(backend, what, RANKS, found) for (backend, what), found in seen.items()]
        for backend in ("gloo", "synth") if arguments.many else ():
            _say(f"{arguments.many} ranks, {backend}")
            found = _run(step, arguments.many, backend, f"{empty}/many", False)
            rows.append(_row(backend, "first step, nothing kept", arguments.many, [found]))
    return rows


def _row(backend: str, what: str, ranks: int, runs: Sequence[dict[str, Any]]) -> Row:
    taken = [run["seconds"] for run in runs]
    return {
        "what": what,
        "method": backend,
        "ranks": ranks,
        "seconds": round(statistics.median(taken), 4),
        "spread_s": round(max(taken) - min(taken), 4),
        "descriptors": max(run["descriptors"] for run in runs),
        "threads": max(run["threads"] for run in runs),
        "runs": len(runs),
    }


def results_document(rows: Sequence[Row]) -> dict[str, Any]:
    """The results file."""
    return document(
        "What do groups cost beside gloo's, and how long does the first step of a job take?",
        rows,
        keys=("what", "method", "ranks"),
        measures={
            "seconds": Measure("less", "spread_s"),
            "descriptors": Measure("less"),
            "threads": Measure("less"),
        },
        units={
            "seconds": "of the slowest rank, median: from init_process_group to the end of an allreduce of "
            "1 MiB, or of making all of the groups",
            "spread_s": "largest minus smallest, s",
            "descriptors": "that a process holds more than before, at most of all ranks and runs; of more "
            "groups, for each that has done an allreduce",
            "threads": "likewise",
        },
        packages=("arborcast", "torch", "numpy"),
        code=RUNTIME,
    )


def format_table(rows: Sequence[Row]) -> str:
    """The rows for a reader at a terminal."""
    layout = "{:28}{:>7}{:>7}{:>10}{:>9}{:>13}{:>9}"
    lines = [layout.format("", "", "ranks", "s", "spread", "descriptors", "threads")]
    for row in rows:
        lines.append(
            layout.format(
                row["what"],
                row["method"],
                row["ranks"],
                f"{row['seconds']:.3f}",
                f"{row['spread_s']:.3f}",
                f"{row['descriptors']:.3g}",
                f"{row['threads']:.3g}",
            )
        )
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, RESULTS)
    parser.add_argument("--groups", type=int, default=20, help="how many are made one after another")
    parser.add_argument(
        "--groups-at-limit",
        type=int,
        default=200,
        help=f"likewise with {DESCRIPTORS} descriptors; 0 for none",
    )
    parser.add_argument("--many", type=int, default=64, help="ranks of the large job; 0 for none")
    parser.add_argument("--runs", type=int, default=LEAST_RUNS, help="turns")
    parser.add_argument("--kept", type=Path, help="a folder of caches where tables are kept, or will be")
    arguments = parser.parse_args()
    if arguments.runs < LEAST_RUNS and arguments.json == RESULTS:
        parser.error(f"--runs {arguments.runs}: kept results need at least {LEAST_RUNS}; or say --json PATH")
    if min(arguments.groups, arguments.runs) < 1 or min(arguments.groups_at_limit, arguments.many) < 0:
        parser.error("--groups and --runs must be at least 1, --groups-at-limit and --many at least 0")
    if arguments.many == 1:
        parser.error("--many 1: a large job has at least 2 ranks")
    return arguments


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure what the command line asks for, print the table, write the results."""
    arguments = _arguments()
    rows = measure(arguments)
    print(format_table(rows))
    keep(arguments.json, results_document(rows))


if __name__ == "__main__":
    main()

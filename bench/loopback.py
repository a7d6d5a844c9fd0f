"""How fast is the process group beside gloo on one machine? Collectives on local processes.

One set of processes holds every contender, and each round measures all of them, in an order that rotates, so
that a busy machine slows all down: gloo; the process group "synth" over sockets and over shared memory, with
schedules only. Once the main threads wait for the calls, once they compute in Python meanwhile. Every element
of every result is checked. Results go to `bench/results/loopback.json`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

from arborcast.bench.contenders import (
    BASELINE,
    COLLECTIVES,
    CONTENDERS,
    Buffers,
    Call,
    Case,
    Contender,
    Measured,
)
from arborcast.bench.harness.document import RUNTIME, timed_row
from arborcast.bench.harness.processes import run_ranks
from arborcast.bench.harness.script import KEPT, command_line, keep, ranks_and_runs
from arborcast.bench.harness.turns import MEASURES, UNITS, Sample, beside_gloo, sample
from arborcast.bench.page.console import print_results
from arborcast.synth.collective import Kind
from arborcast.synth.formats.results import TIME, document

RESULTS = KEPT / "loopback.json"
WARM_UPS = 2
SAMPLE_S = 0.020  # one sample repeats short calls for at least this long
POOL_BYTES = 64 << 20  # of buffers that the calls of one sample work on, so that each is checked
TIMEOUT_S = 3600.0  # for all cases on so many ranks


def main() -> None:
    """Measure what the command line asks for, print the tables, write the results."""
    arguments = _arguments()
    rows = []
    for ranks in arguments.ranks:
        cases = [
            Case(collective, size, is_busy)
            for is_busy in arguments.busy
            for collective in arguments.collectives
            for size in arguments.sizes
            if collective in {"allreduce", "broadcast", "reduce", "alltoall"} or size % (4 * ranks) == 0
        ]
        asked = (ranks, cases, arguments.contenders, arguments.runs)
        measured = run_ranks(ranks, _measure_all, *asked, timeout_s=TIMEOUT_S)[0]
        for case, found in zip(cases, measured, strict=True):
            rows += [_row(ranks, case, name, found) for name in found]
    found = _document(rows)
    print_results(found, "served_by", "target", "met", section="loopback")
    keep(arguments.json, found)


def _arguments() -> argparse.Namespace:
    from arborcast.synth.formats.sizes import parse_size

    parser = command_line(__doc__, RESULTS)
    parser.add_argument(
        "--sizes",
        type=parse_size,
        nargs="+",
        default=[64 << 10, 1 << 20, 16 << 20, 64 << 20],
        help="of the whole buffer",
    )
    parser.add_argument(
        "--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES[:2], help="what is measured"
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="beside gloo"
    )
    parser.add_argument(
        "--busy",
        type=int,
        nargs="+",
        choices=(0, 1),
        default=[0, 1],
        help="0: main threads wait for the calls; 1: they compute in Python meanwhile",
    )
    arguments = ranks_and_runs(parser, [4, 8], 7)
    arguments.contenders = [BASELINE, *(name for name in arguments.contenders if name != BASELINE)]
    return arguments


# ------------------------------------------------------------------------------------- the processes


def _measure_all(
    rank: int, ranks: int, cases: Sequence[Case], contenders: Sequence[str], runs: int
) -> list[dict[str, Measured]]:
    """On one rank, the same result on all: what was measured of each case by contender."""
    import torch.distributed as dist

    entered = {name: Contender(name) for name in contenders}
    results = [_measure(case, entered, rank, ranks, runs) for case in cases]
    dist.barrier()
    return results


# ---------------------------------------------------------------------------------- the measurement


def _measure(
    case: Case, contenders: dict[str, Contender], rank: int, ranks: int, runs: int
) -> dict[str, Measured]:
    """On one rank, the same result on all: what each contender did."""
    if rank == 0:
        print(f"{ranks} ranks, {case.collective} of {case.size_bytes} bytes ...", file=sys.stderr)
    buffers = Buffers(case, rank, ranks)
    calls = {name: contender.call(case) for name, contender in contenders.items()}
    before = {name: contender.count(case) for name, contender in contenders.items()}
    repeats = dict.fromkeys(calls, 1)
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(WARM_UPS + runs):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            taken = _sample(calls[name], buffers, repeats[name], f"rank {rank}: {name}: {case}")
            if turn >= WARM_UPS:
                samples[name].append(taken)
            else:
                wanted = math.ceil(SAMPLE_S / taken.seconds)
                repeats[name] = max(1, min(wanted, POOL_BYTES // case.size_bytes, 1000))
    return {
        name: contender.measured(case, before[name], samples[name]) for name, contender in contenders.items()
    }


def _sample(call: Call, buffers: Buffers, repeats: int, what: str) -> Sample:
    def work() -> None:
        for i in range(repeats):
            call(buffers, i)

    buffers.fill(repeats)
    taken = sample(work, repeats)
    buffers.check(what)
    return taken


# --------------------------------------------------------------------------------------- the answers


def _target(name: str, case: Case) -> float | None:
    """How many times gloo's speed is asked for; None where nothing is."""
    if name == BASELINE:
        return None
    if case.collective in {"reduce", "gather", "scatter", "alltoall"}:
        return 1 / 1.3
    if case.collective not in {"allreduce", "broadcast"}:
        return None
    # Local processes: memory is what the group takes by itself.
    return 1.0 if case.is_busy or name == "sockets" else 1.3


def _row(ranks: int, case: Case, name: str, found: dict[str, Measured]) -> dict[str, Any]:
    samples = found[name].samples
    compared = beside_gloo(found[BASELINE].samples, samples, _target(name, case))
    kind = Kind(case.collective)
    return {
        **timed_row(
            topology=f"full:{ranks}",
            ranks=ranks,
            collective=kind,
            root=0 if kind.has_root else None,
            method=name,
            size_bytes=case.size_bytes,
            times_us=[1e6 * each.seconds for each in samples],
        ),
        "main_thread": "computes" if case.is_busy else "waits",
        "served_by": found[name].served_by,
        "explanation": found[name].explanation,
        **compared,
        "calls_per_sample": samples[-1].calls,
    }


def _document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return document(
        "How fast are schedules beside gloo on local processes?",
        rows,
        keys=("topology", "ranks", "collective", "main_thread", "method", "bytes"),
        measures={**TIME, **MEASURES},
        units={
            "main_thread": "of every rank, while a call is under way: waits for it, or computes in Python",
            "time_us": "of one call, the slowest rank's; median over the rounds",
            "cpu_us": "of one call, all threads of all ranks together; median over the rounds",
            **UNITS,
            "share_of_optimum": "null: loopback has no links whose rates are known",
        },
        packages=("arborcast", "torch", "numpy"),
        code=RUNTIME,
        contenders={
            name: "its settings, where it is the group synth" if told is None else told
            for name, told in CONTENDERS.items()
        },
    )


if __name__ == "__main__":
    main()

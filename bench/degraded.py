"""What one slow rank or link costs an allreduce, and how quickly a job changes over.

The settings are those of OptCC (arXiv 2606.01680): GPUs or servers on a fabric that gives all of them the
same rate, one of which keeps 90 to 10 % of its own; further one slow link of a box, and a server that lost
NICs. For each: the proven optimum and what a ring reaches, both beside the ring without faults. Only the
paper's abstract and introduction were at hand, so that it stands here by what they publish: with up to half
of the rate lost 2 to 6 % over the ring without faults, others up to 57 %, and a limit of O(1/p) over it.

Then, for the failure of each link, schedules made beforehand (`synth repair --each-link`): how large, how
soon applied, and how long a call of eight local ranks takes that goes over to one. Results go to
`bench/results/degraded.json`.

    python bench/degraded.py             # two minutes
    python bench/degraded.py --only loss
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from arborcast import synth, topologies
from arborcast.bench.harness.document import Measure, Row, document, write_document
from arborcast.bench.harness.processes import run_ranks
from arborcast.bench.harness.provenance import RUNTIME
from arborcast.synth.certification.rates import certified_rate
from arborcast.synth.errors import InfeasibleError, InputError
from arborcast.synth.faults.faulty import without
from arborcast.synth.faults.spare_files import read_spares, write_spares
from arborcast.synth.faults.spares import Failure, Spares, make_spares, single_failures
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.topology import Hop, Topology

RESULTS = Path(__file__).resolve().parent / "results" / "degraded.json"
LOSSES = tuple(range(10, 100, 10))
STARS = (8, 16, 32, 64)
BOXES = "dgx-a100:boxes=4"
NICS_LOST = (1, 2, 4, 6)
LINKS = (("dgx1", (0, 3)), ("torus:4x4", (0, 1)))
FORESEEN = (("dgx1", "allreduce"), ("dgx1", "allgather"), ("mi250", "allreduce"), ("torus:4x4", "allreduce"))
RUNS, CALLS, COUNT = 5, 20, 1 << 18
LINK = (0, 3)
PATIENCE_S = 300.0


def losses() -> Iterator[Row]:
    """The rows of what is lost: each with a schedule that the verifier passed and a bound recomputed."""
    for ranks in STARS:
        star = topologies.load(f"star:{ranks}")
        ports = [(link.src, link.dst) for link in star.links if 0 in (link.src, link.dst)]
        yield from _slowed(star, "one slow rank", ports, closed=lambda kept, p=ranks: _closed(kept, p))
    for spec, (first, second) in LINKS:
        yield from _slowed(
            topologies.load(spec), f"slow link {first}-{second}", [(first, second), (second, first)]
        )
    boxes = topologies.load(BOXES).forwarding
    nics = [
        (gpu, link.dst)
        for gpu in range(8)
        for link in boxes.links
        if _is_nic(boxes, gpu, (link.src, link.dst))
    ]
    before = _rates(boxes)
    yield _row(boxes, "none", 0, boxes, before)
    for lost in NICS_LOST:
        left = without(boxes, links=nics[:lost]).topology
        yield _row(boxes, f"a box lost {lost} of {len(nics)} NICs", Fraction(lost, len(nics)), left, before)


def _is_nic(topology: Topology, gpu: int, hop: Hop) -> bool:
    """Whether a link joins a GPU with a switch that ranks of other boxes share."""
    if hop[0] != gpu or hop[1] < topology.ranks:
        return False
    return any(link.dst == hop[1] and 8 <= link.src < topology.ranks for link in topology.links)


def _closed(kept: Fraction, ranks: int) -> Fraction:
    """Seconds per GB at 1 GB/s: the slow rank must send all it has, and 2 (p - 1) messages share p ports."""
    return max(1 / kept, Fraction(2 * (ranks - 1)) / (ranks - 1 + kept))


def _slowed(topology: Topology, fault: str, hops: list[Hop], closed: Any = None) -> Iterator[Row]:
    before = _rates(topology)
    yield _row(topology, "none", Fraction(0), topology, before, closed)
    for percent in LOSSES:
        loss = Fraction(percent, 100)
        slower = {hop: topology.bandwidth[hop] * (1 - loss) for hop in hops}
        yield _row(topology, fault, loss, without(topology, slower=slower).topology, before, closed)


def _rates(topology: Topology) -> dict[str, Any]:
    """The proven optimum with a schedule that reaches it or not, and the better of a ring and of several."""
    begin = time.perf_counter()
    best = synth.solve(topology, "allreduce")
    seconds = time.perf_counter() - begin
    verdict = synth.verify(best)
    if not verdict.correct:
        raise AssertionError(f"{topology.name}: not correct: {verdict.errors[0]}")
    bound = best.bound
    if certified_rate(topology, best.collective, bound.certificate) != bound.rate:
        raise AssertionError(f"{topology.name}: the certificate gives another rate than {bound.rate}")
    rings = [Fraction(0)]
    for method in ("ring", "multiring"):
        try:
            rings.append(synth.verify(synth.solve(topology, "allreduce", method=method)).rate)
        except InfeasibleError:
            continue
    return {
        "optimum": bound.rate,
        "rate": verdict.rate,
        "ring": max(rings),
        "seconds": seconds,
        "proof": type(bound.certificate).__name__.lower(),
        "scope": bound.scope.value,
    }


def _row(
    topology: Topology,
    fault: str,
    loss: Fraction | int,
    left: Topology,
    before: Mapping[str, Any],
    closed: Any = None,
) -> Row:
    _say(f"{topology.name}: {fault}, {float(loss):.0%} lost")
    now = before if left is topology else _rates(left)
    formula = None if closed is None else closed(1 - Fraction(loss)) / topology.links[0].bandwidth
    ring = before["ring"]
    return {
        "what": "loss",
        "topology": topology.name,
        "ranks": topology.ranks,
        "fault": fault,
        "loss": float(loss),
        "optimum": float(now["optimum"]),
        "algbw": float(now["rate"]),
        "optimal": now["rate"] == now["optimum"],
        "proof": now["proof"],
        "scope": now["scope"],
        "slowdown": float(before["optimum"] / now["rate"]),
        "over_fault_free_ring": float(ring / now["rate"]) if ring else None,
        "ring_over_fault_free_ring": float(ring / now["ring"]) if now["ring"] else None,
        "is_closed_form": None if formula is None else 1 / formula == now["optimum"],
        "seconds": now["seconds"],
    }


# ------------------------------------------------------------------------------- made beforehand


def foreseen() -> Iterator[Row]:
    """The rows of spare schedules: how large files are and how soon one is applied."""
    with tempfile.TemporaryDirectory() as folder:
        for spec, kind in FORESEEN:
            _say(f"{spec} {kind}: every link")
            begin = time.perf_counter()
            spares = _made(spec, kind)
            seconds = time.perf_counter() - begin
            path, whole, one = (Path(folder) / name for name in ("spares.json", "whole.json", "one.json"))
            write_spares(spares, path)
            synth.write_schedule(spares.whole, whole)
            explicit = 0
            for difference in spares.differences:
                synth.write_schedule(difference.applied(spares.whole), one)
                explicit += one.stat().st_size
            read = read_spares(path)
            flaws = list(read.flaws())
            applied = [_timed(read, difference.failure) for difference in read.differences for _ in range(5)]
            yield {
                "what": "spares",
                "topology": spec,
                "collective": kind,
                "ranks": spares.whole.topology.ranks,
                "failures": len(spares.differences),
                "optimal": all(it.rate == it.bound.rate for it in spares.differences),
                "correct": not flaws,
                "file_bytes": path.stat().st_size,
                "each_bytes": (path.stat().st_size - whole.stat().st_size) / len(spares.differences),
                "explicit_bytes": explicit / len(spares.differences),
                "seconds": seconds,
                "applied_ms": statistics.median(applied),
                "spread_ms": max(applied) - min(applied),
            }


def _made(spec: str, kind: str) -> Spares:
    whole = synth.solve(topologies.load(spec), kind)
    whole = whole.expand() if isinstance(whole, ImplicitSchedule) else whole
    return make_spares(whole, single_failures(whole.topology))


def _timed(spares: Spares, failure: Failure) -> float:
    begin = time.perf_counter()
    spares.after(failure)
    return 1000 * (time.perf_counter() - begin)


def changes(ranks: int = 8) -> Iterator[Row]:
    """The rows of a group of local processes on dgx1 that does without a link from one call on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spares.json"
        write_spares(_made("dgx1", "allreduce"), path)
        for what, files in (("a simple schedule first", ""), ("a spare schedule", str(path))):
            _say(f"{ranks} ranks go over: {what}")
            runs = [_gone_over(ranks, files) for _ in range(RUNS)]
            first = [max(it["first_ms"] for it in found) for found in runs]
            yield {
                "what": "change-over",
                "topology": "dgx1",
                "collective": "allreduce",
                "ranks": ranks,
                "method": what,
                "bytes": 4 * COUNT,
                "runs": RUNS,
                "usual_ms": statistics.median(max(it["usual_ms"] for it in found) for found in runs),
                "first_ms": statistics.median(first),
                "least_ms": min(first),
                "cpu_ms": statistics.median(it["cpu_ms"] for found in runs for it in found),
                "algbw": runs[0][0]["rate"],
            }


def _gone_over(ranks: int, files: str) -> list[dict[str, float]]:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_ranks(ranks, going_over, ranks, store.port, files, timeout_s=PATIENCE_S)


def going_over(rank: int, ranks: int, port: int, files: str) -> dict[str, float]:
    """On each rank: the time of a call as usual, and of one that first leaves a link out."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    import arborcast.torch_backend  # noqa: F401 - makes "synth" known

    dist.barrier()  # nobody leaves while others still connect
    dist.destroy_process_group()
    os.environ |= {"ARBORCAST_TOPOLOGY": "dgx1", "ARBORCAST_SPARES": files}
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group(
        "synth", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE_S)
    )
    group: Any = dist.group.WORLD
    group.prepare("allreduce")
    tensor = torch.ones(COUNT)
    usual = []
    for _ in range(CALLS):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor.fill_(1))
        usual.append(time.perf_counter() - begin)
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    group.avoid(*LINK)
    dist.all_reduce(tensor.fill_(1))
    first, used = time.perf_counter() - begin, time.process_time() - used
    if not bool((tensor == ranks).all()):
        raise AssertionError("the sum is wrong")
    table = group._communicator._schedules.known(synth.Kind.ALLREDUCE, -1)
    dist.barrier()
    return {
        "usual_ms": 1000 * statistics.median(usual),
        "first_ms": 1000 * first,
        "cpu_ms": 1000 * used,
        "rate": float(table.at(4 * COUNT).schedule.rate),
    }


# ------------------------------------------------------------------------------------- the answers

PARTS = {"loss": losses, "spares": foreseen, "change": changes}


def results_document(rows: list[Row]) -> dict[str, Any]:
    """The results file."""
    return document(
        "What does one slow rank or link cost an allreduce, and how quickly does a job change over?",
        [{**{key: row.get(key) for key in KEYS}, **row} for row in rows],
        keys=("what", *KEYS),
        measures={
            "optimum": Measure("more"),
            "algbw": Measure("more"),
            "applied_ms": Measure("less", "spread_ms"),
            "each_bytes": Measure("less"),
        },
        units={
            "optimum": "GB/s of large messages, proven for every schedule unless scope says otherwise",
            "algbw": "GB/s of the verified schedule; change-over: of what serves afterwards",
            "slowdown": "the optimum without faults over algbw",
            "over_fault_free_ring": "time over that of the best ring, or rings at once, without faults",
            "ring_over_fault_free_ring": "the same of the best ring of the fabric with its fault",
            "is_closed_form": "whether the optimum is max(1/b, 2(p-1)/(p-1+b)) for a rank that keeps b",
            "each_bytes": "of the file of spares for one failure; explicit_bytes: of a schedule file",
            "applied_ms": "from the value read to the schedule of one failure; median, spread_ms all of them",
            "first_ms": "from avoid to the end of the first allreduce after it, slowest rank; median, least",
            "usual_ms": "a call before, median of each rank, slowest rank",
            "cpu_ms": "of a rank's process during first_ms; median of ranks and runs",
        },
        packages=("arborcast", "numpy", "torch", "highspy"),
        code=RUNTIME,
    )


KEYS = ("topology", "collective", "fault", "loss", "method")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure what the command line asks for and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    arguments = parser.parse_args()
    try:
        rows = [row for name in arguments.only for row in PARTS[name]()]
        write_document(arguments.json, results_document(rows))
    except InputError as error:
        raise SystemExit(str(error)) from error
    for row in rows:
        print({key: value for key, value in row.items() if value is not None})


if __name__ == "__main__":
    main()

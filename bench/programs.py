"""Programs for other runtimes: whether exports are right, what the checker misses, how others' files fare.

Four parts. *exports*: every machine of the catalog up to 16 ranks, each collective that the target knows. To
MSCCL's XML and MSCCL++'s plans at three sizes, in place and not: exported, written, read back, checked,
interpreted under random orders; where the exact shares take more chunks than fit, they are rounded. NCCL's
rings and SCCL's steps are read back and verified; GOAL and Chakra are written, and judged by others.
*mutants*: right programs with one mistake each, by the checker and under 100 random orders. *files*: a folder
of others' files, by path; nothing of them is kept but the verdict. *judges*: what programs of others say of
ours, with checkouts that you have built (`bench/judges.py`). Results go to `bench/results/programs.json`.

    python bench/programs.py                                   # exports and mutants, some twenty minutes
    python bench/programs.py --only exports --machines dgx1
    python bench/programs.py --only files --xml FOLDER
    python bench/programs.py --only judges --loggopsim FOLDER --astra-sim BINARY --msccl-tools FOLDER
    python bench/programs.py --runtimes mscclpp --only mutants files --xml FOLDER --json FILE
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from arborcast import topologies
from arborcast.backends.programs import chakra, goal, mscclpp, nccl_graph, sccl
from arborcast.backends.programs.checking.check import check_program
from arborcast.backends.programs.exporting.export import export_program, in_units, rounded
from arborcast.backends.programs.exporting.one_sided import export_one_sided
from arborcast.backends.programs.folder import usual_units
from arborcast.backends.programs.interpreter import Interpretation, interpret, interpret_all
from arborcast.backends.programs.limits import MSCCL
from arborcast.backends.programs.msccl.reader import read
from arborcast.backends.programs.msccl.writer import KINDS as COLLECTIVES
from arborcast.backends.programs.msccl.writer import write
from arborcast.backends.programs.mscclpp.writer import KINDS
from arborcast.backends.programs.program import GlobalProgram, Protocol
from arborcast.bench import judges, one_sided_mutants, program_mutants
from arborcast.bench.harness.document import Measure, Row, document, write_document
from arborcast.bench.harness.provenance import RUNTIME
from arborcast.synth import verify
from arborcast.synth.api import approach
from arborcast.synth.collective import TREE_KINDS, Kind
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.request import Request
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology

RESULTS = Path(__file__).resolve().parent / "results" / "programs.json"
PARTS = ("exports", "mutants", "files", "judges")
OF_MACHINES = ("exports", "mutants")
"""Parts that ask about machines, all or those named."""
RUNTIMES = ("msccl", "mscclpp")
OTHERS = ("nccl-graph", "sccl", "goal", "chakra")
"""Targets of exports alone."""
KEYS = (
    "part",
    "runtime",
    "judge",
    "topology",
    "collective",
    "bytes",
    "in_place",
    "pieces",
    "service",
    "mutation",
    "file",
)
MOST_RANKS = 16
SHAPES = (
    "ring:8",
    "star:8",
    "full:8",
    "hypercube:4",
    "torus:4x4",
    "mesh:3x4",
    "tpu-v5e:4x4",
    "dragonfly:2x2x2",
)
SIZES = ((16 << 10, Protocol.LL), (1 << 20, Protocol.SIMPLE), (256 << 20, Protocol.SIMPLE))
ORDERS_OF_EXPORTS = 3
MUTATED = ("ring:3", "ring:4", "star:4", "star:4,in-network=loopback", "full:4", "torus:3x3", "dgx1")
MUTATED_KINDS = (
    Kind.BROADCAST,
    Kind.REDUCE,
    Kind.ALLGATHER,
    Kind.REDUCE_SCATTER,
    Kind.ALLREDUCE,
    Kind.ALLTOALL,
)
ORDERS_OF_MUTANTS = 100


def machines() -> list[str]:
    """Specs of the catalog up to 16 ranks, one of those whose links are the same, and small shapes."""
    seen: dict[object, str] = {}
    for entry in topologies.catalog():
        try:
            topology = topologies.load(entry.name)
        except InputError:  # needs arguments: those shapes are named here
            continue
        if topology.ranks <= MOST_RANKS:
            links = frozenset((link.src, link.dst, link.bandwidth) for link in topology.links)
            seen.setdefault((topology.ranks, links), entry.name)
    return [*seen.values(), *SHAPES]


def exports(specs: Sequence[str], deadline_s: float, targets: Sequence[str]) -> Iterator[Row]:
    """A row for each machine, collective, size, target and, of runtimes, way to call."""
    for spec in specs:
        topology = topologies.load(spec).forwarding
        start = time.process_time()
        for kind in COLLECTIVES:
            row: Row = {"part": "exports", "topology": spec, "collective": str(kind)}
            for size, protocol in SIZES:
                schedule, why = _schedule(topology, kind, size, deadline_s)
                for target, in_place in itertools.product(targets, (True, False)):
                    if (target == "mscclpp" and kind not in KINDS) or (target in OTHERS and not in_place):
                        continue
                    if target == "nccl-graph":  # a file for all sizes
                        if size == SIZES[-1][0] and kind in TREE_KINDS:
                            yield {**row, "runtime": target, **_rings(topology, kind)}
                        continue
                    about = {**row, "runtime": target, "bytes": size}
                    if target in RUNTIMES:
                        about["in_place"] = in_place
                    if schedule is None:
                        yield {**about, "verdict": "no schedule", "why": why, "wrong": 0}
                    elif target in OTHERS:
                        yield {**about, **_simulated(target, schedule, size)}
                    else:
                        yield {**about, **_exported(target, schedule, protocol, size, in_place=in_place)}
        _say(f"{spec}: exported, {time.process_time() - start:.0f} CPU seconds")


def _rings(topology: Topology, kind: Kind) -> dict[str, Any]:
    try:
        schedule = approach(topology, kind, "multiring", Request(), "explicit").answer()
        graphs = nccl_graph.export_graphs(schedule)
        again = nccl_graph.read(nccl_graph.write(graphs))
        back = nccl_graph.rings_as_schedule(again, topology, schedule.collective)
    except (InputError, InfeasibleError) as error:
        return {"verdict": "does not fit", "why": str(error), "wrong": 0}
    return {**_judged(back), "channels": len(graphs.rings), "method": schedule.method.name}


def _simulated(target: str, schedule: Schedule, size: int) -> dict[str, Any]:
    try:
        if target == "sccl":
            return _judged(sccl.read(sccl.write(schedule), topology=schedule.topology))
        write_it = goal.write if target == "goal" else chakra.write
        write_it(schedule, size)
    except InputError as error:
        return {"verdict": "does not fit", "why": str(error), "wrong": 0}
    return {"verdict": "written", "why": "", "wrong": 0, "method": schedule.method.name}


def _judged(schedule: Schedule) -> dict[str, Any]:
    verdict = verify(schedule, max_errors=1)
    return {
        "verdict": "correct" if verdict.correct else "not correct",
        "why": "; ".join(verdict.errors),
        "wrong": int(not verdict.correct),
        "method": schedule.method.name,
    }


def _schedule(topology: Topology, kind: Kind, size: int, deadline_s: float) -> tuple[Schedule | None, str]:
    found: AnySchedule | None
    try:
        asked = approach(topology, kind, "auto", Request(deadline_s=deadline_s), "explicit")
        found = asked.answer() if size == SIZES[-1][0] else asked.selection().fastest(size)
    except (InputError, InfeasibleError) as error:
        return None, str(error)
    except TimedOutError as error:
        found = error.best
        if found is None:
            return None, str(error)
    assert isinstance(found, Schedule), "asked for in explicit form"
    return found, ""


def _exported(
    runtime: str, schedule: Schedule, protocol: Protocol, size: int, *, in_place: bool
) -> dict[str, Any]:
    start = time.perf_counter()
    export = export_program if runtime == "msccl" else export_one_sided
    exact = in_units(schedule, None)[1]
    chunks = usual_units(schedule) if exact > MSCCL.offset else None
    try:
        program = export(schedule, in_place=in_place, protocol=protocol, chunks=chunks, most_bytes=size)
    except InputError as error:
        return {"verdict": "does not fit", "why": str(error), "wrong": 0}
    if runtime == "msccl":
        back = read(write(program), root=program.root)
    else:
        back = mscclpp.read(mscclpp.write(program), root=program.root)
    assert back.parts == program.parts, "what is written is read back"
    verdict = check_program(back)
    seconds = time.perf_counter() - start
    found = _interpreted(back)
    return {
        "verdict": "correct" if verdict.correct else "not correct",
        "why": "; ".join(verdict.errors) or found.hangs or "",
        "wrong": found.wrong + (found.hangs is not None),
        "method": schedule.method.name,
        "chunks": program.chunks,
        "rate_kept": 1.0 if chunks is None else float(rounded(schedule, chunks).rate / schedule.rate),
        "steps": program.operation_count,
        "thread_blocks": max(len(part.blocks) for part in program.parts),
        "channels": program.channels,
        "seconds": round(seconds, 3),
    }


def _interpreted(program: GlobalProgram) -> Interpretation:
    if not program.one_sided:
        return interpret_all(program, range(ORDERS_OF_EXPORTS), elements=4)
    found = Interpretation(0)
    for seed in range(ORDERS_OF_EXPORTS):
        found = interpret(program, in_place=program.in_place, seed=seed, calls=2)
        if not found.correct:
            break
    return found


def mutated(specs: Sequence[str], count: int, orders: int, seed: int, runtime: str) -> Iterator[Row]:
    """A row for each machine and mistake, over all collectives, protocols and ways to call."""
    programs = list(_to_mutate(specs, runtime))
    each = -(-count // len(programs))
    counts: dict[tuple[str, str], Counter[str]] = {}
    of = program_mutants if runtime == "msccl" else one_sided_mutants
    for done, (spec, program) in enumerate(programs):
        _say(f"{spec}: {done} of {len(programs)} programs mutated, {each} times each")
        for name, mutant in itertools.islice(of.mutants(program, seed), each):
            outcome = of.judge(name, mutant, orders)
            if outcome.rejected:
                what = "rejected" if outcome.wrong else "rejected_never_wrong"
            else:
                what = "missed" if outcome.wrong else "equivalent"
            found = counts.setdefault((spec, name), Counter())
            found[what] += 1
            if what == "rejected_never_wrong":
                found[f"never wrong: {', '.join(sorted(outcome.rejected))}"] += 1
    for (spec, name), found in sorted(counts.items()):
        yield {
            "part": "mutants",
            "runtime": runtime,
            "topology": spec,
            "mutation": name,
            **{what: found[what] for what in ("rejected", "equivalent", "missed", "rejected_never_wrong")},
            "why_never_wrong": sorted(what for what in found if what.startswith("never wrong")),
        }


def _to_mutate(specs: Sequence[str], runtime: str) -> Iterator[tuple[str, GlobalProgram]]:
    export = export_program if runtime == "msccl" else export_one_sided
    for spec in specs:
        topology = topologies.load(spec)
        for kind in MUTATED_KINDS:
            schedule = approach(topology, kind, "auto", Request(), "explicit").answer()
            for protocol in (Protocol.SIMPLE, Protocol.LL):
                for in_place in (True, False):
                    try:
                        yield spec, export(schedule, in_place=in_place, protocol=protocol)
                    except InputError:  # an alltoall in place may not fit
                        continue


def files(folder: Path, runtime: str) -> Iterator[Row]:
    """A row for each XML file of MSCCL, or plan of MSCCL++, below a folder; equal files once."""
    seen: set[str] = set()
    read_it = read if runtime == "msccl" else mscclpp.read
    for path in sorted(folder.rglob("*.xml" if runtime == "msccl" else "*.json")):
        text = path.read_text(encoding="utf-8", errors="replace")
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        if digest in seen:
            continue
        seen.add(digest)
        row: dict[str, Any] = {
            "part": "files",
            "runtime": runtime,
            "file": str(path.relative_to(folder)),
            "sha256": digest,
        }
        start = time.perf_counter()
        try:
            program = read_it(text, path.name)
        except InputError as error:
            yield {**row, "verdict": "refused", "why": str(error), "kinds": []}
            continue
        verdict = check_program(program, max_errors=3)
        yield {
            **row,
            "collective": str(program.kind),
            "ranks": program.ranks,
            "protocol": str(program.protocol),
            "steps": program.operation_count,
            "verdict": "correct" if verdict.correct else "not correct",
            "kinds": sorted(verdict.kinds),
            "why": "; ".join(verdict.errors),
            "notes": list(verdict.notes),
            "seconds": round(time.perf_counter() - start, 3),
        }


def summary(rows: Sequence[Row]) -> list[str]:
    """Counts, a line for each part and target, and for each judge."""
    told = []
    for part, of in itertools.product(PARTS, (*RUNTIMES, *OTHERS, *judges.JUDGES)):
        of_part = [row for row in rows if row["part"] == part and of in (row["runtime"], row.get("judge"))]
        if not of_part:
            continue
        if part == "mutants":
            total = {
                what: sum(row[what] for row in of_part)
                for what in ("rejected", "equivalent", "missed", "rejected_never_wrong")
            }
        else:
            total = dict(Counter(row["verdict"] for row in of_part))
            if part == "exports":
                total["wrong when interpreted"] = sum(row["wrong"] for row in of_part)
        counts = (f"{count} {what.replace('_', ' ')}" for what, count in total.items())
        told.append(f"{of}, {part}: {', '.join(counts)}")
    return told


def main() -> None:
    """Ask, print counts, write the results; parts that were not asked keep their rows."""
    arguments = _arguments()
    given = {"files": arguments.xml, "judges": arguments.checkouts}
    asked = arguments.only or [part for part in PARTS if given.get(part, True)]
    rows = _kept(arguments, asked)
    for part in asked:
        if not given.get(part, True):
            raise SystemExit(f"programs: {part} needs {'--xml FOLDER' if part == 'files' else 'a checkout'}")
        if part == "judges":
            rows += judges.rows(arguments.checkouts)
        elif part == "exports":
            rows += exports(arguments.machines or machines(), arguments.deadline, arguments.runtimes)
        else:
            for runtime in arguments.runtimes:
                if part == "mutants" and runtime in RUNTIMES:
                    rows += mutated(
                        arguments.machines or MUTATED,
                        arguments.count,
                        ORDERS_OF_MUTANTS,
                        arguments.seed,
                        runtime,
                    )
                elif runtime in RUNTIMES:
                    rows += files(arguments.xml, runtime)
    rows.sort(key=lambda row: PARTS.index(row["part"]))
    print("\n".join(summary(rows)))
    found = document(
        "Are programs for other runtimes right, and does the checker miss anything?",
        [{**dict.fromkeys(KEYS), **row} for row in rows],
        keys=KEYS,
        measures={"wrong": Measure("less"), "missed": Measure("less"), "over_bound": Measure("less")},
        units={
            "wrong": "elements or hangs over three random orders",
            "missed": "mutants passed that 100 orders show wrong",
            "over_bound": "their time over that of the bound",
        },
        code=RUNTIME,
    )
    write_document(arguments.json, found)
    print(f"written: {arguments.json}")


def _kept(arguments: argparse.Namespace, asked: Sequence[str]) -> list[Row]:
    """Rows of the file that are not asked for again."""
    if not arguments.json.is_file():
        return []
    rows: list[Row] = json.loads(arguments.json.read_text(encoding="utf-8"))["rows"]
    again = {"judges": arguments.checkouts}
    return [
        row
        for row in rows
        if row["part"] not in asked
        or (row["judge"] or row["runtime"]) not in again.get(row["part"], arguments.runtimes)
        or (row["part"] in OF_MACHINES and arguments.machines and row["topology"] not in arguments.machines)
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="these parts")
    parser.add_argument(
        "--runtimes",
        nargs="+",
        choices=(*RUNTIMES, *OTHERS),
        default=(*RUNTIMES, *OTHERS),
        help="these formats",
    )
    parser.add_argument("--machines", nargs="+", metavar="SPEC", help="these instead of the usual ones")
    parser.add_argument("--count", type=int, default=10_000, help="mutants in all")
    parser.add_argument("--seed", type=int, default=0, help="of the mutants")
    parser.add_argument("--xml", type=Path, metavar="FOLDER", help="with others' files")
    for name, (_, what) in judges.JUDGES.items():
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=what)
    parser.add_argument("--deadline", type=float, default=60, help="seconds for each schedule")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    found = parser.parse_args()
    paths = {name: getattr(found, name.replace("-", "_")) for name in judges.JUDGES}
    found.checkouts = {name: path for name, path in paths.items() if path is not None}
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"programs: {error}", file=sys.stderr)
        sys.exit(2)

"""What programs of others say of ours: simulators of messages, and msccl-tools' own check of steps.

They stay where they are: each is named by the path of a checkout that its user has built. The simulators get
the cases of the testbed at latency 0, cut fine, where a schedule takes the time of the bound and of nothing
else; each first gets a chain of two links whose time can be told by hand. Results go to
`bench/results/judges.json`.

    python bench/judges.py --loggopsim FOLDER --astra-sim BINARY --msccl-tools FOLDER
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from arborcast.backends.programs import chakra, goal, sccl
from arborcast.backends.programs.program import ProgramError
from arborcast.bench.contest.cases import CASES, KINDS
from arborcast.bench.harness.document import RUNTIME
from arborcast.bench.harness.script import KEPT, command_line, keep, one_line
from arborcast.synth.api import solve
from arborcast.synth.errors import InputError
from arborcast.synth.formats.results import Measure, Row, document
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Link, Topology

KEYS = ("topology", "collective", "bytes", "pieces", "service")

SIZE = 256 << 20
"""Bytes of the whole buffer: so many that nanoseconds and bytes that simulators round are nothing."""

CHAIN_BYTES, CHAIN_LATENCY = 1 << 20, 5
"""Over two links of 1 GB/s: twice the bytes and the latency, 2,107.152 us where each link stores them."""

PLANNED = "priority"
"""The order of service that schedules are planned with."""

LIMIT_S = 600
"""Seconds for one run of another program."""

RIGHT = Fraction(1, 1000)
"""How far a simulator may be off on the chain."""


def rows(checkouts: Mapping[str, Path]) -> Iterator[Row]:
    """A row for each judge, case and number of pieces."""
    for name, path in checkouts.items():
        for row in JUDGES[name][0](path):
            print(f"{name}: {row['topology']} {row['collective']} {row['verdict']}", file=sys.stderr)
            yield {"judge": name, **dict.fromkeys(KEYS), **row}


def _loggopsim(folder: Path) -> Iterator[Row]:
    """The simulator of ATLAHS, or LogGOPSim's own: the folder with its two programs."""

    def time_us(schedule: Schedule, size: int, pieces: int, _: str) -> float:
        text = goal.write(schedule, size, pieces=pieces)
        said = re.search(r"L = (\d+) ns, G = (\S+) ns", text)
        assert said is not None, "GOAL says its parameters"
        with tempfile.TemporaryDirectory() as scratch:
            source, binary = Path(scratch) / "x.goal", Path(scratch) / "x.bin"
            source.write_text(text, encoding="utf-8")
            _run([folder / "txt2bin", "-i", source, "-o", binary])
            model = ["-L", said[1], "-o", "0", "-g", "0", "-G", said[2], "-S", "4000000000"]
            told = _run([folder / "LogGOPSim", "-f", binary, *model])
        times = [int(time) for time in re.findall(r"Host \d+: (\d+)", told)]
        if not times:
            raise InputError(f"{folder}: gave no times, got {told[-200:]!r}")
        return max(times) / 1000

    yield from _simulated(time_us, ((64, PLANNED), (1024, PLANNED)))


def _astra_sim(binary: Path) -> Iterator[Row]:
    """ASTRA-sim's analytical backend with congestion: every vertex an NPU, all connected to all."""

    def time_us(schedule: Schedule, size: int, pieces: int, service: str) -> float:
        topology = schedule.topology
        fastest = max(float(topology.bandwidth[hop]) for move in schedule.transfers for hop in move.hops)
        latency = max((float(link.latency_us) for link in topology.links), default=0.0)
        with tempfile.TemporaryDirectory() as scratch:
            files = chakra.write(schedule, size, pieces=pieces, in_order=service == PLANNED)
            for vertex, content in enumerate(files):
                Path(scratch, f"x.{vertex}.et").write_bytes(content)
                Path(scratch, f"calls.{vertex}.et").write_bytes(chakra.write_call(size))
            Path(scratch, "network.yml").write_text(
                f"topology: [ FullyConnected ]\nnpus_count: [ {topology.size} ]\n"
                f"bandwidth: [ {fastest * 1e9 / 2**30!r} ]\nlatency: [ {latency * 1000!r} ]\n",
                encoding="utf-8",
            )
            Path(scratch, "system.json").write_text(json.dumps(_SYSTEM), encoding="utf-8")
            Path(scratch, "memory.json").write_text(
                '{"memory-type": "NO_MEMORY_EXPANSION"}', encoding="utf-8"
            )
            given = {
                "workload-configuration": "calls",
                "system-configuration": "system.json",
                "network-configuration": "network.yml",
                "remote-memory-configuration": "memory.json",
            }
            options = [f"--{name}={scratch}/{value}" for name, value in given.items()]
            told = _run([binary.resolve(), *options], folder=Path(scratch), crashes=True)
        times = [int(time) for time in re.findall(r"sys\[\d+\] finished, (\d+) cycles", told)]
        if not times:
            raise InputError(f"{binary}: gave no times, got {told[-200:]!r}")
        return max(times) / 1000

    yield from _simulated(time_us, ((64, PLANNED), (1024, PLANNED), (64, "fifo")))


_SYSTEM = {
    "scheduling-policy": "FIFO",
    "preferred-dataset-splits": 1,
    "all-reduce-implementation-custom": ["x"],
    "local-mem-bw": 50,
}


def _simulated(
    time_us: Callable[[Schedule, int, int, str], float], asked: Sequence[tuple[int, str]]
) -> Iterator[Row]:
    """The chain, then the cases, each in so many pieces and by an order of service, ours and theirs."""
    links = [
        Link(0, 1, Fraction(1), Fraction(CHAIN_LATENCY)),
        Link(1, 2, Fraction(1), Fraction(CHAIN_LATENCY)),
    ]
    chain = Topology.build("chain of two links", 3, links)
    expected = 2 * (CHAIN_BYTES / 1000 + CHAIN_LATENCY)
    theirs = time_us(_explicit(solve(chain, "broadcast")), CHAIN_BYTES, 1, PLANNED)
    is_right = abs(theirs - expected) <= RIGHT * expected
    yield {
        "topology": chain.name,
        "collective": "broadcast",
        "bytes": CHAIN_BYTES,
        "pieces": 1,
        "ours_us": expected,
        "theirs_us": theirs,
        "verdict": "as by hand" if is_right else "not as by hand",
    }
    if not is_right:
        return
    for case in CASES:
        free = [replace(link, latency_us=Fraction(0)) for link in case.topology.links]
        topology = Topology.build(case.topology.name, case.topology.ranks, free, case.topology.switches)
        for kind in KINDS:
            schedule = _explicit(solve(topology.forwarding, kind))
            bound_us = SIZE / 1000 / float(schedule.bound.rate)
            for pieces, service in asked:
                ours = simulate(schedule, SIZE, pieces=pieces, service=service).time_us
                row: Row = {
                    "topology": topology.name,
                    "collective": str(kind),
                    "bytes": SIZE,
                    "pieces": pieces,
                    "service": service,
                    "bound_us": bound_us,
                    "ours_us": ours,
                }
                try:
                    theirs = time_us(schedule, SIZE, pieces, service)
                except InputError as error:
                    yield {**row, "verdict": "no answer", "why": str(error)}
                    continue
                yield {
                    **row,
                    "theirs_us": theirs,
                    "over_bound": theirs / bound_us,
                    "ours_over_bound": ours / bound_us,
                    "verdict": "timed",
                }


def _explicit(schedule: object) -> Schedule:
    assert isinstance(schedule, Schedule), "small topologies have explicit schedules"
    return schedule


def _msccl_tools(folder: Path) -> Iterator[Row]:
    """`Algorithm.check_implements` and its limits of links, on our SCCL files; then with a send less."""
    text, of = "", ""
    for case in CASES:
        for kind in sccl.NAMES:
            topology = case.topology.forwarding
            row: Row = {"topology": topology.name, "collective": str(kind)}
            try:
                text, of = sccl.write(solve(topology, kind)), str(kind)
            except ProgramError as error:
                yield {**row, "verdict": "does not fit", "why": str(error)}
                continue
            yield {**row, **_checked(folder, text, "not passed", "passed")}
    damaged = json.loads(text)
    del damaged["steps"][-1]["sends"][-1]
    row = {"topology": f"{damaged['topology']['name']}, a send less", "collective": of}
    yield {**row, **_checked(folder, json.dumps(damaged), "refused", "not refused")}


def _checked(folder: Path, text: str, refused: str, passed: str) -> Row:
    """One of these verdicts, with what msccl-tools says against a file; "no answer" where it says nothing."""
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "x.json").write_text(text, encoding="utf-8")
        try:
            told = _run([sys.executable, "-c", _CHECK, folder, Path(scratch, "x.json")], crashes=True).strip()
        except InputError as error:
            return {"verdict": "no answer", "why": str(error)}
    if not told:
        return {"verdict": "no answer", "why": "the check ended without a word"}
    if told == "passed":
        return {"verdict": passed, "why": ""}
    return {"verdict": refused, "why": told.splitlines()[-1][:200]}


_CHECK = """
import pathlib, sys, types
folder, file = map(pathlib.Path, sys.argv[1:])
for name in ("msccl", "msccl.topologies"):  # without what their __init__ imports: solvers
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(folder.joinpath(*name.split(".")))]
from msccl.topologies.topology import Topology
sys.modules["msccl.topologies"].Topology = Topology
from msccl.serialization import MSCCLDecoder
found = MSCCLDecoder().decode(file.read_text())
found.check_implements(found.collective.chunk_up(found.instance.chunks))
print("passed")
"""


def _run(command: list[object], *, folder: Path | None = None, crashes: bool = False) -> str:
    try:
        done = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            cwd=folder,
        )
    except OSError as error:
        raise InputError(f"{command[0]}: cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{command[0]}: must end within {LIMIT_S} s, and was stopped") from error
    if done.returncode and not crashes:
        raise InputError(f"{command[0]}: ended with status {done.returncode}: {done.stderr[-200:]!r}")
    return done.stdout + done.stderr


JUDGES: Mapping[str, tuple[Callable[[Path], Iterator[Row]], str]] = {
    "loggopsim": (_loggopsim, "folder with LogGOPSim and txt2bin: of ATLAHS, sim/LogGOPSim"),
    "astra-sim": (_astra_sim, "ASTRA-sim's analytical binary that is aware of congestion"),
    "msccl-tools": (_msccl_tools, "a checkout of msccl-tools: its folder with the package msccl"),
}
"""Each by its option: what it does with the path, and what the path is."""


@one_line("judges")
def main() -> None:
    """Ask the judges that the command line names, count their verdicts, write the results."""
    parser = command_line(__doc__, KEPT / "judges.json")
    for name, (_, what) in JUDGES.items():
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", dest=name, help=what)
    asked = vars(parser.parse_args())
    checkouts = {name: asked[name] for name in JUDGES if asked[name] is not None}
    if not checkouts:
        raise InputError(f"give at least one of {', '.join(f'--{name}' for name in JUDGES)}")
    found = list(rows(checkouts))
    for (name, verdict), count in Counter((row["judge"], row["verdict"]) for row in found).items():
        print(f"{name}: {count} {verdict}")
    results = document(
        "What do programs of others say of our schedules?",
        found,
        keys=("judge", *KEYS),
        measures={"over_bound": Measure("less")},
        units={"over_bound": "their time over that of the bound"},
        code=RUNTIME,
    )
    keep(asked["json"], results)


if __name__ == "__main__":
    main()

"""How fast are schedules beside gloo on one machine? Allreduce and broadcast on local processes.

One set of processes holds every contender, and each round measures all of them, in an order that rotates, so
that a busy machine slows all down: gloo; the process group "synth" over sockets and over shared memory, with
schedules only; the same group as it comes; and the executor on gloo's point-to-point calls. Every element of
every result is checked. Results go to `bench/results/loopback.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # children are started without PYTHONPATH

from measured import circumstances

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

HOME = Path(__file__).resolve().parent.parent
RESULTS = HOME / "bench" / "results" / "loopback.json"
WARM_UPS = 2
SAMPLE_S = 0.020  # one sample repeats short calls for at least this long
POOL_BYTES = 64 << 20  # of buffers that the calls of one sample work on, so that each is checked
GROUP_TIMEOUT_S = 120.0
BASELINE = "gloo"

# What a contender's groups are told; None is not the process group "synth".
CONTENDERS: dict[str, dict[str, str] | None] = {
    BASELINE: None,
    "sockets": {"ARBORCAST_GLOO_BELOW": "0", "ARBORCAST_TRANSPORT": "sockets"},
    "shared memory": {"ARBORCAST_GLOO_BELOW": "0", "ARBORCAST_TRANSPORT": "shared memory"},
    "as it comes": {},
    "executor": None,
}
COLLECTIVES = ("allreduce", "broadcast", "allgather", "reduce-scatter")


@dataclass(frozen=True)
class Case:
    """What all contenders do in turns: a collective on a buffer, as algbw counts it."""

    collective: str
    size_bytes: int


@dataclass(frozen=True)
class Sample:
    """One contender in one round: of one call, the slowest rank's time and the CPU time of all ranks."""

    seconds: float
    cpu_seconds: float
    calls: int


def main() -> None:
    """Measure what the command line asks for, print the tables, write the results."""
    arguments = _arguments()
    rows = []
    for ranks in arguments.ranks:
        cases = [
            Case(collective, size)
            for collective in arguments.collectives
            for size in arguments.sizes
            if collective in {"allreduce", "broadcast"} or size % (4 * ranks) == 0
        ]
        measured = _on_processes(ranks, cases, arguments.contenders, arguments.runs)
        for case, found in zip(cases, measured, strict=True):
            rows += [_row(ranks, case, name, samples, found) for name, samples in found.items()]
        _print([row for row in rows if row["ranks"] == ranks])
    from synth.formats.atomic import write_atomically

    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.json, json.dumps(_document(rows), indent=1) + "\n")
    print(f"\nwritten: {arguments.json}")


def _arguments() -> argparse.Namespace:
    from synth.sizes import parse_size

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="numbers of processes")
    parser.add_argument(
        "--sizes",
        type=parse_size,
        nargs="+",
        default=[64 << 10, 1 << 20, 16 << 20, 64 << 20],
        help="of the whole buffer",
    )
    parser.add_argument("--runs", type=int, default=7, help=f"measured rounds, after {WARM_UPS} warm-ups")
    parser.add_argument(
        "--collectives", nargs="+", choices=COLLECTIVES, default=COLLECTIVES[:2], help="what is measured"
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="beside gloo"
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    arguments = parser.parse_args()
    if arguments.runs < 5:
        parser.error(f"--runs {arguments.runs}: a median needs at least 5")
    if min(arguments.ranks) < 2:
        parser.error(f"--ranks {min(arguments.ranks)}: must be at least 2")
    arguments.contenders = [BASELINE, *(name for name in arguments.contenders if name != BASELINE)]
    return arguments


# ------------------------------------------------------------------------------------- the processes


def _on_processes(
    ranks: int, cases: Sequence[Case], contenders: Sequence[str], runs: int
) -> list[dict[str, list[Sample]]]:
    """The samples of each case by contender, measured on that many processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, children = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            target = (theirs, rank, ranks, f"{folder}/store", list(cases), list(contenders), runs)
            children.append(context.Process(target=_child, args=target, daemon=True))
            children[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return _answers(pipes)[0]
        finally:
            for child in children:
                child.join(10)
                child.kill()
                child.join()


def _answers(pipes: list[Connection]) -> list[Any]:
    """What each rank sent; the first one that fails ends all."""
    answers: dict[Connection, Any] = {}
    while len(answers) < len(pipes):
        for pipe in wait([pipe for pipe in pipes if pipe not in answers]):
            assert isinstance(pipe, Connection)
            try:
                answers[pipe] = pipe.recv()
            except EOFError:
                raise SystemExit(f"rank {pipes.index(pipe)} failed: see above") from None
    return [answers[pipe] for pipe in pipes]


def _child(
    pipe: Connection,
    rank: int,
    ranks: int,
    store: str,
    cases: list[Case],
    contenders: list[str],
    runs: int,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    calls = {name: _contender(name) for name in contenders}
    results = [_measure(case, calls, rank, ranks, runs) for case in cases]
    pipe.send(results)
    dist.barrier()
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------ the contenders

Call = Callable[["Buffers", int], None]
Prepare = Callable[[Case, int], Call]


def _contender(name: str) -> Prepare:
    """Makes its group on all ranks; what comes back gives for a case what does call number i of a sample."""
    import torch.distributed as dist

    if name == "executor":
        group = dist.new_group(backend="gloo")
        return lambda case, ranks: _executor_call(case, ranks, group)
    told = CONTENDERS[name]
    if told is None:
        group = dist.new_group(backend="gloo")
    else:
        import backends.group.register  # noqa: F401 - makes "synth" known

        with _environment(told):
            group = dist.new_group(backend="synth")
    return lambda case, _: _group_call(case, group)


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _group_call(case: Case, group: dist.ProcessGroup) -> Call:
    import torch.distributed as dist

    def call(buffers: Buffers, i: int) -> None:
        match case.collective:
            case "allreduce":
                dist.all_reduce(buffers.outputs[i], group=group)
            case "broadcast":
                dist.broadcast(buffers.outputs[i], 0, group=group)
            case "allgather":
                dist.all_gather_single(buffers.outputs[i], buffers.inputs[i], group=group)
            case _:
                dist.reduce_scatter_single(buffers.outputs[i], buffers.inputs[i], group=group)

    return call


def _executor_call(case: Case, ranks: int, group: dist.ProcessGroup) -> Call:
    import synth
    import topologies
    from backends.torch_p2p import Executor
    from synth.collective import Collective

    topology = topologies.load(f"full:{ranks}")
    executor = Executor(synth.solve(topology, Collective.on(topology, case.collective)), group)

    def call(buffers: Buffers, i: int) -> None:
        match case.collective:
            case "allreduce":
                executor.allreduce(buffers.outputs[i])
            case "broadcast":
                executor.broadcast(buffers.outputs[i])
            case "allgather":
                executor.allgather(buffers.outputs[i], buffers.inputs[i])
            case _:
                executor.reduce_scatter(buffers.outputs[i], buffers.inputs[i])

    return call


class Buffers:
    """What the calls of one sample work on, filled afresh before each; values depend on rank and index.

    Sums are exact in float32, whatever the order in which they are made.
    """

    def __init__(self, case: Case, rank: int, ranks: int) -> None:
        import torch

        count = case.size_bytes // 4
        whole = torch.arange(count, dtype=torch.float32).remainder_(1021)
        block = slice(rank * count // ranks, (rank + 1) * count // ranks)
        summed = whole * ranks + ranks * (ranks - 1) // 2
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._input: Tensor | None = None
        self._initial: Tensor | None = None
        match case.collective:
            case "allreduce":
                self._initial, self._expected = whole + rank, summed
            case "broadcast":
                self._initial, self._expected = whole + rank, whole
            case "allgather":
                self._input, self._expected = whole[block].clone(), whole
            case _:
                self._input, self._expected = whole + rank, summed[block].clone()

    def fill(self, calls: int) -> None:
        """As many buffers as calls, in the state before them."""
        self.inputs = [] if self._input is None else [self._input] * calls  # never written to
        missing = range(len(self.outputs), calls)
        self.outputs = [*self.outputs[:calls], *(self._expected.clone() for _ in missing)]
        for output in self.outputs:
            if self._initial is None:
                output.fill_(-1.0)
            else:
                output.copy_(self._initial)

    def check(self, what: str) -> None:
        """Raise where a result is wrong anywhere."""
        import torch

        for i, output in enumerate(self.outputs):
            if not torch.equal(output, self._expected):
                wrong = int((output != self._expected).nonzero()[0])
                raise RuntimeError(
                    f"{what}, call {i}: element {wrong} must be {self._expected[wrong]}, got {output[wrong]}"
                )


# ---------------------------------------------------------------------------------- the measurement


def _measure(
    case: Case, contenders: dict[str, Prepare], rank: int, ranks: int, runs: int
) -> dict[str, list[Sample]]:
    """On one rank, the same result on all: the samples of each contender in the order of the rounds."""
    if rank == 0:
        print(f"{ranks} ranks, {case.collective} of {case.size_bytes} bytes ...", file=sys.stderr)
    buffers = Buffers(case, rank, ranks)
    calls = {name: prepare(case, ranks) for name, prepare in contenders.items()}
    repeats = dict.fromkeys(calls, 1)
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(WARM_UPS + runs):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            sample = _sample(calls[name], buffers, repeats[name], f"rank {rank}: {name}: {case}")
            if turn >= WARM_UPS:
                samples[name].append(sample)
            else:
                wanted = math.ceil(SAMPLE_S / sample.seconds)
                repeats[name] = max(1, min(wanted, POOL_BYTES // case.size_bytes, 1000))
    return samples


def _sample(call: Call, buffers: Buffers, repeats: int, what: str) -> Sample:
    import torch
    import torch.distributed as dist

    buffers.fill(repeats)
    dist.barrier()
    cpu = _cpu_seconds()
    start = time.perf_counter()
    for i in range(repeats):
        call(buffers, i)
    seconds = time.perf_counter() - start
    dist.barrier()  # what other threads still do for this rank's peers counts, too
    cpu = _cpu_seconds() - cpu
    buffers.check(what)
    slowest, total = torch.tensor([seconds], dtype=torch.float64), torch.tensor([cpu], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return Sample(slowest.item() / repeats, total.item() / repeats, repeats)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)  # of all threads
    return usage.ru_utime + usage.ru_stime


# --------------------------------------------------------------------------------------- the answers


def _target(name: str, case: Case) -> float | None:
    """How many times gloo's speed is asked for; None where nothing is."""
    if name not in {"sockets", "shared memory", "as it comes"}:
        return None
    in_memory = name != "sockets"  # local processes: memory is what the group takes by itself
    if case.collective == "broadcast":
        return 1.5 if in_memory else 0.9
    if case.collective != "allreduce":
        return None
    if case.size_bytes <= 1 << 20:
        return 1.0
    if case.size_bytes >= 16 << 20:
        return 1.5 if in_memory else 0.95
    return None


def _row(
    ranks: int, case: Case, name: str, samples: list[Sample], all_samples: dict[str, list[Sample]]
) -> dict[str, Any]:
    seconds = [sample.seconds for sample in samples]
    ratios = [
        base.seconds / sample.seconds for base, sample in zip(all_samples[BASELINE], samples, strict=True)
    ]
    cpu_ratios = [
        base.cpu_seconds / sample.cpu_seconds
        for base, sample in zip(all_samples[BASELINE], samples, strict=True)
    ]
    median, target = statistics.median(seconds), _target(name, case)
    speed = statistics.median(ratios)
    algbw = case.size_bytes / median / 1e9
    factor = {"allreduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(
        case.collective, (ranks - 1) / ranks
    )
    return {
        "topology": f"full:{ranks}",
        "ranks": ranks,
        "collective": case.collective,
        "method": name,
        "bytes": case.size_bytes,
        "time_us": median * 1e6,
        "spread": (max(seconds) - min(seconds)) * 1e6,
        "cpu_us": statistics.median(sample.cpu_seconds for sample in samples) * 1e6,
        "algbw": algbw,
        "busbw": algbw * factor,
        "times_gloo": speed,
        "times_gloo_spread": [min(ratios), max(ratios)],
        "cpu_saving": statistics.median(cpu_ratios),
        "cpu_saving_spread": [min(cpu_ratios), max(cpu_ratios)],
        "target": target,
        "met": None if target is None else speed >= target,
        "calls_per_sample": samples[-1].calls,
        "runs": len(samples),
        "share_of_optimum": None,
        "share_of_nominal": None,
    }


def _document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "question": "How fast are schedules beside gloo on local processes?",
        **circumstances("arborcast", "torch", "numpy"),
        "units": {
            "time_us": "of one call, the slowest rank's; median over the rounds",
            "cpu_us": "of one call, all threads of all ranks together; median over the rounds",
            "spread": "largest minus smallest, us",
            "times_gloo": "gloo's time over this one's in the same round; median over the rounds",
            "cpu_saving": "gloo's CPU time over this one's in the same round; median over the rounds",
            "share_of_optimum": "null: loopback has no links whose rates are known",
        },
        "contenders": {
            name: "its settings, where it is the group synth" if told is None else told
            for name, told in CONTENDERS.items()
        },
        "rows": rows,
    }


def _print(rows: list[dict[str, Any]]) -> None:
    titles = ("ranks", "collective", "size", "contender", "ms", "CPU ms", "x gloo", "spread", "CPU", "target")
    layout = "{:>5} {:14} {:>8} {:14}{:>10}{:>10}{:>8} {:>13}{:>7}  {}"
    from synth.sizes import format_size

    print()
    print(layout.format(*titles))
    for row in rows:
        target, met = row["target"], "met" if row["met"] else "MISSED"
        low, high = row["times_gloo_spread"]
        print(
            layout.format(
                row["ranks"],
                row["collective"],
                format_size(row["bytes"]),
                row["method"],
                f"{row['time_us'] / 1e3:.2f}",
                f"{row['cpu_us'] / 1e3:.2f}",
                f"{row['times_gloo']:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{row['cpu_saving']:.2f}",
                "" if target is None else f"{met} {target:.2f}",
            )
        )


if __name__ == "__main__":
    main()

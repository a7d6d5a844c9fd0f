"""Random faults during training: whether every rank that is left raises in time, with no wrong sum before.

Ranks train a small model under DDP over the process group "synth" and check every gradient against one that
is computed serially. At a random moment a random rank is killed, stopped, aborts its group, or is cut off
(the link of its network namespace goes down; root and iproute2 only). All others must raise within the
group's timeout and `GRACE_S`; then processes, sockets and files are looked for that are left over. Results go
to `bench/results/faults.json`.

    python bench/faults.py               # 300 rounds, about twenty minutes
    python bench/faults.py --rounds 20 --faults kill stop
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from arborcast import topologies
from arborcast.bench.emulation import machine, network
from arborcast.bench.emulation.plan import plan_emulation
from arborcast.bench.harness.document import RUNTIME
from arborcast.bench.harness.processes import started
from arborcast.bench.harness.script import KEPT, command_line, keep, one_line
from arborcast.synth.formats.results import Measure, Row, document

RESULTS = KEPT / "faults.json"
FAULTS = ("kill", "stop", "abort", "cut")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "abort": signal.SIGUSR1}
TRANSPORTS = ("shared memory", "sockets")
GRACE_S = 2.0
HANG_S = 30.0
"""Beyond the timeout and the grace: who has not raised by then hangs."""

LOST_AFTER_S = 1.0
"""Of the group: how long the kernel of a rank's host may answer nothing."""

BEGIN_S = 600.0
"""That a group may take to be made, tables and kernels included where there are none yet."""

STEPS_BEFORE = 3
PAUSE_S = 0.01
"""Between two steps, for other processes of the machine: it is not speed that is measured."""

WIDTH = 160

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "torch._dynamo", "torch.nn.parallel", "arborcast.torch_backend"])


@dataclass(frozen=True)
class Round:
    """What is asked of one group.

    Attributes:
        number: of the round, from which everything random follows.
        fault: one of `FAULTS`.
        transport: one of `TRANSPORTS`.
        ranks: of the group.
        victim: the rank that the fault strikes.
        after_s: when it strikes, after all ranks have made `STEPS_BEFORE` steps.
        timeout_s: of the group.
    """

    number: int
    fault: str
    transport: str
    ranks: int
    victim: int
    after_s: float
    timeout_s: float

    @property
    def answering(self) -> list[int]:
        """The ranks that have to raise at once: all but one that is killed or stopped."""
        return [rank for rank in range(self.ranks) if rank != self.victim or self.fault in {"abort", "cut"}]


@dataclass
class Outcome:
    """What came of it.

    Attributes:
        round: that was run.
        seconds: of each rank that raised, from the fault on; a stopped rank's from where it went on.
        hangs: ranks that did not raise.
        wrong: gradients that were not what serial training gives.
        left: what was left over, in words.
        said: the first line of each rank's error.
    """

    round: Round
    seconds: list[float] = field(default_factory=list)
    hangs: int = 0
    wrong: int = 0
    left: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def rounds(count: int, faults: Sequence[str], timeout_s: float, seed: int) -> Iterator[Round]:
    """The faults in turn, over each transport in turn; the rest is drawn."""
    chance = random.Random(seed)
    ways = itertools.cycle((fault, way) for way in TRANSPORTS for fault in faults)
    for number, (fault, way) in zip(range(count), ways, strict=False):
        ranks = chance.choice((3, 4))
        yield Round(
            number,
            fault,
            "sockets" if fault == "cut" else way,  # memory is not shared between hosts
            ranks,
            chance.randrange(ranks),
            chance.uniform(0, 0.5),
            timeout_s,
        )


def run(asked: Round) -> Outcome:
    """One round: ranks that train until a fault ends them."""
    with tempfile.TemporaryDirectory() as folder:
        if asked.fault != "cut":
            return _run(asked, Path(folder), [None] * asked.ranks, lambda: None)
        plan = plan_emulation(topologies.load(f"star:{asked.ranks}"), 1000)
        with network.emulate(plan) as emulation:
            switch = emulation.namespaces[asked.ranks]
            wire = plan.wire_of[asked.victim, asked.ranks]
            paths = [emulation.path(rank) for rank in range(asked.ranks)]
            return _run(asked, Path(folder), paths, lambda: switch.batch("ip", [f"link set w{wire} down"]))


def _run(asked: Round, folder: Path, namespaces: Sequence[str | None], cut: Callable[[], None]) -> Outcome:
    outcome = Outcome(asked)
    (folder / "tmp").mkdir()
    of_ranks = [(asked, rank, folder, namespaces[rank]) for rank in range(asked.ranks)]
    with started(_PROCESSES, _main, of_ranks) as (children, pipes):
        hellos = [_hear(pipe, BEGIN_S) for pipe in pipes]
        if None in hellos:
            raise RuntimeError(f"round {asked.number}: a rank did not begin to train: {hellos}")
        time.sleep(asked.after_s)
        began, pid = time.monotonic(), children[asked.victim].pid
        assert pid is not None, "it was started"
        if asked.fault == "cut":
            cut()
        else:
            os.kill(pid, SIGNALS[asked.fault])
        limit_s = asked.timeout_s + GRACE_S + HANG_S
        for rank in asked.answering:
            _note(outcome, _hear(pipes[rank], began + limit_s - time.monotonic()), began)
        if asked.fault == "stop":  # when it goes on, the others have given up
            began = time.monotonic()
            os.kill(pid, signal.SIGCONT)
            _note(outcome, _hear(pipes[asked.victim], limit_s), began)
        for child in children:
            child.join(HANG_S)
        outcome.left += _left(children, [hello for hello in hellos if hello is not None], folder)
    return outcome


def _hear(pipe: Connection, seconds: float) -> Any:
    """What a rank says within that time; None where it says nothing or is gone."""
    try:
        return pipe.recv() if pipe.poll(max(0.0, seconds)) else None
    except (EOFError, ConnectionError):
        return None


def _note(outcome: Outcome, answer: Any, began: float) -> None:
    if answer is None:
        outcome.hangs += 1
        return
    raised_at, wrong, said = answer
    outcome.seconds.append(max(0.0, raised_at - began))
    outcome.wrong += wrong
    outcome.said.append(said)


def _left(children: Sequence[Any], names: Sequence[str], folder: Path) -> list[str]:
    """Processes, Unix sockets, files and shared memory of the round that are still there."""
    found = [f"process {child.pid} goes on" for child in children if child.is_alive()]
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, 0)
            found.append(f"a child of process {child.pid} goes on")
    sockets = Path("/proc/net/unix").read_text()
    found += [f"socket {name}" for name in names if name in sockets]
    files = (folder / "tmp").rglob("*")  # torch keeps a cache of compiled code there
    found += [f"file {path.name}" for path in files if "torchinductor_" not in str(path)]
    pids = {str(child.pid) for child in children}
    return found + [
        f"shared memory {name}" for name in _shared_memory() if pids & set(re.findall(r"\d+", name))
    ]


def _shared_memory() -> list[str]:
    """The names of what has one, as torch gives them with the number of the process."""
    folder = Path("/dev/shm")
    return [path.name for path in folder.iterdir() if "torch" in path.name] if folder.is_dir() else []


# ---------------------------------------------------------------------------------------- what a rank does


def _main(pipe: Connection, asked: Round, rank: int, folder: Path, namespace: str | None) -> None:
    os.setpgid(0, 0)  # whatever it starts is found by this
    os.environ.update(
        ARBORCAST_TOPOLOGY=f"full:{asked.ranks}",
        ARBORCAST_TRANSPORT=asked.transport,
        ARBORCAST_LOST_AFTER=str(LOST_AFTER_S),
        TMPDIR=str(folder / "tmp"),
    )
    if namespace is not None:
        machine.enter(namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with open(folder / f"said-{rank}", "wb") as said:  # noqa: PTH123 - what C++ says of failures is expected
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    import torch
    import torch.distributed as dist

    import arborcast.torch_backend  # noqa: F401

    torch.set_num_threads(1)
    timeout = timedelta(seconds=BEGIN_S)
    store = dist.FileStore(str(folder / "store"), asked.ranks)
    dist.init_process_group("synth", store=store, rank=rank, world_size=asked.ranks, timeout=timeout)
    signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=_abort).start())
    group: Any = dist.group.WORLD
    wrong = 0
    try:
        for step, is_right in enumerate(training(rank, asked.ranks, asked.number)):
            wrong += not is_right
            time.sleep(PAUSE_S)
            if step == STEPS_BEFORE:
                group._communicator._engine.timeout_s = asked.timeout_s  # no reason to be late with making it
                pipe.send(group._communicator._network._reception.name or "none")
    except Exception as error:
        raised_at = time.monotonic()
        pipe.send((raised_at, wrong, f"{type(error).__name__}: {error}".splitlines()[0]))
    with suppress(Exception):
        dist.destroy_process_group()


def _abort() -> None:
    import torch.distributed as dist

    dist.distributed_c10d._abort_process_group()


def training(rank: int, size: int, seed: int) -> Iterator[bool]:
    """Steps under DDP without end; of each, whether the gradients are those of serial training."""
    import torch
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(seed)
    serial, copy = (
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
        for _ in range(2)
    )
    copy.load_state_dict(serial.state_dict())
    model = DistributedDataParallel(copy, bucket_cap_mb=0.05)
    for step in itertools.count():
        batches = [_batch(other, step) for other in range(size)]
        model.zero_grad()
        model(batches[rank]).square().mean().backward()
        serial.zero_grad()
        for batch in batches:
            (serial(batch).square().mean() / size).backward()
        pairs = zip(copy.parameters(), serial.parameters(), strict=True)
        gradients = ((cast(Tensor, ours.grad), cast(Tensor, theirs.grad)) for ours, theirs in pairs)
        yield all(torch.allclose(*both, rtol=1e-4, atol=1e-7) for both in gradients)


def _batch(rank: int, step: int) -> Any:
    import torch

    return torch.arange(4 * WIDTH, dtype=torch.float32).mul_(rank + 2).add_(step).sin_().view(4, WIDTH)


# ------------------------------------------------------------------------------------------- what is found


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """A row for each fault over each transport."""
    kinds: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        kinds.setdefault((outcome.round.fault, outcome.round.transport), []).append(outcome)
    rows: list[Row] = []
    for (fault, transport), alike in sorted(kinds.items(), key=lambda one: FAULTS.index(one[0][0])):
        seconds = [each for outcome in alike for each in outcome.seconds]
        limit_s = alike[0].round.timeout_s + GRACE_S
        rows.append(
            {
                "fault": fault,
                "transport": transport,
                "rounds": len(alike),
                "left_ranks": len(seconds) + sum(outcome.hangs for outcome in alike),
                "raised_in_time": sum(each <= limit_s for each in seconds),
                "hangs": sum(outcome.hangs for outcome in alike),
                "wrong": sum(outcome.wrong for outcome in alike),
                "left_over": sum(map(len, (outcome.left for outcome in alike))),
                "timeout_s": alike[0].round.timeout_s,
                "median_s": statistics.median(seconds) if seconds else None,
                "slowest_s": max(seconds, default=None),
            }
        )
    return rows


def results_document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The results file."""
    less = Measure("less")
    return document(
        "Do all ranks that are left raise in time when others die, stop, abort or are cut off?",
        rows_of(outcomes),
        keys=("fault", "transport"),
        measures={"hangs": less, "wrong": less, "left_over": less},
        units={
            "left_ranks": "ranks that had to raise, over all rounds",
            "raised_in_time": "of those, within the group's timeout and two seconds",
            "hangs": "of those, not within half a minute more",
            "wrong": "steps whose gradients were not those of serial training",
            "left_over": "processes, sockets, files and shared memory that were there after a round",
            "median_s": "from the fault to the error; of a stopped rank, from where it went on",
            "slowest_s": "likewise, of the slowest rank of all rounds",
        },
        packages=("arborcast", "torch"),
        code=RUNTIME,
        lost_after_s=LOST_AFTER_S,
    )


def format_table(rows: Sequence[Row]) -> str:
    """The rows for a reader at a terminal."""
    layout = "{:6} {:14}{:>7}{:>7}{:>9}{:>7}{:>7}{:>6}{:>9}{:>9}"
    head = ("fault", "transport", "rounds", "ranks", "in time", "hangs", "wrong", "left", "median", "slowest")
    lines = [layout.format(*head)]
    for row in rows:
        figures = (f"{row[name]:.2f}" if row[name] is not None else "-" for name in ("median_s", "slowest_s"))
        counts = ("rounds", "left_ranks", "raised_in_time", "hangs", "wrong", "left_over")
        lines.append(layout.format(row["fault"], row["transport"], *(row[name] for name in counts), *figures))
    return "\n".join([*lines, "median and slowest: seconds from the fault to the error"])


def _arguments() -> argparse.Namespace:
    parser = command_line(__doc__, RESULTS)
    parser.add_argument("--rounds", type=int, default=300, help="groups that are made and struck")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, help="in turn")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds, of each group")
    parser.add_argument("--at-once", type=int, default=2, help="rounds that run at the same time")
    parser.add_argument("--seed", type=int, default=0, help="for whom it strikes, and when")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.at_once) < 1 or arguments.timeout <= 0:
        parser.error("--rounds and --at-once must be at least 1, --timeout positive")
    return arguments


def measure(arguments: argparse.Namespace) -> list[Outcome]:
    """The outcomes of the rounds that the command line asks for; what went wrong is told as it comes."""
    faults = list(arguments.faults)
    if "cut" in faults and (why := machine.why_not()):
        _say(f"no cut: {why}")
        faults.remove("cut")
    outcomes = []
    with ThreadPoolExecutor(arguments.at_once) as pool:
        asked = rounds(arguments.rounds, faults, arguments.timeout, arguments.seed)
        for outcome in pool.map(run, asked):
            outcomes.append(outcome)
            is_late = max(outcome.seconds, default=0) > outcome.round.timeout_s + GRACE_S
            if outcome.hangs or outcome.wrong or outcome.left or is_late:
                _say(f"{outcome.round}: raised after {outcome.seconds} s, {outcome.hangs} hang")
                _say(f"  {outcome.wrong} wrong, left over {outcome.left}: {outcome.said}")
            elif len(outcomes) % 10 == 0:
                _say(f"{len(outcomes)} rounds")
    return outcomes


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@one_line("faults")
def main() -> None:
    """Run what the command line asks for, print the table, write the results."""
    arguments = _arguments()
    outcomes = measure(arguments)
    print(format_table(rows_of(outcomes)))
    keep(arguments.json, results_document(outcomes))


if __name__ == "__main__":
    main()

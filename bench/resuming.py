"""A link fails during a collective: whether every element is right, what it costs, what a restart would cost.

On emulated links (network namespaces; root and iproute2 only) the connection between two ranks is reset at a
random moment of a call, after a random part of the bytes that it carries in one. The call must end with every
element right on every rank, without that link. Results go to `bench/results/resuming.json`.

    python bench/resuming.py               # 108 rounds, a few minutes
    python bench/resuming.py --rounds 12
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from arborcast import topologies
from arborcast.bench.emulation import machine, network
from arborcast.bench.emulation.plan import plan_emulation
from arborcast.bench.emulation.processes import run_inside
from arborcast.bench.harness.document import Measure, Row, document, write_document
from arborcast.bench.harness.provenance import RUNTIME
from arborcast.synth.errors import InputError

RESULTS = Path(__file__).resolve().parent / "results" / "resuming.json"
PAIRS = {"full:4": ((0, 1), (3, 2)), "ring:4": ((1, 2), (0, 3)), "star:4": ((0, 1), (3, 2))}
"""Fabrics, and the ranks whose connection is reset."""

KINDS = ("allreduce", "allgather", "broadcast", "reduce-scatter")
TYPES = ("float32", "int32", "float64", "int8")
BYTES = 4 << 20
MBIT = 200
TIMEOUT_S = 60.0
TIMED = 2  # calls in which nothing fails, before and after


@dataclass(frozen=True)
class Strike:
    """One round: which call is struck, where, and after which part of the bytes of that connection."""

    collective: str
    dtype: str
    pair: tuple[int, int]
    part: float


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a round.

    Attributes:
        right: whether every element was right, in the call that was struck and in the others.
        spans: begin and end of the calls before, of the one that was struck, and of those after.
        struck_at: when the connection was reset; None on other ranks.
        resumed: ms of planning; bytes sent before, by the finish, by a whole call; None where no link failed.
    """

    right: bool
    spans: tuple[tuple[float, float], ...]
    struck_at: float | None
    resumed: tuple[float, int, int, int] | None


def strikes(fabric: str, count: int, seed: int) -> list[Strike]:
    """The rounds on a fabric, the same for the same seed."""
    dice = random.Random(f"{fabric} {seed}")
    return [
        Strike(
            KINDS[number % len(KINDS)],
            TYPES[number // len(KINDS) % len(TYPES)],
            dice.choice(PAIRS[fabric]),
            dice.uniform(0.0, 1.0),
        )
        for number in range(count)
    ]


# ---------------------------------------------------------------------------------------- what a rank does


def strike_all(rank: int, address: str, store_path: str, fabric: str, asked: Sequence[Strike]) -> list[Seen]:
    """A group for each round; for `bench.emulation.processes.run_inside`, which gives the first three."""
    os.environ.update(
        ARBORCAST_TOPOLOGY=fabric,
        ARBORCAST_RESUME="on",
        ARBORCAST_TRANSPORT="sockets",
    )
    import torch.distributed as dist

    import arborcast.torch_backend  # noqa: F401

    size = topologies.load(fabric).ranks
    store = dist.FileStore(store_path, size)
    found = []
    for number, strike in enumerate(asked):
        dist.init_process_group(
            "synth",
            store=dist.PrefixStore(str(number), store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        found.append(_struck(rank, size, strike, number))
        dist.barrier()
        dist.destroy_process_group()
    return found


def _struck(rank: int, size: int, strike: Strike, seed: int) -> Seen:
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    communicator = group._communicator
    calls = [_call(strike, rank, size, seed)]  # which warms up
    first, second = strike.pair
    channel = communicator._network.channels[second] if rank == first else None
    moved = 0
    for _ in range(TIMED):
        moved = channel.state.moved if channel is not None else 0
        calls.append(_call(strike, rank, size, seed))
    moment: list[float] = []
    if channel is not None:
        last = channel.state.moved + strike.part * (channel.state.moved - moved)
        threading.Thread(target=_reset, args=(channel, last, moment), daemon=True).start()
    calls += [_call(strike, rank, size, seed) for _ in range(1 + 1 + TIMED)]  # of those after, one warms up
    (resumed,) = communicator.resumed or [None]
    return Seen(
        all(is_right for is_right, _ in calls),
        tuple(span for _, span in calls[1:]),
        moment[0] if moment else None,
        None
        if resumed is None
        else (
            resumed.plan_ms,
            resumed.sent_bytes,
            resumed.finish_bytes,
            resumed.whole_bytes,
        ),
    )


def _reset(channel: Any, last: float, moment: list[float]) -> None:
    while channel.state.moved < last:
        time.sleep(5e-5)
    moment.append(time.monotonic())
    channel._socket.shutdown(socket.SHUT_RDWR)


def _call(strike: Strike, rank: int, size: int, seed: int) -> tuple[bool, tuple[float, float]]:
    """Whether every element was right, and when the call began and ended."""
    import torch
    import torch.distributed as dist

    dtype = getattr(torch, strike.dtype)
    count = BYTES // dtype.itemsize // size
    data = [_data(size * count, other, seed).to(dtype) for other in range(size)]
    own = data[rank].clone()
    dist.barrier()
    begin = time.monotonic()
    match strike.collective:
        case "allreduce":
            dist.all_reduce(own)
            due = torch.stack(data).sum(0)
        case "broadcast":
            dist.broadcast(own, 0)
            due = data[0]
        case "allgather":
            own = torch.empty_like(own)
            begin = time.monotonic()
            dist.all_gather_into_tensor(own, data[rank][:count])
            due = torch.cat([other[:count] for other in data])
        case _:
            given, own = own, torch.empty(count, dtype=dtype)
            begin = time.monotonic()
            dist.reduce_scatter_tensor(own, given)
            due = torch.stack(data).sum(0)[rank * count :][:count]
    span = begin, time.monotonic()
    return torch.equal(own, due.to(dtype)), span


def _data(count: int, rank: int, seed: int) -> Any:
    import torch

    # Sums of a few of them are exact in every type.
    return torch.randint(1, 8, (count,), generator=torch.Generator().manual_seed(1000 * seed + rank))


# ------------------------------------------------------------------------------------------- what is found


def rows_of(fabric: str, asked: Sequence[Strike], seen: Sequence[Sequence[Seen]]) -> list[Row]:
    """A row for each collective on a fabric.

    Args:
        fabric: its spec.
        asked: the rounds.
        seen: by each rank, of each round.
    """
    rows: list[Row] = []
    for kind in KINDS:
        rounds = [
            [of_rank[number] for of_rank in seen]
            for number, strike in enumerate(asked)
            if strike.collective == kind
        ]
        hit = [each for each in rounds if _is_struck(each)]
        if not rounds:
            continue
        lost, again = [_lost_ms(each) for each in hit], [_restart_ms(each) for each in hit]
        resumed = [each[0].resumed for each in hit if each[0].resumed is not None]
        rows.append(
            {
                "topology": fabric,
                "collective": kind,
                "bytes": BYTES,
                "rounds": len(rounds),
                "right": sum(all(it.right for it in each) for each in rounds),
                "resumed": len(hit),
                "undisturbed_ms": _median([_times(each)[0] for each in rounds]),
                "lost_ms": _median(lost),
                "most_lost_ms": max(lost, default=None),
                "restart_lost_ms": _median(again),
                "plan_ms": _median([it[0] for it in resumed]),
                "sent_again_bytes": _median([float(it[1] + it[2] - it[3]) for it in resumed]),
                "restart_again_bytes": _median([float(it[1]) for it in resumed]),
            }
        )
    return rows


def _is_struck(seen: Sequence[Seen]) -> bool:
    """Whether the connection was reset in the call that was meant, and was still needed."""
    begin = min(it.spans[TIMED][0] for it in seen)
    end = max(it.spans[TIMED][1] for it in seen)
    moments = [it.struck_at for it in seen if it.struck_at is not None]
    return all(it.resumed is not None for it in seen) and any(begin <= at <= end for at in moments)


def _times(seen: Sequence[Seen]) -> list[float]:
    """Milliseconds of the calls: the median before, the one that was struck, the median after."""
    spans = zip(*(it.spans for it in seen), strict=True)
    times = [1000 * (max(end for _, end in each) - min(begin for begin, _ in each)) for each in spans]
    return [statistics.median(times[:TIMED]), times[TIMED], statistics.median(times[TIMED + 2 :])]


def _lost_ms(seen: Sequence[Seen]) -> float:
    before, struck, _ = _times(seen)
    return struck - before


def _restart_ms(seen: Sequence[Seen]) -> float:
    """What a restart would lose at least: all until the failure, then a call without the link."""
    before, _, after = _times(seen)
    begin = min(it.spans[TIMED][0] for it in seen)
    (at,) = [it.struck_at for it in seen if it.struck_at is not None]
    return 1000 * (at - begin) + after - before


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def results_document(rows: list[Row]) -> dict[str, Any]:
    """The results file."""
    return document(
        "Is a collective finished rightly when a link fails in the middle of it, and at what cost?",
        rows,
        keys=("topology", "collective"),
        measures={"lost_ms": Measure("less"), "sent_again_bytes": Measure("less")},
        units={
            "bytes": "of the whole buffer",
            "rounds": "calls in which a connection was to be reset at a random moment",
            "right": "of those, with every element right on every rank, in that call and in those around it",
            "resumed": "of the rounds, in which the connection broke in the call that was meant",
            "undisturbed_ms": "a call in which nothing fails; median",
            "lost_ms": "the time of the call in which a link fails beyond that; median over rounds",
            "most_lost_ms": "the same, the slowest round",
            "restart_lost_ms": "what a call from scratch without the link would lose at least: all the time "
            "until the failure, and what such a call takes longer; nobody notices, agrees or connects in it",
            "plan_ms": "of the time lost: planning the finish and packing the plan, on rank 0",
            "sent_again_bytes": "by all ranks, beyond what a call sends in which nothing fails; median",
            "restart_again_bytes": "that a restart would send again: all that had been handed over",
        },
        packages=("arborcast", "torch"),
        code=RUNTIME,
        mbit=MBIT,
    )


def format_table(rows: Sequence[Row]) -> str:
    """The rows for a reader at a terminal."""
    layout = "{:8} {:15}{:>7}{:>7}{:>8}{:>12}{:>9}{:>9}{:>9}{:>7}{:>10}{:>10}"
    head = ("fabric", "collective", "rounds", "right", "resumed", "undisturbed", "lost ms", "most")
    lines = [layout.format(*head, "restart", "plan", "again MB", "restart")]
    for row in rows:
        names = ("undisturbed_ms", "lost_ms", "most_lost_ms", "restart_lost_ms", "plan_ms")
        figures = ["-" if row[name] is None else f"{row[name]:.1f}" for name in names]
        sent = [row["sent_again_bytes"], row["restart_again_bytes"]]
        figures += ["-" if it is None else f"{it / 1e6:.2f}" for it in sent]
        words = (row[name] for name in ("topology", "collective", "rounds", "right", "resumed"))
        lines.append(layout.format(*words, *figures))
    return "\n".join(lines)


def measure(count: int, seed: int) -> list[Row]:
    """The rows of so many rounds, shared out among the fabrics.

    Raises:
        InputError: not root, no iproute2, or a kernel without what is needed.
        EmulationError: a rank failed.
    """
    rows: list[Row] = []
    for fabric in PAIRS:
        asked = strikes(fabric, count // len(PAIRS), seed)
        with network.emulate(plan_emulation(topologies.load(fabric), MBIT)) as emulation:
            seen = run_inside(emulation, strike_all, fabric, asked, timeout_s=120 + 20 * len(asked))
        found = rows_of(fabric, asked, seen)
        print(format_table(found), file=sys.stderr, flush=True)
        rows += found
    return rows


def main() -> None:
    """Run what the command line asks for, print the table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=108, help="calls that are struck, on all fabrics")
    parser.add_argument("--seed", type=int, default=0, help="for where it strikes, and when")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    arguments = parser.parse_args()
    if arguments.rounds < len(PAIRS):
        parser.error(f"--rounds must be at least {len(PAIRS)}")
    try:
        rows = measure(arguments.rounds, arguments.seed)
        print(format_table(rows))
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_document(arguments.json, results_document(rows))
        print(f"\nwritten: {arguments.json}")
    except (InputError, machine.EmulationError) as error:
        print(f"resuming: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()

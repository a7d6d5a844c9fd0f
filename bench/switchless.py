"""How close to the limit is the process group on hosts without a switch, along cables.

Each fabric becomes network namespaces: a cable is a pair of devices with a subnet of its own, nobody
forwards, and ranks meet in a slow network beside them. Unmodified gloo runs on the same links where all ranks
forward, along the fastest of several cables; what it says where nobody forwards is kept, too. Needs root and
iproute2. Results go to `bench/results/switchless.json`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from functools import partial
from typing import Any

from arborcast import topologies
from arborcast.bench.contest.rows import delivered_fabric
from arborcast.bench.emulation.delivery import check_delivery, delivered
from arborcast.bench.emulation.network import emulate
from arborcast.bench.emulation.plan import EmulationPlan, at_rates, plan_emulation
from arborcast.bench.emulation.processes import run_inside
from arborcast.bench.harness.document import RUNTIME, timed_row
from arborcast.bench.harness.payload import Payload, torch_call
from arborcast.bench.harness.script import KEPT, command_line, keep, one_line
from arborcast.bench.page.console import print_results
from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.formats.results import TIME, Measure, document
from arborcast.synth.topology import Link, Topology

MBIT = 100
SIZES = 4 << 20, 16 << 20
KINDS = Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST
PULLS = 5
LEAD_S = 0.02
"""From the word to begin until the begin: it must have reached every rank by then."""

Timed = list[list[float]]
"""Seconds of one rank: by call, of each run."""


def line(ranks: int) -> Topology:
    """Ranks in a row."""
    pairs = [(rank, rank + 1) for rank in range(ranks - 1)]
    links = [Link(*ends, Fraction(25)) for pair in pairs for ends in (pair, pair[::-1])]
    return Topology.build(f"line:{ranks}", ranks, links)


def pair(rates: Sequence[int]) -> Topology:
    """Two ranks with a cable of each rate."""
    cables = [
        Link(0, 1, Fraction(rate), addresses=EmulationPlan.ends(number)) for number, rate in enumerate(rates)
    ]
    name = f"pair:2, {len(rates)} cables of unequal rates"
    return Topology.build(name, 2, [way for cable in cables for way in (cable, cable.reversed)])


def fabrics() -> list[Topology]:
    """Those that hosts without a switch have; a ring with one cable of half the rate; several cables."""
    ring = topologies.load("ring:4")
    slow = [
        replace(link, bandwidth=link.bandwidth / 2) if {link.src, link.dst} == {0, 1} else link
        for link in ring.links
    ]
    half = Topology.build("ring:4, one cable of half the rate", 4, slow)
    unequal = pair((10, 10, 25, 50))
    return [topologies.load("ring:3"), ring, line(4), topologies.load("full:4"), half, unequal]


def run_calls(
    rank: int,
    address: str,
    store_path: str,
    backend: str,
    topology: Topology,
    sizes: Sequence[int],
    runs: int,
) -> Timed:
    """Time all collectives on a group; for `run_inside`.

    Raises:
        RuntimeError: a result is wrong.
    """
    import torch.distributed as dist

    from arborcast.backends import Options

    size = topology.ranks
    store = dist.FileStore(store_path, size)
    options = Options(topology=topology, prepare=()) if backend == "synth" else None
    timeout = timedelta(seconds=120)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timeout, pg_options=options
    )
    found: Timed = []
    for kind in KINDS:
        for nbytes in sizes:
            count = nbytes // 4 // size * size
            payload, asked = Payload(kind, count, rank, size), torch_call(kind, count)
            seconds = []
            for turn in range(runs + 1):  # the first one warms up
                output = payload.initial.clone()
                call = partial(asked, output, payload.given)
                seconds.append(_timed(store, f"{kind}/{nbytes}/{turn}", rank, call))
                payload.check(output, f"{backend}, {kind} of {nbytes} bytes: rank {rank}")
            found.append(seconds[1:])
    return found


def _timed(store: Any, key: str, rank: int, call: Callable[[], object]) -> float:
    """Seconds from an instant at which all ranks begin to this rank's end."""
    import torch.distributed as dist

    dist.barrier()
    if rank == 0:
        store.set(key, str(time.monotonic() + LEAD_S))
    begin = float(store.get(key))
    while time.monotonic() < begin:
        pass
    call()
    return time.monotonic() - begin


def gloo_alone(rank: int, address: str, store_path: str, size: int) -> str:
    """What gloo says where nobody forwards, by the first cable of each rank."""
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = min(name for _, name in socket.if_nameindex() if name.startswith("w"))
    store = dist.FileStore(store_path, size)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=10)
        )
    except RuntimeError as error:
        return " ".join(str(error).split())
    return ""


def after_a_pull(rank: int, address: str, store_path: str, topology: Topology, cable: int) -> float:
    """Seconds from when a cable of the last rank drops all packets until a call succeeds again."""
    import torch
    import torch.distributed as dist

    from arborcast.backends import Options

    size = topology.ranks
    store = dist.FileStore(store_path, size)
    options = Options(topology=topology, prepare=(), address=address)
    dist.init_process_group(
        "synth", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60), pg_options=options
    )
    group: Any = dist.group.WORLD
    values = torch.ones(1 << 18)
    for _ in range(3):
        dist.all_reduce(values)
    if rank == size - 1:
        store.set("pulled", str(time.monotonic()))
        loss = ["tc", "qdisc", "replace", "dev", f"w{cable}", "root", "pfifo", "limit", "0"]
        subprocess.run(loss, check=True)
    pulled = float(store.get("pulled"))
    try:
        while True:
            dist.all_reduce(values.fill_(1))
    except RuntimeError:
        group.go_on()
    dist.all_reduce(values.fill_(1))
    if not torch.equal(values, torch.full_like(values, size)):
        raise RuntimeError(f"allreduce after the pull: wrong on rank {rank}")
    return time.monotonic() - pulled


def pulls(fabric: Topology, times: int) -> list[float]:
    """Seconds until all ranks go on, each time on a fabric anew."""
    plan, found = plan_emulation(at_rates(fabric, MBIT), MBIT), []
    last = fabric.ranks - 1
    for _ in range(times):
        with emulate(plan, has_cables=True) as emulation:
            cable = plan.wire_of[last - 1, last]
            found.append(max(run_inside(emulation, after_a_pull, plan.cabled, cable)))
        print(f"{fabric.name}: goes on {found[-1]:.1f} s after a pull", file=sys.stderr)
    return found


def measure(fabric: Topology, sizes: Sequence[int], runs: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of a fabric, and what gloo says of it on each rank."""
    fabric = at_rates(fabric, MBIT)
    plan = plan_emulation(fabric, MBIT)
    with emulate(plan, has_cables=True) as emulation:
        rates = delivered(emulation)
        check_delivery(plan, rates, lambda said: print(said, file=sys.stderr))
        ours = run_inside(emulation, run_calls, "synth", plan.cabled, sizes, runs)
        said = run_inside(emulation, gloo_alone, fabric.ranks)
    with emulate(plan) as emulation:
        theirs = run_inside(emulation, run_calls, "gloo", fabric, sizes, runs)
    limits = delivered_fabric(fabric, rates["alone"])
    rows = []
    for at, (kind, nbytes) in enumerate((kind, nbytes) for kind in KINDS for nbytes in sizes):
        least_us = nbytes / 1000 / float(bound(limits, Collective.on(limits, kind)).rate)
        times = {
            name: [1e6 * max(one) for one in zip(*(rank[at] for rank in seen), strict=True)]
            for name, seen in (("cables", ours), ("gloo, forwarded", theirs))
        }
        for name, each in times.items():
            row = timed_row(
                topology=fabric.name,
                ranks=fabric.ranks,
                collective=kind,
                root=0 if kind.has_root else None,
                method=name,
                size_bytes=nbytes,
                times_us=each,
                optimum_us=least_us,
            )
            rows.append(row)
        rows[-2]["speed_up_over_gloo"] = rows[-1]["time_us"] / rows[-2]["time_us"]
        print(
            f"{fabric.name}, {kind} of {nbytes >> 20} MiB: {rows[-2]['share_of_optimum']:.3f}",
            file=sys.stderr,
        )
    return rows, said


@one_line("switchless")
def main() -> None:
    """Measure all fabrics, print the table, write the results."""
    parser = command_line(__doc__, KEPT / "switchless.json")
    parser.add_argument("--only", help="one of the fabrics, by its name")
    parser.add_argument("--runs", type=int, default=5, help="of each call, after one that warms up")
    arguments = parser.parse_args()
    rows, said = [], {}
    for fabric in fabrics():
        if arguments.only in (None, fabric.name):
            new, said[fabric.name] = measure(fabric, SIZES, arguments.runs)
            rows += new
    found = document(
        "How close to the limit is the process group along cables, where nobody forwards?",
        rows,
        keys=("topology", "collective", "method", "bytes"),
        measures={
            **TIME,
            "share_of_optimum": Measure("more", follows="time_us"),
            "speed_up_over_gloo": Measure("more", follows="time_us"),
        },
        units={
            "time_us": "from the instant at which all ranks begin until the last is done; median of runs",
            "share_of_optimum": "of the proven limit at the rates that each cable delivered alone before",
            "speed_up_over_gloo": "gloo where all ranks forward, over this one",
        },
        packages=("arborcast", "torch", "numpy"),
        code=RUNTIME,
        slowest_mbit=MBIT,
        gloo_where_nobody_forwards=said,
        seconds_from_a_pull_until_all_go_on=pulls(topologies.load("ring:4"), PULLS),
    )
    print_results(found, "spread", section="switchless")
    keep(arguments.json, found, is_part=arguments.only is not None)


if __name__ == "__main__":
    main()

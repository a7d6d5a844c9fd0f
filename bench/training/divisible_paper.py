"""The sweeps of the Divisible paper (Takisawa, Yazaki, Ishihata), reproduced by our simulator.

32 fully connected layers, a batch of 1200, 1 to 32 P100s, one stage each: the speed-up over the number of
microbatches, over the layers' width, and NVLink against InfiniBand. The profile follows from arithmetic and
memory traffic. One constant (`MESSAGE_US`) is calibrated, on one published speed-up; every other figure is
a prediction. Nothing here is measured by us.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from arborcast.pipeline.costs.devices import P100
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.profiles import Layer, Profile
from arborcast.pipeline.simulation.pass_simulator import simulate
from arborcast.pipeline.stages import Plan
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load

LAYERS, OUTPUTS, BATCH, WIDTH = 32, 10, 1200, 5000
FLOAT_BYTES = 4

STAGES = (1, 2, 4, 8, 16, 32)
MICROBATCHES = (1, 2, 3, 5, 8, 10, 12, 15, 20, 24, 30, 40, 60, 80)
"""The sweep's: numbers up to the paper's most (80) that divide the batch."""

NAMED = (1, 3, 5, 12, 20, 40, 80)
"""Those that the paper's text names; which others its figures show, the text does not say."""

WIDTHS = tuple(range(1000, 10001, 1000))
MICROBATCH_SIZES = (600, 400, 240, 120, 60)
"""Of the sweep over the width; the paper names 120 alone."""

BEST = {2: (5, 1.34), 4: (5, 1.93), 8: (20, 2.7), 16: (20, 3.49), 32: (20, 3.72)}
"""Published, by processes: the best number of microbatches, its speed-up over one process (section 6.1)."""

CALIBRATED = 32
"""Processes whose published speed-up `MESSAGE_US` is calibrated on. All other figures are predicted."""

MESSAGE_US = 418.0
"""That a blocking message costs the process at each end beyond its bytes (shape and type go first in a
message of their own, arrays through Python): so that 32 stages reach 3.72."""

GEMM_SHARE, MEMORY_SHARE = 0.75, 0.8
"""Of the P100's peak rates that products of matrices and memory traffic reach: what our analytic profiles
assume of every accelerator."""

TILE, TILES_TRIED = 64, (1, 64, 128)
"""Samples that a product is computed for are a multiple of it, as in the usual kernels. An assumption, and
one that matters: of those tried it comes closest to the published figures."""

INFINIBAND = Fraction(25, 2)
"""GB/s of EDR 4x, 100 Gbit/s; hosts have two, and a message takes one of them (table 1)."""

NVLINK = Fraction(20)
"""GB/s of a link of the P100; pairs of GPUs have one or two (table 1)."""


def divisible_sweeps() -> list[dict[str, Any]]:
    """All three sweeps and the comparison with the published figures, as rows.

    Every row has `sweep`, `stages`, `microbatches`, `width`, `network`, `time_us` and `speed_up` (over one
    process with the batch whole; in the sweep over the width, over as many processes with the batch whole).
    Rows of the sweep "best" are the comparison: `paper_microbatches`, `paper_speed_up`, `calibrated`
    (whether this figure set the constant), and the best of `NAMED` and of all of `MICROBATCHES`.
    """
    rows = microbatch_sweep()
    return [*rows, *best_rows(rows), *width_sweep(), *bandwidth_sweep()]


def microbatch_sweep(
    stages: Sequence[int] = STAGES, microbatches: Sequence[int] = MICROBATCHES
) -> list[dict[str, Any]]:
    """Section 6.1: time and speed-up over the number of microbatches, one process per host."""
    serial = step_us(1, 1)
    return [
        _row("microbatches", d, m, WIDTH, "InfiniBand", step_us(d, m), serial)
        for d in stages
        for m in microbatches
    ]


def best_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The published optimum of each number of processes beside the model at the same place, and its own."""
    found = []
    for stages, (published, speedup) in BEST.items():
        mine = {row["microbatches"]: row for row in rows if row["stages"] == stages}
        at = mine[published]
        named, all_of_them = (
            max((m for m in among if m in mine), key=lambda m: (mine[m]["speed_up"], -m))
            for among in (NAMED, MICROBATCHES)
        )
        found.append(
            {
                **at,
                "sweep": "best",
                "paper_microbatches": published,
                "paper_speed_up": speedup,
                "difference": at["speed_up"] / speedup - 1,
                "calibrated": stages == CALIBRATED,
                "best_of_named": named,
                "best_of_named_speed_up": mine[named]["speed_up"],
                "best_of_all": all_of_them,
                "best_of_all_speed_up": mine[all_of_them]["speed_up"],
            }
        )
    return found


def claims(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What else the paper says in words, beside what the model says: `claim`, `model`, `holds`."""
    by_width = {
        (row["stages"], row["width"], BATCH // row["microbatches"]): row["speed_up"]
        for row in rows
        if row["sweep"] == "width"
    }
    two = {
        r["microbatches"]: r["speed_up"] for r in rows if r["sweep"] == "microbatches" and r["stages"] == 2
    }
    slower = min(m for m in two if all(two[n] < two[1] for n in two if n >= m))
    wide = [(d, w) for d in (8, 16) for w in WIDTHS if w >= 3000]
    narrow = [(d, w) for d in (8, 16) for w in WIDTHS if w <= 2000]

    def place(stages: int, width: int) -> int:
        """Of microbatches of 120 samples, from the fastest (0)."""
        order = sorted(MICROBATCH_SIZES, key=lambda size: -by_width[stages, width, size])
        return order.index(120)

    best = {width: max(by_width[8, width, size] for size in MICROBATCH_SIZES) for width in WIDTHS}
    gap = _network_gap(rows)
    first, last = sum(place(*it) == 0 for it in wide), sum(place(*it) == 3 for it in narrow)
    fall = best[2000] / best[3000]
    return [
        _claim("2 processes: 12 microbatches and more are slower than 1", f"from {slower} on", slower == 12),
        _claim("InfiniBand or NVLink makes hardly a difference", f"{gap:.1%} at most", gap < 0.05),
        _claim("below a width of 3000 the speed-up falls", f"2000 has {fall:.0%} of 3000's", fall < 0.95),
        _claim(
            "8 and 16 processes, width from 3000: microbatches of 120 are fastest",
            f"{first} of {len(wide)} widths",
            first == len(wide),
        ),
        _claim(
            "8 and 16 processes, width up to 2000: microbatches of 120 are second slowest",
            f"{last} of {len(narrow)} widths",
            last == len(narrow),
        ),
        _claim(
            "4 and 8 processes: at a width of 10000 most speed-ups fall",
            f"{best[10000] / best[9000] - 1:+.1%} from 9000 to 10000 at 8",
            best[10000] < best[9000],
        ),
    ]


def _claim(claim: str, model: str, holds: bool) -> dict[str, Any]:
    return {"claim": claim, "model": model, "holds": holds}


def _network_gap(rows: Sequence[dict[str, Any]]) -> float:
    """The largest share by which InfiniBand is slower."""
    times: dict[tuple[str, int], float] = {
        (r["network"], r["microbatches"]): r["time_us"] for r in rows if r["sweep"] == "bandwidth"
    }
    return max(times["InfiniBand", m] / times["NVLink", m] - 1 for name, m in times if name == "NVLink")


def width_sweep(stages: Sequence[int] = (4, 8, 16), widths: Sequence[int] = WIDTHS) -> list[dict[str, Any]]:
    """Section 6.3: the speed-up of dividing the batch at all, over the width of the layers."""
    rows = []
    for d in stages:
        for width in widths:
            whole = step_us(d, 1, width=width)
            for size in MICROBATCH_SIZES:
                time = step_us(d, BATCH // size, width=width)
                rows.append(_row("width", d, BATCH // size, width, "InfiniBand", time, whole))
    return rows


def bandwidth_sweep(microbatches: Sequence[int] = MICROBATCHES) -> list[dict[str, Any]]:
    """Section 6.2: 4 processes on 4 hosts (InfiniBand) and on one (NVLink)."""
    serial = step_us(1, 1)
    return [
        _row("bandwidth", 4, m, WIDTH, name, step_us(4, m, topology=topology), serial)
        for name, topology in (("InfiniBand", infiniband(4)), ("NVLink", nvlink()))
        for m in microbatches
    ]


def step_us(
    stages: int,
    microbatches: int,
    *,
    width: int = WIDTH,
    topology: Topology | None = None,
    message_us: float = MESSAGE_US,
) -> float:
    """A step of training, simulated: the paper's fill and drain, one rank per stage.

    Args:
        stages: divides 32.
        microbatches: divides 1200.
        width: of the layers.
        topology: None for one process per host.
        message_us: see `MESSAGE_US`.
    """
    each = LAYERS // stages
    profile = paper_profile(stages, microbatches, width=width, message_us=message_us)
    fabric = infiniband(stages) if topology is None else topology
    plan = Plan([(rank * each, (rank + 1) * each, (rank,)) for rank in range(stages)], microbatches, "gpipe")
    # Plain gradient descent reads weights and gradients and writes weights, stage by stage at the same time.
    update = each * 3 * _memory_us(width * width * FLOAT_BYTES)
    return simulate(plan, profile, LinkCosts(fabric), batch=BATCH, update_us=update).time_us


def paper_profile(
    stages: int,
    microbatches: int,
    *,
    width: int = WIDTH,
    message_us: float = MESSAGE_US,
) -> Profile:
    """The layers' costs for one microbatch in a pipeline of so many stages.

    A product of matrices costs its arithmetic (forward and the input's gradient for samples in whole tiles)
    and reading or writing the weights once; from the second microbatch on, gradients are added to those that
    are there, three times the weights' bytes (the paper saw it in the profiler, section 5). Calls that send
    and receive block the process, so their constant cost is part of the passes of the stage that calls.
    """
    samples = BATCH // microbatches
    each = LAYERS // stages
    tiled = math.ceil(samples / TILE) * TILE
    added = (microbatches - 1) / microbatches  # of all passes, those that find a gradient there
    layers = []
    for index in range(LAYERS):
        outputs = OUTPUTS if index == LAYERS - 1 else width
        weights = width * outputs * FLOAT_BYTES
        arithmetic_us = 2 * width * outputs / (P100.flops["float32"] * GEMM_SHARE) * 1e6  # of a sample
        messages = (index % each == 0 and index > 0) + ((index + 1) % each == 0 and index < LAYERS - 1)
        blocked = messages * message_us
        layers.append(
            Layer(
                f"linear{index}",
                forward_us=tiled * arithmetic_us + _memory_us(weights) + blocked,
                backward_us=(tiled + samples) * arithmetic_us
                + _memory_us((2 + 3 * added) * weights)
                + blocked,
                output_bytes=samples * outputs * FLOAT_BYTES,
                saved_bytes=samples * width * FLOAT_BYTES,
                parameter_bytes=weights,
                gradient_bytes=weights,
            )
        )
    return Profile(f"{LAYERS} x {width}", samples, tuple(layers), source="P100, derived")


def infiniband(hosts: int) -> Topology:
    """Hosts with one process each, around one switch."""
    return load(f"star:{hosts},bandwidth={INFINIBAND}") if hosts > 1 else Topology.build("one", 1, [])


def nvlink() -> Topology:
    """The 4 GPUs of a host: two pairs with two links, one between all others."""
    rates = {
        (a, b): NVLINK * (2 if {a, b} in ({0, 1}, {2, 3}) else 1)
        for a in range(4)
        for b in range(4)
        if a != b
    }
    return Topology.build("reedbush-l", 4, [Link(a, b, rate) for (a, b), rate in rates.items()])


def _memory_us(size_bytes: float) -> float:
    return size_bytes / (P100.memory_gbps * MEMORY_SHARE * 1e3)


def _row(
    sweep: str, stages: int, microbatches: int, width: int, network: str, time_us: float, base_us: float
) -> dict[str, Any]:
    return {
        "sweep": sweep,
        "stages": stages,
        "microbatches": microbatches,
        "width": width,
        "network": network,
        "time_us": time_us,
        "speed_up": base_us / time_us,
    }

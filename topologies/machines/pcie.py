"""Boxes of GPUs that only PCIe joins: sockets, each with its GPUs, straight or through PCIe switches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from arborcast.synth.errors import TopologyError
from arborcast.topologies.builders import assuming, cable, check_size
from arborcast.topologies.entries import BOTH, Entry, Parameter, bandwidth, count, one_of
from arborcast.topologies.gpus import GIGATRANSFERS, GPUS
from arborcast.topologies.machine import Machine, Nic
from arborcast.topologies.machines.boxes import Nested
from arborcast.topologies.processors import FAMILIES, X86, Crossing, between_family, crossing
from arborcast.topologies.rates import NVLINK_LATENCY_US, PCIE_HOP, PCIE_HOP_US, Rates, pcie_rate

_MOST_SOCKETS = 8


def _pcie(
    *,
    name: str,
    gpus: int,
    sockets: int,
    switch: int,
    between: Fraction | None,
    streams: int | None,
    cpu: str,
    rates: Rates,
    gpu: str,
    planned: Fraction,
) -> Machine:
    """GPUs in equal parts under each socket; with `switch` above 1 so many on each PCIe switch.

    A switch reaches its socket at the rate of one slot, which is as old as the processors' where `cpu` says
    which they are. Sockets are joined pairwise at `between`, without it at what these have, or what unknown
    ones can have (in NCCL's rates at `planned`). GPUs that bridges of NVLink can join have one for each two
    neighbours. Each switch, or socket where there is none, has a NIC, whose rate whoever joins several boxes
    must say. A GPU has `streams`, any number of them where it is not said.
    """
    if gpus % (sockets * switch) or sockets > _MOST_SOCKETS:
        raise TopologyError(
            f"{name}: gpus must be a multiple of sockets (at most {_MOST_SOCKETS}) times those on a switch, "
            f"got {gpus} GPUs, {sockets} sockets, {switch} on a switch"
        )
    oldest = min(GPUS[gpu].pcie_generation, FAMILIES[cpu][1] if cpu else GPUS[gpu].pcie_generation)
    rate = pcie_rate(GIGATRANSFERS[oldest], GPUS[gpu].pcie_lanes, rates)
    switches = gpus // switch if switch > 1 else 0
    check_size(name, gpus + switches + sockets, 4 * gpus)
    way = between_family(cpu, rates) if cpu else crossing(X86, "", 0, 0, rates)
    if between is not None or (rates is Rates.NCCL and not cpu):
        way = Crossing(between or planned, "")
    hops = (PCIE_HOP_US, PCIE_HOP_US)
    shape = (sockets, gpus // (sockets * switch), switch)
    tree = Nested(*shape, (rate, rate, way.rate), hops, ("pcie", "cpu"))
    links = assuming(tree.links(why_across=way.assumed), latency=PCIE_HOP)
    for rank in range(0, gpus - 1, 2) if GPUS[gpu].links else ():
        links += cable(rank, rank + 1, GPUS[gpu].links * GPUS[gpu].rate(rates), NVLINK_LATENCY_US)
    box = Machine.of(replace(tree.topology(name, links), streams=(streams,) * gpus), gpu=gpu)
    nics = tuple(Nic(f"nic{index}", None, (gpus + index,)) for index in range(switches or sockets))
    return replace(box, nics=nics)


def _entry(name: str, planned: int, why: str) -> Entry:
    gpu = GPUS[name]
    pairs = " and NVLink bridges of pairs" if gpu.links else ""
    return Entry(
        name,
        f"a box of {name.upper()} on PCIe {gpu.pcie_generation}{pairs}, switch= of them on each PCIe switch",
        partial(_pcie, gpu=name, planned=Fraction(planned)),
        (
            Parameter("gpus", "N", count, 8),
            Parameter("sockets", "N", count, 2),
            Parameter("switch", "N", count, 1),
            Parameter("between", "GB/s", bandwidth),
            Parameter("streams", "N", count),
            Parameter("cpu", "|".join(FAMILIES), one_of(*FAMILIES), ""),
        ),
        BOTH,
        gpu=name,
        vendor="PCIe",
        source=f"{gpu.source}; between sockets what the largest processors have, assumed; in NCCL's rates "
        f"{planned} GB/s, its constant for {why}",
    )


# Peer access over PCIe is switched off by NVIDIA's driver for GeForce cards; traffic then passes host memory
# behind the same links.
ENTRIES: Sequence[Entry] = (
    _entry("rtx4090", 24, "AMD's Zen 3 and 4"),
    _entry("rtx5090", 22, "Xeon of Sapphire Rapids"),
    _entry("l4", 22, "Xeon of Sapphire Rapids"),
    _entry("l40s", 22, "Xeon of Sapphire Rapids"),
    _entry("pro6000", 40, "Xeon of Emerald Rapids"),
    _entry("rtx3090", 24, "AMD's Zen 3 and 4"),
    _entry("a6000", 24, "AMD's Zen 3 and 4"),
    _entry("a100-pcie", 24, "AMD's Zen 3 and 4"),
    _entry("h100-pcie", 40, "Xeon of Emerald Rapids"),
    _entry("h100-nvl", 40, "Xeon of Emerald Rapids"),
)

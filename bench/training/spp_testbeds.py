"""SPP's two testbeds as topologies, and its plan beside four others on seven networks, all predicted.

The source (arXiv 2204.10562) names the machines: 4 hosts of 2 GTX 1080 Ti behind a 50 Gbit/s switch, and one
host of 4 V100 with NVLink. Batches and numbers of microbatches are ours, and said in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from arborcast.pipeline.costs.devices import GTX_1080_TI, V100
from arborcast.pipeline.costs.links import LinkCosts
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.planning.alternatives import METHODS
from arborcast.pipeline.planning.planner import plan as planned
from arborcast.pipeline.planning.prediction import predict
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stages import Plan
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from arborcast.topologies.builders import cable
from arborcast.topologies.rates import FABRIC_HOP_US, PCIE_HOP_US

PCIE = Fraction(12)
"""GB/s each way of a PCIe 3.0 slot with 16 lanes: NCCL's planning figure; the standard says 15.75."""

NIC = Fraction(50, 8)
"""GB/s each way: 50 Gbit/s."""

RESERVED = Fraction(1, 10)
"""Of a GPU's memory, left to the framework, its context and fragmentation: assumed."""

MICROBATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Each method takes the best of these for the model at hand; ours, not the source's numbers."""

SPP = "spp"


@dataclass(frozen=True)
class Testbed:
    """A machine of the comparison.

    Attributes:
        name: in rows.
        topology: its ranks and links.
        device: of its ranks, as `pipeline.zoo.analytic_profile` names it.
        memory_bytes: of a rank that a plan may use.
    """

    name: str
    topology: Topology
    device: str
    memory_bytes: int


def four_hosts() -> Topology:
    """4 hosts of 2 ranks: a PCIe switch each, whose one NIC (6.25 GB/s) both ranks share, and one switch."""
    ranks, hosts = 8, 4
    links = [link for rank in range(ranks) for link in cable(rank, ranks + rank // 2, PCIE, PCIE_HOP_US)]
    for host in range(hosts):
        links += cable(ranks + host, ranks + hosts, NIC, FABRIC_HOP_US)
    switches = [*(f"pcie{host}" for host in range(hosts)), "switch"]
    rotation = [(rank + 2) % ranks for rank in range(ranks)]
    symmetry = (*rotation, *(ranks + (host + 1) % hosts for host in range(hosts)), ranks + hosts)
    return Topology.build("four-hosts", ranks, links, switches, [symmetry])


def four_v100() -> Topology:
    """4 V100, all pairs joined by one or two NVLinks of 25 GB/s: half of the catalog's DGX-1.

    The source says only "4 V100 with NVLink".
    """
    return load("dgx1", ranks=[0, 1, 2, 3])


def testbeds() -> tuple[Testbed, ...]:
    """Both."""
    return tuple(
        Testbed(name, topology, device.name, int(device.memory_bytes * (1 - RESERVED)))
        for name, topology, device in (
            ("4 hosts x 2 1080 Ti", four_hosts(), GTX_1080_TI),
            ("4 V100", four_v100(), V100),
        )
    )


def compare(names: Sequence[str], *, microbatches: Sequence[int] = MICROBATCHES) -> list[dict[str, Any]]:
    """The rows of all networks on both testbeds.

    A batch has as many samples per rank as `pipeline.zoo.SAMPLES` says; profiles are analytic.

    Args:
        names: of `pipeline.zoo`.
        microbatches: each method's choice.

    Raises:
        ProfileError: there is no such network.
    """
    from arborcast.pipeline import zoo as networks

    return [
        row
        for testbed in testbeds()
        for name in names
        for row in compare_profile(
            networks.analytic_profile(name, testbed.device),
            testbed,
            batch=networks.SAMPLES[name] * testbed.topology.ranks,
            microbatches=microbatches,
        )
    ]


def compare_profile(
    profile: Profile, testbed: Testbed, *, batch: int, microbatches: Sequence[int] = MICROBATCHES
) -> list[dict[str, Any]]:
    """A row per method: SPP's plan (its list order), the four alternatives, and ours in any order.

    `time_us` is predicted, None with `why_not` where nothing fits into memory; `speed_up` is that of SPP's
    plan over this one (time of this method over time of SPP's plan); `memory_bytes` is of the fullest rank.
    """
    network = LinkCosts(testbed.topology)
    limit = testbed.memory_bytes
    asked: Mapping[str, Callable[[int], Plan]] = {
        SPP: lambda m: planned(
            profile,
            testbed.topology,
            batch=batch,
            microbatches=m,
            order="pe",
            memory_bytes=limit,
            network=network,
        ),
        **{
            name: lambda m, method=method: method.plan(  # type: ignore[misc]
                profile, network, batch=batch, microbatches=m, memory_bytes=limit
            )
            for name, method in METHODS.items()
        },
        "any order": lambda m: planned(
            profile, testbed.topology, batch=batch, microbatches=m, memory_bytes=limit, network=network
        ),
    }
    rows: list[dict[str, Any]] = []
    for method, ask in asked.items():
        found = _best(ask, profile, network, batch, [m for m in microbatches if m <= batch])
        rows.append(
            {"testbed": testbed.name, "model": profile.model, "method": method, "batch": batch} | found
        )
    spp = rows[0]["time_us"]
    for row in rows:
        row["speed_up"] = row["time_us"] / spp if row["time_us"] and spp else None
    return rows


def _best(
    ask: Callable[[int], Plan], profile: Profile, network: LinkCosts, batch: int, microbatches: Sequence[int]
) -> dict[str, Any]:
    """The fastest plan of a method over the numbers of microbatches, as columns."""
    best: dict[str, Any] | None = None
    refusal = "no number of microbatches fits the batch"
    for count in microbatches:
        try:
            plan = ask(count)
            predicted = predict(plan, profile, network, batch=batch)
        except (PlanError, BatchError) as error:
            refusal = str(error)
            continue
        if best is None or predicted.time_us < best["time_us"]:
            best = {
                "time_us": predicted.time_us,
                "microbatches": plan.microbatches,
                "replicas": [stage.replicas for stage in plan.stages],
                "cuts": list(plan.cuts),
                "ranks": [list(stage.ranks) for stage in plan.stages],
                "order": plan.order,
                "recompute": plan.recompute,
                "bubble": predicted.bubble,
                "memory_bytes": max(memory.total for memory in predicted.memory),
                "fits": True,
                "why_not": None,
            }
    if best is None:
        names = ("time_us", "microbatches", "replicas", "cuts", "ranks", "order", "recompute", "bubble")
        return {**dict.fromkeys((*names, "memory_bytes")), "fits": False, "why_not": refusal}
    return best

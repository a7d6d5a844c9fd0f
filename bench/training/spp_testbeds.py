"""SPP's two testbeds as topologies, and its plan beside others on seven networks, all predicted.

The source (arXiv 2204.10562) names the machines: 4 hosts of 2 GTX 1080 Ti behind a 50 Gbit/s switch, and one
host of 4 V100 with NVLink. Batches and numbers of microbatches are ours, and said in every row. `gain_rows`
asks for which links and batches it gains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any

from arborcast.pipeline.costs.devices import GTX_1080_TI, V100
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.planning.alternatives import METHODS, alternatives
from arborcast.pipeline.planning.asynchronous import fastest_steady_state
from arborcast.pipeline.planning.plan_prediction import predict
from arborcast.pipeline.planning.planner import plan as planned
from arborcast.pipeline.planning.spp import spp
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

SPP, PIPELINE, FREE, ASYNCHRONOUS = "spp", "spp, several stages", "any order", "pipedream-async"
"""Methods beside `METHODS`: SPP's plan where it may not be data parallelism, ours, PipeDream unflushed."""

NICS_GBIT = (100, 50, 25, 10)
SHARES = (Fraction(1), Fraction(1, 4), Fraction(1, 8))
GAIN_NETWORKS = ("vgg19", "resnet152", "transformer", "bert-large")
GAIN_MICROBATCHES = (1, 4, 8, 16, 32)
"""Of `gain_rows`: rates of a host's NIC, samples on a rank in shares of the network's, networks, choices."""


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


def four_hosts(nic: Fraction = NIC) -> Topology:
    """4 hosts of 2 ranks: a PCIe switch each, whose one NIC (GB/s) both ranks share, and one switch."""
    ranks, hosts = 8, 4
    links = [link for rank in range(ranks) for link in cable(rank, ranks + rank // 2, PCIE, PCIE_HOP_US)]
    for host in range(hosts):
        links += cable(ranks + host, ranks + hosts, nic, FABRIC_HOP_US)
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
    """A row per method: SPP's plan as published, the other methods, and ours in any order.

    `time_us` is predicted, None with `why_not` where nothing fits into memory; `speed_up` is that of SPP's
    plan over this one (time of this method over time of SPP's plan); `memory_bytes` is of the fullest rank.
    `floor_us` is the work of a batch divided by all ranks: no plan is faster.
    """
    network = LinkCosts(testbed.topology)
    limit = testbed.memory_bytes
    counts = [m for m in microbatches if m <= batch]
    found: dict[str, Plan | PlanError] = dict(
        alternatives(profile, network, batch=batch, microbatches=counts, memory_bytes=limit)
    )

    def pipeline(count: int) -> Plan:
        return spp(profile, network, batch=batch, microbatches=count, memory_bytes=limit, least_stages=2)

    def ours(count: int) -> Plan:
        return planned(
            profile, testbed.topology, batch=batch, microbatches=count, memory_bytes=limit, network=network
        )

    found[PIPELINE] = _best(pipeline, profile, network, batch, counts)
    found[FREE] = _best(ours, profile, network, batch, counts)
    case: dict[str, Any] = {
        "testbed": testbed.name,
        "model": profile.model,
        "batch": batch,
        "floor_us": floor_us(profile, batch, testbed.topology.ranks),
    }
    rows: list[dict[str, Any]] = [
        case | {"method": method} | _columns(found[method], profile, network, batch)
        for method in (SPP, *(name for name in METHODS if name != SPP), PIPELINE, FREE)
    ]
    try:
        steady = fastest_steady_state(profile, network, batch=batch, microbatches=counts, memory_bytes=limit)
    except PlanError as error:
        rows.append(case | {"method": ASYNCHRONOUS} | _columns(error, profile, network, batch))
    else:
        missing = steady.missing(limit)
        rows.append(
            case
            | {"method": ASYNCHRONOUS}
            | _of_plan(steady.plan)
            | {
                "time_us": steady.time_us,
                "bubble": None,
                "memory_bytes": max(memory.total for memory in steady.memory),
                "fits": not missing,
                "why_not": missing or None,
            }
        )
    shortest = rows[0]["time_us"]
    for row in rows:
        row["speed_up"] = row["time_us"] / shortest if row["time_us"] and shortest else None
    return rows


def floor_us(profile: Profile, batch: int, ranks: int) -> float:
    """What all passes of a batch take, divided by all ranks: parts that do not shrink count once."""
    whole = profile.forward_us(0, profile.depth, batch) + profile.backward_us(0, profile.depth, batch)
    return whole / ranks


def gain_rows(names: Sequence[str] = GAIN_NETWORKS) -> list[dict[str, Any]]:
    """SPP's plan over the best of the others on its four hosts, by the rate of their NICs and the batch."""
    from arborcast.pipeline import zoo as networks

    rows = []
    for gbit, name, share in product(NICS_GBIT, names, SHARES):
        testbed = replace(testbeds()[0], topology=four_hosts(Fraction(gbit, 8)))
        profile = networks.analytic_profile(name, testbed.device)
        batch = max(int(networks.SAMPLES[name] * share), 1) * testbed.topology.ranks
        network = LinkCosts(testbed.topology)
        found = alternatives(
            profile,
            network,
            batch=batch,
            microbatches=[m for m in GAIN_MICROBATCHES if m <= batch],
            memory_bytes=testbed.memory_bytes,
        )
        times = {
            method: predict(plan, profile, network, batch=batch).time_us
            for method, plan in found.items()
            if isinstance(plan, Plan)
        }
        plan = found[SPP]
        others = {method: time for method, time in times.items() if method not in (SPP, "rannc")}
        best = min(others, key=others.__getitem__, default=None)
        rows.append(
            {
                "nic_gbit": gbit,
                "model": name,
                "samples_each": batch // testbed.topology.ranks,
                "time_us": times.get(SPP),
                "replicas": [it.replicas for it in plan.stages] if isinstance(plan, Plan) else None,
                "microbatches": plan.microbatches if isinstance(plan, Plan) else None,
                "data_parallel_us": times.get("data-parallel"),
                "floor_us": floor_us(profile, batch, testbed.topology.ranks),
                "best_other": best,
                "gain": others[best] / times[SPP] if best and SPP in times else None,
            }
        )
    return rows


def _best(
    ask: Callable[[int], Plan], profile: Profile, network: LinkCosts, batch: int, microbatches: Sequence[int]
) -> Plan | PlanError:
    """The fastest plan over the numbers of microbatches."""
    found: list[tuple[float, Plan]] = []
    refusal = PlanError("no number of microbatches fits the batch")
    for count in microbatches:
        try:
            plan = ask(count)
            found.append((predict(plan, profile, network, batch=batch).time_us, plan))
        except (PlanError, BatchError) as error:
            refusal = PlanError(str(error))
    return min(found, key=lambda it: it[0])[1] if found else refusal


def _of_plan(plan: Plan) -> dict[str, Any]:
    return {
        "microbatches": plan.microbatches,
        "replicas": [len(worker.ranks) for worker in plan.workers],
        "cuts": list(plan.cuts),
        "ranks": [list(stage.ranks) for stage in plan.stages],
        "order": plan.order,
        "recompute": plan.recompute,
    }


def _columns(found: Plan | PlanError, profile: Profile, network: LinkCosts, batch: int) -> dict[str, Any]:
    if isinstance(found, PlanError):
        names = ("time_us", "microbatches", "replicas", "cuts", "ranks", "order", "recompute", "bubble")
        return {**dict.fromkeys((*names, "memory_bytes")), "fits": False, "why_not": str(found)}
    predicted = predict(found, profile, network, batch=batch)
    return _of_plan(found) | {
        "time_us": predicted.time_us,
        "bubble": predicted.bubble,
        "memory_bytes": max(memory.total for memory in predicted.memory),
        "fits": True,
        "why_not": None,
    }

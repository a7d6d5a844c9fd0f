"""The machines of the size sweeps, on links of NCCL's own rates, and what NCCL's formulas plan with on them.

Only DGX boxes are machines whose plan by NCCL is known. For the others the same formulas are fed with the
machine's own links, which says what rings as NCCL runs them would reach there, and is labelled so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from arborcast import topologies
from arborcast.synth.baselines.nccl_model import CLUSTER_PLANS, KNOWN_PLANS, NcclSetup, nccl_plan
from arborcast.synth.collective import Collective
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.topology import Topology
from arborcast.topologies.rates import Rates

TORUS = "bandwidth=25,latency=0.7"
"""Links of the tori: one NVLink of 25 GB/s each way, with the latency of the catalog's NVLinks."""

SPECS = (
    *(f"dgx-a100{boxes}" for boxes in ("", ":boxes=2", ":boxes=16", ":boxes=128")),
    *(f"dgx-h100{boxes}" for boxes in ("", ":boxes=2", ":boxes=16")),
    *(f"mi250{boxes}" for boxes in ("", ":boxes=2", ":boxes=8")),
    *(f"torus:{side}x{side},{TORUS}" for side in (4, 8, 16, 32)),
)
QUICK = ("dgx-a100", "dgx-h100:boxes=2", "mi250", f"torus:4x4,{TORUS}")

NICS_OF_MI250_BOX, NIC_OF_MI250 = 16, Fraction(16)  # the share of each die, as in the catalog


@dataclass(frozen=True, slots=True)
class Planning:
    """What the formulas of NCCL's model are fed with.

    Attributes:
        plan: None where they say nothing about this machine.
        why_not: the reason for that.
        why_no_tree: why the formula of the tree is left out, None where it is not.
    """

    plan: NcclSetup | None
    why_not: str | None = None
    why_no_tree: str | None = None


def load(spec: str) -> Topology:
    """The topology of a spec on NCCL's rates where it has them.

    GPUs reach their NICs over PCIe, which NCCL counts at 24 GB/s where the NIC has 25 (and 48 for 50): the
    links to the fabric get that rate, so that both sides of the comparison use the same links.
    """
    machine = spec.partition(":")[0]
    if machine not in KNOWN_PLANS:
        return topologies.load(spec)
    topology = topologies.load(spec, rates=Rates.NCCL)
    if machine not in CLUSTER_PLANS:
        return topology
    most = CLUSTER_PLANS[machine].channel_rate
    fabric = network_switches(topology)
    links = tuple(
        replace(link, bandwidth=min(link.bandwidth, most)) if {link.src, link.dst} & fabric else link
        for link in topology.links
    )
    return replace(topology, links=links)


def network_switches(topology: Topology) -> frozenset[int]:
    """The switches between hosts, which the catalog names fabric."""
    switches = range(topology.ranks, topology.size)
    return frozenset(vertex for vertex in switches if str(topology.label(vertex)).startswith("fabric"))


def planning(topology: Topology, collective: Collective) -> Planning:
    """What to feed the formulas with for all ranks of a machine."""
    machine = topology.name.partition(":")[0]
    if machine == "mi250" and topology.ranks > 16:
        source = "NCCL's formulas on this machine's links: a ring per NIC share of 16 GB/s"
        hosts = topology.ranks // 16
        return Planning(NcclSetup(NICS_OF_MI250_BOX, NIC_OF_MI250, hosts, source=source, balanced=True))
    if machine == "torus":
        return _on_torus(topology)
    if topology.switches and machine not in KNOWN_PLANS:
        return Planning(None, f"NCCL's plan for {topology.name} with its switches is not known")
    try:
        plan = nccl_plan(topology, collective)
    except (InfeasibleError, CollectiveError) as error:
        return Planning(None, str(error))
    if machine not in KNOWN_PLANS:
        plan = replace(plan, source=f"NCCL's formulas on this machine's links: {plan.source}")
    return Planning(plan)


def _on_torus(topology: Topology) -> Planning:
    """Two cycles of a product of two cycles are link-disjoint and take all of its links (Kotzig 1973)."""
    slowest = min(link.bandwidth for link in topology.links)
    degree = len(topology.links) // topology.ranks
    if degree != 4:
        return Planning(None, f"{topology.name}: link-disjoint rings are known for two dimensions only")
    source = "NCCL's formulas on this machine's links: 2 link-disjoint rings, both ways round"
    no_tree = "inside one host NCCL's tree is a chain, and a torus is no set of hosts; see binary-tree"
    return Planning(NcclSetup(4, slowest, source=source), why_no_tree=no_tree)

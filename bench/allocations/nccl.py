"""What NCCL's planning model makes of a fragment: which rings it has, over what, and their rate.

Figures of the model, not measurements (see `synth.baselines.nccl_model`): those of large messages in protocol
Simple. Two generations of its search for rings are told apart, because they differ where a fragment has no
ring of direct links: since 2.8.3 a ring may pass through another GPU (path type NVB, `src/graph/paths.cc`),
before that, as when BLINK was measured, all went over PCIe.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from random import Random

from arborcast.synth.baselines.budget import Budget
from arborcast.synth.baselines.hamiltonian import RingFabric, find_ring, links_of, rings_of
from arborcast.synth.baselines.nccl_model import Medium, NcclSetup, nccl_plan, nccl_times
from arborcast.synth.baselines.switch_paths import Path, Paths, switch_paths
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import CollectiveError
from arborcast.synth.lp.highs import new_model
from arborcast.synth.nccl_protocol import Protocol
from arborcast.synth.topology import Hop, Topology
from arborcast.topologies.gpus import GPUS, slot_rate
from arborcast.topologies.rates import Rates

PCIE = slot_rate(GPUS["v100"], Rates.NCCL)
"""GB/s of a ring over PCIe of generation 3, 16 lanes: 12.

It favours NCCL: between the sockets of a DGX-1 its model has 6 (`BDW_QPI_BW` in `topo.h`).
"""

NCCL, NCCL_RELAYS = "nccl-ring-model", "nccl-relay-model"
"""Methods of rows: rings of direct links, else over PCIe; and rings that may pass through another GPU."""

MODELLED = (Kind.BROADCAST, Kind.ALLREDUCE)
LISTING_STEPS = 1_000_000


class Over(StrEnum):
    """What NCCL's rings run over."""

    NVLINK = "nvlink"
    RELAY = "nvlink-relay"  # some hops pass through another GPU of the fragment
    PCIE = "pcie"


@dataclass(frozen=True, slots=True)
class Rings:
    """NCCL's channels on a fragment."""

    plan: NcclSetup
    over: Over


def nccl_rings(fragment: Topology, *, relays: bool, pcie: Fraction = PCIE, seed: int = 0) -> Rings:
    """The rings that NCCL runs on a fragment: over direct links where there are any.

    The sets of rings are the largest there are, of which NCCL's own search may fall short.

    Args:
        fragment: of one box; its bandwidths are NCCL's constants, or else the rates are not NCCL's.
        relays: whether hops may pass through another GPU where there is no ring of direct links (NCCL since
            2.8.3); otherwise, and where that gives none either, rings go over PCIe.
        pcie: GB/s of such a ring.
        seed: of the search for rings.

    Raises:
        BudgetError: the search for rings came to no end.
    """
    ranks = tuple(range(fragment.ranks))
    capacity = dict(zip(fragment.bandwidth, fragment.capacities, strict=True))
    direct = RingFabric(ranks, switch_paths(fragment, ranks), capacity)
    if find_ring(direct, start=0, rng=Random(seed), deadline=Deadline.after(None)) is not None:
        plan = nccl_plan(fragment, Collective.on(fragment, Kind.ALLREDUCE), seed=seed)
        return Rings(plan, Over.NVLINK)
    if relays:
        relayed = RingFabric(ranks, _with_relays(fragment, direct.paths), capacity)
        count = _most_rings(relayed, seed)
        if count:
            source = f"{count} rings of {fragment.name}, some hops through another GPU"
            return Rings(NcclSetup(count, fragment.bandwidth_unit, source=source), Over.RELAY)
    return Rings(NcclSetup(1, pcie, medium=Medium.PCIE, source="a ring over PCIe"), Over.PCIE)


def nccl_rate(fragment: Topology, kind: Kind, rings: Rings) -> Fraction:
    """Algbw in GB/s that large messages approach.

    Allreduce: B n/(2(n-1)) over rings of B GB/s together. Broadcast: B, because every ring is a pipeline that
    passes the whole of its part from one rank to the next. NCCL's formula is B n/steps with n steps for
    broadcast and reduce (`nsteps` in `src/graph/tuning.cc`, NCCL 2.30).

    Raises:
        CollectiveError: a kind that is not modelled here.
    """
    match kind:
        case Kind.BROADCAST:
            return rings.plan.bandwidth
        case Kind.ALLREDUCE:
            asked = Collective.on(fragment, kind)
            return nccl_times(fragment, asked, [0], plan=rings.plan, protocol=Protocol.SIMPLE)[0].rate
        case _:
            raise CollectiveError(f"{kind}: fragments are surveyed for {', '.join(MODELLED)}")


def _with_relays(fragment: Topology, direct: Paths) -> Paths:
    """The direct ways, and where two ranks have none those through one other rank.

    NCCL keeps one of these ways for a pair, the widest; here all may be used, so that NCCL is not held too
    low by a choice of ours.
    """
    rates = fragment.bandwidth
    ways = dict(direct)
    for src in range(fragment.ranks):
        for dst in range(fragment.ranks):
            if src == dst or (src, dst) in direct:
                continue
            through = [
                Path(src, dst, (relay,), min(rates[src, relay], rates[relay, dst]))
                for relay in range(fragment.ranks)
                if (src, relay) in rates and (relay, dst) in rates
            ]
            if through:
                ways[src, dst] = tuple(through)
    return ways


def _most_rings(fabric: RingFabric, seed: int) -> int:
    """The size of the largest set of rings that the links carry side by side: all are listed, HiGHS picks."""
    import highspy

    budget = Budget(LISTING_STEPS, Deadline.after(None))
    rings = rings_of(fabric, start=fabric.ranks[0], budget=budget, rng=Random(seed))
    found = list(dict.fromkeys(tuple(sorted(links_of(ring).items())) for ring in rings))
    if not found:
        return 0
    through: dict[Hop, list[tuple[int, int]]] = {}
    model = new_model()
    for column, uses in enumerate(found):
        model.addVar(0.0, float(min(fabric.capacity[hop] // times for hop, times in uses)))
        model.changeColCost(column, -1.0)
        model.changeColIntegrality(column, highspy.HighsVarType.kInteger)
        for hop, times in uses:
            through.setdefault(hop, []).append((column, times))
    for hop, entries in through.items():
        columns, times_of = [column for column, _ in entries], [float(times) for _, times in entries]
        model.addRow(0.0, float(fabric.capacity[hop]), len(entries), columns, times_of)
    model.run()
    status = model.modelStatusToString(model.getModelStatus())
    if status != "Optimal":
        raise AssertionError(f"the choice of rings ended as {status}")
    picked = [round(value) for value in model.getSolution().col_value]
    load: Counter[Hop] = Counter()
    for uses, times in zip(found, picked, strict=True):
        for hop, passes in uses:
            load[hop] += times * passes
    if any(passes > fabric.capacity[hop] for hop, passes in load.items()):
        raise AssertionError("the rings chosen pass a link more often than it allows")
    return sum(picked)

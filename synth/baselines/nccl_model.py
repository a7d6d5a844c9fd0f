"""NCCL's own planning model of its ring and tree: formulas, not measurements, and every row says so.

NCCL chooses algorithm and protocol by these latencies and bandwidths (`src/graph/tuning.cc` and `topo.h`
of NCCL 2.30). They tell what NCCL expects of a machine, which is the fair thing to hold a schedule on the
same link rates against. NVLS and CollNet, which reduce inside switches, are not modelled. Nor are two
corrections with which NCCL makes its own predictions longer, so that leaving them out favours NCCL: those
of its tree at medium sizes (by 0.4 to 0.9), and of its ring's latency across hosts (by 1.4 or 1.9).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from typing import TypeAlias

from arborcast.synth.collective import Collective, Kind, bandwidths
from arborcast.synth.errors import CollectiveError, InputError
from arborcast.synth.nccl_protocol import Protocol
from arborcast.synth.topology import Topology

ByHosts: TypeAlias = tuple[Fraction, Fraction, Fraction]
RING, TREE = "nccl-ring-model", "nccl-tree-model"
NOT_RUN = "NCCL's planning model, re-implemented here; NCCL itself was not run"
"""What stands wherever a figure of these formulas is shown."""
MODELLED = (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.REDUCE_SCATTER)


class Medium(StrEnum):
    """What joins two GPUs."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    NETWORK = "network"


class Cpu(StrEnum):
    """Who made the processors of the hosts, on which NCCL's limits across hosts depend."""

    INTEL = "intel"
    AMD = "amd"


@dataclass(frozen=True, slots=True)
class NcclLimits:
    """Limits that NCCL assumes for a GPU generation; those in threes for 1, for 2, and for more hosts.

    Attributes:
        name: of the architecture.
        ll: most GB/s in protocol LL on one host, over all channels; across hosts see `LL_ACROSS_HOSTS`.
        ring_ll128: most GB/s of a ring in LL128, per channel.
        tree_ll128: most GB/s of a tree in LL128, per channel.
        tree_simple: the same in Simple.
    """

    name: str
    ll: Fraction
    ring_ll128: ByHosts
    tree_ll128: ByHosts
    tree_simple: ByHosts


@dataclass(frozen=True, slots=True)
class NcclSetup:
    """The inputs of the model.

    Attributes:
        channels: rings (or trees) that NCCL runs side by side.
        channel_rate: GB/s of each, one way.
        hosts: over how many hosts the ranks are spread evenly.
        medium: what joins the GPUs of one host.
        generation: whose limits apply; None for no limits beyond the links.
        source: where channels and rate come from, for the reader of a row.
        cpu: of the hosts, where there are several.
        tree_rate: GB/s of each channel of the tree; None where it is that of the rings.
        balanced: whether the tree ends on two GPUs of each host (pattern "balanced tree"), which NCCL
            counts in full, and a plain one at 0.85.

    Raises:
        InputError: a number that is not positive.
    """

    channels: int
    channel_rate: Fraction
    hosts: int = 1
    medium: Medium = Medium.NVLINK
    generation: NcclLimits | None = None
    source: str = "given"
    cpu: Cpu = Cpu.INTEL
    tree_rate: Fraction | None = None
    balanced: bool = False

    def __post_init__(self) -> None:
        """Raise InputError unless there is at least one channel, with a rate, on at least one host."""
        for name, value in (
            ("channels", self.channels),
            ("channel rate", self.channel_rate),
            ("hosts", self.hosts),
            ("tree rate", 1 if self.tree_rate is None else self.tree_rate),
        ):
            if value <= 0:
                raise InputError(f"plan: {name} must be positive, got {value}")

    @property
    def bandwidth(self) -> Fraction:
        """GB/s of all channels together."""
        return self.channels * self.channel_rate

    @property
    def tree_bandwidth(self) -> Fraction:
        """GB/s of all channels of the tree together."""
        return self.channels * (self.channel_rate if self.tree_rate is None else self.tree_rate)


@dataclass(frozen=True, slots=True)
class ModelTime:
    """One row of the model.

    Attributes:
        method: `RING` or `TREE`.
        protocol: the one that the row is about.
        bytes: size of the whole buffer.
        time_us: latency_us + bytes / rate.
        latency_us: of the first byte.
        rate: algbw in GB/s that large messages approach.
        algbw: bytes / time, GB/s.
        busbw: algbw times nccl-tests' factor.
        plan: what it was computed from.
    """

    method: str
    protocol: Protocol
    bytes: int
    time_us: float
    latency_us: float
    rate: Fraction
    algbw: float
    busbw: float
    plan: NcclSetup

    @property
    def algorithm(self) -> str:
        """As NCCL calls it: "ring" or "tree"."""
        return {RING: "ring", TREE: "tree"}[self.method]


def _gbps(*rates: str) -> ByHosts:
    one, two, more = map(Fraction, rates)
    return one, two, more


VOLTA = NcclLimits(
    "Volta",
    ll=Fraction(39),
    ring_ll128=_gbps("20", "20", "20"),
    tree_ll128=_gbps("20", "20", "20"),
    tree_simple=_gbps("26.5", "18.5", "10"),
)
AMPERE = NcclLimits(
    "Ampere",
    ll=Fraction("87.7"),
    ring_ll128=_gbps("20", "20", "20"),
    tree_ll128=_gbps("20", "20", "20"),
    tree_simple=_gbps("24", "23.6", "17.8"),
)
HOPPER = NcclLimits(
    "Hopper",
    ll=Fraction(141),
    ring_ll128=_gbps("36.7", "36.7", "36.7"),
    tree_ll128=_gbps("36.7", "36.7", "29"),
    tree_simple=_gbps("38.7", "41.4", "36"),
)

KNOWN_PLANS: Mapping[str, NcclSetup] = {
    "dgx1": NcclSetup(6, Fraction(20), generation=VOLTA, source="NCCL's search on DGX-1 (V100)"),
    "dgx-a100": NcclSetup(12, Fraction(20), generation=AMPERE, source="NCCL's search on DGX A100"),
    "dgx-h100": NcclSetup(12, Fraction(30), generation=HOPPER, source="NCCL's search on DGX H100"),
}
"""What NCCL finds on one whole box of 8 GPUs, by the name in the catalog."""

_OF_CLUSTERS = "NCCL's search, worked out by hand: a ring per NIC at the rate of its PCIe slot"
CLUSTER_PLANS: Mapping[str, NcclSetup] = {
    "dgx-a100": NcclSetup(
        8, Fraction(24), 2, generation=AMPERE, cpu=Cpu.AMD, balanced=True, source=f"{_OF_CLUSTERS} (gen 4)"
    ),
    "dgx-h100": NcclSetup(
        8, Fraction(48), 2, generation=HOPPER, balanced=True, source=f"{_OF_CLUSTERS} (gen 5)"
    ),
}
"""What NCCL finds on boxes of 8 GPUs with a NIC each, by the name in the catalog (hosts: see `nccl_plan`).

Its search (`search.cc`) joins the GPUs of a box into one ring per NIC, at the highest speed of its list that
the way from a GPU to its NIC carries: the least of the NIC (25 or 50 GB/s) and the PCIe slot, which NCCL
counts at 24 or 48. Both are on the lists, and 8 such rings fit the NVLinks, because on each ring one GPU of
the box sends over its NIC and not over NVLink: 7 x 24 of 240, 7 x 48 of 370.8 GB/s. Rings of 25 or 50 GB/s or
below are not doubled. On two hosts NCCL rates the tree by its links inside a box.
"""
TREE_ON_TWO_HOSTS: Mapping[str, Fraction] = {"dgx-a100": Fraction(30), "dgx-h100": Fraction(48)}
"""GB/s per channel of a tree on two hosts: the highest listed speed that 8 channels find inside a box, and
at least that of the NIC. The limits of `NcclLimits.tree_simple` are below both."""

BASE_US: Mapping[str, Mapping[Protocol, float]] = {
    RING: {Protocol.LL: 6.6, Protocol.LL128: 14.0, Protocol.SIMPLE: 8.4},
    TREE: {Protocol.LL: 6.8, Protocol.LL128: 14.0, Protocol.SIMPLE: 8.4},
}
HOP_US: Mapping[tuple[str, Medium], Mapping[Protocol, float]] = {
    (RING, Medium.NVLINK): {Protocol.LL: 0.6, Protocol.LL128: 1.9, Protocol.SIMPLE: 3.4},
    (RING, Medium.PCIE): {Protocol.LL: 1.0, Protocol.LL128: 2.5, Protocol.SIMPLE: 5.7},
    (RING, Medium.NETWORK): {Protocol.LL: 2.7, Protocol.LL128: 4.0, Protocol.SIMPLE: 14.0},
    (TREE, Medium.NVLINK): {Protocol.LL: 0.6, Protocol.LL128: 1.25, Protocol.SIMPLE: 4.0},
    (TREE, Medium.PCIE): {Protocol.LL: 1.0, Protocol.LL128: 1.9, Protocol.SIMPLE: 4.0},
    (TREE, Medium.NETWORK): {Protocol.LL: 5.0, Protocol.LL128: 8.5, Protocol.SIMPLE: 14.0},
}
NET_OVERHEAD_US: Mapping[Cpu, float] = {Cpu.INTEL: 1.0, Cpu.AMD: 2.0}
"""What posting a message to the network takes; three times as much in Simple. Across hosts no step of a ring
is shorter, because every step has a host that posts."""

LL_ACROSS_HOSTS: Mapping[Cpu, tuple[Fraction, Fraction]] = {
    Cpu.INTEL: (Fraction(39), Fraction("20.4")),
    Cpu.AMD: (Fraction("22.5"), Fraction(19)),
}
"""Most GB/s in protocol LL over all channels, on two and on more hosts, whatever the GPUs are."""

FLAGS_OF_128 = Fraction(92, 100)  # 120 of 128 bytes are data, and a little is lost besides
TREE_SHARE = Fraction(92, 100)
TREE_PATTERN = Fraction(85, 100)
TREE_LL = Fraction(10, 38)
TREE_LL128_ON_ONE_HOST = Fraction(7, 9)
TREE_LL128_ACROSS_HOSTS = Fraction(120, 128)


def nccl_times(
    topology: Topology,
    collective: Collective,
    sizes: Sequence[int],
    *,
    plan: NcclSetup | None = None,
    protocol: Protocol | None = None,
    seed: int = 0,
) -> tuple[ModelTime, ...]:
    """What NCCL's planning model says for each size: its ring, and for an allreduce its tree as well.

    Args:
        topology: the fabric.
        collective: allreduce, allgather or reduce-scatter.
        sizes: bytes of the whole buffer.
        plan: channels and their rate; where None, `nccl_plan` works them out, but for machines with switches
            that it does not know.
        protocol: one for all rows; where None, each row takes the fastest for its size, as NCCL does.
        seed: of the search for rings.

    Raises:
        CollectiveError: NCCL's model of this kind is not here, or its plan is not known.
        InfeasibleError: no plan is given and the graph has no ring.
        InputError: ranks that the plan's hosts do not divide, or a negative size.
    """
    if collective.kind not in MODELLED:
        raise CollectiveError(f"{collective.kind}: the NCCL model covers only {', '.join(MODELLED)}")
    if topology.streams:
        raise CollectiveError("NCCL's formulas know no streams of ranks")
    if plan is None:
        if topology.switches and _known_plan(topology, collective) is None:
            raise CollectiveError(f"NCCL's plan for {topology.name} with its switches is not known")
        plan = nccl_plan(topology, collective, seed=seed)
    count = len(collective.ranks)
    if count % plan.hosts:
        raise InputError(f"plan: hosts must divide the {count} ranks evenly, got {plan.hosts}")
    methods = (RING, TREE) if collective.kind is Kind.ALLREDUCE else (RING,)
    return tuple(
        min(
            (
                _row(method, each, collective.kind, count, size, plan)
                for each in ((protocol,) if protocol else Protocol)
            ),
            key=lambda row: row.time_us,
        )
        for method in methods
        for size in sizes
    )


def nccl_plan(topology: Topology, collective: Collective, *, seed: int = 0) -> NcclSetup:
    """NCCL's channels: known for whole boxes of the catalog, else the link-disjoint rings of the graph.

    Derived rates are those of the topology, so build it with NCCL's planning constants (20 GB/s for an
    NVLink of 25) to get what NCCL would plan with; one host and NVLink are then assumed.

    Raises:
        InfeasibleError: the graph has no ring. NCCL then goes over PCIe, which `nccl_times` can be told
            by a plan.
    """
    if (known := _known_plan(topology, collective)) is not None:
        return known
    from arborcast.synth.baselines import solve_baseline

    schedule = solve_baseline(topology, Collective(Kind.ALLREDUCE, collective.ranks), "multiring", seed=seed)
    rings = int(dict(schedule.method.settings)["rings"] or 0)
    return NcclSetup(rings, topology.bandwidth_unit, source=f"{rings} link-disjoint rings of {topology.name}")


def _known_plan(topology: Topology, collective: Collective) -> NcclSetup | None:
    """Of a whole box or of several whole ones of the catalog."""
    if len(collective.ranks) < topology.ranks:
        return None
    if topology.name in KNOWN_PLANS and topology.ranks == 8:
        return KNOWN_PLANS[topology.name]
    machine, boxes = topology.name.partition(":")[0], topology.ranks // 8
    if machine not in CLUSTER_PLANS or not _are_whole_boxes(topology):
        return None
    tree_rate = TREE_ON_TWO_HOSTS[machine] if boxes == 2 else None
    return replace(CLUSTER_PLANS[machine], hosts=boxes, tree_rate=tree_rate)


def _are_whole_boxes(topology: Topology) -> bool:
    """Whether the ranks are all GPUs of several boxes of 8; parts of more boxes may be as many."""
    fastest: dict[int, tuple[Fraction, int]] = {}
    for link in topology.links:
        if not topology.is_switch(link.src):
            fastest[link.src] = max((link.bandwidth, link.dst), fastest.get(link.src, (Fraction(0), -1)))
    in_box = Counter(switch for _, switch in fastest.values())
    return len(in_box) > 1 and set(in_box.values()) == {8}


def _row(method: str, protocol: Protocol, kind: Kind, count: int, size: int, plan: NcclSetup) -> ModelTime:
    if size < 0:
        raise InputError(f"size must not be negative, got {size} bytes")
    rate = (_ring_rate if method == RING else _tree_rate)(protocol, kind, count, plan)
    latency_us = (_ring_latency_us if method == RING else _tree_latency_us)(protocol, kind, count, plan)
    time_us = latency_us + size / (1000 * float(rate))
    algbw, busbw = bandwidths(kind, count, size, time_us)
    return ModelTime(method, protocol, size, time_us, latency_us, rate, algbw, busbw, plan)


def _steps(kind: Kind, count: int) -> int:
    return (2 if kind is Kind.ALLREDUCE else 1) * (count - 1)


def _ring_rate(protocol: Protocol, kind: Kind, count: int, plan: NcclSetup) -> Fraction:
    bandwidth = plan.bandwidth
    match protocol:
        case Protocol.LL:
            bandwidth = min(bandwidth / 2, _most_in_ll(plan, bandwidth))
        case Protocol.LL128:
            bandwidth *= FLAGS_OF_128
            bandwidth = _limited(bandwidth, plan, lambda generation: generation.ring_ll128, plan.channels)
        case Protocol.SIMPLE:
            pass
    return bandwidth * count / _steps(kind, count)


def _ring_latency_us(protocol: Protocol, kind: Kind, count: int, plan: NcclSetup) -> float:
    across = _steps(kind, plan.hosts)
    inside = _steps(kind, count) - across
    inside_us = HOP_US[RING, plan.medium][protocol]
    if plan.hosts > 1:
        overhead_us = NET_OVERHEAD_US[plan.cpu] * (3 if protocol is Protocol.SIMPLE else 1)
        inside_us = max(inside_us, overhead_us)
    return BASE_US[RING][protocol] + inside * inside_us + across * HOP_US[RING, Medium.NETWORK][protocol]


def _tree_rate(protocol: Protocol, kind: Kind, count: int, plan: NcclSetup) -> Fraction:
    """Half of the bandwidth: data goes up the tree and down again."""
    assert kind is Kind.ALLREDUCE and count > 1, "NCCL uses its tree for allreduce only"
    bandwidth = plan.tree_bandwidth * TREE_SHARE
    bandwidth = _limited(bandwidth, plan, lambda generation: generation.tree_simple, plan.channels)
    match protocol:
        case Protocol.LL:
            bandwidth = min(bandwidth * TREE_LL, _most_in_ll(plan, bandwidth))
        case Protocol.LL128:
            bandwidth *= TREE_LL128_ON_ONE_HOST if plan.hosts == 1 else TREE_LL128_ACROSS_HOSTS
            bandwidth = _limited(bandwidth, plan, lambda generation: generation.tree_ll128, plan.channels)
        case Protocol.SIMPLE:
            pass
    return bandwidth * (1 if plan.balanced else TREE_PATTERN) / 2


def _tree_latency_us(protocol: Protocol, kind: Kind, count: int, plan: NcclSetup) -> float:
    """A chain inside each host, a double binary tree across hosts."""
    assert kind is Kind.ALLREDUCE, "NCCL uses its tree for allreduce only"
    inside_us = (count // plan.hosts - 1) * HOP_US[TREE, plan.medium][protocol]
    across_us = (plan.hosts.bit_length() - 1) * HOP_US[TREE, Medium.NETWORK][protocol]
    return BASE_US[TREE][protocol] + 2 * (inside_us + across_us)


def _most_in_ll(plan: NcclSetup, otherwise: Fraction) -> Fraction:
    """GB/s that protocol LL carries at most; `otherwise` where no generation is known."""
    if plan.generation is None:
        return otherwise
    if plan.hosts == 1:
        return plan.generation.ll
    return LL_ACROSS_HOSTS[plan.cpu][0 if plan.hosts == 2 else 1]


def _limited(
    bandwidth: Fraction, plan: NcclSetup, limits_of: Callable[[NcclLimits], ByHosts], channels: int = 1
) -> Fraction:
    """At most what the generation carries; its limits are for 1, for 2 and for more hosts."""
    if plan.generation is None:
        return bandwidth
    return min(bandwidth, limits_of(plan.generation)[min(plan.hosts, 3) - 1] * channels)

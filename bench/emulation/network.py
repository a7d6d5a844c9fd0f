"""A planned emulation on the machine: namespaces, devices, rates, routes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from arborcast.bench.emulation.machine import Namespace, check_machine, new_namespace
from arborcast.bench.emulation.plan import EmulationPlan
from arborcast.synth.topology import Vertex

MTU = 9000
"""Large frames, as in networks of training clusters: headers and acknowledgements take 1.2 % of a link. With
1500 bytes they take 4.4 %, far more with all links busy both ways, and the processors twice the time."""

BURST_S = 0.001
LEAST_BURST_BYTES = 20 << 10
"""Two frames must fit. What has gone unused before a run flatters it by as much on every link."""

QUEUE_BYTES = 8_000_000
MANAGEMENT_MBIT = 100
"""Of the network beside cables, in which ranks meet: what goes by it in place of a cable is seen."""

SETTINGS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    # Others, some hosts' default among them, make chunked traffic slow and bimodal.
    "net/ipv4/tcp_congestion_control": "reno",
}


@dataclass
class Emulation:
    """A network that exists.

    Attributes:
        plan: what was set up.
        namespaces: by vertex; of cables, behind them that of the management network.
        has_cables: whether wires are cables: each a subnet of its own, and nobody forwards. Ranks meet in a
            slow network beside them.
    """

    plan: EmulationPlan
    has_cables: bool = False
    namespaces: list[Namespace] = field(default_factory=list)

    def address(self, vertex: Vertex) -> str:
        """By which all others reach a vertex."""
        return f"10.0.0.{vertex + 1}" if self.has_cables else self.plan.address(vertex)

    def ends(self, src: Vertex, dst: Vertex) -> list[str]:
        """By which `src` reaches `dst` along each of their wires."""
        if not self.has_cables:
            return [self.address(dst)]
        return [self.plan.ends(number)[dst > src] for number in self.plan.wires_of[src, dst]]

    def path(self, vertex: Vertex) -> str:
        """For `bench.emulation.machine.enter`, in another process."""
        return self.namespaces[vertex].path

    def socket(self, vertex: Vertex) -> socket.socket:
        """A TCP socket inside the namespace of a vertex, which any thread may use."""
        return self.namespaces[vertex].run(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))


@contextmanager
def emulate(plan: EmulationPlan, *, has_cables: bool = False) -> Iterator[Emulation]:
    """Set up a network for the time of the block; see `Emulation`.

    Raises:
        InputError: not root, no iproute2, or a kernel without what is needed.
        EmulationError: the machine refuses something on the way.
    """
    check_machine()
    emulation = Emulation(plan, has_cables)
    try:
        for _ in range(plan.topology.size + has_cables):
            emulation.namespaces.append(new_namespace())
        _set_up(emulation)
        yield emulation
    finally:
        for namespace in emulation.namespaces:
            namespace.close()


def _set_up(emulation: Emulation) -> None:
    plan, namespaces = emulation.plan, emulation.namespaces[: emulation.plan.topology.size]
    settings = SETTINGS | ({"net/ipv4/ip_forward": "0"} if emulation.has_cables else {})
    for vertex, namespace in enumerate(namespaces):
        for name, value in settings.items():
            namespace.set(name, value)
        # Without it gloo takes the address that others can reach.
        only = ["addr del 127.0.0.1/8 dev lo", f"addr add {plan.address(vertex)}/32 dev lo"]
        namespace.batch("ip", ["link set lo up", *([] if emulation.has_cables else only)])
    for vertex, namespace in enumerate(namespaces):
        namespace.batch(
            "ip",
            [
                f"link add w{number} type veth peer name w{number} netns {namespaces[wire.ends[1]].path}"
                for number, wire in enumerate(plan.wires)
                if wire.ends[0] == vertex
            ],
        )
    for vertex, namespace in enumerate(namespaces):
        mine = [number for number, wire in enumerate(plan.wires) if vertex in wire.ends]
        namespace.batch("ip", [f"link set w{number} mtu {MTU} up" for number in mine])
        namespace.batch("tc", [_limit(plan, vertex, number) for number in mine])
    if emulation.has_cables:
        _join_cables(emulation)
        return
    for vertex, namespace in enumerate(namespaces):
        namespace.batch("ip", _routes(plan, vertex))


def _join_cables(emulation: Emulation) -> None:
    """Give wires their subnets, and all ranks a port of one bridge."""
    plan, (*ranks, bridge) = emulation.plan, emulation.namespaces
    bridge.batch("ip", ["link add bridge type bridge", "link set bridge up"])
    for rank, namespace in enumerate(ranks):
        mine = [(number, wire.ends[1] == rank) for number, wire in enumerate(plan.wires) if rank in wire.ends]
        lines = [f"addr add {plan.ends(number)[end]}/24 dev w{number}" for number, end in mine]
        lines.append(f"link add m0 type veth peer name m{rank} netns {bridge.path}")
        namespace.batch("ip", [*lines, f"addr add {emulation.address(rank)}/24 dev m0", "link set m0 up"])
        limit = f"rate {MANAGEMENT_MBIT}mbit burst 20kb limit {QUEUE_BYTES}"
        namespace.batch("tc", [f"qdisc add dev m0 root tbf {limit}"])
        bridge.batch("ip", [f"link set m{rank} master bridge up"])


def _limit(plan: EmulationPlan, vertex: Vertex, number: int) -> str:
    wire = plan.wires[number]
    rate = wire.bits_per_s[wire.ends[1] == vertex]
    return f"qdisc add dev w{number} root tbf rate {rate}bit burst {burst_bytes(rate)} limit {QUEUE_BYTES}"


def burst_bytes(bits_per_s: float) -> int:
    """What a link of this rate carries at once after a pause."""
    return max(LEAST_BURST_BYTES, int(bits_per_s / 8 * BURST_S))


def _routes(plan: EmulationPlan, vertex: Vertex) -> list[str]:
    own = plan.address(vertex)
    near, far = [], []
    for target in range(plan.topology.size):
        hop = plan.next_hop.get((vertex, target))
        if hop is None or target == vertex:
            continue
        device = f"w{plan.wire_of[vertex, hop]}"
        if hop == target:
            near.append(f"route add {plan.address(target)}/32 dev {device} scope link src {own}")
        else:
            via = plan.address(hop)
            far.append(f"route add {plan.address(target)}/32 via {via} dev {device} onlink src {own}")
    return near + far

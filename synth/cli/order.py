"""`synth order`: the order of hosts that suits NCCL's rings and trees."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from arborcast.synth.cli.console import Json, answer, log
from arborcast.synth.cli.description import assumptions_document
from arborcast.synth.cli.options import AsJson, Seed, count, option, target
from arborcast.synth.errors import InputError, TimedOutError
from arborcast.synth.formats.words import assumed, at_most, counted

if TYPE_CHECKING:
    from arborcast.synth.baselines.host_network import Busiest, Host, HostNetwork
    from arborcast.synth.baselines.host_orders import HostOrder
    from arborcast.synth.baselines.order_costs import OrderCost
    from arborcast.synth.topology import Topology

MODEL = "rings and trees across hosts as NCCL 2.30 makes them; NCCL itself was not run"
To: TypeAlias = Literal["hostfile", "rankfile", "slurm", "torchrun"]
BOUND_RANKS = 1024
"""Ranks up to which it is worked out what a schedule could reach; it takes longer than the order on more."""
BOUND_S = 10.0


def order(
    fabric: Annotated[
        str,
        typer.Argument(
            help="a fabric of several hosts: of the catalog (dgx-h100:boxes=4) or a file of synth cluster; "
            "or Slurm's topology.yaml or topology.conf, or topograph's graph, which know no rates",
            metavar="FABRIC",
        ),
    ],
    hosts: Annotated[
        str | None,
        option(
            "--hosts",
            "the hosts in today's order: a file with one in each line, or Slurm's expression (node[01-12]); "
            "by default those of the fabric",
            metavar="FILE|LIST",
        ),
    ] = None,
    ranks_per_host: Annotated[
        int | None, count("--ranks-per-host", "ranks of each host, where neither fabric nor hosts tell")
    ] = None,
    to: Annotated[
        To,
        option(
            "--to",
            "what to write: hostfile and rankfile for MPI, slurm for SLURM_HOSTFILE, torchrun a line for "
            "each host",
        ),
    ] = "hostfile",
    output: Annotated[Path | None, target("-o", "--output", "write the order here")] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Order hosts for NCCL's rings and trees.

    The order that loads the network least, beside today's.

    NCCL itself is not run: its rings and trees across hosts follow the list as version 2.30 does it, and
    messages spread evenly over shortest ways.
    """
    from arborcast.synth.baselines.host_network import HostNetwork
    from arborcast.synth.baselines.host_orders import best_order

    topology, named, slots = hosts_of(fabric, hosts, ranks_per_host)
    rated = slots is None
    network = HostNetwork(topology, named)
    found = best_order(network, seed=seed)
    listed = [named[host] for host in found.order]
    if output is not None:
        from arborcast.synth.formats.atomic import write_atomically

        counts = [len(host.ranks) if slots is None else slots[host.name] for host in listed]
        lines = written([host.name for host in listed], counts, to)
        write_atomically(output, "".join(f"{line}\n" for line in lines))
    reachable = _reachable(topology) if rated else None
    answer(
        as_json,
        _document(found, network, listed, reachable, rated),
        lambda: _lines(found, network, listed, reachable, rated, output, to),
    )


def hosts_of(
    fabric: str, said: str | None, per_host: int | None
) -> tuple[Topology, tuple[Host, ...], dict[str, int] | None]:
    """The fabric and its hosts in today's order; where links have no rates, how many ranks each host has.

    A fabric without rates is that of a scheduler, whose topology has one rank for each host.
    """
    from arborcast.synth.baselines.host_network import Host, check_names, in_blocks
    from arborcast.topologies import load
    from arborcast.topologies.readers.schedulers import read_host_list, read_host_tree

    listed = None if said is None else read_host_list(said)
    tree = read_host_tree(Path(fabric))
    if tree is not None:
        place = {name: (rank,) for rank, name in enumerate(tree.names)}
        wanted = [(name, None) for name in tree.names] if listed is None else listed
        for name, _ in wanted:
            if name not in place:
                raise InputError(f"--hosts: {name}: is no host of {fabric}, which has {len(place)}")
        check_names([name for name, _ in wanted])
        slots = {name: count or per_host or 1 for name, count in wanted}
        return tree.topology, tuple(Host(name, place[name]) for name in slots), slots
    topology = load(fabric)
    if listed is None:
        count = topology.ranks // per_host if per_host else _hosts_told(topology.name)
        if not count:
            raise InputError(f"{fabric}: --hosts or --ranks-per-host must say what its hosts are")
        listed = tuple((f"host{number}", None) for number in range(count))
    names = [name for name, _ in listed]
    even = per_host or topology.ranks // len(names)
    counts = [slots or even for _, slots in listed]
    if sum(counts) != topology.ranks:
        raise InputError(
            f"--hosts: the {len(names)} hosts have {sum(counts)} ranks, {fabric} has {topology.ranks}"
        )
    return topology, in_blocks(names, counts), None


def _hosts_told(name: str) -> int:
    """Hosts by the name of a fabric of ours, such as `2 x dgx1 + 1 x dgx2, full`; 0 where it does not say."""
    if "[" in name:  # a fragment, which may have lost any of them
        return 0
    joined = re.findall(r"(?:^|\+ )(\d+) x ", name)
    boxes = re.search(r"\bboxes[=:](\d+)", name)
    return sum(map(int, joined)) or (int(boxes[1]) if boxes else 0)


def written(names: Sequence[str], counts: Sequence[int], to: To) -> Iterator[str]:
    """The lines of a file that says the order, of hosts with so many ranks."""
    rank = 0
    for place, (name, slots) in enumerate(zip(names, counts, strict=True)):
        match to:
            case "hostfile":
                yield f"{name} slots={slots}"
            case "slurm":
                yield from [name] * slots
            case "torchrun":
                yield f"{name}: --nnodes {len(names)} --node-rank {place} --master-addr {names[0]}"
            case "rankfile":
                yield from (f"rank {rank + slot}={name} slot={slot}" for slot in range(slots))
        rank += slots


def _reachable(topology: Topology) -> Fraction | None:
    """GB/s of an allreduce that no schedule exceeds; None where it was not worked out."""
    from arborcast.synth.bounds import bound
    from arborcast.synth.collective import Collective
    from arborcast.synth.deadline import Deadline

    if topology.ranks > BOUND_RANKS:
        return None
    try:
        return bound(topology, Collective.on(topology, "allreduce"), Deadline.after(BOUND_S)).rate
    except TimedOutError:
        log.info("what a schedule could reach was not worked out within %g s", BOUND_S)
        return None


def _cost_document(cost: OrderCost | None) -> Json | None:
    if cost is None:
        return None

    def link(busiest: Busiest | None) -> Json | None:
        return (
            None
            if busiest is None
            else {"from": busiest.ends[0], "to": busiest.ends[1], "messages": float(busiest.load)}
        )

    return {
        "ring_gbps": float(cost.ring),
        "ring_link": link(cost.ring_link),
        "tree_gbps": None if cost.tree is None else float(cost.tree),
        "tree_link": link(cost.tree_link),
    }


def _document(
    found: HostOrder, network: HostNetwork, listed: Sequence[Host], reachable: Fraction | None, rated: bool
) -> Json:
    return {
        "model": MODEL,
        "rates": "of the fabric" if rated else "none are known: every link counts as 1",
        "order": [host.name for host in listed],
        "places": len(network.of_place),
        "given": _cost_document(found.given),
        "best": _cost_document(found.cost),
        "no_order_exceeds": {"ring_gbps": float(found.most[0]), "tree_gbps": float(found.most[1])},
        "proved": found.is_proved,
        "tried": found.tried,
        "no_schedule_exceeds_gbps": None if reachable is None else float(reachable),
        "assumed": assumptions_document(network.topology),
    }


def _lines(
    found: HostOrder,
    network: HostNetwork,
    listed: Sequence[Host],
    reachable: Fraction | None,
    rated: bool,
    output: Path | None,
    to: To,
) -> Iterator[str]:
    def told(cost: OrderCost | None) -> str:
        if cost is None:
            return "its ring has no way from each host to the next: NCCL fails"
        ring = _value(cost.ring, cost.ring_link, rated)
        if cost.tree_link is None or cost.tree is None:
            return f"ring {ring}; trees have no way between two hosts: NCCL_ALGO=Ring"
        return f"ring {ring}; trees {_value(cost.tree, cost.tree_link, rated)}"

    count = len(listed)
    yield f"hosts     {count} of {network.topology.name}, in {counted(len(network.of_place), 'place')}"
    yield f"given     {told(found.given)}"
    if found.order == tuple(range(count)):
        yield "best      the order as it is: no other was found to be better"
    else:
        yield f"best      {told(found.cost)}"
    yield f"proof     {_proof(found)}"
    if rated:
        limit = "see synth bound" if reachable is None else at_most(reachable, network.topology)
        yield f"schedule  that keeps to no ring or tree: {limit} (synth solve)"
        if why := assumed("rate", network.topology):
            yield f"rates     {why}"
    yield f"model     {MODEL}"
    if output is None:
        yield "order     " + " ".join(host.name for host in listed)
    else:
        yield f"written   {output}, a {to}"


def _proof(found: HostOrder) -> str:
    if found.is_proved:
        return "no order of these hosts has a better ring, nor with such a ring better trees"
    ring = float(found.most[0] / found.cost.ring) - 1
    rings = f"no ring is more than {ring:.0%} faster" if ring else "no order has a better ring"
    if found.cost.tree is None:
        trees = "whether another order gives trees a way is open"
    else:
        trees = f"no trees are more than {float(found.most[1] / found.cost.tree) - 1:.0%} faster"
    return f"{rings}; {trees} ({found.tried} orders were tried)"


def _value(rate: object, link: Busiest, rated: bool) -> str:
    where = f"{link.ends[0]} to {link.ends[1]}"
    if rated:
        return f"{float(rate):.4g} GB/s of an allreduce ({where})"  # type: ignore[arg-type]
    return f"{float(link.load):.3g} message{'' if link.load == 1 else 's'} on one link ({where})"

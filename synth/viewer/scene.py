"""A schedule as a document that the viewer plays: the fabric on paper, and what passes which link when.

    title, facts      what is shown, in words
    vertices          label, x, y, kind: "rank", "switch", or "able" (it adds or copies)
    links             src, dst, bandwidth in GB/s; an able switch that adds is a link from itself to itself
    bound             rate, scope; "sets" of vertices of a cut or partition, or "lengths" of links
    chunks            title of each
    transfers         columns: chunk, src, dst, step, reduce, via
    runs              one per size: label, time_us, busbw, pieces, columns of bars: link, start_us, end_us,
                      transfer, piece
    note              what is left out, or null

`web/src/scene.ts` declares the same for the script.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from arborcast.synth.certificate import Bound, Cut, Dual, Partition
from arborcast.synth.collective import Kind
from arborcast.synth.formats.sizes import format_size
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.pictures.placement import place
from arborcast.synth.ports import Ports
from arborcast.synth.schedule import Transfer
from arborcast.synth.simulation.simulator import simulate, timeline
from arborcast.synth.simulation.timing import Occupation, join_touching
from arborcast.synth.topology import Hop, Topology, Vertex

Json: TypeAlias = dict[str, Any]

MOST_EXPANDED = 60_000
"""Transfers up to which an implicit schedule is written out; above, its representatives are shown."""

MOST_BARS = 150_000
"""Bars of a run; where there are more, pieces of a chunk that follow each other are drawn as one."""


def scene_of(schedule: AnySchedule, sizes: Sequence[int], facts: Iterable[str] = ()) -> Json:
    """The scene of a schedule, simulated at each size.

    Args:
        schedule: what is shown; a large one in implicit form by its representatives.
        sizes: bytes of the whole buffer.
        facts: what else is said of it, a line each.

    Raises:
        InputError: a wrong size.
    """
    if isinstance(schedule, ImplicitSchedule) and schedule.transfer_count <= MOST_EXPANDED:
        schedule = schedule.expand()
    fabric = scene_of_fabric(schedule.topology)
    runs, joined = [], False
    for size in sizes:
        timing = simulate(schedule, size)
        passing = timeline(schedule, size, pieces=timing.pieces, own_links=True)
        if sum(map(len, passing.values())) > MOST_BARS:
            passing, joined = {hop: join_touching(bars) for hop, bars in passing.items()}, True
        runs.append(
            {
                "label": format_size(size),
                "time_us": timing.time_us,
                "busbw": timing.busbw,
                "pieces": timing.pieces,
                "bars": _bars(schedule, fabric["links"], passing),
            }
        )
    notes = []
    if joined:
        notes.append("Pieces of a chunk that follow each other on a link are drawn as one.")
    if isinstance(schedule, ImplicitSchedule):
        notes.append(
            f"Shown are the {len(schedule.chunks)} representatives: "
            f"{schedule.translations.order} translations make all chunks of them."
        )
    return {
        "title": f"{schedule.collective.kind} on {schedule.topology.name}, {schedule.method.name}",
        "facts": list(facts),
        **fabric,
        "bound": _bound(schedule.bound, schedule.topology),
        "chunks": _chunk_titles(schedule),
        "transfers": columns_of(schedule.transfers),
        "representatives": isinstance(schedule, ImplicitSchedule),
        "runs": runs,
        "note": " ".join(notes) or None,
    }


def columns_of(transfers: Iterable[Transfer]) -> Json:
    """Transfers as columns."""
    listed = list(transfers)
    return {
        "chunk": [transfer.chunk for transfer in listed],
        "src": [transfer.src for transfer in listed],
        "dst": [transfer.dst for transfer in listed],
        "step": [transfer.step for transfer in listed],
        "reduce": [int(transfer.reduce) for transfer in listed],
        "via": [list(transfer.via) for transfer in listed],
    }


def scene_of_fabric(topology: Topology) -> Json:
    """Vertices in their places, and links."""
    placement = place(topology)
    kinds = ["rank"] * topology.ranks + ["able"] * (topology.holders - topology.ranks)
    kinds += ["switch"] * (topology.size - topology.holders)
    links = [
        {"src": link.src, "dst": link.dst, "bandwidth": float(link.bandwidth)} for link in topology.links
    ]
    links += [
        {"src": vertex, "dst": vertex, "bandwidth": float(switch.adder)}
        for vertex, switch in enumerate(topology.switches, start=topology.ranks)
        if switch.adder is not None
    ]
    return {
        "vertices": [
            {
                "label": str(topology.label(vertex)),
                "x": round(placement.points[vertex][0], 4),
                "y": round(placement.points[vertex][1], 4),
                "kind": kind,
            }
            for vertex, kind in enumerate(kinds)
        ],
        "links": links,
        "is_grid": placement.is_grid,
    }


def _bound(bound: Bound, topology: Topology) -> Json:
    ports = Ports.of(topology)
    found: Json = {"rate": float(bound.rate), "scope": bound.scope.value, "sets": None, "lengths": None}
    match bound.certificate:
        case Cut(side, _):
            found["sets"] = [sorted(_drawn(side, topology))]
        case Partition(blocks, _):
            found["sets"] = [sorted(_drawn(block, topology)) for block in blocks]
        case Dual(lengths=lengths):
            of_hop = dict(zip(ports.fabric.bandwidth, map(float, lengths), strict=True))
            ends = ((ports.out.get(src, src), ports.into.get(dst, dst)) for src, dst in topology.bandwidth)
            found["lengths"] = [of_hop[hop] for hop in ends]
    return found


def _drawn(vertices: Iterable[Vertex], topology: Topology) -> Iterator[Vertex]:
    """Those that the picture has: ports of ranks are none."""
    return (vertex for vertex in vertices if vertex < topology.size)


def _chunk_titles(schedule: AnySchedule) -> list[str]:
    label = schedule.topology.label
    whose = "root" if schedule.collective.kind in {Kind.ALLREDUCE, Kind.REDUCE} else "of"  # data of all ranks
    titles = []
    for chunk in schedule.chunks:
        goes = "" if chunk.target is None else f" for {label(chunk.target)}"
        titles.append(f"{chunk.share} of the buffer, {whose} {label(chunk.owner)}{goes}")
    return titles


def _bars(schedule: AnySchedule, links: Sequence[Json], passing: Mapping[Hop, Sequence[Occupation]]) -> Json:
    """Columns of bars in order of their start."""
    passages: dict[tuple[int, Hop], list[int]] = defaultdict(list)
    for index, transfer in enumerate(schedule.transfers):  # in order of step
        for hop in transfer.hops:
            passages[transfer.chunk, hop].append(index)
    number = {(link["src"], link["dst"]): index for index, link in enumerate(links)}
    rows = []
    for hop, bars in passing.items():
        if hop not in number:
            continue  # a switch without an adder of its own copies and adds at once
        of_chunk: dict[int, list[Occupation]] = defaultdict(list)
        for bar in bars:
            of_chunk[bar.chunk].append(bar)
        for chunk, of_it in of_chunk.items():
            there = passages[chunk, hop]
            for turn, bar in enumerate(of_it):
                # As many bars of each transfer that passes here, one transfer after the other.
                index = there[turn * len(there) // len(of_it)] if there else -1
                rows.append((bar.start_us, bar.end_us, number[hop], index, bar.piece, chunk))
    rows.sort()
    return {
        "start_us": [round(row[0], 4) for row in rows],
        "end_us": [round(row[1], 4) for row in rows],
        "link": [row[2] for row in rows],
        "transfer": [row[3] for row in rows],
        "piece": [row[4] for row in rows],
        "chunk": [row[5] for row in rows],
    }

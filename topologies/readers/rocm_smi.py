"""What `rocm-smi --showtopo` and `amd-smi topology` print to a machine: text, JSON or CSV.

Both print one table per property of the pairs of GPUs. *Link type* says XGMI or PCIE; *hops* is 1 for xGMI
(however far), 2 for PCIe at one NUMA node, 3 across two; *weight* is 15 for each xGMI hop, so only 15 is a
link of the pair's own; the *bandwidth* table (`rocm-smi --shownodesbw`, amd-smi's NUMA BW) holds MB/s of one
link and of all links of a pair, 0-0 where it has none. The drivers' text on hops and weights is in
ROCm/rocm-systems, projects/amdsmi/docs. Neither tool says which GPUs these are; where the file holds a name
(`--showproductname`, `amd-smi static`) that is used, and what was assumed is noted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.topology import Link, Topology
from arborcast.topologies.builders import assuming, cable, with_obvious_symmetries
from arborcast.topologies.gpus import AMD, GPUS, Gpu, gpu_of_architecture
from arborcast.topologies.machine import Machine
from arborcast.topologies.rates import NOT_NVLINK, NVLINK_LATENCY_US, Rates
from arborcast.topologies.readers.options import Said, reader
from arborcast.topologies.readers.pcie_wanted import wants_pcie
from arborcast.topologies.readers.text.pasted import (
    assumed_from_names,
    lines_of,
    named_gpus,
    stated_gpu,
    taken_for,
    unnamed,
)
from arborcast.topologies.readers.text.pcie_paths import pcie_tree
from arborcast.topologies.readers.text.rocm_tables import MAX_GPUS, RocmTables, Table, read_tables
from arborcast.topologies.wirings import links_of_board

Megabytes = Mapping[tuple[int, int], tuple[int, int]]
"""MB/s of one link and of all links of each pair."""


@reader
def parse_rocm_smi(text: str, place: str, said: Said) -> Machine:
    """The machine that the tables show; GPU i of the tables is rank i.

    A pair has as many xGMI links as its bandwidths say. Without that table each pair of weight 15 has one:
    so it is on boards that are a mesh (MI300X), and where a GPU has no more links than such pairs (four
    MI210); elsewhere (MI250X) the text is refused.

    Args:
        text: the saved output, possibly with other text around it.
        place: what errors begin with.
        said: what else is said of it:
            gpu: what the GPUs are (see `topologies.GPUS`); its rate per link then goes before the table's.
            pcie: whether PCIe paths become links too; by default they do, with a note, where xGMI joins
                not all GPUs.
            between_sockets: GB/s each way between two CPUs.
            numa_per_socket: NUMA nodes of a CPU (see `readers.sockets`).
            rates: the data sheet's GB/s per xGMI link, or RCCL's constant.

    Raises:
        TopologyError: tables missing or broken, or what they leave open.
    """
    tables, rates = read_tables(text), said.rates
    stated = None if said.gpu is None else stated_gpu(said.gpu, AMD)
    count = len(tables.names)
    if not 2 <= count <= MAX_GPUS:
        raise TopologyError(f"must show 2 to {MAX_GPUS} GPUs, got {count}")
    kinds = _kinds(tables)
    megabytes = _bandwidths(tables)
    own = _own_pairs(tables, kinds, megabytes)
    known, notes, assumed, rates_assumed = stated, list[str](), "", ""
    if known is None:
        known, note, assumed = _assumed(tables, own, kinds, text, place, bool(megabytes), rates)
        notes += [note] if note else []
    contradiction = _contradiction(known, own, megabytes)
    if megabytes and stated is None and rates is Rates.DATASHEET and not contradiction:
        rates_assumed = ""
        speed = {pair: Fraction(most, 1000) for pair, (_, most) in megabytes.items() if pair in own}
        each = ", ".join(sorted({f"{least / 1000:g}" for least, most in megabytes.values() if most}))
        notes.append(f"xGMI rates are those of its bandwidth table, {each} GB/s a link; --gpu says otherwise")
    elif own:
        if known is None:
            raise TopologyError("does not say which GPUs these are; --gpu must")
        counts = _links_of_pairs(tables, own, {} if contradiction else megabytes, known)
        notes += [contradiction] if contradiction and stated is None else []
        rates_assumed = assumed or known.assumed
        speed = {pair: links * known.rate(rates) for pair, links in counts.items()}
    links: list[Link] = []
    for pair in own:
        links += cable(*pair, speed[pair], NVLINK_LATENCY_US)
    links = assuming(links, rate=rates_assumed, latency=NOT_NVLINK)
    switches: list[str] = []
    alone = "shows no xGMI links: its PCIe paths are the links; --pcie says so"
    if wants_pcie(said, count, links, alone, notes):
        tree = pcie_tree(
            text,
            said,
            tables.names,
            (),
            _ways(tables, kinds),
            [known] * count,
            assumed=assumed,
            together=lambda one, other: _together(tables, one, other),
            first=count,
            nodes=({tables.names[place]: node for place, node in tables.numa.items()}, 0),
        )
        links += tree.links
        switches += tree.names
        notes += tree.notes
    return Machine(
        with_obvious_symmetries(Topology.build("rocm-smi", count, links, switches)),
        gpus=(None if known is None else known.name,) * count,
        devices=tables.names,
        hosts=(0,) * count,
        notes=tuple(notes),
    )


def _contradiction(known: Gpu | None, own: Sequence[tuple[int, int]], megabytes: Megabytes) -> str:
    """The note on a table whose GB/s per link are not those of GPUs that are a mesh; empty where they agree.

    Drivers print the same figure for all generations; where it differs from the data sheet, that counts.
    """
    if known is None or known.board != "mesh" or not megabytes:
        return ""
    if any(least != most for least, most in (megabytes[pair] for pair in own)):
        return ""
    shown = {Fraction(megabytes[pair][0], 1000) for pair in own}
    if not shown or all(50 * abs(each - known.link) <= known.link for each in shown):
        return ""
    told = ", ".join(f"{float(each):g}" for each in sorted(shown))
    return (
        f"its bandwidth table says {told} GB/s a link, where {known.name} has {float(known.link):g}: the "
        "latter counts; --gpu says otherwise"
    )


def _kinds(tables: RocmTables) -> Table:
    """XGMI or PCIE for every pair: by the link types, else by hops, else xGMI where there is bandwidth."""
    if tables.kind:
        kinds = tables.kind
    elif tables.hops:
        kinds = {pair: "XGMI" if hops == "1" else "PCIE" for pair, hops in tables.hops.items()}
    elif tables.bandwidth:
        kinds = {pair: "PCIE" if word == "N/A" else "XGMI" for pair, word in tables.bandwidth.items()}
    else:
        raise TopologyError(
            "must hold the link types (rocm-smi --showtopo, amd-smi topology), or hops or bandwidths"
        )
    for (one, other), kind in kinds.items():
        if kind not in {"XGMI", "PCIE"}:
            raise TopologyError(
                f"{tables.pair(one, other)}: link type must be XGMI or PCIE, got {shorten(kind)}"
            )
    return kinds


def _bandwidths(tables: RocmTables) -> dict[tuple[int, int], tuple[int, int]]:
    """MB/s of one link and of all of each pair; empty where the driver filled in nothing."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for (one, other), word in tables.bandwidth.items():
        first, _, last = ("0-0" if word == "N/A" else word).partition("-")
        least, most = found[one, other] = int(first), int(last)
        if least > most or (most and not least):
            rule = "must be those of one link and of all, or 0-0"
            raise TopologyError(f"{tables.pair(one, other)}: bandwidths {rule}, got {word}")
    return found if any(most for _, most in found.values()) else {}


def _own_pairs(tables: RocmTables, kinds: Table, megabytes: Megabytes) -> list[tuple[int, int]]:
    """The pairs, smaller number first, with xGMI links of their own rather than a way over other GPUs."""
    pairs = [pair for pair in combinations(range(len(tables.names)), 2) if kinds[pair] == "XGMI"]
    if megabytes:
        return [pair for pair in pairs if megabytes[pair][1]]
    if tables.weight:
        return [pair for pair in pairs if _weight(tables, pair) < 2 * 15]
    return pairs


def _weight(tables: RocmTables, pair: tuple[int, int]) -> int:
    word = tables.weight[pair]
    if not word.isdecimal():
        one, other = pair
        raise TopologyError(f"{tables.pair(one, other)}: weight must be a number, got {shorten(word)}")
    return int(word)


def _neighbours(tables: RocmTables, own: Sequence[tuple[int, int]]) -> list[int]:
    """To how many others each GPU has xGMI links of its own."""
    return [sum(here in pair for pair in own) for here in range(len(tables.names))]


def _assumed(
    tables: RocmTables,
    own: Sequence[tuple[int, int]],
    kinds: Table,
    text: str,
    place: str,
    has_rates: bool,
    rates: Rates,
) -> tuple[Gpu | None, str, str]:
    """What the GPUs are taken for, the note that says so and why ("" where the text names them)."""
    lines = lines_of(text)
    named = named_gpus(lines, AMD)
    most = max(_neighbours(tables, own))
    stated = {kind.name: kind for kind in named.by_index.values()}
    if len(stated) == 1 and GPUS[min(stated)].links >= most:
        return GPUS[min(stated)], "", ""
    found = assumed_from_names(named, place, AMD, lambda kind: kind.links >= most)
    if found is None:
        found = _by_architecture(lines, most)
    if found is None and (has_rates or not own):
        return None, "", ""
    kind, why = found or _guess(tables, own, kinds)
    rate = f" ({float(kind.rate(rates)):g} GB/s each way per xGMI link)" if own else ""
    return kind, unnamed(f"{kind.name}{rate}", why), taken_for(kind, why)


def _by_architecture(lines: Sequence[str], links: int) -> tuple[Gpu, str] | None:
    """The GPU with so many links of the one architecture that the lines name, such as gfx942."""
    names = {match[0].lower() for line in lines for match in re.finditer(r"gfx9[0-9a-f]{2}", line, re.I)}
    kind = gpu_of_architecture(min(names), links=links) if len(names) == 1 else None
    return None if kind is None or kind.links < links else (kind, min(names))


def _guess(tables: RocmTables, own: Sequence[tuple[int, int]], kinds: Table) -> tuple[Gpu, str]:
    """MI300X for one full mesh, MI210 for several with PCIe between, MI250X for the pairs of its board."""
    xgmi = [pair for pair in combinations(range(len(tables.names)), 2) if kinds[pair] == "XGMI"]
    if len(own) < len(xgmi) and links_of_board(GPUS["mi250x"], own) is not None:
        return GPUS["mi250x"], "the pairs that are linked"
    if len(own) < len(xgmi):
        far = next(pair for pair in xgmi if pair not in set(own))
        raise TopologyError(f"{tables.pair(*far)} goes over other GPUs, as between MI250X; {_MISSING}")
    several = len(xgmi) < len(kinds) // 2
    kind = GPUS["mi210" if several else "mi300x"]
    most = max(_neighbours(tables, own))
    fitting = [gpu for gpu in GPUS.values() if gpu.vendor == AMD and gpu.links >= most]
    others = {gpu.link: gpu.name for gpu in fitting if gpu.board == "mesh" or gpu.links == most}
    others.pop(kind.link, None)
    same = ", ".join(f"{name} at {float(link):g}" for link, name in others.items())
    return kind, f"its {'meshes' if several else 'mesh'} (the same as {same})"


_MISSING = (
    "how many links join a pair is not shown, only the bandwidth table (rocm-smi --shownodesbw, "
    "amd-smi topology) says it"
)


def _links_of_pairs(
    tables: RocmTables, own: Sequence[tuple[int, int]], megabytes: Megabytes, known: Gpu
) -> dict[tuple[int, int], int]:
    """How many xGMI links join each pair."""
    neighbours = _neighbours(tables, own)
    counts: dict[tuple[int, int], int] = {}
    of_board = None if megabytes else links_of_board(known, own)
    for one, other in own:
        if megabytes:
            least, most = megabytes[one, other]
            if most % least:
                rule = "bandwidths must be those of one link and of all"
                raise TopologyError(f"{tables.pair(one, other)}: {rule}, got {least}-{most}")
            counts[one, other] = most // least
        else:
            counts[one, other] = 1 if of_board is None else of_board[one, other]
            if (
                of_board is None
                and known.board != "mesh"
                and not neighbours[one] == neighbours[other] == known.links
            ):
                raise TopologyError(
                    f"{tables.pair(one, other)}: {known.name} has {known.links} links, and {_MISSING}"
                )
    for here, name in enumerate(tables.names):
        used = sum(count for pair, count in counts.items() if here in pair)
        if used > known.links:
            raise TopologyError(
                f"{name}: must have at most {known.links} xGMI links ({known.name}), got {used}"
            )
    return counts


def _ways(tables: RocmTables, kinds: Table) -> dict[tuple[str, str], str]:
    """How near the pairs are over PCIe, as far as hops say it."""
    words = {"2": "NODE", "3": "SYS"}
    return {
        (tables.names[one], tables.names[other]): words[tables.hops[one, other]]
        for (one, other), kind in kinds.items()
        if kind == "PCIE" and tables.hops.get((one, other)) in words
    }


def _together(tables: RocmTables, one: str, other: str) -> bool | None:
    nodes = [tables.numa.get(tables.names.index(name)) for name in (one, other)]
    return None if None in nodes else nodes[0] == nodes[1]

"""Which hosts a scheduler knows and the switches between them: Slurm, topograph, lists of hosts.

These files say what hangs under what and no rates: each link counts as one, so that what is worked out on
them is how many messages share it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from arborcast.synth.errors import InputError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.reading import parse_json, read_text
from arborcast.synth.formats.shapes import MAPPING, MAX_RANKS, Name, check_shape
from arborcast.synth.formats.yaml_text import parse_yaml
from arborcast.synth.topology import Link, Topology
from arborcast.topologies.machine import Machine
from arborcast.topologies.readers.infragraph import asked_rates

MAX_BYTES = 1 << 24
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_SLOTS = re.compile(r"(?:\s+slots=|:)(\d+)$")


@MAPPING
class _Switch(TypedDict):
    switch: Name
    children: NotRequired[Name]
    nodes: NotRequired[Name]


@MAPPING
class _Tree(TypedDict):
    switches: Annotated[list[_Switch], Field(min_length=1, max_length=MAX_RANKS)]


@MAPPING
class _BlockOf(TypedDict):
    block: Name
    nodes: NotRequired[Name]


@MAPPING
class _Blocks(TypedDict):
    blocks: Annotated[list[_BlockOf], Field(min_length=1, max_length=MAX_RANKS)]
    block_sizes: NotRequired[list[Annotated[int, Field(ge=1, le=MAX_RANKS)]]]


@MAPPING
class _SlurmTopology(TypedDict):
    topology: Name
    cluster_default: NotRequired[bool]
    flat: NotRequired[bool]
    tree: NotRequired[_Tree]
    block: NotRequired[_Blocks]


class _Instance(TypedDict):
    id: Name
    network_layers: NotRequired[list[Name]]
    attributes: NotRequired[dict[str, Any]]


class _Graph(TypedDict):
    instances: Annotated[list[_Instance], Field(min_length=1, max_length=MAX_RANKS)]


@dataclass(frozen=True, slots=True)
class HostTree:
    """Hosts under switches: a topology of one rank for each host, in which every link has rate 1."""

    names: tuple[str, ...]
    topology: Topology

    @classmethod
    def of(cls, name: str, place: str, above: Sequence[tuple[str, str]], hosts: Sequence[str]) -> HostTree:
        """Out of who hangs under whom: pairs of a host or switch and a switch.

        Raises:
            InputError: there is no host, or one is named as a switch, too.
        """
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        if not numbers:
            raise InputError(f"{place}: must name at least one host")
        ranks = len(numbers)
        switches = list(dict.fromkeys(end for pair in above for end in pair if end not in numbers))
        if both := {switch for _, switch in above} & numbers.keys():
            raise InputError(f"{place}: {min(both)}: must be a host or a switch, not both")
        numbers |= {switch: ranks + number for number, switch in enumerate(switches)}
        ends = [
            (numbers[one], numbers[other])
            for pair in dict.fromkeys(above)
            for one, other in (pair, pair[::-1])
        ]
        links = [Link(*each, Fraction(1), Fraction(0)) for each in ends]
        return cls(tuple(numbers)[:ranks], Topology.build(name, ranks, links, switches))


def rated(tree: HostTree, rates: Mapping[str, Fraction]) -> Machine:
    """The hosts as ranks, with GB/s each way of links by their layer: "1" from hosts up, then "2", ...

    Raises:
        InputError: a layer has no rate.
    """
    topology = tree.topology
    layer = dict.fromkeys(range(topology.ranks), 0)
    while len(layer) < topology.size:
        up = {it.dst: layer[it.src] + 1 for it in topology.links if it.src in layer and it.dst not in layer}
        if not up:
            raise InputError(f"{topology.name}: {topology.label(topology.size - 1)} must be above some host")
        layer |= up
    names = [str(max(layer[link.src], layer[link.dst])) for link in topology.links]
    if missing := sorted({*names} - rates.keys()):
        raise InputError(f"{topology.name}: does not say how fast its layers are; {asked_rates(missing)}")
    links = [replace(it, bandwidth=rates[name]) for it, name in zip(topology.links, names, strict=True)]
    machine = Machine.of(replace(topology, links=tuple(links)))
    return replace(machine, devices=tree.names, hosts=tuple(range(topology.ranks)))


def read_host_tree(path: Path) -> HostTree | None:
    """Slurm's topology.yaml or topology.conf, or topograph's graph; None where the file is something else.

    Raises:
        InputError: it is one of them and breaks a rule.
    """
    if not path.is_file():
        return None
    text, place = read_text(path, max_bytes=MAX_BYTES), str(path)
    if re.search(r"^\s*(SwitchName|BlockName)\s*=", text, re.MULTILINE | re.IGNORECASE):
        return _of_slurm_conf(text, place)
    if "network_layers" in text or '"instances"' in text:
        return _of_topograph(parse_json(text, place), place)
    if re.search(r"^\s*-\s+topology\s*:", text, re.MULTILINE):
        return _of_slurm_yaml(parse_yaml(text, place), place)
    return None


def _of_topograph(document: object, place: str) -> HostTree:
    """Layers lead from the nearest switch outwards; hosts of one NVLink domain stand nearer still."""
    above: list[tuple[str, str]] = []
    hosts: list[str] = []
    for each in check_shape(_Graph, document, place)["instances"]:
        domain = (each.get("attributes") or {}).get("nvlink")
        layers = [*([f"nvlink {domain}"] if isinstance(domain, str) else []), *each.get("network_layers", ())]
        hosts.append(each["id"])
        above += zip((each["id"], *layers), layers, strict=False)
    return HostTree.of("topograph", place, above, hosts)


def _of_slurm_yaml(document: object, place: str) -> HostTree:
    if not isinstance(document, list):
        raise InputError(f"{place}: must be a list of topologies")
    told = [
        check_shape(_SlurmTopology, each, f"{place}: topology {n + 1}") for n, each in enumerate(document)
    ]
    default = [each for each in told if each.get("cluster_default")] or told
    if len(default) > 1 and not default[0].get("cluster_default"):
        names = ", ".join(each["topology"] for each in told)
        raise InputError(f"{place}: one of {names} must say cluster_default: true")
    chosen = default[0]
    name = chosen["topology"]
    if tree := chosen.get("tree"):
        rows = [
            (each["switch"], each.get("children", ""), each.get("nodes", "")) for each in tree["switches"]
        ]
        return _of_switches(name, place, rows)
    if block := chosen.get("block"):
        named = [(each["block"], each.get("nodes", "")) for each in block["blocks"]]
        return _of_blocks(name, place, named, block.get("block_sizes", []))
    raise InputError(f"{place}: topology {name}: must have a tree or blocks; a flat one gives no order")


def _of_slurm_conf(text: str, place: str) -> HostTree:
    switches, blocks, sizes = [], [], []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        said = {key.lower(): value for key, _, value in (word.partition("=") for word in words)}
        if "switchname" in said:
            switches.append((said["switchname"], said.get("switches", ""), said.get("nodes", "")))
        elif "blockname" in said:
            blocks.append((said["blockname"], said.get("nodes", "")))
        elif "blocksizes" in said:
            try:
                sizes = [int(size) for size in said["blocksizes"].split(",")]
            except ValueError:
                raise InputError(
                    f"{place}: line {number}: BlockSizes must be numbers, got {shorten(said['blocksizes'])}"
                ) from None
        elif said:
            raise InputError(
                f"{place}: line {number}: must begin with SwitchName, BlockName or BlockSizes, "
                f"got {shorten(words[0])}"
            )
    if switches and blocks:
        raise InputError(f"{place}: must have switches or blocks, not both")
    name = Path(place).name
    return _of_switches(name, place, switches) if switches else _of_blocks(name, place, blocks, sizes)


def _of_switches(name: str, place: str, rows: Sequence[tuple[str, str, str]]) -> HostTree:
    """Rows of a switch, the switches under it and the hosts under it; in YAML, `children` may be either."""
    known = {switch for switch, _, _ in rows}
    above, hosts = [], []
    for switch, children, nodes in rows:
        for child in hostlist(children, place):
            above.append((child, switch))
            if child not in known:
                hosts.append(child)
        for node in hostlist(nodes, place):
            above.append((node, switch))
            hosts.append(node)
    return HostTree.of(name, place, above, hosts)


def _of_blocks(name: str, place: str, blocks: Sequence[tuple[str, str]], sizes: Sequence[int]) -> HostTree:
    """Blocks of hosts; by each larger size, so many blocks in a row are one of the next level."""
    above: list[tuple[str, str]] = []
    hosts: list[str] = []
    for block, nodes in blocks:
        of_block = hostlist(nodes, place)
        hosts += of_block
        above += [(host, block) for host in of_block]
    level = [block for block, _ in blocks]
    for size, larger in pairwise(sizes):
        if larger <= size or larger % size:
            raise InputError(
                f"{place}: block sizes must be multiples, each of the one before, got {size}, {larger}"
            )
        width = larger // size
        above += [(each, f"{larger} hosts, {number // width}") for number, each in enumerate(level)]
        level = list(dict.fromkeys(f"{larger} hosts, {number // width}" for number in range(len(level))))
    if len(level) > 1:
        above += [(each, "all blocks") for each in level]
    return HostTree.of(name, place, above, hosts)


def read_host_list(said: str) -> tuple[tuple[str, int | None], ...]:
    """Hosts of a file of them, or of Slurm's expression, with how many ranks each has where it says so.

    A file has a host or an expression in each line, with `slots=8` or `:8` behind it where MPI wants it.

    Raises:
        InputError: an expression that does not end, nothing named, or a host of no slots.
    """
    path = Path(said)
    lines = read_text(path, max_bytes=MAX_BYTES).splitlines() if path.is_file() else [said]
    found: list[tuple[str, int | None]] = []
    for number, line in enumerate(lines, 1):
        place = f"{said}: line {number}" if path.is_file() else "--hosts"
        text = line.partition("#")[0].strip()
        slots = _SLOTS.search(text)
        each = None if slots is None else int(slots[1])
        if each == 0:
            raise InputError(f"{place}: slots must be at least 1, got 0")
        found += [(host, each) for host in hostlist(_SLOTS.sub("", text), place)]
    if not found:
        raise InputError(f"{said}: must name at least one host")
    return tuple(found)


def hostlist(text: str, place: str) -> list[str]:
    """The names that Slurm's expression stands for: `node[01-03,7],login` is node01, 02, 03, 7 and login.

    Raises:
        InputError: brackets that do not close, or what is no range in them.
    """
    return [name for part in _split(text, place) for name in _expanded(part, place)]


def _split(text: str, place: str) -> Iterator[str]:
    """At commas outside of brackets."""
    part, depth = "", 0
    for letter in text + ",":
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise InputError(f"{place}: {shorten(text)}: brackets must close, one by one")
        if letter == "," and not depth:
            if part.strip():
                yield part.strip()
            part = ""
        else:
            part += letter
    if part.strip():
        raise InputError(f"{place}: {shorten(text)}: brackets must close, one by one")


def _expanded(part: str, place: str) -> Iterator[str]:
    before, opened, rest = part.partition("[")
    if not opened:
        if re.search(r"\s", part):
            raise InputError(f"{place}: must be names of hosts, got {shorten(part)}")
        yield part
        return
    ranges, _, after = rest.partition("]")
    for each in ranges.split(","):
        found = _RANGE.fullmatch(each.strip())
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if not 0 <= int(last) - int(first) < MAX_RANKS:
            raise InputError(f"{place}: {shorten(part)}: must be ranges such as 1-4, got {shorten(each)}")
        for number in range(int(first), int(last) + 1):
            for tail in _expanded(after, place) if after else ("",):
                yield f"{before}{number:0{len(first)}d}{tail}"

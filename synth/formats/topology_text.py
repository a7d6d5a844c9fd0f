"""Topology files for people: YAML with comments, a line for each cable, made to be read and edited."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import TypeAlias

from arborcast.synth.formats.documents import said_of_link, said_of_streams, switch_to_document
from arborcast.synth.topology import Link, Switch, Topology, Vertex

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.+-]*")
_WORDS = {"null", "true", "false"}


def topology_to_yaml(
    topology: Topology,
    *,
    head: Iterable[str] = (),
    foot: Iterable[str] = (),
    gpu: Sequence[str | None] = (),
    notes: Sequence[str] = (),
    group: Callable[[Link], str] | None = None,
) -> str:
    """The text of a topology file. Two links that are alike both ways stand on one line.

    Args:
        topology: what it describes.
        head: comment lines that go first, without their `#`.
        foot: comment lines that go last.
        gpu: the GPU of each rank, None where it is unknown; left out where it is of all of them.
        notes: what was assumed, a line each.
        group: the heading that a link stands under; groups come in the order of their first links.
    """
    before, after = _comments(head), _comments(foot)
    lines = [*before, ""] if before else []
    lines += [f"name: {_text(topology.name)}", f"ranks: {topology.ranks}"]
    if any(gpu):
        names = ["null" if name is None else _text(name) for name in gpu]
        lines.append(f"gpu: {names[0] if len(set(names)) == 1 else _flow(names)}")
    if topology.switches:
        names = [
            _switch(switch)
            for vertex, switch in enumerate(topology.switches, topology.ranks)
            if vertex not in topology.parallels
        ]
        lines.append(f"switches: {_flow(names)}")
    if notes:
        lines += ["notes:", *(f"  - {json.dumps(note, ensure_ascii=False)}" for note in notes)]
    if topology.message_us:
        lines.append(f"message_us: {_decimal(topology.message_us)}")
    if topology.streams:
        lines.append(f"streams: {json.dumps(said_of_streams(topology))}")
    lines.append("links:" if topology.links else "links: []")
    groups: dict[str, list[str]] = {}
    for link, ends in _cables(topology):
        numbers = ", ".join(f"{key}: {_value(value)}" for key, value in said_of_link(link).items())
        groups.setdefault(group(link) if group else "", []).append(f"  - {{{ends}, {numbers}}}")
    for heading, entries in groups.items():
        lines += [*([f"  # {heading}"] if heading else []), *entries]
    if topology.symmetries:
        lines += ["# Where each symmetry takes rank 0, 1, 2, ... and then the switches.", "symmetries:"]
        lines += [
            f"  - {_flow([_label(topology, image) for image in images if image not in topology.parallels])}"
            for images in topology.symmetries
        ]
    lines += ["", *after] if after else []
    return "\n".join(lines) + "\n"


def _switch(switch: Switch) -> str:
    said = switch_to_document(switch)
    if not said:
        return _text(switch.name)
    values = {key: json.dumps(value).strip('"') for key, value in said.items()}
    return (
        "{"
        + ", ".join(f"{key}: {value}" for key, value in {"name": _text(switch.name), **values}.items())
        + "}"
    )


_Place: TypeAlias = tuple[Vertex, Vertex, Fraction, tuple[str, str] | None]
"""What tells one of the links between two vertices from the others."""


def _cables(topology: Topology) -> Iterator[tuple[Link, str]]:
    links = {(link.src, link.dst, link.latency_us, link.addresses): link for link in topology.cables}
    done: set[_Place] = set()
    for place, link in links.items():
        if place in done:
            continue
        src, dst, wait, _ = place
        turned = (dst, src, wait, link.reversed.addresses)
        back = links.get(turned)
        first, second = _label(topology, src), _label(topology, dst)
        if back is not None and said_of_link(back.reversed) == said_of_link(link):
            done.add(turned)
            yield link, f"between: [{first}, {second}]"
        else:
            yield link, f"from: {first}, to: {second}"


def _value(value: object) -> str:
    return _decimal(value) if isinstance(value, Fraction) else json.dumps(value, ensure_ascii=False)


def _comments(lines: Iterable[str]) -> list[str]:
    return [f"# {line}".rstrip() for line in lines]


def _flow(items: Sequence[str]) -> str:
    return f"[{', '.join(items)}]"


def _label(topology: Topology, vertex: Vertex) -> str:
    label = topology.label(vertex)
    return str(label) if isinstance(label, int) else _text(label)


def _text(text: str) -> str:
    """As it is where YAML reads that as the same text, else in quotes."""
    return (
        text
        if _PLAIN.fullmatch(text) and text.lower() not in _WORDS
        else json.dumps(text, ensure_ascii=False)
    )


def _decimal(value: Fraction) -> str:
    """As a decimal where that is exact and short, else as a fraction."""
    text = f"{float(value):.12g}"
    return text if "e" not in text and Fraction(text) == value else str(value)

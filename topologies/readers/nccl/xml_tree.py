"""The elements of NCCL's XML with their parents and hosts, and how attributes are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import shorten

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element


@dataclass(frozen=True, slots=True)
class XmlTree:
    """A parsed file.

    Attributes:
        order: all elements, parents before children.
        parents: the parent of each element but the root, by the element's identity.
        hosts: the host of each element, by its identity: cpus that name no `host_hash` are of one host.
    """

    order: tuple[Element, ...]
    parents: dict[int, Element]
    hosts: dict[int, int]

    @classmethod
    def of(cls, root: Element) -> XmlTree:
        """Walk the elements, without recursion."""
        order: list[Element] = []
        parents: dict[int, Element] = {}
        hosts: dict[int, int] = {}
        numbers: dict[str, int] = {}
        stack = [(root, "")]
        while stack:
            element, host = stack.pop()
            if element.tag == "cpu":
                host = (element.get("host_hash") or "").strip().lower()
            if element is not root:
                hosts[id(element)] = numbers.setdefault(host, len(numbers))
            order.append(element)
            for child in reversed(element):
                parents[id(child)] = element
                stack.append((child, host))
        return cls(tuple(order), parents, hosts)

    def parent(self, element: Element) -> Element | None:
        """The element that holds it; None for the root."""
        return self.parents.get(id(element))

    def host(self, element: Element) -> int:
        """The host it belongs to, counted from 0."""
        return self.hosts[id(element)]

    def by_host(self, elements: Iterable[Element]) -> dict[int, list[Element]]:
        """Some elements by their hosts."""
        found: dict[int, list[Element]] = {}
        for element in elements:
            found.setdefault(self.host(element), []).append(element)
        return found


def whole(element: Element, attribute: str, where: str) -> int:
    """An attribute that must be a whole number.

    Raises:
        TopologyError: it is missing or something else.
    """
    value = element.get(attribute)
    if value is None:
        raise TopologyError(f"{where}: {attribute} is missing")
    if not re.fullmatch(r"-?[0-9]{1,9}", value.strip()):
        raise TopologyError(f"{where}: {attribute} must be a whole number, got {shorten(value)}")
    return int(value)


def hexadecimal(element: Element, attribute: str) -> int | None:
    """An attribute such as vendor="0x10de"; None where it is missing or says nothing."""
    value = (element.get(attribute) or "").strip().lower()
    return int(value, 16) if re.fullmatch(r"0x[0-9a-f]{1,8}", value) else None


def some(names: Sequence[str]) -> str:
    """Names as notes have them: the first, and how many more."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def printable(text: str) -> str:
    """A name out of the file, as lists and messages can hold it."""
    return "".join(char if char.isprintable() else "?" for char in text.strip())[:64]


def bus_address(text: str) -> str:
    """A PCI address in one form: tools write the domain with 4 or 8 digits, the rest in either case."""
    parts = re.fullmatch(
        r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})[.:]([0-9a-f])", text.strip().lower()
    )
    if parts is None:
        return printable(text.lower())
    domain, bus, device, function = (int(part, 16) for part in parts.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"

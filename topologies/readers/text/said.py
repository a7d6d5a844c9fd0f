"""What text says of slots and processors in words: "PCIe 5 x8", "Gen 4 / 16x", "Host Max Gen4", "EPYC 7302".

The slot of a GPU is as fast as its product's, unless the text says another generation or width, or names a
processor whose PCIe is older.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from arborcast.topologies.gpus import GIGATRANSFERS, Gpu
from arborcast.topologies.processors import NamedProcessor, processor_named
from arborcast.topologies.rates import Rates, pcie_rate
from arborcast.topologies.readers.text.pasted import short_lines

FULL_WIDTH = 16

_LANES = r"(?:[\s/,@(]{0,12}(?:width\s{0,2})?(?:x\s?(?P<lanes>[0-9]{1,2})|(?P<before>[0-9]{1,2})x)\b)"
_GENERATION = r"(?P<generation>[1-6])(?:\.0)?(?![0-9.])"
_FORMS = (
    re.compile(rf"\bpci-?(?:e|express)\s{{0,6}}(?:gen(?:eration)?\.?\s{{0,6}})?{_GENERATION}{_LANES}?", re.I),
    re.compile(rf"\bgen\s{{0,6}}{_GENERATION}{_LANES}", re.I),
    re.compile(rf"(?<![0-9.])(?P<speed>2\.5|5|8|16|32|64)(?:\.0)?\s?GT/s(?:\s\(\w+\))?{_LANES}", re.I),
)
_HOST = re.compile(r"\bhost max\s{0,3}:?\s{0,3}(?:pcie\s)?(?:gen\s{0,2})?([1-6])\b", re.I)
_OTHERS = re.compile(
    r"nvme|ssd|m\.2|ethernet|mellanox|connectx|\bnics?\b|\bnet\b|\bhba\b|lnkcap|sxm|oam", re.I
)
"""Lines about other devices, and about what a slot could do."""


@dataclass(frozen=True, slots=True)
class SaidSlot:
    """What the text says of the slots of its GPUs.

    Attributes:
        generation: of PCIe; None where it says none, or several.
        lanes: likewise.
        host: the newest generation that the host can; None where nothing says so.
        processor: what it names, where it is one; it may limit the generation.
        note: what was taken of it, or left out.
    """

    generation: int | None = None
    lanes: int | None = None
    host: int | None = None
    processor: NamedProcessor | None = None
    note: str = ""

    def rate(self, gpu: Gpu | None, rates: Rates) -> Fraction:
        """GB/s each way of a GPU's slot; generation 3 where neither GPU nor words tell it, as in NCCL."""
        generation = self.generation or (3 if gpu is None else gpu.pcie_generation)
        limits = [generation, *([] if gpu is None else [gpu.pcie_generation])]
        limits += [] if self.host is None else [self.host]
        if self.processor is not None and (gpu is not None or self.generation is not None):
            limits.append(self.processor.pcie_generation)
        lanes = self.lanes or (FULL_WIDTH if gpu is None else gpu.pcie_lanes)
        return pcie_rate(GIGATRANSFERS[min(limits)], lanes, rates)

    def holds_back(self, gpu: Gpu | None) -> str:
        """The note on a processor whose PCIe is older than the GPU's slot; empty where none is."""
        if self.processor is None or gpu is None or self.generation is not None:
            return ""
        older = self.processor.pcie_generation
        if older >= min(gpu.pcie_generation, self.host or older + 1):
            return ""
        return f"slots count as PCIe {older}.0, which is what its processor has ({self.processor.called})"


def said_slot(lines: Iterable[str]) -> SaidSlot:
    """What the lines say of the slots of GPUs: a generation or width that they agree on."""
    generations: dict[int, int] = {}
    widths: dict[int, int] = {}
    hosts: set[int] = set()
    processors: dict[str, NamedProcessor] = {}
    for number, line in short_lines(lines):
        hosts.update(int(found) for found in _HOST.findall(line))
        found = processor_named(line)
        if found is not None:
            processors.setdefault(found.called, found)
        if _OTHERS.search(line) and not re.search(r"lnksta", line, re.I):
            continue
        for match in (match for form in _FORMS for match in form.finditer(_HOST.sub("", line))):
            parts = match.groupdict()
            if parts.get("generation"):
                generations.setdefault(int(parts["generation"]), number)
            elif parts.get("speed"):
                speed = Fraction(parts["speed"])
                generations.setdefault(next(g for g, rate in GIGATRANSFERS.items() if rate == speed), number)
            lanes = parts.get("lanes") or parts.get("before")
            if lanes in {"1", "2", "4", "8", "16"}:
                widths.setdefault(int(lanes), number)
    generation = next(iter(generations)) if len(generations) == 1 else None
    lanes_said = next(iter(widths)) if len(widths) == 1 and len(generations) == 1 else None
    note = ""
    if len(generations) > 1:
        several = ", ".join(f"{each}.0 in line {line}" for each, line in sorted(generations.items()))
        note = f"names several generations of PCIe ({several}): none is taken"
    elif generation is not None:
        width = "" if lanes_said is None else f" x{lanes_said}"
        note = f"slots count as PCIe {generation}.0{width}, as line {generations[generation]} says"
    newest = min(hosts, default=None)
    known = {found.pcie_generation: found for found in processors.values()}
    processor = next(iter(known.values())) if len(known) == 1 else None
    return SaidSlot(generation, lanes_said, newest, processor, note)

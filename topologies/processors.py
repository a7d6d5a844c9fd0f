"""What joins the processors of a host: raw capacities by data sheets, and what NCCL plans with.

The capacity between two sockets is that of all links which a processor can have to another one: links x lanes
x gigatransfers a second / 8, each way. Protocols take some of it and boards may leave links out, so that
nothing passes more. Where the processor is unknown, the largest of its kind counts, which is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fractions import Fraction

from arborcast.synth.topology import PLANNED
from arborcast.topologies.rates import Rates

X86, ARM, POWER = "x86_64", "arm64", "ppc64"
AMD, INTEL = "AuthenticAMD", "GenuineIntel"
_ZHAOXIN = {"CentaurHauls", "Shanghai"}


@dataclass(frozen=True, slots=True)
class Crossing:
    """The way between two sockets.

    Attributes:
        rate: GB/s each way.
        what: whose it is, such as "4 xGMI links of 32 GT/s (Zen 4)".
        assumed: why it is assumed; empty where the processor is known.
    """

    rate: Fraction
    what: str
    assumed: str = ""

    @property
    def note(self) -> str:
        """What was taken, for those who read the file of a machine."""
        taken = f"are assumed: {self.assumed}" if self.assumed else f"count, the raw rate of {self.what}"
        return (
            f"between its CPUs {float(self.rate):g} GB/s each way {taken}; --between-sockets says otherwise"
        )


@dataclass(frozen=True, slots=True)
class _Processor:
    """Processors of one vendor whose sockets are joined alike; models of a family count up."""

    architecture: str
    vendor: str
    family: int
    models: Collection[int]
    crossing: Crossing


def _x86(name: str, vendor: str, family: int, models: Collection[int], links: str) -> _Processor:
    """`links` as "4 xGMI links of 16 x 32 GT/s": their number, lanes, and what a lane does."""
    count, kind, _, _, lanes, _, speed, _ = links.split()
    rate = int(count) * int(lanes) * Fraction(speed) / 8
    what = f"{count} {kind} links of {speed} GT/s ({name})"
    return _Processor(X86, vendor, family, models, Crossing(rate, what))


# AMD: architecture overviews of EPYC 7001 to 9005, at most 4 xGMI links of 16 lanes. Intel: briefs of Xeon
# Scalable, UPI of 20 lanes, UPI 2.0 of 24; Cooper Lake has Skylake's number, and at most 2 links to each
# other socket. Grace: white paper, 900 GB/s both ways. POWER9: AC922 redbook.
_PROCESSORS = (
    _x86("Zen 1", AMD, 23, range(0x30), "4 xGMI links of 16 x 10.7 GT/s"),
    _x86("Zen 2", AMD, 23, range(0x30, 0x100), "4 xGMI links of 16 x 18 GT/s"),
    _x86("Zen 3", AMD, 25, range(0x10), "4 xGMI links of 16 x 18 GT/s"),
    _x86("Zen 4", AMD, 25, range(0x10, 0x100), "4 xGMI links of 16 x 32 GT/s"),
    _x86("Zen 5", AMD, 26, range(0x100), "4 xGMI links of 16 x 32 GT/s"),
    _x86("Broadwell and before", INTEL, 6, {0x2D, 0x3E, 0x3F, 0x4F}, "3 QPI links of 20 x 9.6 GT/s"),
    _x86("Skylake to Cooper Lake", INTEL, 6, {0x55}, "3 UPI links of 20 x 10.4 GT/s"),
    _x86("Ice Lake", INTEL, 6, {0x6A, 0x6C}, "3 UPI links of 20 x 11.2 GT/s"),
    _x86("Sapphire Rapids", INTEL, 6, {0x8F}, "4 UPI links of 24 x 16 GT/s"),
    _x86("Emerald Rapids", INTEL, 6, {0xCF}, "4 UPI links of 24 x 20 GT/s"),
    _x86("Xeon 6", INTEL, 6, {0xAD, 0xAE, 0xAF, 0xDD}, "6 UPI links of 24 x 24 GT/s"),
    _Processor(ARM, "", -1, (), Crossing(Fraction(450), "NVLink-C2C (Grace)")),
    _Processor(POWER, "", -1, (), Crossing(Fraction(64), "an X bus (POWER9)")),
)


@dataclass(frozen=True, slots=True)
class NamedProcessor:
    """A processor by what it is called.

    Attributes:
        called: the words that name it.
        pcie_generation: of its slots.
        crossing: the way between two of them; None where they stand alone or it is not known.
    """

    called: str
    pcie_generation: int
    crossing: Crossing | None


# Generations of PCIe by Intel ARK and AMD's product pages; numbers of Xeon Scalable have theirs as the second
# digit, those of EPYC as the last. Which of `_PROCESSORS` each is, where it can have a neighbour.
_NAMES = tuple(
    (re.compile(pattern, re.IGNORECASE), generation, family)
    for pattern, generation, family in (
        (r"EPYC\S* 7[0-9A-Z]{2}1", 3, "Zen 1"),
        (r"EPYC\S* 7[0-9A-Z]{2}2", 4, "Zen 2"),
        (r"EPYC\S* 7[0-9A-Z]{2}3", 4, "Zen 3"),
        (r"EPYC\S* [89][0-9A-Z]{2}4", 5, "Zen 4"),
        (r"EPYC\S* 9[0-9A-Z]{2}5", 5, "Zen 5"),
        (r"Threadripper(?: PRO)? [12]9[0-9]{2}|\b[12]9[0-9]{2}W?X TR\b", 3, ""),
        (r"Threadripper(?: PRO)? [35]9[0-9]{2}|\b[35]9[0-9]{2}W?X TR\b", 4, ""),
        (r"Threadripper(?: PRO)? [79]9[0-9]{2}|\b[79]9[0-9]{2}W?X TR\b", 5, ""),
        (r"Ryzen [3579] [12][0-9]{3}", 3, ""),
        (r"Ryzen [3579] [35][0-9]{3}", 4, ""),
        (r"Ryzen [3579] [79][0-9]{3}", 5, ""),
        (r"Xeon\S* (?:CPU )?E[57]-[0-9]{4}", 3, "Broadwell and before"),
        (r"Xeon\S* (?:Gold|Silver|Platinum|Bronze) [3-9][12][0-9]{2}", 3, "Skylake to Cooper Lake"),
        (r"Xeon\S* (?:Gold|Silver|Platinum|Bronze) [3-9]3[0-9]{2}", 4, "Ice Lake"),
        (r"Xeon\S* (?:Gold|Silver|Platinum|Bronze) [3-9]4[0-9]{2}", 5, "Sapphire Rapids"),
        (r"Xeon\S* (?:Gold|Silver|Platinum|Bronze) [3-9]5[0-9]{2}", 5, "Emerald Rapids"),
        (r"Xeon\S* 6[5-9][0-9]{2}[PE]", 5, "Xeon 6"),
        (r"Core\S* i[3579]-(?:[6-9][0-9]{3}|10[0-9]{3})[A-Z]{0,2}\b", 3, ""),
        (r"Core\S* i[3579]-11[0-9]{3}", 4, ""),
        (r"Core\S* (?:i[3579]-1[2-4][0-9]{3}|Ultra)", 5, ""),
    )
)
FAMILIES = {
    family.lower().replace(" ", "-").removesuffix("-to-cooper-lake"): (family, generation)
    for _, generation, family in _NAMES
    if family not in {"", "Broadwell and before"}
}
"""Processors that have a neighbour, as specs name them, with the generation of their PCIe."""

_BY_NAME = {known.crossing.what.rpartition("(")[2].rstrip(")"): known.crossing for known in _PROCESSORS}


def between_family(name: str, rates: Rates) -> Crossing:
    """The way between two processors of a family of `FAMILIES`."""
    family = FAMILIES[name][0]
    known = next(known for known in _PROCESSORS if known.crossing is _BY_NAME[family])
    return crossing(known.architecture, known.vendor, known.family, min(known.models), rates)


def processor_named(line: str) -> NamedProcessor | None:
    """The processor that a line names; None where it names none that is known."""
    for pattern, generation, family in _NAMES:
        match = pattern.search(line)
        if match is not None:
            return NamedProcessor(match[0], generation, _BY_NAME.get(family))
    return None


_FAMILIES = {0x8F: 23, 0xAF: 25, 0xBF: 26}
"""AMD's families as NCCL's files had them until 2.30, which took the extended family for upper digits."""


def crossing(architecture: str, vendor: str, family: int, model: int, rates: Rates) -> Crossing:
    """The way between two sockets with processors of one model.

    Args:
        architecture: x86_64, arm64 or ppc64; empty where it is unknown.
        vendor: as CPUID says it.
        family: of x86, as lscpu or NCCL's file says it.
        model: of x86.
        rates: raw capacities, or NCCL's constants (`ncclTopoGetInterCpuBw`, topo.h of 2.31).
    """
    vendor = vendor.strip()
    family = _FAMILIES.get(family, family) if vendor == AMD else family
    if rates is Rates.NCCL:
        return Crossing(_planned(architecture, vendor, family, model), PLANNED, PLANNED)
    of_kind = [known for known in _PROCESSORS if known.architecture == architecture] or list(_PROCESSORS)
    of_vendor = [known for known in of_kind if known.vendor == vendor] or of_kind
    for known in of_vendor:
        if (known.vendor, known.family) == (vendor, family) and model in known.models:
            return known.crossing
    return _largest(of_vendor)


def _largest(known: Iterable[_Processor]) -> Crossing:
    most = max((each.crossing for each in known), key=lambda way: way.rate)
    why = f"the raw rate of {most.what}, the largest of its kind as the processor is unknown"
    return Crossing(most.rate, most.what, why)


def _planned(architecture: str, vendor: str, family: int, model: int) -> Fraction:
    if architecture in {ARM, POWER}:
        return Fraction(6 if architecture == ARM else 32)
    if vendor == AMD:
        return Fraction({25: 24, 26: 32}.get(family, 16))
    if vendor == INTEL:
        newest = ((0xCF, 40), (0x8F, 22), (0x55, 10))
        return Fraction(next((rate for least, rate in newest if family == 6 and model >= least), 6))
    if vendor in _ZHAOXIN:
        return Fraction(9 if (family, model) == (7, 0x5B) else 6)
    return Fraction(10)  # as for Skylake

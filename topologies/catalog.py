"""The catalog: which topologies have a name, what arguments they take, and what they are.

A catalog spec is a name with arguments: `torus:4x4,bandwidth=25`. The first argument may stand without its
key; all others are key=value, separated by commas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import parse_number, shorten
from arborcast.synth.topology import Topology
from arborcast.topologies import boxes, grids
from arborcast.topologies.builders import MAX_VERTICES
from arborcast.topologies.rates import Rates


@dataclass(frozen=True, slots=True)
class Beyond:
    """Hardware that goes beyond the model.

    Attributes:
        hardware: its name.
        what: what it can do, in one line.
        allreduce: the GB/s that no allreduce on it exceeds, where that is known.
    """

    hardware: str
    what: str
    allreduce: Fraction | None = None


def nvlink_sharp(topology: Topology, ranks: int) -> Beyond:
    """What NVLink SHARP could give so many ranks of a DGX H100, or of a fragment of one.

    In a star of n ports of b GB/s each way, switches that only forward allow n / (2 (n - 1)) * b: in and out
    of every rank, all others' contributions to its part of the buffer and the sums of their parts must pass.
    A switch that adds up what its ports send and hands the sum to all of them needs each port once each way:
    b, which is also the limit, as the whole buffer must leave every rank. NCCL's NVLS, which reads sums and
    writes copies through the switch, moves 1 / n more: at most n / (n + 1) * b (both by our derivation).
    """
    what = "NVSwitches that also reduce and copy; here they only forward"
    rates = {link.bandwidth for link in topology.links}
    if len(topology.switches) != 1 or len(rates) != 1 or len(topology.links) != 2 * topology.ranks:
        return Beyond("NVLink SHARP", what)
    (rate,) = rates
    if ranks < 3:  # two ranks exchange at the rate of a port anyway
        return Beyond("NVLink SHARP", what, rate)
    reading = rate * ranks / (ranks + 1)
    measured = "; nccl-tests#212 tells of about 275" if ranks == 8 else ""
    return Beyond(
        "NVLink SHARP",
        f"{what}. An allreduce could reach {float(rate):.6g} GB/s, {float(reading):.6g} in the way of NCCL's "
        f"NVLS{measured}",
        rate,
    )


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument of a catalog entry.

    Attributes:
        key: as the user writes it.
        shown: the value as the help shows it, such as N.
        read: makes the value out of its text, or raises ValueError with the rule and the value.
        default: what counts when it is not given; None together with `required` for those that must be.
        required: whether it must be given.
        keyword: the builder's name for it, where the key is no name in Python.
    """

    key: str
    shown: str
    read: Callable[[str], object]
    default: object = None
    required: bool = False
    keyword: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A topology of the catalog.

    Attributes:
        name: as a spec begins.
        description: what it is, in one line.
        builder: takes `name` and the parameters by keyword, and `rates` where there are rates to choose from.
        parameters: the first of them may be given without its key.
        sources: the rates to choose from, none for shapes that stand for no product.
        beyond: what its hardware can do that the model leaves out.
        gpu: what its ranks are, as in `topologies.GPUS`; None for shapes that stand for no product.
    """

    name: str
    description: str
    builder: Callable[..., Topology] = field(repr=False)
    parameters: tuple[Parameter, ...] = ()
    sources: tuple[Rates, ...] = ()
    beyond: Callable[[Topology, int], Beyond] | None = field(default=None, repr=False)
    gpu: str | None = None

    @property
    def arguments(self) -> str:
        """What follows the name in a spec: `:N[,bandwidth=GB/s]`; empty where there is none."""
        text = ""
        for index, parameter in enumerate(self.parameters):
            bare = index == 0 and parameter.required
            shown = parameter.shown if bare else f"{parameter.key}={parameter.shown}"
            shown = f"{',' if index else ':'}{shown}"
            text += shown if parameter.required else f"[{shown}]"
        return text

    def build(self, arguments: str = "", rates: Rates = Rates.DATASHEET) -> Topology:
        """The topology for the text after the colon of a spec.

        Raises:
            TopologyError: an argument is unknown, missing or wrong, or there are no such rates.
        """
        values = self._read(arguments)
        name = self._spec(values)
        if self.sources:
            if rates not in self.sources:
                raise TopologyError(f"{self.name}: has no {rates.value} rates, only {self._known_rates()}")
            values["rates"] = rates
        elif rates is not Rates.DATASHEET:
            raise TopologyError(
                f"{self.name}: has no {rates.value} rates, its links have what bandwidth= says; "
                f"take rates {Rates.DATASHEET.value}"
            )
        return self.builder(name=name, **values)

    def _spec(self, values: Mapping[str, Any]) -> str:
        """The spec that gives these values: it names no argument that is what counts anyway."""
        said = []
        for index, parameter in enumerate(self.parameters):
            value = values[parameter.keyword or parameter.key]
            if parameter.required or value != parameter.default:
                bare = index == 0 and parameter.required
                said.append(_write(value) if bare else f"{parameter.key}={_write(value)}")
        return f"{self.name}:{','.join(said)}" if said else self.name

    def _read(self, arguments: str) -> dict[str, Any]:
        given: dict[str, str] = {}
        for index, part in enumerate(arguments.split(",") if arguments else []):
            key, equals, value = (text.strip() for text in part.partition("="))
            if not equals and index == 0 and self.parameters:
                key, value = self.parameters[0].key, key
            if key not in {parameter.key for parameter in self.parameters}:
                takes = f"takes {self.arguments}" if self.parameters else "takes no arguments"
                raise TopologyError(f"{self.name}: {takes}, got {shorten(part.strip())}")
            if key in given:
                raise TopologyError(f"{self.name}: {key} must be given once, got it twice")
            given[key] = value
        values: dict[str, Any] = {}
        for parameter in self.parameters:
            if parameter.required and parameter.key not in given:
                raise TopologyError(
                    f"{self.name}: an argument is missing, must be given as {self.name}{self.arguments}"
                )
            values[parameter.keyword or parameter.key] = self._value(parameter, given)
        return values

    def _value(self, parameter: Parameter, given: Mapping[str, str]) -> object:
        if parameter.key not in given:
            return parameter.default
        try:
            return parameter.read(given[parameter.key])
        except ValueError as error:
            raise TopologyError(f"{self.name}: {parameter.key}: {error}") from error

    def _known_rates(self) -> str:
        return " and ".join(source.value for source in self.sources)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text[:10]) <= MAX_VERTICES:
        raise ValueError(f"must be a whole number in 1..{MAX_VERTICES}, got {shorten(text)}")
    return int(text[:10])


def _extents(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if len(parts) > 16:
        raise ValueError(f"must have at most 16 dimensions, got {len(parts)}")
    return tuple(_count(part) for part in parts)


def _bandwidth(text: str) -> Fraction:
    number = parse_number(text)
    if not Fraction(1, 10**9) <= number <= 10**9:
        rule = "must be positive" if number <= 0 else "must be between 1e-9 and 1e9 GB/s"
        raise ValueError(f"{rule}, got {shorten(text)}")
    return number


def _latency(text: str) -> Fraction:
    number = parse_number(text)
    if not 0 <= number <= 10**9:
        rule = "must not be negative" if number < 0 else "must be at most 1e9 us"
        raise ValueError(f"{rule}, got {shorten(text)}")
    return number


def _write(value: object) -> str:
    """The text of an argument, which its parameter reads as the same value: 4x4, 8, 0.7, 1/3."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, Fraction) and value.denominator > 1:
        decimal = str(float(value))
        return decimal if Fraction(decimal) == value else str(value)
    return str(value)


_BANDWIDTH = Parameter("bandwidth", "GB/s", _bandwidth, Fraction(1))
_LATENCY = Parameter("latency", "US", _latency, Fraction(0))
_LINKS = (_BANDWIDTH, _LATENCY)
_BOXES = Parameter("boxes", "N", _count, 1)
_RAILS = Parameter("rails", "1|2|4|8", _count, 2)
_RANKS = Parameter("ranks", "N", _count, required=True)


def _shape(shown: str) -> Parameter:
    return Parameter("extents", shown, _extents, required=True)


_BOTH = (Rates.DATASHEET, Rates.NCCL)
_ENTRIES = (
    Entry("dgx1", "8 V100, hybrid cube mesh of NVLinks", boxes.dgx1, (), _BOTH, gpu="v100"),
    Entry(
        "dgx1-p100", "8 P100, the same cube mesh with single links", boxes.dgx1_p100, (), _BOTH, gpu="p100"
    ),
    Entry("dgx2", "16 V100 on NVSwitch", boxes.dgx2, (), _BOTH, gpu="v100"),
    Entry(
        "dgx-a100",
        "boxes of 8 A100 on NVSwitch, NICs to a fabric",
        boxes.dgx_a100,
        (_BOXES, _RAILS),
        _BOTH,
        gpu="a100",
    ),
    Entry(
        "dgx-h100",
        "boxes of 8 H100 on NVSwitch (NVLink SHARP not used), NICs to a fabric",
        boxes.dgx_h100,
        (_BOXES, _RAILS),
        _BOTH,
        nvlink_sharp,
        gpu="h100",
    ),
    Entry(
        "mi250",
        "boxes of 16 MI250 dies, NICs to a fabric",
        boxes.mi250,
        (_BOXES,),
        (Rates.DATASHEET,),
        gpu="mi250",
    ),
    Entry("torus", "a grid that wraps round", grids.torus, (_shape("4x4"), *_LINKS)),
    Entry("mesh", "a grid that does not wrap round", grids.mesh, (_shape("3x4"), *_LINKS)),
    Entry("ring", "ranks in a circle, both ways", grids.ring, (_RANKS, *_LINKS)),
    Entry(
        "hypercube",
        "2 to the power of D ranks",
        grids.hypercube,
        (Parameter("dimension", "D", _count, required=True), *_LINKS),
    ),
    Entry("full", "every rank linked to every other", grids.full, (_RANKS, *_LINKS)),
    Entry("star", "ranks around one switch", grids.star, (_RANKS, *_LINKS)),
    Entry(
        "fat-tree",
        "switches over switches over ranks, children counted from the top",
        grids.fat_tree,
        (
            _shape("2x4x8"),
            Parameter("oversubscription", "R", _bandwidth, Fraction(1)),
            *_LINKS,
        ),
    ),
    Entry(
        "dragonfly",
        "groups x routers x ranks, a cable between each two groups",
        grids.dragonfly,
        (
            _shape("4x2x2"),
            _BANDWIDTH,
            Parameter("local", "GB/s", _bandwidth),
            Parameter("global", "GB/s", _bandwidth, keyword="between"),
            _LATENCY,
        ),
    ),
)


def catalog() -> tuple[Entry, ...]:
    """All topologies that have a name, machines first."""
    return _ENTRIES


def entry_named(name: str) -> Entry | None:
    """The entry of this name, in whatever case and with `_` for `-`; None where there is none."""
    plain = name.lower().replace("_", "-")
    return next((entry for entry in _ENTRIES if entry.name == plain), None)


def beyond(spec: str, topology: Topology, ranks: int) -> Beyond | None:
    """What the hardware of a spec can do beyond the topology made of it, for so many ranks that take part.

    None where nothing is known.
    """
    entry = entry_named(spec.partition(":")[0])
    return None if entry is None or entry.beyond is None else entry.beyond(topology, ranks)

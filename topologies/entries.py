"""What the catalog is made of: entries, their arguments, and how the text of an argument becomes a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from arborcast.synth.errors import TopologyError
from arborcast.synth.formats.numerals import parse_number, shorten
from arborcast.synth.topology import Topology
from arborcast.topologies import builders
from arborcast.topologies.builders import MAX_VERTICES
from arborcast.topologies.machine import Machine
from arborcast.topologies.rates import Rates

DATASHEET = (Rates.DATASHEET,)
BOTH = (Rates.DATASHEET, Rates.NCCL)
"""The rates of an entry: data sheets' alone, or NCCL's (RCCL's) planning constants too."""


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
        needs: the argument without which this one says nothing: rails, where there is one box.
    """

    key: str
    shown: str
    read: Callable[[str], object]
    default: object = None
    required: bool = False
    keyword: str = ""
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A topology of the catalog.

    Attributes:
        name: as a spec begins.
        description: what it is, in one line.
        builder: takes `name` and the parameters by keyword, and `rates` where there are rates to choose from.
        parameters: the first of them may be given without its key.
        sources: the rates to choose from, none for shapes that stand for no product.
        gpu: what its ranks are, as in `topologies.GPUS`; None where they are no GPUs or nobody's product.
        vendor: whose it is, the heading that it is listed under.
        source: where its rates and its wiring are published, in one line; "" for shapes.
    """

    name: str
    description: str
    builder: Callable[..., Topology | Machine] = field(repr=False)
    parameters: tuple[Parameter, ...] = ()
    sources: tuple[Rates, ...] = ()
    gpu: str | None = None
    vendor: str = ""
    source: str = ""

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
        """The graph of `machine`, which takes and raises the same."""
        return self.machine(arguments, rates).topology

    def machine(self, arguments: str = "", rates: Rates = Rates.DATASHEET) -> Machine:
        """The machine for the text after the colon of a spec.

        Raises:
            TopologyError: an argument is unknown, missing or wrong, or there are no such rates.
        """
        values = self._read(arguments)
        name = self._spec(values)
        if self.sources:
            if rates not in self.sources:
                raise TopologyError(f"{self.name}: has no {rates.value} rates, only {self._known_rates()}")
            if len(self.sources) > 1:
                values["rates"] = rates
        elif rates is not Rates.DATASHEET:
            raise TopologyError(
                f"{self.name}: has no {rates.value} rates, its links have what the arguments say; "
                f"take rates {Rates.DATASHEET.value}"
            )
        built = self.builder(name=name, **values)
        return Machine.of(built, gpu=self.gpu) if isinstance(built, Topology) else built

    def _spec(self, values: Mapping[str, Any]) -> str:
        """The spec that gives these values: it names no argument that is what counts anyway."""
        said: list[str] = []
        keys: set[str] = set()
        for index, parameter in enumerate(self.parameters):
            value = values[parameter.keyword or parameter.key]
            if parameter.required or (
                value != parameter.default and (not parameter.needs or parameter.needs in keys)
            ):
                bare = index == 0 and parameter.required
                said.append(_write(value) if bare else f"{parameter.key}={_write(value)}")
                keys.add(parameter.key)
        return f"{self.name}:{','.join(said)}" if said else self.name

    def _read(self, arguments: str) -> dict[str, Any]:
        given: dict[str, str] = {}
        for index, part in enumerate(arguments.split(",") if arguments else []):
            key, equals, value = (text.strip() for text in part.partition("="))
            if not equals and index == 0:
                key, value = self.parameters[0].key, key
            if key not in {parameter.key for parameter in self.parameters}:
                raise TopologyError(f"{self.name}: takes {self.arguments}, got {shorten(part.strip())}")
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


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text[:10]) <= MAX_VERTICES:
        raise ValueError(f"must be a whole number in 1..{MAX_VERTICES}, got {shorten(text)}")
    return int(text[:10])


def extents(text: str) -> tuple[int, ...]:
    """Whole numbers with an x between: 4x4x8."""
    parts = text.split("x")
    if len(parts) > 16:
        raise ValueError(f"must have at most 16 dimensions, got {len(parts)}")
    return tuple(count(part) for part in parts)


def bandwidth(text: str) -> Fraction:
    """A positive number, such as GB/s."""
    return _number(text, Fraction(1, 10**9), "must be positive", "must be between 1e-9 and 1e9 GB/s")


def latency(text: str) -> Fraction:
    """A number of microseconds, 0 allowed."""
    return _number(text, Fraction(0), "must not be negative", "must be at most 1e9 us")


def _number(text: str, least: Fraction, sign: str, limits: str) -> Fraction:
    number = parse_number(text)
    if not least <= number <= 10**9:
        below = number < 0 or number == 0 < least
        raise ValueError(f"{sign if below else limits}, got {shorten(text)}")
    return number


def one_of(*words: str) -> Callable[[str], str]:
    """A reader of one of these words."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be {' or '.join(words)}, got {shorten(text)}")
        return text

    return read


IN_NETWORK = Parameter(
    "in-network",
    "|".join(builders.IN_NETWORK),
    one_of(*builders.IN_NETWORK),
    "none",
    keyword="in_network",
)
"""What switches can do beside forwarding."""


def _write(value: object) -> str:
    """The text of an argument, which its parameter reads as the same value: 4x4, 8, 0.7, 1/3."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, Fraction) and value.denominator > 1:
        decimal = str(float(value))
        return decimal if Fraction(decimal) == value else str(value)
    return str(value)

"""Small graphs to shard, written by hand, and a device on which a byte and an operation take a picosecond."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from arborcast.pipeline.costs.devices import DeviceRates
from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.operators import Dims, Given, Operand, OperatorTrace, Primitive
from arborcast.pipeline.profiles import Layer, Profile, Tie
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.graph import Graph, merged
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.synth.topology import Link, Topology

UNIT = DeviceRates("unit", {"float32": 1e12}, 1000, 2**40, efficiency=1, memory_efficiency=1, launch_us=0)
"""1 ps for an operation or for a byte."""


def ring(ranks: int, rate: int | Fraction = 1) -> Topology:
    """Links of so many GB/s both ways; two ranks have one."""
    hops = {(a, (a + 1) % ranks) for a in range(ranks)}
    links = [Link(a, b, Fraction(rate), Fraction(0)) for a, b in hops | {(b, a) for a, b in hops}]
    return Topology.build("ring", ranks, links)


def on_ring(shape: tuple[int, ...], rate: int | Fraction = 1, **options: int) -> Setting:
    ranks = math.prod(shape)
    return Setting(FabricPrices(ring(ranks, rate), Mesh(shape, tuple(range(ranks)))), UNIT, **options)


class Writer:
    """Writes a trace line by line."""

    def __init__(self) -> None:
        self.given: list[Given] = []
        self.lines: list[Primitive] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.place = 0

    def input(self, name: str, *shape: int) -> str:
        self.shapes[name] = shape
        self.given.append(Given(name, shape, 4 * math.prod(shape)))
        return name

    def weight(self, name: str, *shape: int) -> str:
        self.shapes[name] = shape
        self.given.append(Given(name, shape, 4 * math.prod(shape), True, True, name))
        return name

    def operand(self, name: str, dims: Dims, kept: bool = False) -> Operand:
        return Operand(name, dims, self.shapes[name], 4 * math.prod(self.shapes[name]), kept)

    def linear(self, name: str, x: str, weight: str, bias: str = "") -> str:
        batch, inner = self.shapes[x]
        outer, _ = self.shapes[weight]
        self.shapes[name] = (batch, outer)
        flops = 2 * batch * inner * outer
        gradients = 1 if any(it.name == x for it in self.given) else 2
        added = (self.operand(bias, ("n",)),) if bias else ()
        self.lines.append(
            Primitive(
                name,
                "linear",
                (self.operand(x, ("b", "k"), True), self.operand(weight, ("n", "k"), True), *added),
                self.operand(name, ("b", "n")),
                {"b": batch, "n": outer, "k": inner},
                frozenset("k"),
                "b",
                flops,
                gradients * flops,
                place=self.place,
            )
        )
        return name

    def gelu(self, name: str, x: str) -> str:
        return self._each(name, "gelu", x, kept=True)

    def add(self, name: str, x: str, y: str) -> str:
        return self._each(name, "add", x, y)

    def _each(self, name: str, kind: str, *inputs: str, kept: bool = False) -> str:
        """Element by element."""
        rows, columns = self.shapes[name] = self.shapes[inputs[0]]
        dims: Dims = ("b", "n")
        read = tuple(self.operand(it, dims, kept) for it in inputs)
        parts, output = {"b": rows, "n": columns}, self.operand(name, dims)
        self.lines.append(
            Primitive(name, kind, read, output, parts, sample="b", is_cheap=True, place=self.place)
        )
        return name

    def softmax(self, name: str, x: str) -> str:
        rows, _ = self.shapes[name] = self.shapes[x]
        dims: Dims = ("b", None)
        output = self.operand(name, dims, True)
        read = (self.operand(x, dims),)
        self.lines.append(Primitive(name, "softmax", read, output, {"b": rows}, sample="b", place=self.place))
        return name

    def graph(self) -> Graph:
        return merged(OperatorTrace("example", 1, tuple(self.given), tuple(self.lines)))


def mlp(batch: int, width: int, inner: int) -> Graph:
    """x -> linear -> gelu -> linear -> softmax."""
    it = Writer()
    x = it.input("x", batch, width)
    up = it.gelu("gelu", it.linear("up", x, it.weight("w1", inner, width)))
    it.softmax("softmax", it.linear("down", up, it.weight("w2", width, inner)))
    return it.graph()


def products(rows: int, widths: Sequence[int]) -> Graph:
    """Products and their gelus, a layer each."""
    it = Writer()
    x = it.input("x", rows, widths[0])
    for it.place, (one, other) in enumerate(pairwise(widths)):
        layer = it.place
        x = it.gelu(f"g{layer}", it.linear(f"l{layer}", x, it.weight(f"w{layer}", other, one)))
    return replace(it.graph(), samples=rows)


def profile_of(graph: Graph, ranks: int = 1) -> Profile:
    """Layers that take 30 us, with the bytes that operators say and Adam's state."""
    sliced, layers = Sliced(graph, ranks), []
    for number in range(sliced.depth):
        own = sliced.stage(number, number + 1).operators
        weights = sum(it.given.size_bytes for it in own if it.given is not None and it.given.is_parameter)
        crossing = sum(it.size_bytes for it in sliced.crossing(number + 1))
        kept = sum(it.size_bytes for operator in own for it in operator.kept)
        layers.append(
            Layer(f"layer{number}", 10, 20, crossing, kept, weights, weights, 2 * weights, update_us=5)
        )
    names = {operator.name: operator.result.size_bytes for operator in graph.operators}
    ties = tuple(Tie(name, names[name], users) for name, users in sliced.shared.items())
    return Profile(graph.name, graph.samples, tuple(layers), ties)

"""Stages as graphs of their own: the operators of layers [start, end), with what crosses their ends.

    layers [0, 2)   x -> linear -> gelu -> |send|         |receive| -> linear -> loss   layers [2, 4)

What crosses a boundary is sent once: every rank of one stage sends an equal part, along one dimension that
does not depend on the meshes, and every rank of the next receives one. How a stage comes from what it makes
to those parts, and from them to what it reads, is part of its sharding; gradients take the same way back.
Model inputs are loaded by whoever reads them; what depends on parameters alone is computed where it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.operators import Given
from arborcast.pipeline.sharding.graph import Graph, Member, MergedOperator, Tensor


@dataclass(frozen=True, slots=True)
class SliceMessage:
    """Entries [start, stop) of a tensor that crosses, along the dimension that is divided.

    Attributes:
        src: the rank that sends them.
        dst: the rank that receives them.
        start: of a whole tensor 0.
        stop: of a whole tensor 1.
    """

    src: int
    dst: int
    start: int
    stop: int


def parted_dim(tensor: Tensor) -> int | None:
    """The dimension of a tensor that crosses which is divided; None where it is whole on every rank."""
    return tensor.labels.index(0) if 0 in tensor.labels else None


def part_of(tensor: Tensor, mesh: Mesh, place: int) -> tuple[int, int]:
    """The entries [start, stop) of a tensor that crosses which one rank of a mesh has."""
    dim = parted_dim(tensor)
    start, length = 0, 1 if dim is None else tensor.shape[dim]
    rows = len(mesh.ranks)
    for size in mesh.shape:  # as `strategies` divides ends: along every axis where that goes without a rest
        rows //= size
        at, place = divmod(place, rows)
        if length % size == 0:
            length //= size
            start += at * length
    return start, start + length


def messages(tensor: Tensor, senders: Mesh, receivers: Mesh) -> Iterator[SliceMessage]:
    """Who sends which part of a tensor that crosses to whom: every receiver gets its own part once.

    Of several ranks that have a part, receivers ask one after another. Gradients go the same way back.
    """
    holders: dict[tuple[int, int], list[int]] = {}
    for place, rank in enumerate(senders.ranks):
        holders.setdefault(part_of(tensor, senders, place), []).append(rank)
    for place, rank in enumerate(receivers.ranks):
        start, stop = part_of(tensor, receivers, place)
        for (first, last), theirs in sorted(holders.items()):
            if first < stop and start < last:
                yield SliceMessage(theirs[place % len(theirs)], rank, max(first, start), min(last, stop))


@dataclass(frozen=True)
class Sliced:
    """A graph whose operators bear the numbers of their layers, to be cut between layers.

    Attributes:
        graph: of the whole model, its operators merged within layers only.
        ranks: of the whole fabric: what crosses is divided along a dimension with a multiple of so many
            entries (of several, the first), and is whole on every rank where there is none.
    """

    graph: Graph
    ranks: int

    @property
    def depth(self) -> int:
        """Number of layers."""
        return 1 + max(it.place for it in self.graph.operators)

    def crossing(self, cut: int) -> tuple[Tensor, ...]:
        """What is made in layers before a cut, from samples, and read in those behind; label 0 is divided."""
        return tuple(self._parted(tensor) for tensor, made, last in self._spans if made < cut <= last)

    def stage(self, start: int, end: int) -> Graph:
        """The layers [start, end) as a graph."""
        inner = [
            number
            for number, it in enumerate(self.graph.operators)
            if number in self._varying and it.given is None and start <= it.place < end
        ]
        received = {it.value: it for it in self.crossing(start)}
        sent = self.crossing(end)
        wanted = set(self._copied(inner, received)) | set(inner)
        operators = self.graph.operators
        read = {tensor.value for number in wanted for tensor in operators[number].reads}
        inside = [operators[number] for number in sorted(wanted)]
        given = [_given(it, read) for it in inside if it.given is not None]
        made = [it for it in inside if it.given is None]
        return replace(
            self.graph,
            operators=(
                *given,
                *(_received(it, start) for it in received.values()),
                *made,
                *(_sent(it, end - 1) for it in sent),
            ),
        )

    def layer(self, number: int) -> Graph:
        """A layer alone, for what it costs at least: what others make, or use too, is there for nothing.

        Any sharding of a stage, restricted to the layers in it, is one of each, and costs no less than all;
        not each divides alike what repeats within a layer, as other blocks may repeat in the stage.
        """
        graph = self.stage(number, number + 1)
        received = {it.value for it in self.crossing(number)}
        operators = []
        for it in graph.operators:
            if it.name in received or (it.name in self.shared and it.given is not None):
                there = Given(it.name, it.result.shape, it.result.size_bytes)
                operators.append(replace(it, kind="input", is_end=False, given=there))
            elif not it.is_end:
                # Whoever makes what is received may keep it too.
                inputs, joined = (
                    tuple(
                        replace(tensor, kept=tensor.kept and tensor.value not in received)
                        for tensor in tensors
                    )
                    for tensors in (it.inputs, it.joined)
                )
                operators.append(replace(it, inputs=inputs, joined=joined))
        return replace(graph, operators=tuple(operators))

    @cached_property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Parameters with gradients that several layers use: by name, the layers."""
        found = {}
        for number, operator in enumerate(self.graph.operators):
            if operator.given is not None and operator.given.is_trained:
                layers = tuple(sorted(self._layers_of(number)))
                if len(layers) > 1:
                    found[operator.name] = layers
        return found

    @cached_property
    def _varying(self) -> frozenset[int]:
        """Operators that depend on samples, model inputs among them."""
        found: set[int] = set()
        for number, operator in enumerate(self.graph.operators):
            if operator.given is not None:
                if not operator.given.is_parameter:
                    found.add(number)
            elif any(self.graph.maker[it.value][0] in found for it in operator.reads):
                found.add(number)
        return frozenset(found)

    @cached_property
    def _readers(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for number, operator in enumerate(self.graph.operators):
            for tensor in operator.reads:
                found.setdefault(self.graph.maker[tensor.value][0], []).append(number)
        return {source: tuple(theirs) for source, theirs in found.items()}

    def _layers_of(self, number: int) -> set[int]:
        """The layers of those that read it, or what is made of it from parameters alone."""
        found: set[int] = set()
        for reader in self._readers.get(number, ()):
            found |= (
                {self.graph.operators[reader].place} if reader in self._varying else self._layers_of(reader)
            )
        return found

    @cached_property
    def _spans(self) -> tuple[tuple[Tensor, int, int], ...]:
        """Values made from samples and read in later layers: the value, its layer, its last reader's."""
        last: dict[str, int] = {}
        for operator in self.graph.operators:
            for tensor in operator.reads:
                last[tensor.value] = max(last.get(tensor.value, -1), operator.place)
        return tuple(
            (tensor, operator.place, last[tensor.value])
            for number, operator in enumerate(self.graph.operators)
            if operator.given is None and number in self._varying
            for tensor in operator.outputs
            if last.get(tensor.value, -1) > operator.place
        )

    def _copied(self, inner: Iterable[int], received: Iterable[str]) -> Iterator[int]:
        """What these operators read that comes from no other stage."""
        waiting, seen, elsewhere = list(inner), set(inner), set(received)
        while waiting:
            for tensor in self.graph.operators[waiting.pop()].reads:
                source = self.graph.maker[tensor.value][0]
                if tensor.value not in elsewhere and source not in seen:
                    seen.add(source)
                    waiting.append(source)
                    yield source

    def _parted(self, tensor: Tensor) -> Tensor:
        dims = [dim for dim, length in enumerate(tensor.shape) if length % self.ranks == 0]
        labels = tuple(0 if dims and dim == dims[0] else None for dim in range(len(tensor.shape)))
        return replace(tensor, labels=labels, kept=False)


def _given(operator: MergedOperator, read: Collection[str]) -> MergedOperator:
    """A parameter or an input with those of its views that are read: each layer may have its own."""
    first, *views = operator.outputs
    return replace(operator, outputs=(first, *(it for it in views if it.value in read)))


def _received(tensor: Tensor, place: int) -> MergedOperator:
    return replace(_end(tensor, "receive", tensor.value, place), outputs=(tensor,))


def _sent(tensor: Tensor, place: int) -> MergedOperator:
    return replace(_end(tensor, "send", f"{tensor.value} sent", place), inputs=(tensor,))


def _end(tensor: Tensor, kind: str, name: str, place: int) -> MergedOperator:
    length = [size for size, label in zip(tensor.shape, tensor.labels, strict=True) if label == 0]
    crossing = replace(tensor, value=name)
    return MergedOperator(
        name, kind, crossing, (Member(crossing),), place=place, parts=tuple(length), is_end=True
    )

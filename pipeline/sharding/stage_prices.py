"""What a stage costs on some ranks: the least over their meshes, each by the program of `shard`.

Equal slices of a model (blocks repeat) and equal fragments of a topology are asked once. A search that only
needs to know whether a stage may be worth it asks for a limit first: what its layers take alone, added up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import TypeAlias

from arborcast.pipeline.answers import kept
from arborcast.pipeline.costs.devices import DeviceRates
from arborcast.pipeline.errors import MemoryShortError, PlanError
from arborcast.pipeline.meshes import Mesh, meshes
from arborcast.pipeline.sharding.evaluation import fixed_bytes
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.graph import Graph
from arborcast.pipeline.sharding.repeats import renamed
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.sharding_program import Allowed, Sharding, least_memory, shard
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.synth.topology import Topology

_LayerSums: TypeAlias = dict[tuple[int, int], list[int]]
"""By the prices of a mesh and microbatches in flight."""

Layout = Callable[[tuple[int, ...]], Allowed]
"""From the sizes of a mesh to the strategies that are allowed on it."""


@dataclass(frozen=True)
class PricedStage:
    """The best way to divide a stage over some ranks.

    Attributes:
        sharding: on the best mesh; another stage's with the same operators, if one was asked before.
        setting: the mesh, of the fragment of its ranks, and its prices.
        memory_bytes: of each rank, with as many microbatches in flight as asked.
    """

    sharding: Sharding
    setting: Setting
    memory_bytes: int


@dataclass
class StagePrices:
    """Stages of one model on one topology; answers are kept.

    Attributes:
        sliced: the model.
        topology: the fabric.
        device: that every rank is.
        microbatches: of a step.
        optimizer_ratio: bytes of the optimizer's state for each byte of weights.
        memory_bytes: of one rank that may be used; None for no limit.
        layout: restricts the strategies; None for all.
        axes: of a mesh at most.
        collective_us: as of `FabricPrices`.
        sum_gbps: likewise.
    """

    sliced: Sliced
    topology: Topology
    device: DeviceRates
    microbatches: int = 1
    optimizer_ratio: Fraction = Fraction(2)
    memory_bytes: int | None = None
    layout: Layout | None = None
    axes: int = 2
    collective_us: float = 0.0
    sum_gbps: float | None = None
    programs: int = field(default=0, init=False)
    _settings: dict[Hashable, tuple[Setting, ...]] = field(default_factory=dict, repr=False)
    _fragments: dict[tuple[int, ...], tuple[Setting, ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _signs: dict[Hashable, int] = field(default_factory=dict, init=False, repr=False)
    _graphs: dict[tuple[int, int], tuple[int, Graph]] = field(default_factory=dict, init=False, repr=False)
    _least: _LayerSums = field(default_factory=dict, init=False, repr=False)
    _by_schedule: dict[int, Setting] = field(default_factory=dict, init=False, repr=False)
    _room: _LayerSums = field(default_factory=dict, init=False, repr=False)
    _free: dict[tuple[int, int], Sharding | PlanError] = field(default_factory=dict, init=False, repr=False)
    _fitted: dict[tuple[int, int, int], Sharding | PlanError] = field(
        default_factory=dict, init=False, repr=False
    )

    def limits_ps(self, ranks: Sequence[int]) -> list[list[int]]:
        """For each mesh of these ranks what the first 0, 1, ... layers take at least for a step.

        No sharding of layers [start, end) takes less than the difference, on the mesh where that is least.
        """
        return [self._sums(setting) for setting in self.settings(ranks)]

    def priced(self, start: int, end: int, ranks: Sequence[int], in_flight: int) -> PricedStage:
        """The sharding of these layers on these ranks that takes the least time for a step.

        Args:
            start: the first layer.
            end: the layer behind the last one.
            ranks: in the order in which meshes are filled row by row.
            in_flight: of how many microbatches a rank holds activations.

        Raises:
            MemoryShortError: no mesh has one that fits (with what the one that comes closest needs).
            PlanError: no mesh has one for want of links.
        """
        best: PricedStage | None = None
        errors: list[PlanError] = []
        for least, setting in sorted(self._by_least(start, end, ranks), key=lambda it: it[0]):
            if best is not None and least >= best.sharding.total_ps:
                break
            try:
                found = self._on_mesh(start, end, setting, in_flight)
            except PlanError as error:
                errors.append(error)
                continue
            if best is None or found.sharding.total_ps < best.sharding.total_ps:
                best = found
        if best is None:
            short = [it for it in errors if isinstance(it, MemoryShortError)]
            raise min(short, key=lambda it: it.least_bytes) if short else errors[0]
        return best

    def scheduled(self, start: int, end: int, ranks: Sequence[int], in_flight: int) -> PricedStage:
        """The same where collectives take what their schedules take when simulated, which is no less.

        Meshes that exact rates do not rule out are sharded again.
        """
        rough: list[tuple[int, Setting]] = []
        for setting in self.settings(ranks):
            with suppress(PlanError):
                rough.append((self._on_mesh(start, end, setting, in_flight).sharding.total_ps, setting))
        if not rough:
            return self.priced(start, end, ranks, in_flight)  # raises
        best: PricedStage | None = None
        for least, setting in sorted(rough, key=lambda it: it[0]):
            if best is None or least < best.sharding.total_ps:
                found = self._on_mesh(start, end, self._real(setting), in_flight)
                if best is None or found.sharding.total_ps < best.sharding.total_ps:
                    best = found
        assert best is not None
        return best

    @property
    def is_exact(self) -> bool:
        """Whether every program so far was solved to the proof, but for what floats leave open."""
        return all(
            it.is_optimal
            for known in (self._free, self._fitted)
            for it in known.values()
            if isinstance(it, Sharding)
        )

    def settings(self, ranks: Sequence[int]) -> tuple[Setting, ...]:
        """The meshes of some ranks that can be run, named by their places: `Mesh.can_ascend`."""
        order = tuple(ranks)

        def found() -> tuple[Setting, ...]:
            fragment = self.topology.subset(order)
            made = kept(self._settings, (fragment.ranks, fragment.links), lambda: self._made(fragment))
            return tuple(it for it in made if Mesh(it.sizes, order).can_ascend)

        return tuple(it for it in kept(self._fragments, order, found) if len(it.sizes) <= self.axes)

    def setting(self, ranks: Sequence[int], shape: tuple[int, ...], in_flight: int) -> Setting:
        """One mesh of some ranks, at what schedules take.

        Raises:
            PlanError: ranks have no such mesh.
        """
        found = [it for it in self.settings(ranks) if it.sizes == shape]
        if not found:
            names = ", ".join(str(it.prices.mesh) for it in self.settings(ranks))
            raise PlanError(f"mesh {'x'.join(map(str, shape))} of {len(ranks)} ranks: must be one of {names}")
        return replace(self._real(found[0]), in_flight=in_flight)

    def restricted(self, layout: Layout, axes: int = 2) -> StagePrices:
        """The same prices with other strategies allowed."""
        return replace(self, layout=layout, axes=axes)

    def _real(self, setting: Setting) -> Setting:
        made = partial(replace, setting, prices=replace(setting.prices, by_schedule=True))
        return kept(self._by_schedule, id(setting), made)

    def _by_least(self, start: int, end: int, ranks: Sequence[int]) -> list[tuple[int, Setting]]:
        sums = self.limits_ps(ranks)
        return [
            (it[end] - it[start], setting) for it, setting in zip(sums, self.settings(ranks), strict=True)
        ]

    def _made(self, fragment: Topology) -> tuple[Setting, ...]:
        found: list[Setting] = []
        prices = FabricPrices(fragment, Mesh((), (0,)), False, self.collective_us, self.sum_gbps)
        for mesh in meshes(range(fragment.ranks)):
            prices = replace(prices, mesh=mesh)
            found.append(Setting(prices, self.device, self.microbatches, 1, self.optimizer_ratio))
        return tuple(found)

    def _allowed(self, setting: Setting) -> Allowed | None:
        if self.layout is None:
            return None
        layout = self.layout(setting.sizes)
        return lambda operator, strategy: operator.is_end or layout(operator, strategy)

    def _sums(self, setting: Setting) -> list[int]:
        """What the first 0, 1, ... layers take at least."""

        def layer_ps(graph: Graph) -> int:
            # A stage may fold other blocks than its layers do: only a choice without any is no dearer.
            return shard(graph, setting, allowed=self._allowed(setting), alike=False).bound_ps

        return self._over_layers(self._least, (id(setting.prices), 0), layer_ps)

    def _check_room(self, start: int, end: int, setting: Setting, in_flight: int) -> None:
        """Raise where not even what the layers need alone fits."""
        limit = self.memory_bytes
        if limit is None:
            return
        inside = replace(setting, in_flight=in_flight)
        sums = self._over_layers(
            self._room,
            (id(setting.prices), in_flight),
            lambda graph: least_memory(graph, inside, allowed=self._allowed(inside)),
        )
        least = sums[end] - sums[start]
        if least > limit:
            raise MemoryShortError(f"every rank must have at least {least} bytes, got {limit}", least)

    def _over_layers(self, known: _LayerSums, key: tuple[int, int], of: Callable[[Graph], int]) -> list[int]:
        """Sums of what the first 0, 1, ... layers need alone; of equal layers it is asked once."""

        def found() -> list[int]:
            equal: dict[int, int] = {}
            graphs = map(self.sliced.layer, range(self.sliced.depth))
            each = (kept(equal, self._sign(it), partial(of, it)) for it in graphs)
            return list(accumulate(each, initial=0))

        return kept(known, key, found)

    def _on_mesh(self, start: int, end: int, setting: Setting, in_flight: int) -> PricedStage:
        sign, graph = self._known(start, end)
        key = sign, id(setting.prices)
        found = kept(self._free, key, lambda: self._sharded(graph, setting, None))
        limit = self.memory_bytes
        if isinstance(found, Sharding) and limit is not None and _memory(found, in_flight) > limit:
            self._check_room(start, end, setting, in_flight)
            inside = replace(setting, in_flight=in_flight)
            found = kept(self._fitted, (*key, in_flight), lambda: self._sharded(graph, inside, limit))
            if isinstance(found, Sharding):
                return PricedStage(found, setting, found.cost.memory_bytes)
        if isinstance(found, PlanError):
            raise found
        return PricedStage(found, setting, _memory(found, in_flight))

    def _sharded(self, graph: Graph, setting: Setting, memory_bytes: int | None) -> Sharding | PlanError:
        self.programs += 1
        try:
            return shard(graph, setting, memory_bytes=memory_bytes, allowed=self._allowed(setting))
        except PlanError as error:
            return error

    def _known(self, start: int, end: int) -> tuple[int, Graph]:
        def found() -> tuple[int, Graph]:
            graph = self.sliced.stage(start, end)
            return self._sign(graph), graph

        return kept(self._graphs, (start, end), found)

    def _sign(self, graph: Graph) -> int:
        return self._signs.setdefault(_nameless(graph), len(self._signs))


def _memory(found: Sharding, in_flight: int) -> int:
    """Bytes of a rank with so many microbatches in flight, of a choice made with one."""
    fixed = sum(fixed_bytes(found.graph, found.chosen))
    return fixed + in_flight * (found.cost.memory_bytes - fixed)


def _nameless(graph: Graph) -> Hashable:
    """What graphs have in common that differ in names only: shardings of one are shardings of the other."""
    numbers: dict[str, int] = {}

    def number(value: str) -> str:
        return str(numbers.setdefault(value, len(numbers)))

    operators = tuple(renamed(it, number) for it in graph.operators)
    named = list(numbers)
    trained = tuple(value in graph.trained for value in named)
    memory = tuple(number(graph.memory[value]) if value in graph.memory else "" for value in named)
    return operators, trained, memory, graph.samples

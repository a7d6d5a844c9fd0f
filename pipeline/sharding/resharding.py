"""From one way to lie on a mesh to another, by the cheapest sequence of collectives: shortest paths.

    divided along a dimension  --allgather-->  replicas  --slice (free)-->  divided
    summands  --allreduce-->  replicas         summands  --reduce-scatter-->  divided
    divided along one dimension  --alltoall-->  divided along another

A dimension that is divided along several axes is so in their order, so only the last of them can change.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from arborcast.pipeline.meshes import SUM, Axes, Spec
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.specs import divides, local_bytes
from arborcast.synth.collective import Kind


@dataclass(frozen=True, slots=True)
class ReshardingStep:
    """One collective; `kind` is None for a slice, which is free.

    Attributes:
        kind: of collective.
        axes: along which.
        size_bytes: of its whole buffer.
        spec: how the tensor lies after it.
    """

    kind: Kind | None
    axes: Axes
    size_bytes: int
    spec: Spec


@dataclass(frozen=True, slots=True)
class ReshardingPath:
    """A sequence of collectives and what it takes.

    Attributes:
        ps: picoseconds.
        steps: in order.
    """

    ps: int
    steps: tuple[ReshardingStep, ...] = ()


@dataclass(frozen=True)
class Resharder:
    """The paths on one mesh; answers are kept."""

    prices: FabricPrices
    _found: dict[tuple[tuple[int, ...], int, Spec], dict[Spec, ReshardingPath]] = field(
        default_factory=dict, repr=False
    )

    def path(
        self, shape: tuple[int, ...], size_bytes: int, source: Spec, target: Spec
    ) -> ReshardingPath | None:
        """The cheapest way for a tensor; None where links do not allow any.

        Args:
            shape: of the whole tensor.
            size_bytes: of the whole tensor.
            source: how it lies.
            target: how it shall lie; without summands.
        """
        if source == target:
            return ReshardingPath(0)
        key = shape, size_bytes, source
        if key not in self._found:
            self._found[key] = self._all(*key)
        return self._found[key].get(target)

    def _all(self, shape: tuple[int, ...], size_bytes: int, source: Spec) -> dict[Spec, ReshardingPath]:
        """Dijkstra from one spec; of equally cheap paths one of the fewest steps."""
        done: dict[Spec, ReshardingPath] = {}
        heap: list[tuple[int, int, int, Spec, tuple[ReshardingStep, ...]]] = [(0, 0, 0, source, ())]
        pushed = 0
        while heap:
            ps, count, _, spec, steps = heapq.heappop(heap)
            if spec in done:
                continue
            done[spec] = ReshardingPath(ps, steps)
            for step in self._steps(shape, size_bytes, spec):
                price = 0 if step.kind is None else self.prices.ps(step.kind, step.axes, step.size_bytes)
                if price is not None and step.spec not in done:
                    pushed += 1
                    heapq.heappush(heap, (ps + price, count + 1, pushed, step.spec, (*steps, step)))
        return done

    def _steps(self, shape: tuple[int, ...], size_bytes: int, spec: Spec) -> Iterator[ReshardingStep]:
        sizes = self.prices.mesh.shape
        local = local_bytes(size_bytes, spec, sizes)
        for axes in self.prices.mesh.ways:
            held = {spec[axis] for axis in axes}
            if len(held) > 1:
                continue
            at = held.pop()
            if at is not None and at != SUM and not _is_last(spec, axes, at):
                continue
            for to in (None, *range(len(shape))):
                moved = tuple(to if axis in axes else old for axis, old in enumerate(spec))
                if to == at or (
                    to is not None and not (_is_last(moved, axes, to) and divides(moved, shape, sizes))
                ):
                    continue
                if at is None:
                    yield ReshardingStep(None, axes, 0, moved)
                elif at == SUM:
                    yield ReshardingStep(
                        Kind.ALLREDUCE if to is None else Kind.REDUCE_SCATTER, axes, local, moved
                    )
                elif to is None:
                    yield ReshardingStep(Kind.ALLGATHER, axes, local_bytes(size_bytes, moved, sizes), moved)
                else:
                    yield ReshardingStep(Kind.ALLTOALL, axes, local, moved)


def _is_last(spec: Spec, axes: Axes, dim: int) -> bool:
    """Whether a dimension is divided along no axis behind these."""
    return all(at != dim for axis, at in enumerate(spec) if axis > max(axes))

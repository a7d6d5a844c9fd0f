"""Both levels of Alpa together: layers into stages on ranges of ranks, each stage divided over its best mesh.

With W(i) what all microbatches of stage i take, its messages to and from the next stage and its part of the
end of a step (gradients, updates) among them, for M microbatches

    step = sum of W(i) / M + (M - 1) * max of W(i) / M, and the sums of gradients of shared parameters

(Alpa's: one microbatch goes through all stages, then the slowest stage goes on alone; for one stage it is W.)
1F1B takes no longer, the end of a step apart, which it adds where stages end at different times.

The search goes from the last stage to the first, so that it knows how many microbatches are in flight. It is
best first by a limit: what the stages so far take, and what the layers and ranks that are left take at least
in any number of stages (`_Rest`). A stage enters with its own limit, and its integer programs are solved only
once nothing cheaper is left, so that most never are. The first plan that comes out whole is the best one.

Source: Alpa (OSDI 2022), section 5.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arborcast.pipeline.answers import kept
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import MemoryShortError, PlanError
from arborcast.pipeline.meshes import Mesh, row_of
from arborcast.pipeline.planning.memory_need import peak_in_flight
from arborcast.pipeline.sharding.slices import Sliced, messages, parted_dim
from arborcast.pipeline.sharding.stage_prices import PricedStage, StagePrices
from arborcast.pipeline.simulation.synchronisation import sum_us

ORDER = "1f1b"
"""Of passes, which says what is in flight."""

FAR = 1 << 60
"""Picoseconds: more than anything takes."""


@dataclass(frozen=True)
class JointStage:
    """Consecutive layers on some ranks.

    Attributes:
        start: the first layer.
        end: the layer behind the last one.
        ranks: in the order in which the mesh is filled.
        priced: how they are divided.
        crossing_ps: of a microbatch, to the next stage and back.
    """

    start: int
    end: int
    ranks: tuple[int, ...]
    priced: PricedStage
    crossing_ps: int

    def total_ps(self, microbatches: int) -> int:
        """All of a step."""
        return self.priced.sharding.total_ps + microbatches * self.crossing_ps


@dataclass(frozen=True)
class JointPlan:
    """Stages, the first one first.

    Attributes:
        stages: all layers.
        microbatches: of a step.
        ties_ps: sums of gradients of parameters that several stages use, once per step.
    """

    stages: tuple[JointStage, ...]
    microbatches: int
    ties_ps: int = 0

    def step_ps(self) -> int:
        """Of a step."""
        each = [it.total_ps(self.microbatches) for it in self.stages]
        return (sum(each) + (self.microbatches - 1) * max(each)) // self.microbatches + self.ties_ps


def best_joint(
    prices: StagePrices,
    network: LinkCosts,
    order: Sequence[int],
    *,
    most_stages: int | None = None,
    known: Sequence[JointPlan] = (),
) -> JointPlan:
    """The plan with the least time of a step.

    Over every cut between layers, ranges of the device order whose sizes divide the number of ranks (ranks at
    its front may stay without work), meshes, and shardings in which repeated blocks of a stage are divided
    alike.

    Args:
        prices: of stages.
        network: of messages between stages and of ties; of the same topology.
        order: the ranks; stages are put on consecutive ones.
        most_stages: None for no limit.
        known: plans in scope: what cannot be better is left out.

    Raises:
        MemoryShortError: none fits; by how many bytes every plan is short at least, and which rank of the one
            that comes closest.
        PlanError: none for want of links.
    """
    return _StageSearch(prices, network, tuple(order), most_stages).run(known)


def one_stage(prices: StagePrices, ranks: Sequence[int]) -> JointPlan:
    """All layers on all of these ranks.

    Raises:
        PlanError: as `StagePrices.priced`.
    """
    priced = prices.priced(0, prices.sliced.depth, ranks, 1)
    stage = JointStage(0, prices.sliced.depth, tuple(ranks), priced, 0)
    return JointPlan((stage,), prices.microbatches)


@dataclass(frozen=True, slots=True)
class _Partial:
    """The last stages of a plan.

    Attributes:
        layer: the first of their first.
        place: the first of their ranks in the device order.
        stages: all of them.
        users: for each shared parameter with more users in front, the ranks so far.
        total: W summed up, with ties.
        longest: the largest W.
        ties_ps: of those that are complete.
    """

    layer: int
    place: int
    stages: tuple[JointStage, ...] = ()
    users: tuple[tuple[str, tuple[int, ...]], ...] = ()
    total: int = 0
    longest: int = 0
    ties_ps: int = 0

    @property
    def size(self) -> int:
        """Of the first one's ranks; 0 of no stages."""
        return len(self.stages[0].ranks) if self.stages else 0

    @property
    def key(self) -> object:
        return self.layer, self.place, self.size, len(self.stages), self.users


class _NewStage(NamedTuple):
    """A stage in front of some, whose sharding is still to be found."""

    layer: int
    place: int
    behind: _Partial


@dataclass
class _StageSearch:
    prices: StagePrices
    network: LinkCosts
    order: tuple[int, ...]
    most_stages: int | None
    short: MemoryShortError | None = field(default=None, init=False)
    lacking: PlanError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        count = len(self.order)
        self.sizes = [size for size in range(1, count + 1) if count % size == 0]
        self.depth = self.prices.sliced.depth
        self.microbatches = self.prices.microbatches
        self.crossings: dict[tuple[int, int, int, int], int] = {}
        self.rest = _Rest(self)

    def run(self, known: Sequence[JointPlan]) -> JointPlan:
        best = min(known, key=lambda it: it.step_ps(), default=None)
        limit = math.inf if best is None else best.step_ps() * self.microbatches + self.microbatches - 1
        serial = count()
        heap: list[tuple[int, int, _Partial | _NewStage]] = []
        seen: dict[object, list[tuple[int, int]]] = {}

        def lengthen(behind: _Partial) -> None:
            for least, longer in self.longer(behind, limit):
                heapq.heappush(heap, (least, next(serial), longer))

        lengthen(_Partial(self.depth, len(self.order)))
        while heap:
            _, _, partial = heapq.heappop(heap)
            if isinstance(partial, _NewStage):
                found = self.found(partial)
                if found is not None and self.limit(found) < limit:
                    heapq.heappush(heap, (self.limit(found), next(serial), found))
                continue
            if partial.layer == 0:
                return JointPlan(partial.stages, self.microbatches, partial.ties_ps)
            others = seen.setdefault(partial.key, [])
            mine = partial.total + self.microbatches * partial.ties_ps, partial.longest
            if any(a <= mine[0] and b <= mine[1] for a, b in others):
                continue
            others.append(mine)
            if len(partial.stages) != self.most_stages:
                lengthen(partial)
        if best is not None:
            return best
        error = self.short or self.lacking
        assert error is not None, "some stage was tried"
        raise error

    def longer(self, behind: _Partial, below: float) -> Iterator[tuple[int, _NewStage]]:
        """With one more stage in front, and a limit, if that is lower than this."""
        for size in self.sizes:
            place = behind.place - size
            if place < 0:
                break
            least = self.rest.least(0, behind.layer, place, size)
            if behind.size:
                least = least + self.microbatches * self.crossing_ps(behind, size)
            total, longest = self.rest.total[: behind.layer, place], self.rest.longest[: behind.layer, place]
            layers = np.flatnonzero(total < FAR)
            least, total, longest = least[layers], total[layers], longest[layers]
            total = total + behind.total + least + self.microbatches * behind.ties_ps
            longest = np.maximum(np.maximum(longest, least), behind.longest)
            limits = total + (self.microbatches - 1) * longest
            for at in np.flatnonzero(limits < below):
                yield int(limits[at]), _NewStage(int(layers[at]), place, behind)

    def limit(self, partial: _Partial) -> int:
        """No plan that ends with these stages has less."""
        total = partial.total + int(self.rest.total[partial.layer, partial.place])
        longest = max(partial.longest, int(self.rest.longest[partial.layer, partial.place]))
        return total + (self.microbatches - 1) * longest + self.microbatches * partial.ties_ps

    def found(self, new: _NewStage) -> _Partial | None:
        """With the sharding of its first stage, if there is one."""
        layer, place, behind = new
        ranks = self.order[place : behind.place]
        in_flight = peak_in_flight(ORDER, len(behind.stages), self.microbatches)
        try:
            priced = self.prices.priced(layer, behind.layer, ranks, in_flight)
        except MemoryShortError as error:
            self.lack(error, f"[{layer}, {behind.layer})", ranks, in_flight)
            return None
        except PlanError as error:
            self.lacking = self.lacking or error
            return None
        crossing = self.crossing_ps(behind, len(ranks)) if behind.size else 0
        stage = JointStage(layer, behind.layer, ranks, priced, crossing)
        own = stage.total_ps(self.microbatches)
        users, ties = self.ties(layer, behind.layer, ranks, dict(behind.users))
        total, longest = behind.total + own, max(behind.longest, own)
        stages = (stage, *behind.stages)
        return _Partial(layer, place, stages, users, total, longest, behind.ties_ps + ties)

    def lack(self, error: MemoryShortError, layers: str, ranks: tuple[int, ...], in_flight: int) -> None:
        if self.short is not None and self.short.least_bytes <= error.least_bytes:
            return
        limit = self.prices.memory_bytes
        assert limit is not None, "it is short of it"
        self.short = MemoryShortError(
            f"memory: rank {ranks[0]} must have at least {error.least_bytes} bytes, got {limit}: every plan "
            f"is at least {error.least_bytes - limit} short; the closest has layers {layers} on ranks "
            f"{', '.join(map(str, ranks))}, in flight: {in_flight}",
            error.least_bytes,
        )

    def crossing_ps(self, behind: _Partial, size: int) -> int:
        """Of a microbatch, from a stage of so many ranks to the one behind it and back."""
        key = behind.layer, behind.place, behind.size, size
        # Sizes divide the number of ranks, so that parts are equal on every mesh: as in a row.
        senders = row_of(self.order[behind.place - size : behind.place])
        ends = behind.layer, senders, row_of(self.order[behind.place : behind.place + behind.size])
        return kept(self.crossings, key, lambda: crossing_ps(self.prices, self.network, *ends))

    def ties(
        self, start: int, end: int, ranks: tuple[int, ...], users: dict[str, tuple[int, ...]]
    ) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], int]:
        """Who uses shared parameters that layers in front use too; and the sums of those that none does."""
        done = 0
        for name, layers in self.prices.sliced.shared.items():
            if any(start <= it < end for it in layers):
                users[name] = (*ranks, *users.get(name, ()))
            if layers[0] >= start and name in users:
                theirs = users.pop(name)
                if any(it >= end for it in layers):
                    done += tie_ps(self.prices.sliced, name, theirs, self.network)
        return tuple(sorted(users.items())), done


class _Rest:
    """What the first layers take at least on the first ranks of the order; `FAR` where there are no ranks.

    Attributes:
        total: the least sum of W, by number of layers and of ranks.
        longest: the least largest W.
    """

    def __init__(self, search: _StageSearch) -> None:
        self.search = search
        places, depth = len(search.order), search.depth
        self.sums: dict[tuple[int, int], NDArray[np.int64]] = {}
        self.total = np.full((depth + 1, places + 1), FAR, dtype=np.int64)
        self.longest = self.total.copy()
        self.total[0, :] = self.longest[0, :] = 0
        for place in range(1, places + 1):
            for size in (it for it in search.sizes if it <= place):
                before = self.total[:, place - size], self.longest[:, place - size]
                for end in range(1, depth + 1):
                    least = self.least(0, end, place - size, size)
                    total = int((before[0][:end] + least).min())
                    longest = int(np.maximum(before[1][:end], least).min())
                    self.total[end, place] = min(int(self.total[end, place]), total, FAR)
                    self.longest[end, place] = min(int(self.longest[end, place]), longest)

    def least(self, start: int, end: int, place: int, size: int) -> NDArray[np.int64]:
        """W at least of the layers from each in [start, end) to the end, on so many ranks from a place."""
        ranks = self.search.order[place : place + size]
        sums = kept(self.sums, (place, size), lambda: np.array(self.search.prices.limits_ps(ranks)))
        least: NDArray[np.int64] = (sums[:, end, None] - sums[:, start:end]).min(axis=0)
        return least


def crossing_ps(prices: StagePrices, network: LinkCosts, cut: int, senders: Mesh, receivers: Mesh) -> int:
    """Of a microbatch: what crosses a boundary, then its gradients back."""
    total = 0.0
    for tensor in prices.sliced.crossing(cut):
        ways = [(senders, receivers)]
        if tensor.value in prices.sliced.graph.trained:
            ways.append((receivers, senders))
        dim = parted_dim(tensor)
        entries = 1 if dim is None else tensor.shape[dim]
        for src, dst in ways:
            total += network.transfer_us(
                {
                    (it.src, it.dst): (it.stop - it.start) / entries * tensor.size_bytes
                    for it in messages(tensor, src, dst)
                }
            )
    return math.ceil(total * 10**6)


def ties_ps(sliced: Sliced, stages: Sequence[tuple[int, int, tuple[int, ...]]], network: LinkCosts) -> int:
    """What summing gradients of parameters takes that several stages use; those as (start, end, ranks)."""
    done = 0
    for name, layers in sliced.shared.items():
        users = [ranks for start, end, ranks in stages if any(start <= it < end for it in layers)]
        if len(users) > 1:
            done += tie_ps(sliced, name, [rank for ranks in users for rank in ranks], network)
    return done


def tie_ps(sliced: Sliced, name: str, ranks: Sequence[int], network: LinkCosts) -> int:
    """What summing the gradient of one parameter takes."""
    size = sliced.graph.operators[sliced.graph.maker[name][0]].result.size_bytes
    return math.ceil(sum_us(sorted(ranks), size, network) * 10**6)

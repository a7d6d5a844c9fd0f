"""Which plan is fastest: for every number of stages and microbatches a partition, the best ones simulated.

The dynamic program minimises the busiest resource, not the time of a step; so for each number of stages its
partition is estimated in closed form, and what looks best is predicted by the simulator.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, product
from typing import TypeAlias

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.costs.saved_bytes import Segments, Treatment
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.planning.activation_search import ActivationOptions
from arborcast.pipeline.planning.device_order import device_order, transposed
from arborcast.pipeline.planning.estimate import StepCosts, estimates_us, step_costs
from arborcast.pipeline.planning.planning_problem import PlanningProblem
from arborcast.pipeline.planning.schedule_variants import MOST_EACH, derived
from arborcast.pipeline.planning.stage_dp import (
    PartitionProblem,
    PlacedStages,
    closest_to_fitting,
    partitions,
)
from arborcast.pipeline.planning.tables import DeviceTables, LayerTables
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.simulation.lower_bound import least_us
from arborcast.pipeline.stages import Plan, Stage

FEW = 12
"""Numbers of microbatches up to which the dynamic program is run for each at once."""

BASES = 4
"""Partitions of which orders that split backward passes, or lay several stages on ranks, are made besides."""

SLACK = 0.05
"""By how much a group's own partitions may be faster than those of other groups with its microbatches."""


Ranked: TypeAlias = tuple[tuple[float, int, int], Plan]
"""A plan behind what it is ranked by: its time, the place of its order, its microbatches."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What a search may choose from.

    Attributes:
        batch: samples.
        microbatches: numbers of them, ascending, at most the batch.
        orders: of `ORDERS`; of equally fast plans the earlier order wins.
        recompute: with, without, or both.
        menu: what may become of the results of each layer instead, where memory is limited; or None.
        stages: numbers of stages, ascending.
        max_in_flight: most microbatches in flight, or None.
        limits: bytes of memory of each rank; None for no limit.
        keep_ties_together: whether layers that share a parameter must be in one stage.
    """

    batch: int
    microbatches: tuple[int, ...]
    orders: tuple[str, ...]
    recompute: tuple[bool, ...]
    stages: tuple[int, ...]
    max_in_flight: int | None = None
    limits: tuple[int, ...] | None = None
    keep_ties_together: bool = False
    menu: ActivationOptions | None = None

    def question(self, microbatches: int, order: str, recompute: bool) -> PartitionProblem:
        """What the dynamic program is asked under the limits."""
        return PartitionProblem(
            self.batch, microbatches, order, recompute, self.max_in_flight, self.limits, self.menu
        )

    @property
    def searched(self) -> tuple[str, ...]:
        """The orders that a closed form ranks; 1F1B where all are made from its plans."""
        return tuple(it for it in self.orders if ORDERS[it].in_flight is not None) or ("1f1b",)

    @property
    def made(self) -> tuple[str, ...]:
        """The orders whose plans are made from those in 1F1B."""
        return tuple(it for it in self.orders if ORDERS[it].in_flight is None)


@dataclass(frozen=True, slots=True)
class SearchKey:
    """What the dynamic program is run for once: a device order, by number, and a question."""

    devices: int
    question: PartitionProblem


def search(profile: Profile, network: LinkCosts, choices: SearchSpace, *, simulated: int = 16) -> Plan:
    """The plan with the least predicted time among the most promising.

    Under limits of memory each order is searched by itself: what fits differs between them. What
    `schedule_variants` makes of the fastest plan, of the fastest with several stages, and of the `BASES`
    partitions whose busiest ranks have least to do, is compared with it; where only such orders are asked
    for, the first
    `simulated` that it makes of the most promising plans are.

    Raises:
        PlanError: nothing fits into memory (by how much and on which stage, in the plan that comes closest).
    """
    searched = choices.searched
    own = [it for it in searched if it in choices.orders]
    limits = None if choices.limits is None else dict(enumerate(choices.limits))
    race = _PlanRace(PlanningProblem(profile, network, choices.batch, 1, limits), choices)
    if not own:
        plans = _SearchQueue(race, replace(choices, orders=searched)).plans()
        made = (it for _, plan in _different(plans) for it in race.derived(plan))
        for plan in islice(made, simulated):
            race.run(plan)
    for orders in [own] if choices.limits is None else [[order] for order in own]:
        _search(race, tuple(orders), simulated)
    for base in race.bases if own and choices.made else ():
        for plan in race.derived(base, most_each=2):
            if race.best is None or least_us(plan, profile, batch=choices.batch) < race.best[0][0]:
                race.run(plan)
    return _closest(race) if race.best is None else race.best[1]


class _PlanRace:
    """Plans that are simulated one after another.

    Attributes:
        problem: with any number of microbatches.
        layers: of the profile.
        devices: for each device order.
        best: the fastest so far.
    """

    def __init__(self, problem: PlanningProblem, choices: SearchSpace) -> None:
        profile, network = problem.profile, problem.network
        self.problem, self.network, self.choices = problem, network, choices
        self.layers = LayerTables(profile, choices.keep_ties_together)
        self.devices = [DeviceTables(network, order) for order in device_orders(network)]
        self._partitions: dict[tuple[object, ...], tuple[int, dict[int, PlacedStages]]] = {}
        self.best: Ranked | None = None
        self._several: Ranked | None = None
        self.space: _SearchQueue | None = None  # the last one searched
        self._costs = network, replace(network, by_schedule=True)

    @property
    def bases(self) -> tuple[Plan, ...]:
        """The fastest plan, the fastest with several stages, and those of the least busy ranks."""
        fastest = [it[1] for it in (self.best, self._several) if it is not None]
        least_busy = [] if self.space is None else islice(self.space.least_busy(), BASES)
        return tuple({(it.stages, it.microbatches): it for it in (*least_busy, *fastest)}.values())

    def run(self, plan: Plan) -> bool:
        """Simulate a plan; whether it is the fastest, or would be if allreduces cost their bytes only."""
        has_sums = len(plan.ranks) > len(plan.workers) or self.problem.profile.ties_across(plan.cuts)
        is_near = False
        for costs in self._costs if has_sums else self._costs[1:]:  # schedules only for plans fast without
            time_us = self.problem.time_us(plan, costs)
            place = self.choices.orders.index(plan.order)
            found: Ranked = (_rounded(time_us), place, plan.microbatches), plan
            is_exact = costs is self._costs[1]
            if is_exact and len(plan.stages) > 1 and (self._several is None or found[0] < self._several[0]):
                self._several = found
            if self.best is not None and found[0] >= self.best[0]:
                return is_near
            is_near = True
        self.best = found
        return True

    def partitions(self, group: SearchKey, *, again: bool = False) -> dict[int, PlacedStages]:
        """The partitions of a group, found once for all orders; `again` for rates that have become exact."""
        devices, question, stages = self.devices[group.devices], group.question, self.choices.stages
        # Of an order only counts what it keeps in flight, and of what.
        kept: tuple[int, ...] = ()
        if question.limits is not None:
            kept = ORDERS[question.order].splits, *map(question.in_flight, range(stages[-1]))
        key = group.devices, question.microbatches, question.recompute, question.limits, kept
        if key not in self._partitions or (again and self._partitions[key][0] != devices.version):
            found = partitions(self.layers, devices, question, stages[-1], exact=False)
            wanted = {number: partition for number, partition in found.items() if number in stages}
            self._partitions[key] = devices.version, wanted
        return self._partitions[key][1]

    def derived(self, plan: Plan, most_each: int = MOST_EACH) -> Iterator[Plan]:
        """What fits of a plan's ranks and microbatches in other orders."""
        if plan.max_in_flight is None:
            made = derived(plan, self.layers, self.choices.made, self.choices.batch, most_each)
            yield from filter(self.problem.fits, made)

    def fitting(self, plan: Plan) -> Plan | None:
        """With what becomes of results chosen anew, if that is by layer; None where it does not fit."""
        menu = self.choices.menu
        if self.choices.limits is None or menu is None:
            return plan if self.problem.fits(plan) else None
        found = [
            self.layers.choice(stage.start, stage.end, menu, room)
            for stage, room in zip(plan.stages, self.problem.budgets(plan), strict=True)
        ]
        segments = [choice.segments for choice in found if choice is not None]
        return None if len(segments) < len(found) else with_segments(plan, segments, menu)


def _search(race: _PlanRace, orders: tuple[str, ...], simulated: int) -> None:
    """Run the most promising plans in some orders.

    The space: for each device order, number of microbatches, order and choice of recomputation, and each
    number of stages, the partition of the dynamic program. A closed form gives each the time that it needs
    at least. In the order of these at most `simulated` different plans are simulated, with the schedules of
    their allreduces, fewer once no other can be better than the best so far.

    Not all groups are solved: of many, those for every doubling of the microbatches are at once, and their
    partitions tell by the closed form which of the other groups are worth it.
    """
    choices = race.choices
    space = race.space = _SearchQueue(race, replace(choices, orders=orders))
    for estimate_us, plan in islice(_different(space.plans()), simulated):
        if race.best is not None and estimate_us > race.best[0][0]:
            break
        if race.run(plan):
            assert race.best is not None, "one was run"
            for narrower in _narrower(plan, race, race.best[0][0]):
                race.run(narrower)


def with_segments(plan: Plan, segments: Sequence[Segments], menu: ActivationOptions) -> Plan:
    """A plan with what becomes of the results of each stage."""
    stages = tuple(replace(stage, segments=own) for stage, own in zip(plan.stages, segments, strict=True))
    offloads = any(it.treatment is Treatment.OFFLOAD for own in segments for it in own)
    return replace(plan, stages=stages, recompute=False, offload_gbps=menu.offload_gbps if offloads else None)


def _narrower(plan: Plan, race: _PlanRace, most_us: float) -> Iterator[Plan]:
    """A plan with fewer replicas of a stage, which latency can make faster, unless passes alone take longer.

    The dynamic program knows the bytes of allreduces only.
    """
    profile = race.problem.profile
    for index, stage in enumerate(plan.stages):
        once = sum(
            it.forward_us - it.forward_fixed_us + it.backward_us - it.backward_fixed_us
            for it in profile.layers[stage.start : stage.end]
        )
        passes_us = once * race.choices.batch / profile.samples
        gradient_bytes = profile.bytes_once("gradient_bytes", [(stage.start, stage.end)])
        for replicas in range(stage.replicas - 1, 0, -1):
            if passes_us / replicas >= most_us:
                break
            if math.isinf(race.network.allreduce_us(stage.ranks[:replicas], gradient_bytes)):
                continue  # the links among these do not join them
            fewer = Stage(stage.start, stage.end, stage.ranks[:replicas])
            made = replace(plan, stages=(*plan.stages[:index], fewer, *plan.stages[index + 1 :]))
            fitting = race.fitting(made)
            if fitting is not None:
                yield fitting


def device_orders(network: LinkCosts) -> tuple[tuple[int, ...], ...]:
    """In which orders stages may lie on ranks: along the hosts, and across them at every level of hosts.

    The first lets pipelines cross hosts and replicas stay inside, the others the reverse.
    """
    along = device_order(network.topology)
    return tuple(dict.fromkeys((along, *transposed(along, network))))


def _different(plans: Iterable[tuple[float, Plan]]) -> Iterator[tuple[float, Plan]]:
    """Without those that do the same as one before."""
    seen: set[tuple[object, ...]] = set()
    for estimate_us, plan in plans:
        # One stage is the same on every device order, and so is every order of one microbatch.
        one = len(plan.stages) == 1
        stages = (tuple(sorted(plan.ranks)), plan.segments(0)) if one else plan.stages
        key = (stages, plan.recompute, plan.microbatches, plan.passes)
        if key not in seen:
            seen.add(key)
            yield estimate_us, plan


@dataclass(frozen=True, slots=True)
class _QueuedKey:
    """A group to be opened, or its partition into so many stages, found with the limits or without.

    `value_us` is the partition's when it was queued; it may have been found to be higher since.
    """

    group: SearchKey
    stages: int | None = None
    limited: bool = False
    value_us: float = 0.0


class _SearchQueue:
    """The groups of a search, of which those that look best are solved first.

    What costs time is put off until a partition's turn comes: making the rates of its allreduces exact,
    and solving its group under the memory limit if it breaks that. Until then its estimate is too low.
    """

    def __init__(self, race: _PlanRace, choices: SearchSpace) -> None:
        self.choices, self.race, self.problem = choices, race, race.problem
        self.opened: dict[SearchKey, None] = {}
        self.limited: set[SearchKey] = set()  # solved under the limits
        self.queue: list[tuple[float, int, int, int, _QueuedKey]] = []
        self.number = count()

    def plans(self) -> Iterator[tuple[float, Plan]]:
        """All plans with their estimates, the least first as far as it is known."""
        self._begin()
        while self.queue:
            estimate_us, *_, entry = heapq.heappop(self.queue)
            group = entry.group
            if entry.stages is None:
                self._push_plans(group)
            elif entry.limited == (group in self.limited):
                partition = self._solved(group).get(entry.stages)
                if partition is None:
                    continue
                plan = plan_of(self.problem, group.question, partition)
                if not (entry.limited or self.problem.fits(plan)):
                    self.limited.add(group)
                    self._push_plans(group)
                elif not partition.exact or partition.value_us != entry.value_us:
                    self.race.devices[group.devices].find_rates(partition.places)
                    self._solved(group, again=not partition.exact)
                    self._push_plan(group, entry.stages)
                else:
                    yield estimate_us, plan

    def least_busy(self) -> Iterator[Plan]:
        """Plans in 1F1B of the known partitions into several stages, for orders with next to no bubble.

        First comes the one with the least time for the first microbatch to come to the last stage, and then
        for the busiest ranks' passes and allreduces.
        """
        found: list[tuple[float, int, Plan]] = []
        for group in self.opened:
            count = group.question.microbatches
            question = PartitionProblem(self.choices.batch, count)
            known = {} if group.question.recompute else self.race.partitions(group)
            for partition in known.values():
                if len(partition.places) > 1:
                    costs = self._costs(partition, False, [count])
                    busy = costs.forward.most + costs.backward.most + costs.allreduce
                    least_us = float(busy.max() + (costs.forward.one + costs.forth.one).sum())
                    plan = plan_of(self.problem, question, partition)
                    found.append((_rounded(least_us), count, plan))
        shapes: dict[object, Plan] = {}  # device orders aside, of which the better one comes first
        for _, count, plan in sorted(found, key=lambda it: it[:2]):
            replicas = tuple(stage.replicas for stage in plan.stages)
            if shapes.setdefault((plan.cuts, replicas, count), plan) is plan:
                yield plan

    def _begin(self) -> None:
        """Queue every group with the least estimate of the partitions that are known without limits."""
        choices = self.choices
        for devices, recompute in product(range(len(self.race.devices)), choices.recompute):
            known: dict[object, PlacedStages] = {}
            for microbatches in _doublings(choices.microbatches):
                # With recomputation other partitions may be better, but these tell enough.
                question = PartitionProblem(choices.batch, microbatches, recompute=choices.recompute[0])
                known |= {
                    (it.cuts, it.places): it for it in self._solved(SearchKey(devices, question)).values()
                }
            costs = [self._costs(it, recompute, choices.microbatches) for it in known.values()]
            for order in choices.orders:
                times = [estimates_us(it, order, choices.max_in_flight) for it in costs]
                for microbatches, estimates in zip(
                    choices.microbatches, zip(*times, strict=True), strict=True
                ):
                    question = choices.question(microbatches, order, recompute)
                    self._push(min(estimates) / (1 + SLACK), _QueuedKey(SearchKey(devices, question)))

    def _solved(self, group: SearchKey, *, again: bool = False) -> dict[int, PlacedStages]:
        if group not in self.limited:  # then the order and its cap do not matter
            question = group.question
            question = PartitionProblem(question.batch, question.microbatches, recompute=question.recompute)
            group = SearchKey(group.devices, question)
        self.opened[group] = None
        return self.race.partitions(group, again=again)

    def _costs(self, partition: PlacedStages, recompute: bool, counts: Sequence[int]) -> StepCosts:
        batch = self.choices.batch
        gbps = self.choices.menu.offload_gbps if self.choices.menu is not None else None
        return step_costs(
            self.race.layers, partition, batch=batch, recompute=recompute, counts=counts, offload_gbps=gbps
        )

    def _push_plans(self, group: SearchKey) -> None:
        for number in self._solved(group):
            self._push_plan(group, number)

    def _push_plan(self, group: SearchKey, stages: int) -> None:
        question, partition = group.question, self._solved(group).get(stages)
        if partition is not None:  # exact rates may have shown that nothing connects so many stages
            costs = self._costs(partition, question.recompute, [question.microbatches])
            (estimate_us,) = estimates_us(costs, question.order, question.max_in_flight)
            self._push(estimate_us, _QueuedKey(group, stages, group in self.limited, partition.value_us))

    def _push(self, estimate_us: float, entry: _QueuedKey) -> None:
        """Of equal estimates the one that the search prefers comes first."""
        question = entry.group.question
        preference = self.choices.orders.index(question.order), question.microbatches, next(self.number)
        heapq.heappush(self.queue, (_rounded(estimate_us), *preference, entry))


def _rounded(time_us: float) -> float:
    """Without the last digits, in which sums differ that are added up in different orders."""
    return float(f"{time_us:.9g}")


def _doublings(counts: Sequence[int]) -> list[int]:
    """All of a few; of more the least, the greatest, and enough that none is less than half of the next."""
    if len(counts) <= FEW:
        return list(counts)
    chosen = [counts[-1]]
    for one, previous in zip(counts[-2::-1], counts[-3::-1], strict=False):
        if 2 * previous < chosen[-1]:
            chosen.append(one)
    return sorted({*chosen, counts[0]})


def plan_of(problem: PlanningProblem, question: PartitionProblem, partition: PlacedStages) -> Plan:
    """A partition as a plan; the problem may be of other numbers of microbatches."""
    plan = replace(problem, microbatches=question.microbatches).plan(
        [(it.start, it.end, it.ranks) for it in partition.stages],
        question.order,
        "spp",
        recompute=question.recompute,
        max_in_flight=question.max_in_flight,
    )
    if not partition.segments or question.menu is None:
        return plan
    return with_segments(plan, partition.segments, question.menu)


def _closest(race: _PlanRace) -> Plan:
    """The plan that comes closest to the memory that there is; programs reckon with the most that it needs.

    Where results are treated by layer it is the closest of those that keep all or recompute all, and in its
    stages the choice that needs least memory.

    Raises:
        PlanError: it does not fit; it says what is missing.
    """
    problem, layers, choices, menu = race.problem, race.layers, race.choices, race.choices.menu
    if choices.limits is None:  # a pipeline without replicas in 1F1B is always possible
        raise _too_few(choices)
    devices = race.devices[0]
    closest: tuple[float, Plan] | None = None
    ways = (False, True) if menu is not None and menu.recompute else choices.recompute
    for microbatches, order, recompute in product(choices.microbatches, choices.searched, ways):
        question = choices.question(microbatches, order, recompute)
        partition = closest_to_fitting(layers, devices, question, choices.stages)
        if partition is not None and (closest is None or partition.value_us < closest[0]):
            closest = partition.value_us, plan_of(problem, question, partition)
    assert closest is not None
    plan = closest[1]
    if menu is not None:
        least = [
            layers.units(menu, room).least_memory(it.start, it.end, room.in_flight)
            for it, room in zip(plan.stages, problem.budgets(plan), strict=True)
        ]
        plan = with_segments(plan, least, menu)
    if choices.made == choices.orders:  # 1F1B may fit where they do not
        plan = next(derived(plan, layers, choices.made, choices.batch), plan)
    try:
        problem.check_memory(plan)
    except PlanError as error:
        how = f"{len(plan.stages)} stages, {plan.microbatches} microbatches, order {plan.order}"
        raise PlanError(f"no plan fits into memory; the closest one ({how}) does not: {error}") from error
    if plan.order not in choices.orders:
        raise _too_few(choices)
    return plan


def _too_few(choices: SearchSpace) -> PlanError:
    """There is a plan in 1F1B, but none to be made from it."""
    memory = "" if choices.limits is None else ", and memory for that"
    return PlanError(
        f"order: {', '.join(choices.made)} needs at least two groups of ranks, and layers between which may "
        f"be cut for all stages on them{memory}, got too few"
    )

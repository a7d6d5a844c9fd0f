"""Both levels together: against all plans one by one, against each level alone, and what 1F1B then takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import MemoryShortError, PlanError
from arborcast.pipeline.meshes import meshes
from arborcast.pipeline.planning.device_order import device_order
from arborcast.pipeline.planning.interop_search import best_joint, one_stage
from arborcast.pipeline.planning.sharded_planning import choose_both
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.graph import Graph
from arborcast.pipeline.sharding.layouts import LAYOUTS
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.sharding_program import shard
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.pipeline.sharding.stage_prices import StagePrices
from arborcast.pipeline.simulation.pass_simulator import simulate
from arborcast.pipeline.simulation.synchronisation import sum_us
from arborcast.pipeline.stages import Plan, boundary_messages
from arborcast.synth.topology import Topology
from tests.sharding.examples import UNIT, Writer, products, profile_of, ring
from tests.support.planning_cases import line, model, wired


@dataclass
class Question:
    graph: Graph
    topology: Topology
    microbatches: int

    def prices(self, **options: object) -> StagePrices:
        sliced = Sliced(self.graph, self.topology.ranks)
        return StagePrices(sliced, self.topology, UNIT, self.microbatches, **options)  # type: ignore[arg-type]

    def every_plan(self, memory_bytes: int | None) -> Iterator[int | None]:
        """The step of each plan, the best sharding on the best mesh in each stage; None where none fits."""
        sliced, network = Sliced(self.graph, self.topology.ranks), LinkCosts(self.topology)
        ranks, count = range(self.topology.ranks), self.microbatches
        for stages in divisions(sliced.depth, len(ranks)):
            totals = []
            for at, (start, end, first, size) in enumerate(stages):
                own = tuple(ranks)[first : first + size]
                graph = sliced.stage(start, end)
                options = []
                for mesh in meshes(own):
                    in_flight = min(count, len(stages) - at)
                    setting = Setting(FabricPrices(self.topology, mesh), UNIT, count, in_flight)
                    try:
                        options.append(shard(graph, setting, memory_bytes=memory_bytes).total_ps)
                    except PlanError:
                        continue
                if not options:
                    break
                crossing = 0
                if at + 1 < len(stages):
                    _, _, other, others = stages[at + 1]
                    theirs = tuple(ranks)[other : other + others]
                    for tensor in sliced.crossing(end):
                        for src, dst in ((own, theirs), (theirs, own)):
                            crossing += network.transfer_us(boundary_messages(src, dst, tensor.size_bytes))
                totals.append(min(options) + count * round(crossing * 10**6))
            if len(totals) < len(stages):
                yield None
                continue
            ties = 0.0
            for layers in sliced.shared.values():
                users = [
                    rank
                    for start, end, first, size in stages
                    if any(start <= layer < end for layer in layers)
                    for rank in tuple(ranks)[first : first + size]
                ]
                if sum(any(start <= layer < end for layer in layers) for start, end, *_ in stages) > 1:
                    ties += sum_us(users, 4 * 64, network)
            yield (sum(totals) + (count - 1) * max(totals)) // count + round(ties * 10**6)


def divisions(depth: int, ranks: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Stages as (start, end, first rank, ranks), the last one at the last rank."""

    def front(end: int, place: int) -> Iterator[list[tuple[int, int, int, int]]]:
        if end == 0:
            yield []
        for start in range(end):
            for size in range(1, place + 1):
                if ranks % size == 0:
                    for before in front(start, place - size):
                        yield [*before, (start, end, place - size, size)]

    yield from front(depth, ranks)


@st.composite
def questions(draw: st.DrawFn, ranks: int) -> Question:
    """Three products, perhaps with a skip connection, perhaps with a shared weight, on a line of ranks."""
    it = Writer()
    rows = draw(st.sampled_from([2, 8, 64]))
    x = it.linear("a", it.input("x", rows, 8), it.weight("w", 8, 8))
    it.place = 1
    y = it.gelu("g", it.linear("b", x, it.weight("v", 8 * draw(st.sampled_from([1, 16])), 8)))
    it.place = 2
    y = it.linear("c", y, it.weight("u", 8, it.shapes[y][1]))
    if draw(st.booleans()):
        y = it.linear("d", y, "w")
    it.softmax("softmax", it.add("s", y, x) if draw(st.booleans()) else y)
    rate = draw(st.sampled_from([Fraction(1), Fraction(20), Fraction(1000)]))
    slow = draw(st.sampled_from([rate, rate / 10]))
    rates = {hop: slow if hop == (1, 2) else rate for hop in pairwise(range(ranks))}
    return Question(it.graph(), wired(ranks, rates), draw(st.integers(1, 4)))


SHARES = st.sampled_from([None, 1.0, 0.8])
"""Of the memory that the best plan needs without a limit."""


@given(questions(2), SHARES)
@settings(max_examples=5, deadline=None)
def test_no_plan_of_all_is_better(question, share):
    check_best(question, share)


@pytest.mark.long
@given(questions(4), SHARES)
@settings(max_examples=10, deadline=None)
def test_no_plan_of_all_on_four_ranks_is_better(question, share):
    check_best(question, share)


def check_best(question: Question, share: float | None) -> None:
    network, order = LinkCosts(question.topology), range(question.topology.ranks)
    limit = None
    if share is not None:
        free = best_joint(question.prices(), network, order)
        limit = int(share * max(it.priced.memory_bytes for it in free.stages))
    every = [it for it in question.every_plan(limit) if it is not None]
    prices = question.prices(memory_bytes=limit)
    if not every:
        with pytest.raises(MemoryShortError, match="every plan is at least"):
            best_joint(prices, network, order)
        return
    found = best_joint(prices, network, order)
    assert abs(found.step_ps() - min(every)) <= 10  # crossings are rounded one by one
    assert limit is None or all(it.priced.memory_bytes <= limit for it in found.stages)


@pytest.mark.parametrize(
    ("rows", "rate"),
    [(512, 1), pytest.param(8, 1, marks=pytest.mark.long), pytest.param(64, 100, marks=pytest.mark.long)],
)
def test_never_worse_than_either_level_alone_or_a_fixed_layout(rows, rate):
    topology = ring(4, rate)
    prices = Question(products(rows, [64] * 4), topology, 4).prices()
    network, order = LinkCosts(topology), range(4)
    alone = [one_stage(prices, order).step_ps()]
    for layout in LAYOUTS.values():
        try:
            alone.append(one_stage(prices.restricted(layout), order).step_ps())
        except PlanError:  # two groups of a ring of four that are no neighbours
            assert layout is LAYOUTS["megatron"]
    pipelines = best_joint(prices.restricted(LAYOUTS["data-parallel"], axes=1), network, order)
    found = best_joint(prices, network, order)
    assert found.step_ps() <= min([pipelines.step_ps(), *alone])
    # what is known from before is found again without solving anything
    again = best_joint(prices, network, order, known=[found])
    assert again.step_ps() == found.step_ps()


def test_memory_that_cannot_fit_says_by_how_much_and_where():
    it = Writer()
    x = it.linear("a", it.input("x", 8, 8), it.weight("w", 8, 8))
    it.place = 1
    it.softmax("s", it.linear("b", x, it.weight("v", 64, 8)))
    question = Question(it.graph(), ring(2), 2)
    with pytest.raises(MemoryShortError) as told:
        best_joint(question.prices(memory_bytes=100), LinkCosts(question.topology), range(2))
    least = told.value.least_bytes
    assert f"must have at least {least} bytes, got 100: every plan is at least {least - 100} short" in str(
        told.value
    )
    assert "rank 0 " in str(told.value)
    assert "layers [" in str(told.value)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_passes_in_1f1b_take_no_longer_than_the_formula(stages: Sequence[tuple[int, int]], microbatches: int):
    profile, topology = model([(f + 1, b + 1) for f, b in stages]), line(len(stages) + 1)
    plan = Plan([(at, at + 1, (at,)) for at in range(len(stages))], microbatches, "1f1b", topology=topology)
    each = [f + b + 2 for f, b in stages]
    took = simulate(plan, profile, LinkCosts(topology), batch=microbatches).time_us
    assert took <= sum(each) + (microbatches - 1) * max(each) + 1e-9


@pytest.mark.parametrize(
    ("counts", "said"),
    [({"microbatches": 0}, "microbatches: .* got 0"), ({"stages": -1}, "stages: .* got -1")],
)
def test_counts_below_one_are_refused(counts, said):
    it = Writer()
    it.softmax("s", it.linear("a", it.input("x", 8, 8), it.weight("w", 8, 8)))
    with pytest.raises(PlanError, match=said):
        choose_both(it.graph(), ring(2), UNIT, profile_of(it.graph()), **counts)


def test_of_equal_orders_ranks_ascend():
    torus = topologies.load("torus:2x2")
    assert device_order(torus) == (0, 1, 3, 2)
    it = Writer()
    it.linear("a", it.input("x", 512, 64), it.weight("w", 64, 64))
    found = choose_both(it.graph(), torus, UNIT, profile_of(it.graph()), stages=1)
    assert found.plan.stages[0].ranks == (0, 1, 2, 3)

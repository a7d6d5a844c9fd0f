from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.chunks.allreduce.partial_sums import sum_problem
from arborcast.synth.chunks.bounds import flow_bound as flows
from arborcast.synth.chunks.bounds.flow_bound import flow_bound, flows_of
from arborcast.synth.chunks.bounds.step_certificate import FlowDual
from arborcast.synth.chunks.bounds.step_check import certified_ratio
from arborcast.synth.chunks.limit_documents import limit_to_document
from arborcast.synth.chunks.problem.demand_action import DemandAction
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import TimedOutError
from arborcast.synth.topology import Link, Permutation, Topology
from arborcast.topologies import load
from tests.support.chunk_problems import least_ratio, problem_of, small_problems
from tests.support.strategies import topologies

EVER = Deadline()


def proved(problem: ChunkProblem, steps: int, **how: tuple[()]) -> Fraction:
    limit = flow_bound(problem, steps, deadline=EVER, **how)
    assert limit is not None and limit.steps == steps and isinstance(limit.certificate, FlowDual)
    assert limit.ratio == certified_ratio(problem, steps, limit.certificate)
    return limit.ratio


@given(small_problems())
@settings(max_examples=80)
def test_flows_prove_no_more_than_the_truth_with_symmetries_or_without(drawn):
    problem, steps = drawn
    ratio = proved(problem, steps)
    assert 0 < ratio <= least_ratio(problem, steps)
    assert proved(problem, steps, symmetries=()) == pytest.approx(ratio)


@given(small_problems([Kind.GATHER, Kind.SCATTER], custom=False))
@settings(max_examples=40)
def test_flows_are_exact_for_gather_and_scatter(drawn):
    problem, steps = drawn
    assert proved(problem, steps) == pytest.approx(least_ratio(problem, steps))


@given(st.data())
@settings(max_examples=25)
def test_single_blocks_of_several_sources_to_one_target_each(data):
    """What leaves the same set of sources is one flow, wherever in the set it begins."""
    topology = data.draw(topologies(max_ranks=4, switches=0))
    order = data.draw(st.permutations(range(topology.ranks)))
    held = data.draw(st.integers(1, topology.ranks - 1))
    demands = [Demand(frozenset(order[:held]), frozenset({target})) for target in order[held:]]
    problem = ChunkProblem.of(topology, Collective.custom(topology, demands))
    assert problem.latency is not None
    assert proved(problem, problem.latency) == pytest.approx(least_ratio(problem, problem.latency))


# R/C that no schedule goes below; the frontiers known to be complete attain every one but those said to be
# loose.
KNOWN = [
    ("dgx1", "allgather", {2: "3/2", 3: "7/6"}),
    ("dgx1", "gather", {2: "7/6", 3: "7/6"}),
    ("dgx1", "scatter", {2: "7/6"}),
    ("dgx1", "broadcast", {2: "1", 3: "9/22", 4: "4/13", 5: "5/19", 6: "6/25", 7: "7/31", 8: "8/37"}),
    # Loose: into each rank 3/2 would do; all at once take the static limit 8/3, which two steps attain.
    ("dgx1", "alltoall", {2: "3/2"}),
    # Loose: a broadcast in a 3-cube needs R/C = 1 in 3 steps, for the trees get in each other's way.
    ("hypercube:3", "broadcast", {3: "5/6"}),
    ("ring:8", "allgather", {4: "7/2"}),
    # Each rank has as much into the switch as out of it: one block after the other.
    ("dgx-a100", "allgather", {1: "7"}),
    ("mi250", "broadcast", {4: "27/20"}),
    ("dgx-h100:boxes=2", "broadcast", {4: "16/79"}),
    ("torus:4x8", "allgather", {6: "31/4"}),
]


@pytest.mark.parametrize(("spec", "kind", "ratios"), KNOWN)
def test_known_limits(spec, kind, ratios):
    problem = problem_of(spec, kind)
    assert {steps: proved(problem, steps) for steps in ratios} == {
        steps: Fraction(ratio) for steps, ratio in ratios.items()
    }


def test_of_many_that_differ_the_narrowest_flows_do(monkeypatch):
    problem = problem_of(load("dgx1").subset(range(7)), "allgather")
    everything = proved(problem, 3)
    monkeypatch.setattr(flows, "ENOUGH_COLUMNS", 200)
    limit = flow_bound(problem, 3, deadline=EVER)
    assert limit is not None and isinstance(limit.certificate, FlowDual)
    assert len(limit.certificate.flows) < len(flows_of(problem, sums=False))
    assert limit.ratio == everything


def test_a_limit_of_a_mirror_image_is_written_for_the_fabric_as_it_is() -> None:
    """A gather towards 0 over one-way links 2 -> 1 -> 0, proved of a scatter over the reversed ones."""
    fabric = Topology.build("line", 3, [Link(1, 0, Fraction(2)), Link(2, 1, Fraction(1))])
    turned = fabric.reversed()
    limit = flow_bound(ChunkProblem.of(turned, Collective.on(turned, "scatter", root=0)), 2, deadline=EVER)
    assert limit is not None
    written = limit_to_document(limit, fabric, mirrored=True)["certificate"]
    hops = {(link.src, link.dst) for link in fabric.links}
    assert {(src, dst) for row in written["links"] for src, dst, _ in row} <= hops
    ways = [(step, tuple(way)) for flow in written["flows"] for step, way, _ in flow["lengths"]]
    assert ways and {way for _, way in ways} <= hops
    plain = limit_to_document(limit, turned)["certificate"]
    assert ways == [
        (1 - step, tuple(way[::-1])) for flow in plain["flows"] for step, way, _ in flow["lengths"]
    ]


def test_capacities_of_any_size_make_no_difference():
    """With bandwidths that have a large common denominator, the units are tiny and R/C as large."""
    square = [(0, 1), (1, 2), (2, 3), (3, 0)]
    plain = Topology.build("plain", 4, [Link(u, v, Fraction(3)) for u, v in square])
    odd = [Link(u, v, Fraction(3) + (Fraction(1, 10**6) if u == 0 else 0)) for u, v in square]
    fine = Topology.build("fine", 4, odd)
    for kind in ("allgather", "alltoall"):
        problems = [ChunkProblem.of(fabric, Collective.on(fabric, kind)) for fabric in (plain, fine)]
        assert max(problems[1].capacities) == 3_000_001
        ratios = [proved(problem, 3) for problem in problems]
        # Rounds on the links of 3 GB/s: 1 of theirs is 3,000,000 of the finer units.
        assert ratios[1] * 3_000_000 == pytest.approx(float(ratios[0]), rel=1e-5)
        assert ratios[1] * 3_000_000 <= ratios[0]


@pytest.mark.parametrize(
    ("kind", "count", "blocks"),
    [("gather", 1, 7), ("scatter", 8, 1), ("alltoall", 16, 7), ("allgather", 8, 7), ("broadcast", 7, 1)],
)
def test_what_flows_together(kind, count, blocks):
    found = flows_of(problem_of("dgx1", kind), sums=False)
    assert len(found) == count
    assert min(map(len, found)) == blocks
    assert len(flows_of(problem_of("dgx1"), sums=True)) == 8 * 7


def test_below_the_latency_there_is_nothing_to_limit():
    with pytest.raises(ValueError, match="1 steps: fewer than the latency, 2, of the problem"):
        flow_bound(problem_of("dgx1", "allgather"), 1, deadline=EVER)
    apart = Topology.build("apart", 2, [Link(1, 0, Fraction(1))])
    problem = ChunkProblem.of(apart, Collective.on(apart, "broadcast", root=0))
    with pytest.raises(ValueError, match="9 steps: some rank is out of reach in any number of them"):
        flow_bound(problem, 9, deadline=EVER)


def test_out_of_time():
    with pytest.raises(TimedOutError, match=r"flows did not end within the deadline of 0 s"):
        flow_bound(problem_of("dgx1", "allgather"), 3, deadline=Deadline(0, 0.0))


def test_what_a_symmetry_does_to_demands_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for each flow: among 64 ranks of a torus that took minutes, past any deadline."""
    torus = load("torus:3x3")
    asked: list[Permutation] = []
    images = DemandAction.images

    def counted(action: DemandAction, element: Permutation) -> tuple[int, ...]:
        asked.append(element)
        return images(action, element)

    monkeypatch.setattr(DemandAction, "images", counted)
    problem = sum_problem(torus, Collective.on(torus, "allreduce"))
    assert flow_bound(problem, 3, deadline=EVER, sums=True, symmetries=torus.symmetries)
    assert sorted(asked) == sorted(torus.symmetries)

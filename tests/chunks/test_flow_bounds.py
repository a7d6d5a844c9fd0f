from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.chunks.bounds.flow_bounds import cut_bound, flow_bound
from arborcast.synth.chunks.bounds.flow_program import groups_of
from arborcast.synth.chunks.bounds.step_certificate import PathDual
from arborcast.synth.chunks.bounds.step_check import certified_ratio
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import TimedOutError
from arborcast.synth.topology import Link, Topology
from tests.support.chunk_problems import ROUTED, least_ratio, problem_of, small_problems
from tests.support.strategies import topologies

EVER = Deadline()


@given(small_problems())
@settings(max_examples=80)
def test_cuts_prove_no_more_than_flows_and_flows_no_more_than_the_truth(drawn):
    problem, steps = drawn
    cuts = cut_bound(problem, steps, deadline=EVER)
    flows = flow_bound(problem, steps, deadline=EVER)
    assert 0 < cuts.ratio <= flows.ratio <= least_ratio(problem, steps)
    for limit in (cuts, flows):
        assert limit.steps == steps
        assert isinstance(limit.certificate, PathDual)
        assert limit.ratio == certified_ratio(problem, steps, limit.certificate)


@given(small_problems(ROUTED, custom=False))
@settings(max_examples=40)
def test_flows_are_exact_where_nothing_is_copied(drawn):
    problem, steps = drawn
    assert flow_bound(problem, steps, deadline=EVER).ratio == pytest.approx(least_ratio(problem, steps))


@given(small_problems([Kind.GATHER, Kind.SCATTER], custom=False))
@settings(max_examples=40)
def test_cuts_are_exact_for_gather_and_scatter(drawn):
    problem, steps = drawn
    assert cut_bound(problem, steps, deadline=EVER).ratio == pytest.approx(least_ratio(problem, steps))


@given(st.data())
@settings(max_examples=25)
def test_single_blocks_of_several_sources_to_one_target_each(data):
    """What leaves the same set of sources is one flow, wherever in the set it begins."""
    topology = data.draw(topologies(max_ranks=4, switches=0))
    order = data.draw(st.permutations(range(topology.ranks)))
    held = data.draw(st.integers(1, topology.ranks - 1))
    demands = [Demand(frozenset(order[:held]), frozenset({target})) for target in order[held:]]
    demands.append(Demand(frozenset({order[0]}), frozenset({order[-1]})))
    problem = ChunkProblem.of(topology, Collective.custom(topology, demands))
    assert problem.latency is not None
    truth = least_ratio(problem, problem.latency)
    assert flow_bound(problem, problem.latency, deadline=EVER).ratio == pytest.approx(truth)
    assert cut_bound(problem, problem.latency, deadline=EVER).ratio <= truth


BOTH = (cut_bound, flow_bound)

# R/C that no schedule goes below; the frontiers known to be complete attain every one but those said to be
# loose.
KNOWN = [
    ("dgx1", "allgather", BOTH, {2: "3/2", 3: "7/6"}),
    ("dgx1", "gather", BOTH, {2: "7/6", 3: "7/6"}),
    ("dgx1", "scatter", BOTH, {2: "7/6"}),
    ("dgx1", "broadcast", BOTH, {2: "1", 3: "9/22", 4: "4/13", 5: "5/19", 6: "6/25", 7: "7/31", 8: "8/37"}),
    # Into each rank 7/6 would do; all at once take the static limit, which two steps attain.
    ("dgx1", "alltoall", (cut_bound,), {2: "3/2"}),
    ("dgx1", "alltoall", (flow_bound,), {2: "8/3", 3: "8/3"}),
    # Loose: a broadcast in a 3-cube needs R/C = 1 in 3 steps, for the trees get in each other's way.
    ("hypercube:3", "broadcast", BOTH, {3: "5/6"}),
    ("ring:8", "allgather", (cut_bound,), {4: "7/2"}),
    # Each rank has as much into the switch as out of it: one block after the other.
    ("dgx-a100", "allgather", (flow_bound,), {1: "7"}),
    ("dgx-a100", "alltoall", (flow_bound,), {1: "7"}),
]


@pytest.mark.parametrize(("spec", "kind", "limits", "ratios"), KNOWN)
def test_known_limits(spec, kind, limits, ratios):
    problem = problem_of(spec, kind)
    for limit in limits:
        found = {steps: limit(problem, steps, deadline=EVER).ratio for steps in ratios}
        assert found == {steps: Fraction(ratio) for steps, ratio in ratios.items()}


def test_capacities_of_any_size_make_no_difference():
    """With bandwidths that have a large common denominator, the units are tiny and R/C as large."""
    square = [(0, 1), (1, 2), (2, 3), (3, 0)]
    plain = Topology.build("plain", 4, [Link(u, v, Fraction(3)) for u, v in square])
    odd = [Link(u, v, Fraction(3) + (Fraction(1, 10**6) if u == 0 else 0)) for u, v in square]
    fine = Topology.build("fine", 4, odd)
    for kind in ("allgather", "alltoall"):
        problems = [ChunkProblem.of(fabric, Collective.on(fabric, kind)) for fabric in (plain, fine)]
        assert max(problems[1].capacities) == 3_000_001
        for limit in (cut_bound, flow_bound):
            ratios = [limit(problem, 3, deadline=EVER).ratio for problem in problems]
            # Rounds on the links of 3 GB/s: 1 of theirs is 3,000,000 of the finer units.
            assert ratios[1] * 3_000_000 == pytest.approx(float(ratios[0]), rel=1e-5)
            assert ratios[1] * 3_000_000 <= ratios[0]


def test_cuts_make_short_certificates():
    """At most one set of lengths for each cut that has a price, of which there are no more than steps."""
    certificate = cut_bound(problem_of("dgx1", "broadcast", 0), 5, deadline=EVER).certificate
    assert isinstance(certificate, PathDual)
    assert len(certificate.shares) <= 6


@pytest.mark.parametrize(
    ("kind", "groups", "flows"),
    [("gather", 1, 1), ("scatter", 1, 1), ("alltoall", 8, 1), ("allgather", 8, 7)],
)
def test_flows_that_need_no_copies_are_added_up(kind, groups, flows):
    found = groups_of(problem_of("dgx1", kind))
    assert len(found) == groups
    assert {len(group.flows) for group in found} == {flows}


@pytest.mark.parametrize("limit", [cut_bound, flow_bound])
def test_below_the_latency_there_is_nothing_to_limit(limit):
    with pytest.raises(ValueError, match="1 steps: fewer than the latency, 2, of the problem"):
        limit(problem_of("dgx1", "allgather"), 1, deadline=EVER)
    apart = Topology.build("apart", 2, [Link(1, 0, Fraction(1))])
    problem = ChunkProblem.of(apart, Collective.on(apart, "broadcast", root=0))
    with pytest.raises(ValueError, match="9 steps: some rank is out of reach in any number of them"):
        limit(problem, 9, deadline=EVER)


@pytest.mark.parametrize("limit", [cut_bound, flow_bound])
def test_out_of_time(limit):
    with pytest.raises(TimedOutError, match=r"(cuts|flows) did not end within the deadline of 0 s"):
        limit(problem_of("dgx1", "allgather"), 3, deadline=Deadline(0, 0.0))

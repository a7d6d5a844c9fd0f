"""Allreduces that meet in cores: every core replayed, every schedule verified, limits beside them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth import bounds
from arborcast.synth.chunks.allreduce.cores import Core, boxes_of, cores_of, rails_of
from arborcast.synth.chunks.allreduce.halves import static_ratio
from arborcast.synth.chunks.allreduce.hierarchical import HierarchicalAllreduces
from arborcast.synth.chunks.allreduce.partial_sums import sum_schedule
from arborcast.synth.chunks.allreduce.points import point_method
from arborcast.synth.chunks.bounds.flow_bound import flow_bound
from arborcast.synth.chunks.problem.symmetry import problem_group
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.support.chunk_problems import sums_on
from tests.support.strategies import topologies

SIX = load("dgx1").subset(range(6))


def met(fabric: Topology, steps: int) -> tuple[Schedule, Fraction, float] | None:
    """A schedule of so many steps, its R/C, and that with any number of chunks."""
    collective = Collective.on(fabric, "allreduce")
    limit = bounds.bound(fabric, collective)
    problem = sums_on(fabric)
    meeting = HierarchicalAllreduces(problem)
    mixture = meeting.mixture(steps, static_ratio(fabric, collective, limit), Deadline())
    if mixture is None:
        assert steps < meeting.fewest_steps
        return None
    chunks, plan = meeting.plan(mixture, steps, 40_000)
    method = point_method(chunks, plan.rounds, 0)
    schedule = sum_schedule(fabric, collective, problem, chunks, plan, method=method, bound=limit)
    return schedule, Fraction(sum(plan.rounds), chunks), mixture.ratio


def exchanged(core: Core) -> dict[int, frozenset[int]]:
    """Whose contributions each member has at the end; none may be added twice."""
    held = {member: frozenset({member}) for member in core.members}
    for level in core.levels:
        after = dict(held)
        for block in level:
            for src in block:
                for dst in block:
                    if src != dst:
                        assert not after[dst] & held[src]
                        after[dst] |= held[src]
        held = after
    return held


@pytest.mark.parametrize("spec", ["dgx1", "dgx-a100:boxes=2", "ndv2:boxes=2", "torus:3x3", "star:4"])
def test_a_core_ends_with_what_all_of_it_had(spec: str) -> None:
    problem = sums_on(spec)
    cores = cores_of(problem, problem_group(problem, 64))
    assert len(set(cores)) == len(cores)
    for core in cores:
        assert all(got == set(core.members) for got in exchanged(core).values())


def test_boxes_and_rails_are_those_of_the_machine() -> None:
    problem = sums_on("dgx-a100:boxes=2")
    (boxes,) = boxes_of(problem, range(16))
    assert boxes == (tuple(range(8)), tuple(range(8, 16)))
    assert rails_of(boxes) == tuple((rank, rank + 8) for rank in range(8))
    cores = cores_of(problem, problem_group(problem, 64))
    both = tuple(range(16))
    assert {core.levels for core in cores if core.members == both} >= {
        (boxes, rails_of(boxes)),
        (rails_of(boxes), boxes),
    }


@settings(max_examples=6)
@given(topologies(max_ranks=4), st.integers(0, 2))
def test_what_meets_is_correct_and_no_better_than_the_limit(fabric: Topology, more: int) -> None:
    collective = Collective.on(fabric, "allreduce")
    if bounds.bound(fabric, collective).rate == 0 or fabric.ranks < 2:
        return
    steps = HierarchicalAllreduces(sums_on(fabric)).fewest_steps + more
    found = met(fabric, steps)
    assert found is not None
    schedule, ratio, mixed = found
    assert synth.verify(schedule).correct
    assert schedule.steps == steps == len(schedule.rounds or ())
    least = flow_bound(sums_on(fabric), steps, deadline=Deadline(), sums=True)
    assert least is not None and ratio >= least.ratio
    assert mixed <= float(ratio) * (1 + 1e-9)
    assert met(fabric, steps) == found


@pytest.mark.parametrize(
    ("spec", "steps", "ratio"),
    [
        # Boxes exchange and then rails in half of the chunks, the reverse in the others.
        ("dgx-a100:boxes=4", 2, Fraction(3)),
        # Reduced to two ranks that are neighbours, or to one: all that links can carry in four steps.
        ("ring:4", 4, Fraction(3, 4)),
    ],
)
def test_both_orders_are_mixed(spec: str, steps: int, ratio: Fraction) -> None:
    found = met(load(spec), steps)
    assert found is not None and found[1] == ratio
    assert synth.verify(found[0]).correct


@pytest.mark.parametrize(
    ("steps", "size"),
    [
        # Ten messages a chunk, to a rank in the middle and back: what flows prove of 4 steps.
        (4, (18, 4, 10)),
        (6, (102, 6, 48)),
    ],
)
def test_few_chunks_attain_what_a_mixture_promises(steps: int, size: tuple[int, int, int]) -> None:
    meeting = HierarchicalAllreduces(sums_on(SIX))
    mixture = meeting.mixture(steps, Fraction(2, 5), Deadline())
    assert mixture is not None and mixture.ratio == pytest.approx(size[2] / size[0])
    chunks, plan = meeting.plan(mixture, steps)
    assert (chunks, len(plan.rounds), sum(plan.rounds)) == size

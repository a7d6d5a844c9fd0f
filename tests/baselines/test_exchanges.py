"""Exchanges by digits: right on clusters of any shape, of the best rate, in as many steps as they say."""

from __future__ import annotations

from fractions import Fraction

import pytest

from arborcast import topologies
from arborcast.synth.baselines.mixed_radix_butterfly import exchange_schedules
from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.schedule import Schedule
from arborcast.synth.symmetry.translation_search import translations_of
from arborcast.synth.topology import Topology
from arborcast.synth.verification.verifier import verify


def found(fabric: Topology, kind: str, ranks: list[int] | None = None) -> dict[str, AnySchedule]:
    collective = Collective.on(fabric, kind, ranks=ranks)
    limit = bound(fabric, collective)
    every = exchange_schedules(fabric, collective, limit, translations_of(fabric), Deadline.after(None))
    return {" ".join(str(value) for _, value in each.method.settings): each for each in every}


@pytest.mark.parametrize("spec", ["star:2", "star:5", "star:8", "full:6", "dgx-a100:boxes=2"])
@pytest.mark.parametrize("kind", ["allgather", "reduce_scatter", "allreduce"])
def test_every_radix_is_right(spec: str, kind: str) -> None:
    schedules = found(topologies.load(spec), kind)
    assert schedules
    for schedule in schedules.values():
        explicit = schedule.expand() if isinstance(schedule, ImplicitSchedule) else schedule
        verdict = verify(explicit)
        assert verdict.errors == ()
        assert verdict.rate == schedule.rate


def test_shared_exchanges_have_the_best_rate_in_few_steps() -> None:
    schedules = found(topologies.load("dgx-a100:boxes=4"), "allreduce")
    # Two steps each way: all boxes at once, all of a box at once; by halving two and three.
    assert schedules["shared 4x8"].steps == 4
    assert schedules["shared 2x2"].steps == 10
    assert schedules["whole 2x8"].steps == 3
    assert schedules["mixed 2x8"].steps == 4
    for name, schedule in schedules.items():
        assert isinstance(schedule, Schedule) != name.startswith("shared")
        assert not name.startswith("shared") or schedule.is_optimal
    # Each rank sends its eighth to three other boxes over a NIC of 25 GB/s.
    assert schedules["mixed 4x8"].rate == Fraction(25 * 8, 3)


def test_nothing_is_found_where_ranks_are_not_joined() -> None:
    assert not found(topologies.load("torus:4x4"), "allreduce")
    assert not found(topologies.load("star:5"), "allreduce", [0, 1, 2])
    assert not found(topologies.load("star:5"), "broadcast")

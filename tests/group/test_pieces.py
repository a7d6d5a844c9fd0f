"""Into how many pieces chunks are cut: few where processors are the limit, many where links are slow."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from arborcast import synth, topologies
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.pieces import (
    MESSAGE_US,
    ONE_HOST,
    SEVERAL_HOSTS,
    SHORTEST_BYTES,
    PieceRule,
    messages_of,
    most_messages,
    shares_of,
    switches_in,
)
from arborcast.synth.topology import Topology
from tests.simulation.test_switches import able, allreduce, star, turning

MIB = 1 << 20


def full_mesh_of_4(rate: str) -> Schedule:
    """The allreduce whose four trees have two steps, on links of that many GB/s."""
    topology = topologies.load("full:4")
    links = [replace(link, bandwidth=Fraction(rate)) for link in topology.links]
    return synth.solve(Topology.build("mesh", 4, links), "allreduce", method="trees")


def test_within_a_host_pieces_do_not_depend_on_the_links() -> None:
    slow, fast = full_mesh_of_4("1/40"), full_mesh_of_4("25")
    for size in (1, 64 << 10, 8 * MIB, 64 * MIB):
        assert ONE_HOST.pieces(slow, size) == ONE_HOST.pieces(fast, size)
    assert [ONE_HOST.pieces(slow, size * MIB) for size in (1, 2, 4, 8, 64)] == [1, 2, 4, 4, 4]


def test_what_is_not_passed_on_within_a_host_is_whole() -> None:
    gathered = synth.solve(topologies.load("full:4"), "allgather", method="trees")
    assert gathered.steps == 1
    assert ONE_HOST.pieces(gathered, 64 * MIB) == 1


def test_fast_links_get_few_pieces_and_slow_ones_as_many_as_their_time_pays_for() -> None:
    slow, fast = full_mesh_of_4("1/40"), full_mesh_of_4("25")
    assert SEVERAL_HOSTS.pieces(fast, 8 * MIB) == 16
    # 8 MiB at 2 * 25 MB/s take 168 ms; each rank ends 12 messages per piece: an eighth pays for 58 pieces.
    assert slow.rate == Fraction(1, 20)
    ends = 12
    assert SEVERAL_HOSTS.pieces(slow, 8 * MIB) == int(8 * MIB / 50 / 8 / (ends * MESSAGE_US)) == 58


def test_pieces_are_never_shorter_than_the_shortest_nor_more_than_the_steps_need() -> None:
    slow = full_mesh_of_4("1/10000")
    assert SEVERAL_HOSTS.pieces(slow, MIB) == (MIB // 4) // SHORTEST_BYTES == 32
    assert SEVERAL_HOSTS.pieces(slow, 64 * MIB) == 64 * slow.steps == 128
    assert SEVERAL_HOSTS.pieces(slow, 1) == 1


def test_rates_may_be_too_small_or_too_large_for_floating_point() -> None:
    """A file may name such links: as many pieces as are ever of use, or as few as fast links get."""
    slow, fast = full_mesh_of_4("1e-400"), full_mesh_of_4("1e400")
    assert SEVERAL_HOSTS.pieces(slow, 64 * MIB) == 64 * slow.steps == 128
    assert SEVERAL_HOSTS.pieces(fast, 8 * MIB) == 16


def test_a_switch_that_adds_counts_half_of_each_message() -> None:
    """4 sums come to it and 4 go out, so it is as busy as a rank with 4; the ranks themselves have 2."""
    topology = replace(star(4, able()), message_us=Fraction(10))
    schedule = allreduce(topology, ["1"], turning(dict.fromkeys(range(4), 4), 4))
    assert messages_of(schedule) == {0: 2, 1: 2, 2: 2, 3: 2, 4: 8}
    assert most_messages(schedule) == 8
    # 16 MB at 1 GB/s take 16 ms, an eighth of which pays for 50 times 4 messages of 10 us.
    assert SEVERAL_HOSTS.pieces(schedule, 16 * 10**6) == 50
    stores = replace(topology, switches=(replace(topology.switches[0], stores=True),))
    assert SEVERAL_HOSTS.pieces(allreduce(stores, ["1"], schedule.transfers), 16 * 10**6) == 1


@pytest.mark.parametrize("fabric", ["torus:3x3", "hypercube:3", "dgx-a100"])
@pytest.mark.parametrize("kind", ["allgather", "reduce-scatter", "alltoall"])
def test_an_orbit_counts_as_all_its_transfers(fabric: str, kind: str) -> None:
    """Messages and shares of the first of each orbit are those of the schedule written out."""
    implicit = synth.solve(topologies.load(fabric), kind, form="implicit")  # type: ignore[call-overload]
    explicit = implicit.expand()
    for counted in (messages_of, shares_of, lambda it: shares_of(it, sums=3)):
        few, all_of_them = counted(implicit), counted(explicit)
        assert few
        assert all(all_of_them[end] == count for end, count in few.items())
        assert max(few.values()) == max(all_of_them.values())
    assert switches_in(implicit) == switches_in(explicit)


@pytest.mark.parametrize("size", [1 << 10, MIB, 64 * MIB])
def test_a_piece_size_that_somebody_asked_for_holds_where_nothing_is_gained_by_less(size: int) -> None:
    rule = PieceRule(1 << 10, least=16, per_step=4)
    assert rule.pieces(full_mesh_of_4("1/40"), size) == min(16, max(1, size // 4 >> 10))

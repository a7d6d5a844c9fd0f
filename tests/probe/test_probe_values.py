"""The pure parts of `synth probe`: the plan, fair shares, round numbers, comparisons, the file."""

from __future__ import annotations

import logging
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.backends.probe.comparison import compare
from arborcast.backends.probe.inference import infer
from arborcast.backends.probe.likeness import resembling
from arborcast.backends.probe.measurements import Load, Spread
from arborcast.backends.probe.plan import broad_loads, matchings, solo_rounds, targeted_loads
from arborcast.backends.probe.prediction import Predictor
from arborcast.backends.probe.report import describe, document, table_rows, topology_file
from arborcast.backends.probe.shape import clustered, rounded
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Link, Topology
from tests.support.simulated_fabrics import boxes, mesh, star
from tests.support.strategies import topologies as drawn_topologies

# The plan


def test_the_matchings_of_four_and_five() -> None:
    assert matchings(4) == [((0, 3), (1, 2)), ((0, 1), (2, 3)), ((0, 2), (1, 3))]
    assert len(matchings(5)) == 5


@given(st.integers(2, 17))
def test_matchings_hold_each_pair_once_and_a_rank_once_a_round(ranks: int) -> None:
    rounds = matchings(ranks)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(ranks), 2))
    for pairs in rounds:
        members = [rank for pair in pairs for rank in pair]
        assert len(members) == len(set(members))


@given(st.integers(2, 9), st.booleans())
def test_each_flow_is_measured_alone_once(ranks: int, parallel: bool) -> None:
    rounds = solo_rounds(ranks, parallel=parallel)
    assert sorted(flow for flows in rounds for flow in flows) == list(permutations(range(ranks), 2))
    assert parallel or all(len(flows) == 1 for flows in rounds)


def test_broad_loads_of_three() -> None:
    assert broad_loads(3) == [
        ((0, 1), (0, 2)), ((1, 0), (1, 2)), ((2, 0), (2, 1)),
        ((1, 0), (2, 0)), ((0, 1), (2, 1)), ((0, 2), (1, 2)),
        ((1, 2), (2, 1)), ((0, 1), (1, 0)), ((0, 2), (2, 0)),
    ]  # fmt: skip


def test_only_slowed_flows_are_tried_in_pairs() -> None:
    solo = {flow: Spread(9, 10, 11, 3) for flow in permutations(range(4), 2)}
    slow, fast = Spread(4, 5, 6, 3), Spread(9, 9.5, 10, 3)
    load = Load({(0, 2): slow, (1, 3): slow, (2, 0): fast, (3, 1): slow})
    assert targeted_loads(solo, [load], slowed=0.2) == [
        ((0, 2), (1, 3)), ((1, 3), (3, 1)), ((0, 2), (3, 1))
    ]  # fmt: skip


# Fair shares


@given(drawn_topologies(max_ranks=5, switches=2, symmetric=False), st.data())
def test_rates_are_max_min_fair(topology: Topology, data: st.DataObject) -> None:
    flows = data.draw(
        st.lists(st.sampled_from(list(permutations(range(topology.ranks), 2))), unique=True, min_size=1)
    )
    predictor = Predictor(topology)
    rates = predictor.rates(flows)
    loads = {hop: [flow for flow in rates if hop in predictor.way(flow)] for hop in topology.bandwidth}  # type: ignore[operator]
    for hop, users in loads.items():
        assert sum(rates[flow] for flow in users) <= topology.bandwidth[hop] * (1 + 1e-9)
    for flow, rate in rates.items():
        # The certificate: a full link on the flow's way, where no other flow gets more.
        assert any(
            sum(rates[user] for user in loads[hop]) >= float(topology.bandwidth[hop]) * (1 - 1e-9)
            and all(rates[user] <= rate * (1 + 1e-9) for user in loads[hop])
            for hop in predictor.way(flow) or ()
        )


def test_a_way_goes_through_switches_only_and_is_the_widest() -> None:
    links = [
        Link(0, 1, Fraction(2)),
        Link(1, 2, Fraction(9)),
        Link(0, 3, Fraction(5)),
        Link(3, 1, Fraction(4)),
    ]
    predictor = Predictor(Topology.build("drawn", 3, links, ["switch"]))
    assert predictor.way((0, 1)) == ((0, 3), (3, 1))
    assert predictor.way((0, 2)) is None  # rank 1 would have to forward
    assert predictor.rates([(0, 1), (0, 2)]) == {(0, 1): 4}


# Round numbers


@given(st.floats(1e-4, 1e4))
def test_rounding_is_near_and_short(value: float) -> None:
    number = rounded(value)
    assert abs(float(number) / value - 1) <= 0.0251
    assert len(f"{float(number):.12g}".replace(".", "").strip("0")) <= 3


def spread(value: float, width: float = 0) -> Spread:
    return Spread(value - width, value, value + width, 3)


def test_clusters() -> None:
    assert clustered([spread(24.7), spread(50.9), spread(25.3), spread(49)], alike=0.06) == [25, 50, 25, 50]
    assert clustered([spread(10), spread(12.4)], alike=0.06) == [10, Fraction(25, 2)]
    # Nothing tells these apart but luck.
    assert len(set(clustered([spread(10, 4), spread(13, 4)], alike=0.06))) == 1


# Comparisons


def test_a_pattern_is_compared_without_its_scale() -> None:
    given_ = topologies.load("dgx1")
    flows = list(permutations(range(8), 2))
    said = Predictor(given_)
    rates = {flow: Fraction(said.rates([flow]).get(flow, 10)) / 100 for flow in flows}
    measured = mesh(rates, 8).measured(noise=0.02)
    found = compare(measured, given_, tolerance=0.1)
    assert found.contradictions == ()
    assert found.scale == pytest.approx(0.01, rel=0.02)
    assert len(found.unlinked) == 8 * 7 - len(given_.links)
    assert len(compare(measured, given_, tolerance=0.1, absolute=True).contradictions) >= len(given_.links)


def test_a_link_that_is_not_what_was_said() -> None:
    flows = list(permutations(range(4), 2))
    measured = mesh({flow: 1 if flow == (2, 3) else 4 for flow in flows}, 4).measured(noise=0)
    found = compare(measured, topologies.load("full:4,bandwidth=40"), tolerance=0.25, name="full.yaml")
    assert found.contradictions == (
        "2->3: full.yaml says 40 GB/s (times 0.1: 4), measured 1 (1 to 1), 4 times slower",
    )


def test_ports_contradict_a_mesh_under_load_only() -> None:
    found = compare(star([5] * 4, [5] * 4).measured(noise=0.02), topologies.load("full:4"), tolerance=0.25)
    assert len(found.contradictions) == 12
    assert all("beside" in line and "slower" in line for line in found.contradictions)


def test_a_pair_without_a_link_must_not_be_fast() -> None:
    measured = mesh(dict.fromkeys(permutations(range(4), 2), 3), 4).measured(noise=0)
    found = compare(measured, topologies.load("ring:4"), tolerance=0.25)
    assert "0->2: ring:4 has no link, measured 3 GB/s, as fast as its linked pairs" in found.contradictions
    assert len(found.contradictions) == 4


def test_another_number_of_ranks_is_refused() -> None:
    measured = mesh({(0, 1): 1, (1, 0): 1}, 2).measured(noise=0)
    with pytest.raises(InputError, match=r"full:3: has 3 ranks, and 2 processes measured; .*--ranks"):
        compare(measured, topologies.load("full:3"), tolerance=0.1)


# The file


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 1], [2, 3], [4, 5]]])
def test_the_file_says_the_topology_and_every_measurement(groups: list[list[int]], tmp_path: Path) -> None:
    measured = boxes(groups, 25, 5, named=True).measured(noise=0.03)
    found = infer(measured, name="two boxes: odd # name")
    text = topology_file(found, measured)
    (tmp_path / "fabric.yaml").write_text(text)
    assert topologies.load(str(tmp_path / "fabric.yaml")) == found.topology
    assert "# host       host0: ranks 0, 1\n# host       host1: ranks 2, 3\n" in text
    for flow, rate in measured.solo.items():
        assert f"# {flow[0]}->{flow[1]} " in text
        assert f"{rate.minimum:.3g}/{rate.median:.3g}/{rate.maximum:.3g}" in text
    assert text.count("# 3 times: ") == len(measured.loads)


def test_the_table_and_the_lines_below_it() -> None:
    measured = star([5] * 4, [5] * 4).measured(noise=0)
    found = infer(measured)
    assert table_rows(measured)[0] == ("0->1", "10.0", "5", "5 to 5", "1.67")
    assert list(describe(found, measured, None, None)) == [
        "host       host: ranks 0, 1, 2, 3",
        "measured   each pair alone, 3 times; sockets",
        "topology   each rank has a port that its flows share",
    ]
    like = resembling(measured, {"box.yaml": topologies.load("star:4")}, tolerance=0.25)
    near = ", ".join(like.alike)
    assert list(describe(found, measured, None, None, like))[3:] == [
        f"resembles  box.yaml with its rates times 5; ranks are its 0 1 2 3; as near: {near}",
        "           12 pairs of 1 GB/s: measured 5 GB/s, off by 0% at most",
        "           totals of flows at once: off by 0% at most",
    ]
    uneven = star([5, 5, 5, 1], [5] * 4).measured(noise=0)
    unlike = resembling(uneven, {"box.yaml": topologies.load("star:4")}, tolerance=0.25)
    lines = list(describe(infer(uneven), uneven, None, None, unlike))
    assert any(line.startswith("resembles  none within 25%; the nearest is ") for line in lines)
    assert document(infer(uneven), uneven, None, unlike)["resembles"]["found"] is False
    inexact = describe(found, replace(measured, exact=False), None, None)
    assert any("disjoint pairs at once" in line for line in inexact)


def test_the_document_is_plain_json() -> None:
    measured = boxes([[0, 1], [2, 3]], 25, 5).measured(noise=0)
    comparison = compare(measured, topologies.load("full:4"), tolerance=0.1)
    said = document(infer(measured), measured, comparison)
    assert said["pairs"][0]["bandwidth"] == [25, 25, 25]
    assert said["check"]["contradictions"] == list(comparison.contradictions)
    assert said["topology"]["ranks"] == 4


def test_pure_parts_are_silent(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.DEBUG):
        infer(star([5] * 3, [5] * 3).measured(noise=0.05))
    assert not caplog.records
    assert capsys.readouterr() == ("", "")

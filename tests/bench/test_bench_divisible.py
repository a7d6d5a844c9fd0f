"""The Divisible paper's sweeps by our simulator, and SPP's testbeds: what the benches rest on."""

from __future__ import annotations

import pytest

from arborcast.bench.training import divisible_paper as paper
from arborcast.bench.training import spp_testbeds as spp
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.planning.hosts import levels
from arborcast.pipeline.profiles import Layer, Profile
from arborcast.synth.api import bound


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return paper.microbatch_sweep(microbatches=paper.NAMED)


def test_published_speed_ups_from_one_calibrated_constant(rows: list[dict]) -> None:
    best = {row["stages"]: row for row in paper.best_rows(rows)}
    assert {stages: row["paper_speed_up"] for stages, row in best.items()} == {
        2: 1.34,
        4: 1.93,
        8: 2.7,
        16: 3.49,
        32: 3.72,
    }
    assert [stages for stages, row in best.items() if row["calibrated"]] == [32]
    assert abs(best[32]["difference"]) < 0.002
    assert all(abs(row["difference"]) < 0.03 for row in best.values())


def test_best_numbers_of_microbatches(rows: list[dict]) -> None:
    """Published: 5, 5, 20, 20, 20. With 8 processes the model puts 12 ahead of 20, by less than 2 %."""
    best = {row["stages"]: row for row in paper.best_rows(rows)}
    assert {stages: row["best_of_named"] for stages, row in best.items()} == {
        2: 5,
        4: 5,
        8: 12,
        16: 20,
        32: 20,
    }
    assert best[8]["best_of_named_speed_up"] / best[8]["speed_up"] < 1.02


def test_one_process_loses_by_dividing_its_batch(rows: list[dict]) -> None:
    alone = [row["speed_up"] for row in rows if row["stages"] == 1]
    assert alone[0] == 1
    assert alone == sorted(alone, reverse=True)


def test_the_costs_of_a_layer_by_hand() -> None:
    """Stage 1 of 2, third of 5 microbatches: 240 samples in 4 tiles of 64."""
    profile = paper.paper_profile(2, 5)
    flops = 10.6e12 * 0.75 / 1e6  # per us
    weights_us = 5000 * 5000 * 4 / (732 * 0.8 * 1e3)
    product = 2 * 5000 * 5000 / flops
    inner, edge = profile.layers[3], profile.layers[16]
    assert inner.forward_us == pytest.approx(256 * product + weights_us)
    # weights read for the input's gradient, a gradient written, and added (3) in 4 of 5 microbatches
    assert inner.backward_us == pytest.approx((256 + 240) * product + (2 + 3 * 4 / 5) * weights_us)
    assert edge.forward_us - inner.forward_us == pytest.approx(paper.MESSAGE_US)
    assert inner.output_bytes == 240 * 5000 * 4
    assert profile.layers[-1].parameter_bytes == 5000 * 10 * 4
    assert profile.samples == 240


def test_the_other_sweeps(rows: list[dict]) -> None:
    found = [
        *rows,
        *paper.best_rows(rows),
        *paper.width_sweep(),
        *paper.bandwidth_sweep(microbatches=(1, 5)),
    ]
    holds = {claim["claim"]: claim["holds"] for claim in paper.claims(found)}
    assert holds["InfiniBand or NVLink makes hardly a difference"]
    assert holds["below a width of 3000 the speed-up falls"]
    assert len(holds) == 6
    keys = ("sweep", "stages", "microbatches", "width", "network")
    assert len({tuple(row[key] for key in keys) for row in found}) == len(found)


def test_the_testbeds() -> None:
    hosts = spp.four_hosts()
    assert levels(LinkCosts(hosts)) == (((0, 1), (2, 3), (4, 5), (6, 7)), (tuple(range(8)),))
    # One rank of each host: a link carries 2 * 3/4 of the buffer each way, at 6.25 GB/s.
    assert bound(hosts.subset([0, 2, 4, 6]), "allreduce").rate == pytest.approx(6.25 * 4 / 6)
    v100 = spp.four_v100()
    assert v100.ranks == 4
    assert {(link.src, link.dst) for link in v100.links} == {
        (a, b) for a in range(4) for b in range(4) if a != b
    }
    assert {float(link.bandwidth) for link in v100.links} == {25, 50}
    assert [(it.name, round(it.memory_bytes / 1e9, 1)) for it in spp.testbeds()] == [
        ("4 hosts x 2 1080 Ti", 10.6),
        ("4 V100", 15.5),
    ]


def test_rows_of_a_comparison() -> None:
    layers = [Layer(f"l{i}", 1000, 2000, 10**5, 10**6, 10**6, 10**6, 0, 10, 10) for i in range(6)]
    profile = Profile("drawn", 16, tuple(layers))
    small = spp.Testbed("drawn", spp.four_v100(), "v100", 10 * 10**6)
    rows = spp.compare_profile(profile, small, batch=64, microbatches=(1, 8))
    assert [row["method"] for row in rows] == [
        "spp",
        "data-parallel",
        "gpipe",
        "pipedream",
        "hetpipe",
        "rannc",
        "spp, several stages",
        "any order",
        "pipedream-async",
    ]
    found = {row["method"]: row for row in rows}
    assert found["spp"]["speed_up"] == 1
    assert not found["data-parallel"]["fits"]  # 6 MB of weights and 6 of gradients
    assert "too many" in found["data-parallel"]["why_not"]
    assert found["data-parallel"]["time_us"] is None
    assert found["gpipe"]["replicas"] == [1, 1, 1, 1]
    assert found["any order"]["time_us"] <= found["spp"]["time_us"]
    # 3 us each sample and layer but for 10 of 1000 and 2000 that are there once; four ranks.
    assert found["spp"]["floor_us"] == pytest.approx(6 * (20 + 4 * 2980) / 4)
    for row in rows:
        assert row["time_us"] is None or row["time_us"] >= row["floor_us"]
        assert not row["fits"] or row["memory_bytes"] <= 10 * 10**6
        assert set(row) == set(rows[0])

"""What messages and sums cost, as the ranks of a job measure it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from arborcast import pipeline, topologies
from arborcast.pipeline.run import measured_links
from tests.support.ranks import run_ranks


def measured(rank, size, spec, collectives):
    topology = None if spec is None else topologies.load(spec)
    return pipeline.measure_links(topology, collectives=collectives, repeats=3)


@pytest.mark.parametrize(("spec", "collectives"), [(None, "gloo"), ("ring:3", "synth")])
def test_all_ranks_measure_the_same_costs(spec, collectives):
    """With three ranks the last one has nobody to exchange messages with."""
    found, *others = run_ranks(3, measured, spec, collectives)
    assert others == [found, found]
    assert found.sum_gbps > 0 and found.handling_us > 0
    assert (found.peer_bytes > 0) == (collectives == "synth")  # buffers in memory that ranks share
    assert found.topology.ranks == 3 and found.by_ring == (collectives == "gloo")
    if spec is not None:
        assert found.topology == topologies.load(spec)
    else:
        assert {link.bandwidth for link in found.topology.links} == {found.topology.links[0].bandwidth}
    assert found.allreduce_us((0, 1, 2), 1 << 24) > found.allreduce_us((0, 1, 2), 1 << 20) > 0


def test_of_a_fabric_the_bytes_of_a_sum_cost_what_processors_take(monkeypatch):
    """With clocks by hand: a call takes 50 us and 4 ns a byte, the processors 20 us and 1 ns of it."""
    clocks = {"elapsed": 0.0, "processors": 0.0}

    def pass_by(elapsed_us, processors_us):
        clocks["elapsed"] += elapsed_us / 1e6
        clocks["processors"] += processors_us / 1e6

    by_hand = SimpleNamespace(
        perf_counter=lambda: clocks["elapsed"], process_time=lambda: clocks["processors"]
    )
    monkeypatch.setattr(measured_links, "time", by_hand)
    monkeypatch.setattr("torch.distributed.barrier", lambda job: None)

    def add(values):
        pass_by(50 + values.nbytes * 0.004, 20 + values.nbytes * 0.001)

    for by_processor, byte_us in ((False, 0.004), (True, 0.001)):
        found = measured_links._between(None, add, (1 << 10, 1 << 20), 3, by_processor=by_processor)
        assert found == pytest.approx((50, byte_us))

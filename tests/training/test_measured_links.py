"""What messages and sums cost, as the ranks of a job measure it."""

from __future__ import annotations

import pytest

from arborcast import pipeline, topologies
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
    assert found.topology.ranks == 3
    if spec is not None:
        assert found.topology == topologies.load(spec)
    else:
        assert {link.bandwidth for link in found.topology.links} == {found.topology.links[0].bandwidth}
    assert found.allreduce_us((0, 1, 2), 1 << 24) > found.allreduce_us((0, 1, 2), 1 << 20) > 0

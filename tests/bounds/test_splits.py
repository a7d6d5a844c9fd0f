"""How large fabrics split links for an allreduce, tried on small ones: as good as the linear program."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from arborcast import synth
from arborcast.synth.bounds import dispatch
from arborcast.synth.bounds.capacity_lp import split_bandwidth
from arborcast.synth.collective import Collective
from arborcast.synth.packing import packer, splits
from arborcast.synth.topology import Topology
from tests.support.strategies import topologies as graphs


@given(graphs(max_ranks=6, switches=3))
@settings(max_examples=50)
def test_symmetric_fabrics_lose_nothing(topology: Topology) -> None:
    optimum = split_bandwidth(topology, Collective.on(topology, "allreduce")).rate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "_FREE_ROOTS_UP_TO", 0)
        patch.setattr(packer, "SMALL", 0)
        found = synth.solve(topology, "allreduce")
    assert synth.verify(found).errors == ()
    assert found.rate == found.bound.rate == optimum


@given(graphs(max_ranks=5, switches=2, symmetric=False))
@settings(max_examples=40)
def test_unequal_directions_beyond_the_program_stay_between_its_limits(topology: Topology) -> None:
    optimum = split_bandwidth(topology, Collective.on(topology, "allreduce")).rate
    with pytest.MonkeyPatch.context() as patch:
        for module in (splits, dispatch):
            patch.setattr(module, "LARGEST_TWO_WAY", 0)
        found = synth.solve(topology, "allreduce")
    assert synth.verify(found).errors == ()
    assert found.rate <= optimum <= found.bound.rate


@given(graphs(max_ranks=6, switches=2))
@settings(max_examples=40)
def test_batches_that_outlive_their_cuts_pack_exactly(topology: Topology) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packer, "SMALL", 0)
        found = synth.solve(topology, "allgather")
    assert synth.verify(found).errors == ()
    assert found.is_optimal

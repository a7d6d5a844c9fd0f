"""What messages cost where a topology says it: the engine's pieces, no run shorter than the work."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from arborcast import synth
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import TopologyError
from arborcast.synth.formats import topology_to_document
from arborcast.synth.formats.topology_text import topology_to_yaml
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.selection import Selection
from arborcast.synth.simulation.pieces import SEVERAL_HOSTS
from arborcast.synth.simulation.simulator import Runs, simulate
from arborcast.synth.topology import Topology
from arborcast.topologies import load

COST_US = Fraction(10)


def costing(spec: str, message_us: Fraction = COST_US) -> Topology:
    return replace(load(spec), message_us=message_us)


def chunky(topology: Topology, chunks: int) -> Schedule:
    """A broadcast from 0 to 1 of so many chunks, all at once."""
    collective = Collective(Kind.BROADCAST, (0, 1), 0)
    return Schedule.build(
        topology,
        collective,
        Method(f"{chunks} chunks"),
        synth.bound(topology, collective),
        [Chunk(Fraction(1, chunks), 0)] * chunks,
        [Transfer(chunk, 0, 1, 0) for chunk in range(chunks)],
    )


def test_no_run_is_shorter_than_the_work_of_its_busiest_end() -> None:
    fast = costing("ring:2,bandwidth=1000")
    few, many = chunky(fast, 1), chunky(fast, 64)
    assert simulate(many, 1 << 10).time_us == 64 * COST_US
    assert simulate(many, 1 << 10, pieces=2).time_us == 128 * COST_US
    assert simulate(few, 1 << 10).time_us == COST_US
    assert Selection((many, few)).fastest(1 << 10) is few
    # Eight pieces through rank 1, which receives and sends each: no more is claimed than that.
    moves = [Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 1)]
    passing = replace(few, topology=costing("ring:3,bandwidth=1000"), transfers=moves)
    assert simulate(passing, 1 << 20).time_us == 8 * 2 * COST_US
    assert Runs(passing).least_us(1 << 20) == pytest.approx(160)
    # 1 GiB keeps the link longer than 64 messages their ends, and links alone have nothing against them.
    assert Selection((many, few)).fastest(1 << 30) is many
    free = load("ring:2,bandwidth=1000")
    assert Selection((chunky(free, 64), chunky(free, 1))).fastest(1 << 10).chunk_count == 64


@pytest.mark.parametrize("form", ["explicit", "implicit"])
def test_the_simulator_cuts_as_the_engine_does(form: str) -> None:
    for bandwidth, message_us in (("0.01", COST_US), ("25", COST_US / 50)):
        spec = f"torus:3x3,bandwidth={bandwidth}"
        schedule = synth.solve(costing(spec, message_us), "allgather", form=form)  # type: ignore[call-overload]
        for size in (1 << 12, 1 << 20, 1 << 24):
            assert simulate(schedule, size).pieces == SEVERAL_HOSTS.pieces(schedule, size)
    # Dear messages are worth fewer pieces; cheap ones as many as gain anything.
    slow, fine = (chunky(costing("ring:2,bandwidth=0.01", cost), 1) for cost in (COST_US * 20, COST_US))
    cuts = [SEVERAL_HOSTS.pieces(each, 1 << 19) for each in (slow, fine)]
    assert cuts == [int(Fraction(1 << 19, 10) / 8 / 200), 64]


def test_files_say_what_messages_cost(tmp_path: Path) -> None:
    fabric = costing("torus:3x3", Fraction(21, 5))
    (tmp_path / "fabric.yaml").write_text(topology_to_yaml(fabric))
    read = load(str(tmp_path / "fabric.yaml"))
    assert read.message_us == Fraction(21, 5)
    assert read.subset([0, 1, 2]).message_us == read.reversed().message_us == Fraction(21, 5)
    assert "message_us" not in topology_to_document(load("torus:3x3"))
    for form in ("explicit", "implicit"):
        path = tmp_path / f"{form}.json"
        synth.write_schedule(synth.solve(fabric, "allgather", form=form), path)  # type: ignore[call-overload]
        assert synth.read_schedule(path).topology.message_us == Fraction(21, 5)
    wrong = topology_to_yaml(fabric).replace("message_us: 4.2", "message_us: -1")
    (tmp_path / "fabric.yaml").write_text(wrong)
    with pytest.raises(TopologyError, match="message_us"):
        load(str(tmp_path / "fabric.yaml"))

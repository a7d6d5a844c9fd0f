"""What nobody has declared to understand is refused, and every attribute of a topology has been declared."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

import pytest

from arborcast import synth
from arborcast.backends.lowering.lower import lower
from arborcast.backends.programs.formats import export_files
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.synth import features
from arborcast.synth.alltoallv.block_planner import AlltoallvPlanner
from arborcast.synth.baselines.host_network import HostNetwork, in_blocks
from arborcast.synth.baselines.host_orders import best_order
from arborcast.synth.bounds import certified_rate
from arborcast.synth.chunks.solvers.cache import keyed_topology
from arborcast.synth.collective import Collective
from arborcast.synth.errors import TopologyError
from arborcast.synth.features import EVERYBODY, UNDERSTOOD, check_features
from arborcast.synth.formats.documents import topology_from_document, topology_to_document
from arborcast.synth.formats.shapes import LinkShape, SwitchShape, TopologyShape
from arborcast.synth.formats.topology_text import topology_to_yaml
from arborcast.synth.formats.yaml_text import parse_yaml
from arborcast.synth.groups.fair_solver import solve_groups
from arborcast.synth.methods import METHODS, implicit_method_for
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.symmetry.isomorphism import ComparableTopology
from arborcast.synth.topology import Link, Switch, Topology
from arborcast.topologies import load
from tests.support.commands import Said

PLAIN = {
    "link": {"src", "dst", "bandwidth"},
    "switch": {"name"},
    "topology": {"name", "ranks", "links"},
}
"""What everybody understands: ranks, links and bandwidths."""

PROVENANCE = {"link rate_assumed", "link latency_assumed"}
"""Where numbers come from: not compared, so no feature."""


@dataclass(frozen=True, slots=True)
class StreamLink(Link):
    """A link as a contributor would have it: a rate that so many transfers at once are needed for."""

    streams: int | None = None


DGX = load("dgx1")
SCHEDULE = synth.solve(DGX, "allgather")
BUSY = replace(
    DGX,
    links=tuple(StreamLink(*(getattr(link, f.name) for f in fields(Link)), streams=1) for link in DGX.links),
)
NEW = replace(SCHEDULE, topology=BUSY)

DOORS: dict[str, Any] = {
    "method auto": lambda: synth.solve(BUSY, "allgather"),
    "method trees": lambda: synth.solve(BUSY, "allgather", method="trees"),
    "method ring": lambda: synth.solve(BUSY, "allgather", method="ring"),
    "solver of implicit form": lambda: implicit_method_for(BUSY, SCHEDULE.collective),
    "bound": lambda: synth.bound(BUSY, "allgather"),
    "certificate check": lambda: certified_rate(BUSY, SCHEDULE.collective, SCHEDULE.bound.certificate),
    "verifier": lambda: synth.verify(NEW),
    "simulator": lambda: simulate(NEW, 1 << 20),
    "frontier of chunks": lambda: synth.pareto(BUSY, "allgather"),
    "groups": lambda: solve_groups(BUSY, [Collective.on(BUSY, "allgather")]),
    "alltoallv": lambda: AlltoallvPlanner(BUSY),
    "repair": lambda: synth.repair(NEW, without_links=[(0, 1)]),
    "lowering": lambda: lower(NEW, 1 << 10),
    "pipeline planning": lambda: LinkCosts(BUSY),
    "order of hosts": lambda: best_order(HostNetwork(BUSY, in_blocks("ab", [4, 4]))),
}


@pytest.mark.parametrize("consumer", DOORS)
def test_an_attribute_that_nobody_knows_is_refused_by_all(consumer: str) -> None:
    """The contributor's `streams` once gave "optimal, verified" for rates three to four times too high."""
    line = f"topology dgx1: {consumer} does not understand link streams, set at 0->1; nobody does"
    with pytest.raises(TopologyError) as caught:
        DOORS[consumer]()
    assert str(caught.value) == line


def test_all_who_ask_are_tried_but_methods_like_those_above() -> None:
    assert set(DOORS) | features.METHODS | {"export"} == EVERYBODY


def test_parallel_links_that_differ_in_it_are_not_added_up() -> None:
    one, two = (StreamLink(0, 1, Fraction(4), streams=count) for count in (1, 2))
    with pytest.raises(TopologyError, match="link 0->1: parallel links must be alike but for bandwidth"):
        Topology.build("t", 2, [one, two])
    (link,) = Topology.build("t", 2, [one, one]).links
    assert link == replace(one, bandwidth=Fraction(8))


def test_exports_refuse_it(tmp_path: Any) -> None:
    with pytest.raises(TopologyError, match="export does not understand link streams"):
        export_files(NEW, "msccl", tmp_path / "program.xml")


def test_who_understands_it_serves_it_and_the_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNDERSTOOD, "link streams", frozenset({"simulator", "bound"}))  # type: ignore[arg-type]
    check_features(BUSY, "simulator")
    with pytest.raises(TopologyError, match=r"verifier does not .*; it is for bound, simulator$"):
        check_features(BUSY, "verifier")


@pytest.mark.parametrize("words", [["bound", "dgx1", "allgather"], ["solve", "dgx1", "allgather"]])
def test_commands_say_so_in_one_line(command: Any, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setitem(UNDERSTOOD, "link latency_us", frozenset({"verifier"}))  # type: ignore[arg-type]
    said: Said = command(*words)
    assert said.status == 2
    assert "does not understand link latency_us, set at 0->1; it is for verifier" in said.err
    assert len(said.err.splitlines()) == 1


def test_every_attribute_is_declared_and_every_method_asks() -> None:
    """A new attribute of the model fails here until `UNDERSTOOD` says who takes it into account."""
    kinds: dict[str, Any] = {"link": Link, "switch": Switch, "topology": Topology}
    found = {
        f"{what} {each.name}"
        for what, kind in kinds.items()
        for each in fields(kind)
        if each.name not in PLAIN[what]
    }
    assert found - PROVENANCE == set(UNDERSTOOD)
    assert all(consumers <= EVERYBODY for consumers in UNDERSTOOD.values())
    assert {f"method {name}" for name in ("auto", *METHODS)} == features.METHODS


BASE = Topology.build(
    "base",
    2,
    [Link(a, b, Fraction(4), Fraction(1)) for a, b in ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1))],
    [Switch("s", reduces=True, multicasts=True)],
)
OTHER_LINK = {
    "bandwidth": Fraction(5),
    "latency_us": Fraction(2),
    "rate_assumed": "a guess",
    "latency_assumed": "another",
    "addresses": ("10.1.0.1", "10.1.0.2"),
    "lanes": tuple(
        Link(0, 1, rate, Fraction(1), addresses=(f"10.1.{at}.1", f"10.1.{at}.2"))
        for at, rate in enumerate((Fraction(1), Fraction(3)))
    ),
}
OTHER_SWITCH = {
    "name": "t",
    "reduces": False,
    "multicasts": False,
    "turns": True,
    "loopback": True,
    "adder": Fraction(3, 2),
    "trees": 3,
    "latency_us": Fraction(7),
    "stores": True,
}
OTHER_TOPOLOGY = {
    "name": "other",
    "symmetries": ((1, 0, 2),),
    "message_us": Fraction(3),
    "streams": (2, None),
}


def test_every_attribute_has_another_value_below() -> None:
    assert set(OTHER_LINK) == {each.name for each in fields(Link)} - {"src", "dst"}
    assert set(OTHER_SWITCH) == {each.name for each in fields(Switch)}
    assert set(OTHER_TOPOLOGY) == {each.name for each in fields(Topology)} - {"ranks", "links", "switches"}
    # In files lanes are links.
    assert set(LinkShape.__annotations__) - {"between", "from", "to"} == set(OTHER_LINK) - {"lanes"}
    assert set(SwitchShape.__annotations__) == set(OTHER_SWITCH)
    assert set(TopologyShape.__annotations__) == {each.name for each in fields(Topology)}


def changed() -> dict[str, Topology]:
    """The base with one attribute changed, by its name."""
    found = {f"topology {key}": replace(BASE, **{key: value}) for key, value in OTHER_TOPOLOGY.items()}  # type: ignore[arg-type]
    for key, value in OTHER_SWITCH.items():
        switch = replace(BASE.switches[0], **{key: value})  # type: ignore[arg-type]
        found[f"switch {key}"] = replace(BASE, switches=(switch,))
    for key, value in OTHER_LINK.items():
        first = replace(BASE.links[0], **{key: value})  # type: ignore[arg-type]
        found[f"link {key}"] = replace(BASE, links=(first, *BASE.links[1:]))
    return found


CHANGED = changed()


@pytest.mark.parametrize("attribute", CHANGED)
def test_a_changed_attribute_survives_and_is_seen(attribute: str) -> None:
    """Through both documents, reversal and a fragment; by isomorphism and the key of the cache."""
    topology = CHANGED[attribute]
    read = topology_from_document(topology_to_document(topology), "file")
    assert exactly(read) == exactly(topology)
    written = topology_from_document(parse_yaml(topology_to_yaml(topology), "file"), "file")
    assert exactly(written) == exactly(topology)
    assert exactly(topology.reversed().reversed()) == exactly(topology)
    assert exactly(replace(topology.subset([0, 1]), name=topology.name)) == exactly(topology)
    what = attribute.partition(" ")[0]
    is_label = attribute in PROVENANCE or attribute.endswith(" name")
    is_seen = (what != "topology" or attribute == "topology streams") and not is_label
    mine, base = (ComparableTopology(each, latencies=True) for each in (topology, BASE))
    assert (mine.isomorphism(base) is None) == is_seen
    keyed = (is_seen and attribute != "link latency_us") or attribute == "topology symmetries"
    assert (keyed_topology(topology) != keyed_topology(BASE)) == keyed


def exactly(topology: Topology) -> dict[str, Any]:
    """Every attribute, those included that comparisons leave out."""
    return dataclasses.asdict(topology)

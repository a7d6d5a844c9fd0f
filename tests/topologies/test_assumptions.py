"""What is assumed of links: said for every machine, kept by what makes one topology of another, and told."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from arborcast import synth
from arborcast.synth.faults.faulty import without
from arborcast.synth.formats import topology_from_document, topology_to_document
from arborcast.synth.formats.topology_text import topology_to_yaml
from arborcast.synth.formats.yaml_text import parse_yaml
from arborcast.synth.topology import PLANNED, Link, Topology
from arborcast.topologies import GPUS, Rates, catalog, load, load_machine
from arborcast.topologies.cluster import join, with_nics
from arborcast.topologies.fabrics import Rails
from tests.support.commands import Command

SMALL = {"gpus": "4", "boxes": "2", "nodes": "2", "groups": "2"}


def whys(topology: Topology, what: str) -> set[str]:
    return {why for of, why in topology.assumptions if of == what}


@pytest.mark.parametrize(
    ("spec", "rates", "latencies"),
    [
        ("dgx1:boxes=2", set(), set()),
        ("dgx-h100:boxes=2", set(), set()),
        ("ndv4:boxes=2", set(), set()),
        ("p5:boxes=2", set(), {"of InfiniBand, for EFA"}),
        ("a3-mega:boxes=2", set(), {"of InfiniBand, for Ethernet"}),
        ("mi300x", set(), {"of NVLink, for want of a published one"}),
        ("tpu-v4:4x4x4", set(), {"of NVLink, for want of a published one"}),
        ("gaudi3", set(), {"of NVLink, for want of a published one"}),
        (
            "frontier:nodes=2",
            set(),
            {"of NVLink, for want of a published one", "of InfiniBand, for Slingshot"},
        ),
        ("perlmutter", set(), set()),
        (
            "perlmutter:nodes=2",
            {"between switches of Slingshot: as on Frontier"},
            {"of InfiniBand, for Slingshot"},
        ),
        ("hgx-h20", {"h20: press of 2024: NVLink 900 GB/s"}, set()),
        (
            "mi350x:boxes=2,nic=25",
            set(),
            {"of NVLink, for want of a published one", "of InfiniBand, for Ethernet"},
        ),
        ("rtx5090:between=64", set(), {"0.14 us for a PCIe link"}),
        ("torus:3x3", set(), set()),
    ],
)
def test_what_is_assumed_of_the_catalog(spec: str, rates: set[str], latencies: set[str]) -> None:
    topology = load(spec)
    assert whys(topology, "rate") == rates
    assert whys(topology, "latency") == latencies


def test_sources_that_are_no_makers_say_that_they_are_assumed() -> None:
    """Every row whose source admits it carries it to its links; no other does."""
    doubt = re.compile("assum|not found|press|Reuters|taken as|as in a DGX|as in DeepSeek")
    for gpu in GPUS.values():
        if gpu.links and gpu.name != "vr200":  # of which slot and id alone are unknown
            assert bool(doubt.search(gpu.source)) == bool(gpu.assumed), gpu.name
    for entry in catalog():
        if not entry.source:
            continue
        keys = {parameter.key for parameter in entry.parameters}
        given = [f"{key}={value}" for key, value in SMALL.items() if key in keys]
        if "extents" in keys:
            given = ["4x4x4" if entry.name in {"tpu-v4", "tpu-v5p", "tpu-7x"} else "4x4"]
        elif any(parameter.required for parameter in entry.parameters):
            given = ["3"]
        assumed = whys(entry.build(",".join(given)), "rate")
        assert bool(doubt.search(entry.source)) == bool(assumed), (entry.name, assumed, entry.source)


def drawn() -> Topology:
    """Three ranks and a switch; one rate and two latencies are assumed, also of a parallel link."""
    links = [
        Link(0, 3, Fraction(2), Fraction(1), "a guess"),
        Link(3, 0, Fraction(2), Fraction(1)),
        Link(1, 3, Fraction(2), Fraction(1)),
        Link(3, 1, Fraction(2), Fraction(1), "", "a habit"),
        Link(2, 3, Fraction(2), Fraction(1)),
        Link(3, 2, Fraction(2), Fraction(1)),
        Link(0, 1, Fraction(5), Fraction(1)),
        Link(0, 1, Fraction(1), Fraction(9), "another guess", "another habit"),
    ]
    return Topology.build("drawn", 3, links, ["hub"])


def by_number(topology: Topology) -> set[tuple[object, ...]]:
    label = topology.label
    return {
        (label(x.src), label(x.dst), x.latency_us, x.rate_assumed, x.latency_assumed) for x in topology.cables
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda it: it.reversed().reversed(),
        lambda it: it.reordered([2, 0]).reordered([1, 2, 0]),
        lambda it: it.forwarding,
        lambda it: without(it).topology,
        lambda it: topology_from_document(json.loads(json.dumps(topology_to_document(it))), "f"),
        lambda it: topology_from_document(parse_yaml(topology_to_yaml(it), "f"), "f"),
    ],
)
def test_it_goes_with_the_links(change: Callable[[Topology], Topology]) -> None:
    assert by_number(change(drawn())) == by_number(drawn())


def test_a_fragment_says_what_is_assumed_of_its_own_links() -> None:
    assert drawn().subset([1, 2]).assumptions == {("latency", "a habit"): 1}
    box = load("rtx5090")
    assert whys(box, "rate") and not whys(box.subset([0, 1, 2]), "rate")


def test_joined_hosts_keep_what_is_assumed_inside() -> None:
    host = with_nics(load_machine("rtx5090"), Fraction(25))
    joined = join("two", [host, host], Rails()).machine.topology
    assert whys(joined, "rate") == whys(load("rtx5090"), "rate")
    assert "of InfiniBand, for an unknown network" in whys(joined, "latency")


def test_schedules_carry_it(tmp_path: Path) -> None:
    box = load("rtx5090:gpus=4")
    for schedule in (
        synth.solve(box, "allgather", form="explicit"),
        synth.solve(box, "allgather", form="implicit"),
    ):
        synth.write_schedule(schedule, tmp_path / "s.json")
        assert synth.read_schedule(tmp_path / "s.json").topology.assumptions == box.assumptions


def test_commands_say_for_which_rates_a_limit_is_proved(command: Command) -> None:
    said = command("bound", "rtx5090", "alltoall").out
    assert "at most" in said
    assert (
        "rates    proved for these rates, of which 2 of 18 are assumed: the raw rate of 6 UPI links" in said
    )
    answer = command("bound", "rtx5090", "alltoall", "--json").document
    assert {key: answer["assumed"][-1][key] for key in ("of", "links")} == {"of": "rate", "links": 2}
    assert "assumed" not in command("bound", "dgx1", "alltoall").out
    assert "waits    all 56 latencies are assumed" in command("show", "mi300x").out


@pytest.mark.parametrize("spec", ["assumed", "stated"])
def test_groups_and_sweeps_say_which_rates_are_assumed(spec: str, tmp_path: Path, command: Command) -> None:
    why = "a guess" if spec == "assumed" else ""
    pairs = [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)]
    links = [Link(src, dst, Fraction(1), rate_assumed=why if src == 0 else "") for src, dst in pairs]
    file = tmp_path / "triangle.yaml"
    file.write_text(topology_to_yaml(Topology.build("triangle", 3, links)), encoding="utf-8")
    groups = ("groups", str(file), "--group", "allgather:0-2")
    sweep = (
        "sweep",
        str(file),
        "-o",
        str(tmp_path / "answers"),
        "--collectives",
        "allgather",
        "--fragments",
        "3",
    )
    for words in (groups, sweep):
        assert ("2 of 6 are assumed: a guess" in command(*words).out) == bool(why)
        told = command(*words, "--json").document["assumed"]
        assert told == ([{"of": "rate", "links": 2, "why": why}] if why else [])


@pytest.mark.parametrize("spec", ["dgx1", "pro6000", "mi300x"])
def test_planning_rates_prove_nothing(spec: str, tmp_path: Path, command: Command) -> None:
    words = (spec, "alltoall", "--rates", "nccl")
    file = str(tmp_path / "s.json")
    said = [
        command("show", spec, "--rates", "nccl"),
        command("bound", *words),
        command("solve", *words, "--method", "routes", "-o", file),
        command("verify", file),
        command("simulate", file, "--sizes", "1MiB"),
    ]
    if spec != "pro6000":  # minutes
        said.append(command("pareto", spec, "allgather", "--rates", "nccl", "--max-steps", "3"))
    for ran in said:
        assert PLANNED in ran.out
        assert not re.search("at most|at least|no less|proof|proved|proven|optimal", ran.out)
    assert {x.rate_assumed for x in load(spec, rates=Rates.NCCL).links} == {PLANNED}
    answer = command("bound", *words, "--json").document
    assert PLANNED in [each["why"] for each in answer["assumed"]]

"""`synth export`, `import`, and verify and run of programs: what they say, write and refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest

from arborcast.backends.programs import mscclpp
from arborcast.backends.programs.formats import FORMATS
from arborcast.backends.programs.msccl.reader import read
from arborcast.backends.programs.msccl.writer import write
from arborcast.backends.programs.program import Move
from arborcast.synth import solve, write_schedule
from arborcast.synth.collective import Kind
from arborcast.synth.nccl_protocol import Protocol
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.programs.drawn import drawn
from tests.programs.test_checker import exchange
from tests.support.commands import Command, refused

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def exported(tmp_path: Path, command: Command) -> Path:
    write_schedule(solve(load("ring:4"), "allreduce"), tmp_path / "ring.json")
    file = tmp_path / "ring.xml"
    said = command("export", str(tmp_path / "ring.json"), "-o", str(file), "--sizes", "1KiB:1MiB")
    assert (said.status, said.err) == (0, "")
    assert f"{file}: allreduce among 4 ranks, in place: 4 chunks by Simple, 36 steps" in said.out
    assert "rate  4/3 GB/s (1.333) by the fullest link, 100 % of the proven bound" in said.out
    return file


def test_a_schedule_goes_out_and_comes_back(exported: Path, command: Command) -> None:
    verdict = command("verify", str(exported), "--topology", "ring:4", "--json").document
    assert verdict["correct"] is True
    assert (verdict["rate"], verdict["bound"]) == ("4/3", "4/3")
    assert (verdict["least_bytes"], verdict["most_bytes"]) == (1024, 1 << 20)
    assert "100 % of the proven bound" in command("verify", str(exported), "--topology", "ring:4").out
    ran = command("run", str(exported), "--sizes", "1KiB", "--json").document
    assert ran["correct"] is True
    assert ran["rows"][0]["orders"] == 5
    back = exported.with_suffix(".json")
    assert command("import", str(exported), "--topology", "ring:4", "-o", str(back)).status == 0
    assert command("verify", str(back), "--json").document["rate"] == "4/3"


@pytest.mark.parametrize("target", FORMATS)
def test_what_runs_a_program_keeps_to_no_streams(target: str, tmp_path: Path, command: Command) -> None:
    """Which is said; its rate counts links alone, and so does the bound beside it."""
    ring = replace(load("ring:4"), symmetries=(), streams=(1,) * 4)
    file, out = tmp_path / "ring.json", tmp_path / f"out.{target}"
    found = solve(ring, "allreduce", form="explicit", method="multiring")
    write_schedule(found, file)
    sizes = ("--sizes", "1KiB") if target in {"goal", "chakra"} else ()
    said = command("export", str(file), "--to", target, "-o", str(out), *sizes)
    assert (said.status, said.err) == (0, ""), said
    assert said.out.splitlines()[-1] == (
        "  streams are not kept: what runs this may send to more ranks at once than the topology says"
    )
    if target == "msccl":
        assert (found.bound.rate, solve(load("ring:4"), "allreduce").bound.rate) == (
            Fraction(2, 3),
            Fraction(4, 3),
        )
        assert "rate  2/3 GB/s (0.6667) by the fullest link, 50 % of the proven bound" in said.out


def test_a_hang_is_told_and_drawn(tmp_path: Path, command: Command) -> None:
    program = drawn(exchange(3), Kind.ALLTOALL, chunks=20, in_place=False, out_of_place=True)
    file, picture = tmp_path / "hang.xml", tmp_path / "hang.svg"
    file.write_text(write(program))
    said = command("verify", str(file), "--picture", str(picture))
    assert (said.status, said.out) == (1, f"drawn {picture}\n")
    assert "not correct: hangs, 2 blocks wait: rank 0 block 0 step 2 (s i2) waits for room" in said.err
    assert said.err.count("\n") == 1
    assert "<svg" in picture.read_text()
    ran = command("run", str(file), "--sizes", "1KiB")
    assert (ran.status, "2 of 2 blocks wait for ever" in ran.err) == (1, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<!DOCTYPE a [<!ENTITY b "c">]><algo/>', "takes no DTD"),
        ("<system version='1'/>", "takes no single quotes"),
        ('<system version="1"/>', "must begin with an element algo, got 'system'"),
        ("<" * 5000, "must be an element"),
        ("<a>" * 5000, "must not be nested this deep"),
    ],
)
def test_other_xml_is_refused(text: str, message: str, tmp_path: Path, command: Command) -> None:
    file = tmp_path / "file.xml"
    file.write_text(text)
    for words in (("verify", str(file)), ("run", str(file))):
        refused(command(*words), "file.xml: ", message)


def test_a_table_becomes_a_folder_with_its_commands(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "table"
    words = ("-o", str(folder), "--sizes", "1KiB:1MiB", "--json")
    said, again = (command("export", "ring:3", "broadcast", "--root", "1", *words) for _ in range(2))
    assert again == said
    files = [entry["file"] for entry in said.document["files"]]
    assert sorted(path.name for path in (folder / "msccl-algorithms").iterdir()) == sorted(files)
    ranges = []
    for name in files:
        program = read((folder / "msccl-algorithms" / name).read_text(), root=1)
        assert (program.kind, program.ranks) == (Kind.BROADCAST, 3)
        assert program.chunks & (program.chunks - 1) == 0  # so that usual sizes divide by them
        if program.in_place:
            ranges.append((program.least_bytes, program.most_bytes))
    assert ranges[0][0] == 0 and ranges[-1][1] is None
    assert all(before[1] is not None and before[1] + 1 == after[0] for before, after in pairwise(ranges))
    readme = (folder / "README.md").read_text()
    assert "mpirun -np 3 -x MSCCL_ALGO_DIR=$PWD/msccl-algorithms" in readme
    assert "broadcast_perf" in readme and "Its root is rank 1" in readme
    refused(
        command("export", "ring:3", "reduce", *words[:-1]), "must hold nothing else, as MSCCL reads every"
    )


def test_a_table_of_plans_becomes_a_folder_with_its_commands(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "table"
    spec = "star:4,in-network=loopback,latency=10"
    words = ("export", spec, "allreduce", "--to", "mscclpp", "-o", str(folder), "--sizes", "1KiB:1MiB")
    assert command(*words).status == 0
    readme = (folder / "README.md").read_text()
    plans = {path.name: path.read_text() for path in sorted((folder / "mscclpp-plans").iterdir())}
    programs = {name: mscclpp.read(text) for name, text in plans.items()}
    protocols = {True: set[Protocol](), False: set[Protocol]()}
    for program in programs.values():
        operations = [one for row in program.parts[0].blocks for one in row.operations]
        protocols[any(isinstance(one, Move) and one.switch for one in operations)].add(program.protocol)
    assert protocols[True] == {Protocol.SIMPLE}  # switches add no packets
    assert Protocol.LL in protocols[False]
    ranges = [(one.least_bytes, one.most_bytes) for one in programs.values() if one.in_place]
    assert ranges[0][0] == 0 and ranges[-1][1] is None
    assert all(before[1] is not None and before[1] + 1 == after[0] for before, after in pairwise(ranges))
    for name, program in programs.items():
        line = next(line for line in readme.splitlines() if f"mscclpp-plans/{name} " in line)
        size = int(line.split("--size ")[1].split()[0])
        assert size % (16 * program.chunks) == 0  # what the executor asks
        assert program.least_bytes <= size <= (program.most_bytes or size)
        assert ("--in_place" in line) is program.in_place
        assert command("verify", str(folder / "mscclpp-plans" / name)).status == 0
    refused(command(*words[:2], "gather", *words[3:]), "ranks besides the root have but one")
    refused(
        command(*words[:3], "--ranks-per-host", "2", *words[5:]), "--ranks-per-host: is nothing that msccl"
    )


def test_a_table_keeps_its_large_sizes_where_switches_only_forward(tmp_path: Path, command: Command) -> None:
    """NVLink SHARP does not do what these switches can."""
    words = ("export", "star:4,in-network=both", "allreduce", "--to", "mscclpp", "--sizes", "1KiB:1MiB")
    found = command(*words, "-o", str(tmp_path / "switches"), "--json").document
    assert any(line.endswith("solve with --no-in-network") for line in found["missing"])
    found = command(*words, "-o", str(tmp_path / "ranks"), "--no-in-network", "--json").document
    assert found["missing"] == []
    assert found["files"][-1]["most_bytes"] is None


def test_the_document_of_a_refusal_is_one_object(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "race.xml"
    file.write_text(write(drawn("0>1: s i0\n0<1: r i0\n1<0: rrc i0 i0\n1>0: s i0")))
    said = command("verify", str(file), "--json")
    found = json.loads(said.out)
    assert (said.status, found["correct"], found["kinds"]) == (1, False, ["race"])
    assert [wait["rank"] for wait in found["trace"]] == [1, 1]


def test_plans_of_mscclpp_go_out_and_are_judged(tmp_path: Path, command: Command) -> None:
    schedule, plan = tmp_path / "ring.json", tmp_path / "plan.json"
    write_schedule(solve(load("ring:4"), "allreduce", method="multiring"), schedule)
    said = command("export", str(schedule), "--to", "mscclpp", "--ranks-per-host", "2", "-o", str(plan))
    assert (said.status, said.err) == (0, "")
    assert "4/3 GB/s (1.333) as its puts follow each other, 100 % of the proven bound" in said.out
    assert command("verify", str(plan), "--json").document["format"] == "mscclpp"
    assert command("run", str(plan), "--sizes", "1KiB", "--json").document["correct"] is True
    back = tmp_path / "back.json"
    assert command("import", str(plan), "--topology", "ring:4", "-o", str(back)).status == 0
    assert command("verify", str(back), "--json").document["rate"] == "4/3"
    document = json.loads(plan.read_text())
    blocks = document["gpus"][0]["threadblocks"]
    blocks[0]["ops"] = [op for op in blocks[0]["ops"] if "signal" not in op["name"] and op["name"] != "pws"]
    plan.write_text(json.dumps(document))
    said = command("verify", str(plan))
    assert said.status == 1
    assert "signals" in said.err


def test_rings_and_steps_go_out_and_come_back(tmp_path: Path, command: Command) -> None:
    schedule = tmp_path / "ring.json"
    write_schedule(solve(load("ring:4"), "allreduce", method="multiring"), schedule)
    for target, said, rate in (
        ("nccl-graph", "2 orders of the ranks, 2 channels; for NCCL_ALGO=Ring", "4/3"),
        ("sccl", "steps and rounds", "4/3"),
    ):
        file, back = tmp_path / target, tmp_path / f"{target}.json"
        out = command("export", str(schedule), "--to", target, "-o", str(file))
        assert (out.status, out.out) == (0, f"{file}: {said}\n")
        assert command("verify", str(file), "--topology", "ring:4", "--json").document["rate"] == rate
        assert command("import", str(file), "--topology", "ring:4", "-o", str(back)).status == 0
        assert command("verify", str(back), "--json").document["rate"] == rate
    refused(command("verify", str(tmp_path / "nccl-graph")), "name the topology (--topology)")


def test_simulators_are_given_one_size(tmp_path: Path, command: Command) -> None:
    schedule, file = tmp_path / "ring.json", tmp_path / "ring.goal"
    write_schedule(solve(load("ring:4"), "allreduce"), schedule)
    refused(command("export", str(schedule), "--to", "goal", "-o", str(file)), "name it (--sizes)")
    said = command("export", str(schedule), "--to", "goal", "--sizes", "1MiB", "-o", str(file))
    assert said.out == f"{file}: o = g = O = 0, L = 0 ns, G = 1 ns a byte, S > 262144\n"
    assert file.read_text().startswith("// ring:4 allreduce, 1048576 bytes\n")
    traces = tmp_path / "ring"
    said = command(
        "export", str(schedule), "--to", "chakra", "--sizes", "1MiB", "--pieces", "2", "-o", str(traces)
    )
    assert said.status == 0
    assert sorted(path.name for path in tmp_path.glob("*.et")) == [f"ring.{rank}.et" for rank in range(4)]
    wrong = command("export", str(schedule), "--to", "sccl", "--protocol", "LL", "-o", str(file))
    refused(wrong, "--protocol: is nothing that sccl knows")


def test_roots_are_those_of_the_file_or_of_the_command(tmp_path: Path, command: Command) -> None:
    write_schedule(solve(load("ring:4"), "broadcast", root=2), tmp_path / "b.json")
    for target, name in (("msccl", "b.xml"), ("sccl", "sccl.json")):
        said = command("export", str(tmp_path / "b.json"), "--to", target, "-o", str(tmp_path / name))
        assert (said.status, said.err) == (0, "")
    ran = command("run", str(tmp_path / "b.xml"), "--root", "2", "--sizes", "1KiB", "--json").document
    assert ran["correct"] is True
    refused(command("run", str(tmp_path / "b.xml"), "--iterations", "0"), "must be at least 1, got 0")
    file = str(tmp_path / "sccl.json")
    assert command("verify", file, "--root", "2").status == 0
    refused(command("verify", file, "--root", "1"), "does broadcast from 2, not broadcast from 1")
    refused(command("verify", file, "--collective", "allgather"), "does broadcast from 2, not allgather")


def test_names_of_ours_make_no_file_another_runtimes(tmp_path: Path, command: Command) -> None:
    file = tmp_path / "s.json"
    ring = load("ring:3")
    write_schedule(solve(Topology.build("gpus", ring.ranks, ring.links), "allreduce"), file)
    assert command("verify", str(file)).status == 0


def test_steps_that_move_nothing_are_told(exported: Path, command: Command) -> None:
    exported.write_text(re.sub(r'cnt="[0-9]+"', 'cnt="0"', exported.read_text()))
    said = command("verify", str(exported))
    assert (said.status, said.err.count("\n")) == (1, 1)
    assert "moves nothing" in said.err


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_offered_explained_and_has_its_functions(name: str, command: Command) -> None:
    row = FORMATS[name]
    help_text = " ".join(command("export", "--help").out.split())
    assert f"{name}: {row.about}" in help_text
    assert name in (ROOT / "docs" / "how-to" / "export.md").read_text()
    for field in ("export", "write", "read", "table"):
        assert not getattr(row, field) or row.load(field) is not None
    assert bool(row.read) == bool(row.begins) == bool(row.marks)

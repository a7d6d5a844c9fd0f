"""NCCL's graph files, GOAL, Chakra traces and SCCL's JSON: written, read back, refused."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.backends.programs import chakra, goal, nccl_graph, sccl
from arborcast.backends.programs.program import ProgramError
from arborcast.synth.collective import TREE_KINDS, Collective, Kind
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.refusals import refuses
from tests.support.strategies import topologies

EXAMPLES = Path(__file__).resolve().parents[2] / "topologies" / "examples"

# The two rings of a ring, one each way: of 4 GB/s out and in per rank, 2 each.
DRAWN = """<graphs version="1">
  <graph id="0" pattern="4" crossnic="0" nchannels="2" speedintra="1" speedinter="1" latencyinter="0" typeintra="NVL" typeinter="PIX" samechannels="1">
    <channel><gpu dev="0" rank="0"/><gpu dev="2" rank="2"/><gpu dev="1" rank="1"/></channel>
    <channel><gpu dev="0" rank="0"/><gpu dev="1" rank="1"/><gpu dev="2" rank="2"/></channel>
  </graph>
  <graph id="1" pattern="3" crossnic="0" nchannels="2" speedintra="1" speedinter="1" latencyinter="0" typeintra="NVL" typeinter="PIX" samechannels="1">
    <channel><gpu dev="0" rank="0"/><gpu dev="2" rank="2"/><gpu dev="1" rank="1"/></channel>
    <channel><gpu dev="0" rank="0"/><gpu dev="1" rank="1"/><gpu dev="2" rank="2"/></channel>
  </graph>
</graphs>
"""  # noqa: E501  (as NCCL's parser wants it: no line ends within an element)


def line(ranks: int) -> Topology:
    """Ranks side by side, 1 GB/s each way."""
    cables = [(rank, rank + 1) for rank in range(ranks - 1)]
    return Topology.build(
        "line", ranks, [Link(*ends, Fraction(1)) for pair in cables for ends in (pair, pair[::-1])]
    )


def test_rings_are_written_as_drawn() -> None:
    graphs = nccl_graph.export_graphs(synth.solve(load("ring:3"), "allreduce", method="multiring"))
    assert nccl_graph.write(graphs).partition("-->\n")[2] == DRAWN
    assert nccl_graph.read(DRAWN) == graphs


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_rings_come_back_at_the_same_rate(kind: Kind) -> None:
    for spec in ("ring:4", "dgx1"):
        schedule = synth.solve(load(spec), kind, method="multiring")
        graphs = nccl_graph.read(nccl_graph.write(nccl_graph.export_graphs(schedule)))
        again = nccl_graph.rings_as_schedule(graphs, schedule.topology, schedule.collective)
        assert synth.verify(again).correct
        assert again.rate == schedule.rate


def test_faster_rings_get_several_channels() -> None:
    graphs = nccl_graph.export_graphs(synth.solve(load("dgx-a100"), "allreduce", method="multiring"))
    assert len(set(graphs.rings)) == 1
    assert (len(graphs.rings), graphs.speed) == (10, 30)  # of 300 GB/s


@pytest.mark.parametrize(("method", "algorithm"), [("multiring", "Ring"), ("trees", "Tree")])
def test_the_file_says_for_whom_it_is(method: str, algorithm: str) -> None:
    """Before 2.30.3 NCCL reads `dev`, in hexadecimal. The comment ends once, and says what to set."""
    fabric = line(2) if method == "trees" else load("ring:3")
    schedule = synth.solve(fabric, "allreduce", method=method)
    gpus = [12, 3, 5][: fabric.ranks]
    files = nccl_graph.export(schedule, gpus=gpus)
    text = str(files.contents[""])
    comment, _, rest = text.partition("-->")
    assert f"NCCL_ALGO={algorithm} " in comment
    assert f"NCCL_ALGO={algorithm}" in files.said
    assert comment.startswith("<!-- ")
    assert "--" not in comment[4:]
    entries = re.findall(r'<gpu dev="([0-9a-f]+)" rank="(\d)"/>', rest)
    assert {(int(dev, 16), int(rank)) for dev, rank in entries} == {
        (gpu, rank) for rank, gpu in enumerate(gpus)
    }
    assert nccl_graph.read(text) == replace(nccl_graph.export_graphs(schedule), algorithm="Ring")
    for wrong in ([1], [1] * fabric.ranks):
        with pytest.raises(ProgramError, match=f"gpus: must be one for each of {fabric.ranks} ranks"):
            nccl_graph.export(schedule, gpus=wrong)


def test_what_is_no_ring_is_refused() -> None:
    with pytest.raises(ProgramError, match="chunk 0: forks or joins at rank 0"):
        nccl_graph.export_graphs(synth.solve(load("ring:4"), "allgather"))
    with pytest.raises(ProgramError, match="alltoall: a graph of NCCL runs broadcast"):
        nccl_graph.export_graphs(synth.solve(load("ring:4"), "alltoall"))


@refuses("old", "new", "said")
def test_files_that_nccl_refuses_or_breaks_on_are_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(ProgramError) as refusal:
        nccl_graph.read(DRAWN.replace(old, new, 1))
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_nccl_passes_over_is_named() -> None:
    (note,) = nccl_graph.read(DRAWN.replace('nchannels="2"', 'nchannels="1"', 1)).notes[:1]
    assert note == "graph 0: nchannels is 1; the other 1 channels are passed over"


def test_goal_of_a_chain_is_as_drawn() -> None:
    text = goal.write(synth.solve(line(3), "broadcast"), 1000, pieces=2)
    assert (
        text.splitlines()[2:]
        == """num_ranks 3
rank 0 {
s0: send 500b to 1 tag 0 cpu 0 nic 0
s1: send 500b to 1 tag 1 cpu 0 nic 0
s1 irequires s0
}
rank 1 {
r0: recv 500b from 0 tag 0 cpu 0 nic 0
r1: recv 500b from 0 tag 1 cpu 0 nic 0
s2: send 500b to 2 tag 2 cpu 1 nic 1
s2 requires r0
s3: send 500b to 2 tag 3 cpu 1 nic 1
s3 irequires s2
s3 requires r1
}
rank 2 {
r2: recv 500b from 1 tag 2 cpu 1 nic 1
r3: recv 500b from 1 tag 3 cpu 1 nic 1
}""".splitlines()
    )


def goal_time_us(text: str) -> float:
    """When the last message of a file has come: links serve in their order, hosts store and forward."""
    said = re.search(r"L = (\d+) ns, G = (\S+) ns", text)
    assert said is not None
    latency, gap = int(said[1]), float(said[2])
    sends: dict[str, tuple[int, int, int, int]] = {}
    before: dict[str, list[str]] = defaultdict(list)
    host = -1
    for entry in text.splitlines():
        if entry.startswith("rank "):
            host = int(entry.split()[1])
        if found := re.match(r"(s\d+): send (\d+)b to (\d+) tag \d+ cpu (\d+) nic \4$", entry):
            sends[found[1]] = int(found[2]), host, int(found[3]), int(found[4])
        if found := re.match(r"(s\d+) i?requires ([sr]\d+)$", entry):
            before[found[1]].append(found[2])
    starts: dict[str, float] = {}
    free: dict[tuple[int, int], float] = defaultdict(float)  # when a host's link is free
    while len(starts) < len(sends):
        ready = [
            name
            for name in sends
            if name not in starts and all(f"s{other[1:]}" in starts for other in before[name])
        ]
        assert ready, "the orders of the links wait for each other"
        for name in ready:
            size, src, _, number = sends[name]
            come = [f"s{other[1:]}" for other in before[name] if other[0] == "r"]
            there = (starts[other] + sends[other][0] * gap + latency for other in come)
            starts[name] = max(free[src, number], *there, 0)
            free[src, number] = starts[name] + size * gap
    return max(start + sends[name][0] * gap + latency for name, start in starts.items()) / 1000


@pytest.mark.parametrize(
    ("spec", "kind"), [("dgx1", "broadcast"), ("star:4", "allreduce"), ("two-boxes.yaml", "allreduce")]
)
def test_goal_takes_what_our_simulator_says(spec: str, kind: str) -> None:
    """Over switches, too, which pieces wait at and on whose ports they queue."""
    topology = load(str(EXAMPLES / spec) if spec.endswith("yaml") else spec)
    links = [replace(link, latency_us=Fraction(0)) for link in topology.links]
    topology = Topology.build(topology.name, topology.ranks, links, topology.switches).forwarding
    schedule = synth.solve(topology, kind)
    ours = synth.simulate(schedule, 64 << 20, pieces=8).time_us
    assert goal_time_us(goal.write(schedule, 64 << 20, pieces=8)) == pytest.approx(ours, rel=1e-4)


@settings(max_examples=20, deadline=None)
@given(topologies(max_ranks=5, max_bandwidth=3), st.sampled_from(TREE_KINDS), st.integers(1, 3))
def test_links_have_numbers_of_their_own_and_messages_two_ends(
    topology: Topology, kind: Kind, pieces: int
) -> None:
    schedule = synth.solve(topology, kind)
    text = goal.write(schedule, 1 << 20, pieces=pieces)
    links: dict[tuple[int, int], set[tuple[str, int]]] = defaultdict(set)
    ends: dict[tuple[int, ...], list[str]] = defaultdict(list)
    rank = -1
    for line in text.splitlines():
        if line.startswith("rank "):
            rank = int(line.split()[1])
        found = re.search(r": (send|recv) (\d+)b \w+ (\d+) tag (\d+) cpu (\d+) nic \5$", line)
        if found:
            name, size, peer, tag, number = found[1], *map(int, found.groups()[1:])
            links[rank, number].add((name, peer))
            ends[(tag, size, *((rank, peer) if name == "send" else (peer, rank)))].append(name)
    assert all(len(uses) == 1 for uses in links.values())
    assert all(sorted(names) == ["recv", "send"] for names in ends.values())
    assert goal_time_us(text) * 1.001 >= (1 << 20) / float(schedule.rate) / 1000


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


def fields(data: bytes) -> list[tuple[int, Any]]:
    """The fields of a message of protobuf: numbers, and what has a length."""
    at, found = 0, []
    while at < len(data):
        tag, at = varint(data, at)
        value, at = varint(data, at)
        if tag & 7 == 2:
            found.append((tag >> 3, data[at : at + value]))
            at += value
        else:
            found.append((tag >> 3, value))
    return found


def test_chakra_traces_are_messages_of_protobuf() -> None:
    files = chakra.write(synth.solve(line(3), "broadcast"), 1000, pieces=2)
    nodes = []
    at = 0
    while at < len(files[1]):
        length, at = varint(files[1], at)
        nodes.append(fields(files[1][at : at + length]))
        at += length
    assert nodes[0] == [(1, b"0.0.4")]
    assert [dict(node)[3] for node in nodes[1:]] == [6, 6, 5, 5]  # receives, then sends
    assert [dict(node)[1] for node in nodes[1:]] == [0, 1, 2, 3]
    assert dict(nodes[4])[5] == b"\x01"  # the second send waits for the second receive
    said = {dict(fields(value))[1]: fields(value)[1] for number, value in nodes[4] if number == 10}
    assert said == {b"comm_src": (7, 1), b"comm_dst": (7, 2), b"comm_tag": (7, 3), b"comm_size": (9, 500)}


@settings(max_examples=8, deadline=None)
@given(topologies(max_ranks=4, max_bandwidth=2), st.sampled_from(sorted(sccl.NAMES)))
def test_steps_of_sccl_come_back_and_do_their_job(topology: Topology, kind: Kind) -> None:
    schedule = synth.solve(topology, kind)
    if topology.switches:
        with pytest.raises(ProgramError, match="without switches"):
            sccl.write(schedule)
        return
    text = sccl.write(schedule)
    _replay(json.loads(text))
    again = sccl.read(text, topology=topology)
    assert synth.verify(again).correct
    assert again.collective == schedule.collective
    assert {hop: Fraction(load) for hop, load in again.load.items()} == dict(schedule.load)


def test_steps_that_swap_parts_of_a_sum_are_refused() -> None:
    """Each rank takes the other's values in place of its own, then they add: SCCL's files cannot say that."""
    topology = load("full:2")
    collective = Collective.on(topology, Kind.ALLREDUCE)
    moves = [
        Transfer(0, src, 1 - src, step, reduce) for step, reduce in ((0, False), (1, True)) for src in (0, 1)
    ]
    limit = synth.bound(topology, Kind.ALLREDUCE)
    swap = Schedule.build(topology, collective, Method("drawn"), limit, [Chunk(Fraction(1), 0)], moves)
    assert synth.verify(swap).correct
    with pytest.raises(ProgramError, match="chunk 0, step 0: rank 0 replaces what rank 1 holds of the sum"):
        sccl.write(swap)


def _replay(found: dict[str, Any]) -> None:
    """As msccl-tools judges a file: who holds a chunk passes it on, links have room in their rounds."""
    parts = found["instance"]["chunks"]
    chunks = [
        (set(chunk["pre"]), set(chunk["post"]), chunk["addr"] * parts + part)
        for chunk in found["collective"]["chunks"]
        for part in range(parts)
    ]
    held = [set(before) for before, _, _ in chunks]
    for step in found["steps"]:
        now = [set(ranks) for ranks in held]
        loads: dict[tuple[int, int], int] = defaultdict(int)
        for address, source, target in step["sends"]:
            loads[target, source] += 1
            for ranks, before, (_, _, at) in zip(now, held, chunks, strict=True):
                if at == address and source in before:
                    ranks.add(target)
        held = now
        assert all(
            load <= step["rounds"] * found["topology"]["links"][to][at] for (to, at), load in loads.items()
        )
    assert all(after <= ranks for ranks, (_, after, _) in zip(held, chunks, strict=True))


@refuses("change", "said")
def test_files_that_are_not_sccls_are_refused(change: dict[str, Any], said: str) -> None:
    document = {**json.loads(sccl.write(synth.solve(line(2), "allgather"))), **change}
    with pytest.raises(ProgramError) as refusal:
        sccl.read(json.dumps(document))
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_messages_of_one_chunk_follow_each_other() -> None:
    schedule = synth.solve(load("ring:4"), Collective.on(load("ring:4"), "broadcast"), method="ring")
    times = [transfer.step for transfer in schedule.transfers]
    assert all(one <= other for one, other in pairwise(times))
    with pytest.raises(ProgramError, match="size must be at least 1 byte, got 0"):
        goal.write(schedule, 0)
    with pytest.raises(ProgramError, match="pieces must be at least 1, got 0"):
        chakra.write(schedule, 8, pieces=0)

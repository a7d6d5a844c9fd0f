"""Peers: what each of them writes, drawn or random, becomes a schedule that the verifier judges."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.bench import peers
from arborcast.bench.adapters import forestcoll as peers_forestcoll
from arborcast.bench.adapters import ours
from arborcast.bench.adapters import rows as peers_rows
from arborcast.bench.adapters import sccl as peers_sccl
from arborcast.bench.adapters import tacos as peers_tacos
from arborcast.bench.adapters.answer import Algorithm, Answer, CannotAskError, Question, Reading, answer_of
from arborcast.bench.harness.document import read_document
from arborcast.bench.harness.processes import Finished
from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InputError, ScheduleError
from arborcast.synth.packing.exact import pack_exactly
from arborcast.synth.topology import Link, Topology
from arborcast.synth.verification.verifier import verify
from tests.support.refusals import refuses
from tests.support.strategies import topologies as drawn_topologies


def asked(spec: str | Topology, kind: str = "allgather", root: int = 0) -> Question:
    topology = topologies.load(spec) if isinstance(spec, str) else spec
    collective = Collective.on(topology, kind, root=root)
    return Question(topology.name, topology, collective, bound(topology, collective))


def test_ours_is_asked_about_a_fragment() -> None:
    fragment = topologies.load("dgx1", ranks=(1, 4, 5))
    collective = Collective.on(fragment, "allgather")
    question = Question("dgx1", fragment, collective, bound(fragment, collective), (1, 4, 5))
    (algorithm,) = ours.Ours("trees").ask(question, 120).algorithms
    assert algorithm.schedule.topology == fragment
    assert question.fabric == fragment.name


def only(reading: Reading) -> Algorithm:
    (algorithm,) = reading[1]
    return algorithm


def finished(output: str = "", **changes: Any) -> Finished:
    facts = {
        "status": 0,
        "errors": "",
        "seconds": 9.0,
        "cpu_seconds": 8.0,
        "peak_MB": 70.0,
        "timed_out": False,
    }
    return Finished(output=output, **(facts | changes))


# --- ForestColl -------------------------------------------------------------------------------------------


def star_trees() -> dict[str, Any]:
    """A star of three ranks around switch 3: a chain 0 -> 1 -> 2 from rank 0, and its two rotations.

    Each rank sends twice in all, so that a unit of each tree takes 2 units of time: 3 blocks of 1 in 2.
    """
    return {
        "call_seconds": 0.25,
        "time_units": 2.0,
        "units": 1,
        "trees": [
            {"root": 0, "count": 1, "paths": [[[0, 3], [3, 1]], [[1, 3], [3, 2]]]},
            {"root": 1, "count": 1, "paths": [[[1, 3], [3, 2]], [[2, 3], [3, 0]]]},
            {"root": 2, "count": 1, "paths": [[[2, 3], [3, 0]], [[0, 3], [3, 1]]]},
        ],
    }


def test_trees_of_forestcoll_run_backwards_for_a_reduce_scatter() -> None:
    """The star is the same reversed, so the same trees gather from their last rank to their first."""
    algorithm = only(peers_forestcoll.read(star_trees(), asked("star:3", "reduce-scatter")))
    first = algorithm.schedule.transfers[0]
    assert (first.src, first.dst, first.reduce) == (2, 1, True)
    assert verify(algorithm.schedule).correct


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda f: f["trees"][0]["paths"].pop(), ValueError, r"rank 0 must reach each rank once.*not \[2\]"),
        (
            lambda f: f["trees"][1]["paths"].append([[1, 3], [3, 0]]),
            ValueError,
            "tree of rank 1 must reach each rank once, got 3 paths that reach 2",
        ),
        (
            lambda f: f["trees"][0]["paths"][1].__setitem__(1, [1, 2]),
            ValueError,
            "links must follow each other",
        ),
        (
            lambda f: f["trees"][0]["paths"].__setitem__(0, [[0, 1]]),
            ScheduleError,
            "has no link 0->1",
        ),
        (lambda f: f["trees"].pop(), ValueError, "trees of rank 2 must carry 1 units, got 0"),
        (lambda f: f["trees"][1].update(count=2), ValueError, "trees of rank 1 must carry 1 units, got 2"),
        (lambda f: f.pop("units"), KeyError, "units"),
    ],
)
def test_what_is_no_tree_is_told(
    spoil: Callable[[dict[str, Any]], object], error: type[Exception], message: str
) -> None:
    found = star_trees()
    spoil(found)
    with pytest.raises(error, match=message):
        peers_forestcoll.read(found, asked("star:3"))


def test_a_rate_that_the_trees_do_not_have_is_misstated() -> None:
    judged = peers_rows.quality(
        only(peers_forestcoll.read(star_trees() | {"time_units": 1.0}, asked("star:3")))
    )
    assert (judged["verdict"], judged["verified"], judged["rate"]) == ("misstated", True, "3/2")
    assert judged["why"] == "states 3 GB/s, is 1.5"


@given(drawn_topologies(max_ranks=5))
def test_any_packing_in_its_form_comes_back_at_its_rate(topology: Topology) -> None:
    question = asked(topology)
    each = question.bound.rate / topology.ranks
    packing = pack_exactly(topology, dict.fromkeys(range(topology.ranks), each), attempts=1)
    unit = topology.bandwidth_unit
    scale = math.lcm(*((tree.weight / unit).denominator for tree in packing.trees))
    trees = []
    for tree in packing.trees:
        ways = [(edge.parent, *edge.via, edge.child) for edge in tree.edges]
        paths = [[list(hop) for hop in pairwise(way)] for way in ways]
        trees.append({"root": tree.root, "count": int(tree.weight / unit * scale), "paths": paths})
    found = {"call_seconds": 0, "time_units": scale, "units": int(each / unit * scale), "trees": trees}
    algorithm = only(peers_forestcoll.read(found, question))
    replayed = verify(algorithm.schedule)
    assert replayed.errors == ()
    assert replayed.rate == algorithm.claimed == question.bound.rate


def test_forestcoll_is_asked_in_whole_capacities_and_not_about_other_collectives(tmp_path: Path) -> None:
    found = peers_forestcoll.graph_of(asked("star:2,bandwidth=25/2"))
    assert found == {"links": [[0, 2, 1], [1, 2, 1], [2, 0, 1], [2, 1, 1]], "ranks": [0, 1]}
    with pytest.raises(CannotAskError, match="broadcast: its public trees are for allgather"):
        peers_forestcoll.ForestColl(tmp_path).ask(asked("ring:4", "broadcast"), 1)


# --- SCCL -------------------------------------------------------------------------------------------------


def sccl_answer(listed: list[dict[str, Any]], *steps: list[list[int]], chunks: int = 1) -> dict[str, Any]:
    """Steps of one round each, of sends [address, source, target]."""
    ranks = 1 + max(rank for chunk in listed for rank in (*chunk["pre"], *chunk["post"]))
    return {
        "msccl_type": "algorithm",
        "instance": {"chunks": chunks},
        "collective": {"name": "drawn", "nodes": ranks, "chunks": listed},
        "steps": [{"rounds": 1, "sends": sends} for sends in steps],
    }


def gathered(ranks: int) -> list[dict[str, Any]]:
    """The chunks of an allgather."""
    return [{"pre": [rank], "post": list(range(ranks)), "addr": rank} for rank in range(ranks)]


def ring_of_four() -> dict[str, Any]:
    """An allgather on a ring of four: to both neighbours, then what came from the left goes on to the right.

    step 0: 0->1 0->3 1->0 1->2 2->1 2->3 3->0 3->2
    step 1: 0 holds 3's and sends it to 1, and so on round the ring
    """
    first = [[rank, rank, other] for rank in range(4) for other in sorted({(rank + 1) % 4, (rank - 1) % 4})]
    return sccl_answer(gathered(4), first, [[3, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 0]])


def test_an_address_of_no_chunk_is_told() -> None:
    found = ring_of_four()
    found["steps"][1]["sends"].append([9, 0, 1])
    with pytest.raises(ValueError, match="step 1: no chunk of the collective has address 9"):
        peers_sccl.read(found, asked("ring:4"))


def test_parts_of_an_address_follow_each_other() -> None:
    """A broadcast of two chunks on a ring of three from rank 1: chunk c first goes to rank 2 - 2c."""
    found = sccl_answer(
        [{"pre": [1], "post": [0, 1, 2], "addr": 0}], [[0, 1, 2], [1, 1, 0]], [[0, 2, 0], [1, 0, 2]], chunks=2
    )
    algorithm = peers_sccl.read(found, asked("ring:3", "broadcast", root=1))
    assert [chunk.share for chunk in algorithm.schedule.chunks] == [Fraction(1, 2)] * 2
    assert verify(algorithm.schedule).correct


def test_sums_share_an_address_and_go_to_one_rank() -> None:
    """A reduce-scatter on a full mesh of three: everybody sends its part to whom it is for."""
    listed = [{"pre": [part], "post": [rank], "addr": rank} for rank in range(3) for part in range(3)]
    sends = [[to, source, to] for to in range(3) for source in range(3) if source != to]
    found = sccl_answer(listed, sends)
    algorithm = peers_sccl.read(found, asked("full:3", "reduce-scatter"))
    assert verify(algorithm.schedule).correct
    sends.append([0, 1, 0])  # what rank 1 has counts twice
    assert not verify(peers_sccl.read(found, asked("full:3", "reduce-scatter")).schedule).correct


def test_blocks_that_stay_where_they_are_are_left_out() -> None:
    """A gather to rank 0, which idly sends its own block away."""
    listed = [{"pre": [rank], "post": [0], "addr": rank} for rank in range(3)]
    found = sccl_answer(listed, [[1, 1, 0], [2, 2, 0], [0, 0, 1]])
    algorithm = peers_sccl.read(found, asked("ring:3", "gather"))
    assert [(t.src, t.dst) for t in algorithm.schedule.transfers] == [(1, 0), (2, 0)]
    assert verify(algorithm.schedule).correct


def test_the_numbers_of_its_own_dgx1_become_ours() -> None:
    """Our rank 3 is its rank 1, our rank 7 its rank 5; both pairs are linked there and here."""
    found = sccl_answer([{"pre": [1], "post": list(range(8)), "addr": 0}], [[0, 1, 5]])
    algorithm = peers_sccl.read(found, asked("dgx1", "broadcast", root=3))
    (transfer,) = algorithm.schedule.transfers
    assert (algorithm.schedule.chunks[0].owner, transfer.src, transfer.dst) == (3, 3, 7)


def test_only_points_that_nothing_beats_are_kept() -> None:
    better, same = ring_of_four(), ring_of_four()
    slower = ring_of_four()
    slower["steps"][1]["rounds"] = 2
    longer = ring_of_four()
    longer["steps"].append({"rounds": 1, "sends": []})
    algorithms = [peers_sccl.read(found, asked("ring:4")) for found in (longer, slower, better, same)]
    assert [found.label for found in peers_sccl.without_beaten(algorithms)] == ["(1,2,2)"]


# --- TACOS ------------------------------------------------------------------------------------------------

# A ring of three, one chunk a rank, everybody to both others at once; 1 MiB at 1 GB/s takes 1048.576 us.
TRIANGLE = """\
send 0 0 1 0.000000000 1048.576000000
send 0 0 2 0.000000000 1048.576000000
send 1 1 0 0.000000000 1048.576000000
send 1 1 2 0.000000000 1048.576000000
send 2 2 0 0.000000000 1048.576000000
send 2 2 1 0.000000000 1048.576000000
time_us 1048.576000000
call_seconds 0.000300000
"""


def test_chunks_of_tacos_belong_to_the_rank_modulo_the_ranks() -> None:
    """A cable of two ranks, two chunks each: 0 and 2 are rank 0's."""
    output = "".join(
        f"send {chunk} {chunk % 2} {1 - chunk % 2} {step * 10.0} {step * 10.0 + 10.0}\n"
        for step, chunks in enumerate(((0, 3), (2, 1)))
        for chunk in chunks
    )
    algorithm = only(peers_tacos.read(output + "time_us 20\ncall_seconds 1\n", asked("ring:2"), 2))
    assert [chunk.owner for chunk in algorithm.schedule.chunks] == [0, 1, 0, 1]
    assert verify(algorithm.schedule).correct


@refuses("before", "after", "message")
def test_what_is_no_answer_of_tacos_is_told(before: str, after: str, message: str) -> None:
    assert before in TRIANGLE
    with pytest.raises((ValueError, KeyError), match=message):
        peers_tacos.read(TRIANGLE.replace(before, after), asked("ring:3"), 1)


def test_a_wrong_answer_of_tacos_is_wrong() -> None:
    lines = TRIANGLE.splitlines(keepends=True)
    judged = peers_rows.quality(only(peers_tacos.read("".join(lines[1:]), asked("ring:3"), 1)))
    assert judged["verdict"] == "wrong"
    assert "rate" not in judged
    late = TRIANGLE.replace("time_us 1048.576", "time_us 2097.152")
    judged = peers_rows.quality(only(peers_tacos.read(late, asked("ring:3"), 1)))
    assert (judged["verdict"], judged["claimed"]) == ("misstated", 1.5)


def test_tacos_is_asked_in_GiB_and_only_what_it_knows(tmp_path: Path) -> None:  # noqa: N802 - a unit
    question = asked("ring:2,bandwidth=1073741824/1000000000,latency=1/2")
    assert peers_tacos.text_of(question, 4) == "2 4 1048576\n0 1 1.0 0.5\n1 0 1.0 0.5\n"
    peer = peers_tacos.Tacos(tmp_path)
    for spec, kind, why in (
        ("ring:4", "broadcast", "allgather among all ranks only"),
        ("star:4", "allgather", "not switches"),
        ("dgx1", "allgather", "one bandwidth and latency only"),
    ):
        with pytest.raises(CannotAskError, match=why):
            peer.ask(asked(spec, kind), 1)


# --- Both peers that send in steps, at random -------------------------------------------------------------


def flood(topology: Topology) -> list[list[list[int]]]:
    """In each step every link passes on what its end lacks: a greedy allgather, no chunk twice anywhere."""
    held = [{rank} for rank in range(topology.ranks)]
    steps = []
    while any(len(has) < topology.ranks for has in held):
        coming: list[set[int]] = [set() for _ in held]
        sends = []
        for link in topology.links:
            if useful := sorted(held[link.src] - held[link.dst] - coming[link.dst]):
                sends.append([useful[0], link.src, link.dst])
                coming[link.dst].add(useful[0])
        held = [has | new for has, new in zip(held, coming, strict=True)]
        steps.append(sends)
    return steps


def unit_graphs() -> st.SearchStrategy[Topology]:
    """Strongly connected, without switches, every link 1 GB/s."""

    def even(topology: Topology) -> Topology:
        links = [Link(link.src, link.dst, Fraction(1)) for link in topology.links]
        return Topology.build("even", topology.ranks, links)

    return drawn_topologies(max_ranks=6, switches=0, symmetric=False).map(even)


def as_tacos(steps: Iterable[Iterable[Sequence[int]]]) -> str:
    lines = [
        f"send {chunk} {source} {target} {step * 0.3:.9f} {step * 0.3 + 0.3:.9f}"
        for step, sends in enumerate(steps)
        for chunk, source, target in sends
    ]
    return "\n".join([*lines, "time_us 1", "call_seconds 0"])


@given(unit_graphs(), st.data())
def test_what_floods_a_graph_is_correct_and_no_send_of_it_may_be_missing(
    topology: Topology, data: st.DataObject
) -> None:
    question, steps = asked(topology), flood(topology)
    of_tacos = only(peers_tacos.read(as_tacos(steps), question, 1)).schedule
    of_sccl = peers_sccl.read(sccl_answer(gathered(topology.ranks), *steps), question).schedule
    assert of_tacos.transfers == of_sccl.transfers
    assert verify(of_tacos).correct
    assert verify(of_sccl).rate == Fraction(topology.ranks, len(steps))
    gone = data.draw(st.sampled_from([(step, send) for step, sends in enumerate(steps) for send in sends]))
    less = [[send for send in sends if (step, send) != gone] for step, sends in enumerate(steps)]
    assert not verify(only(peers_tacos.read(as_tacos(less), question, 1)).schedule).correct
    assert not verify(
        peers_sccl.read(sccl_answer(gathered(topology.ranks), *less), question).schedule
    ).correct


# --- Answers, rows, the command ---------------------------------------------------------------------------


def test_every_end_of_a_run_has_its_verdict() -> None:
    algorithm = peers_sccl.read(ring_of_four(), asked("ring:4"))

    def found() -> Reading:
        return 1.0, [algorithm]

    def nothing() -> Reading:
        return None, []

    def broken() -> Reading:
        raise KeyError("trees")

    failed = finished(status=1, errors="Traceback\nAssertionError: no\n")
    stopped = finished(status=-9, timed_out=True)
    answers = [
        *(answer_of(finished(), found), answer_of(finished(), nothing), answer_of(finished(), broken)),
        *(answer_of(failed, found), answer_of(stopped, found), answer_of(stopped, found, read_partial=found)),
    ]
    assert [(answer.verdict, answer.why, len(answer.algorithms)) for answer in answers] == [
        ("found", None, 1),
        ("impossible", "it ended without an algorithm", 0),
        ("unreadable", "KeyError: 'trees'", 0),
        ("failed", "AssertionError: no", 0),
        ("out of time", "stopped after 9 s", 0),
        ("out of time", "stopped after 9 s", 1),
    ]


class Canned:
    """A contender with answers in store; None stands for a question that it does not know."""

    def __init__(self, name: str, *answers: Answer | None) -> None:
        self.name = name
        self.answers = list(answers)
        self.asked = 0

    def check(self) -> None:
        """It is there."""

    def ask(self, question: Question, limit_s: float) -> Answer:
        answer = self.answers[self.asked]
        self.asked += 1
        if answer is None:
            raise CannotAskError(f"{question.topology.name}: not mine")
        return answer


def test_rows_say_what_became_of_each_contender() -> None:
    question = asked("ring:4")
    algorithm = peers_sccl.read(ring_of_four(), question)
    runs = [
        Answer(finished(seconds=seconds), "found", None, 0.5, (algorithm,)) for seconds in (5.0, 9.0, 6.0)
    ]
    contenders = [
        Canned("steady", *runs),
        Canned("stranger", None),
        Canned("slow", Answer(finished(), "out of time", "stopped after 9 s")),
    ]
    rows = peers.rows_of(question, contenders, runs=3, limit_s=9)
    assert [(row["method"], row["verdict"], row["why"], row["runs"]) for row in rows] == [
        ("steady (1,2,2)", "found", None, 3),
        ("stranger", "not asked", "ring:4: not mine", None),
        ("slow", "out of time", "stopped after 9 s", 1),
    ]
    first = rows[0]
    assert (first["seconds"], first["seconds_spread"], first["call_seconds"]) == (6.0, 4.0, 0.5)
    assert (first["rate"], first["bound"], first["share_of_optimum"]) == ("2", "8/3", 0.75)
    assert (first["steps"], first["rounds"], first["chunks"], first["verified"]) == (2, 2, 4, True)
    # 64 KiB in quarters of 16,384 bytes, one after the other over links of 1 GB/s.
    assert first["time_us_64KiB"] == pytest.approx(2 * 16.384)
    assert all(row.keys() == first.keys() for row in rows)
    assert peers_rows.reasons(rows) == [
        "ring:4, stranger: not asked: ring:4: not mine",
        "ring:4, slow: out of time: stopped after 9 s",
    ]


def test_the_best_of_runs_that_differ_counts() -> None:
    question = asked("ring:4")
    slower = ring_of_four()
    slower["steps"][1]["rounds"] = 2
    found = [
        Algorithm("", peers_sccl.read(case, question).schedule) for case in (slower, ring_of_four(), slower)
    ]
    contender = Canned("lucky", *(Answer(finished(), "found", None, None, (one,)) for one in found))
    (row,) = peers.rows_of(question, [contender], runs=3, limit_s=9)
    # 4 blocks in 2 rounds rather than in 3
    assert (row["rate"], row["algbw_spread"], row["call_seconds"]) == ("2", pytest.approx(2 / 3), None)


def test_one_wrong_run_makes_the_row_wrong() -> None:
    question = asked("ring:4")
    less = ring_of_four()
    less["steps"][1]["sends"].pop()
    found = [Algorithm("", peers_sccl.read(case, question).schedule) for case in (ring_of_four(), less)]
    contender = Canned("fickle", *(Answer(finished(), "found", None, None, (one,)) for one in found))
    (row,) = peers.rows_of(question, [contender], runs=2, limit_s=9)
    assert (row["verdict"], row["verified"], row["rate"]) == ("wrong", False, None)


def test_without_a_peer_there_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        peers.main([])
    assert end.value.code == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith("peers: give at least one checkout: --sccl PATH")


@refuses("name", "message")
def test_a_folder_that_is_no_checkout_is_refused(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        peers.main([f"--{name}", str(tmp_path)])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_compare_wants_known_peers() -> None:
    with pytest.raises(InputError, match="peers: must be some of sccl, forestcoll, tacos, got taccl"):
        peers.compare("ring:4", "allgather", {"taccl": Path()})
    with pytest.raises(InputError, match="got none"):
        peers.compare("ring:4", "allgather", {})


# Checkouts as small as can be: each answers the allgather on a ring of three, or four, in its own form.
PACKER = """\
def optimal_pipeline_spanning_trees(graph, compute_nodes):
    ranks = sorted(compute_nodes)
    links = {(a, b): data["capacity"] for a, b, data in graph.edges(data=True)}
    assert ranks == [0, 1, 2] and set(links.values()) == {1} and len(links) == 6
    trees = {(root, 0): [[(root, other)] for other in ranks if other != root] for root in ranks}
    return (1.0, 1), (trees, dict.fromkeys(trees, 1))
"""
SOLVER = """\
import json, sys
if "--help" not in sys.argv:
    assert sys.argv[1:3] == ["solve", "pareto-optimal"] and "Allgather" in sys.argv
    ring = json.loads({ring!r})
    with open("Allgather-steps2.msccl.json", "w") as file:
        json.dump(ring, file)
"""


def test_whole_runs_of_small_checkouts_give_rows_and_a_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forestcoll, tacos, sccl = (tmp_path / name for name in ("forestcoll", "tacos", "sccl"))
    program = tacos / peers_tacos.PROGRAM
    for folder in (forestcoll, program.parent, sccl / "msccl"):
        folder.mkdir(parents=True)
    (forestcoll / "pipeline_allgather.py").write_text(PACKER)
    program.write_text(f"#!{sys.executable}\nprint({TRIANGLE!r}, end='')\n")
    program.chmod(0o755)
    (sccl / "msccl" / "__main__.py").write_text(SOLVER.format(ring=json.dumps(ring_of_four())))
    given = ["--forestcoll", str(forestcoll), "--tacos", str(tacos), "--runs", "1"]
    written = tmp_path / "peers.json"
    peers.main([*given, "--topology", "ring:3", "--json", str(written)])
    document = read_document(written)
    assert document["keys"] == ["topology", "collective", "method"]
    assert document["peers"].keys() == {"forestcoll", "tacos"}
    assert [(row["method"], row["verdict"], row["rate"]) for row in document["rows"]] == [
        ("trees", "found", "3"),
        ("ForestColl", "found", "3"),
        ("selection, 64 MiB", "found", "3"),
        ("TACOS, 1 chunk a rank", "found", "3"),
        ("TACOS, 4 chunks a rank", "wrong", None),  # it printed one chunk a rank
    ]
    times = {row["method"]: row["time_us_64MiB"] for row in document["rows"]}
    assert times["selection, 64 MiB"] <= min(times["trees"], times["TACOS, 1 chunk a rank"])
    assert "ForestColl" in capsys.readouterr().out
    rows = peers.compare("ring:4", "allgather", {"sccl": sccl}, runs=1)
    assert [(row["method"], row["verified"]) for row in rows if row["method"].startswith("SCCL")] == [
        ("SCCL (1,2,2)", True)
    ]
    assert any(row["method"].startswith("chunks (") and row["times_ours"] is None for row in rows)

"""Spare schedules: what a difference says, that it gives back the repaired schedule, files of them."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast import topologies as catalog
from arborcast.synth.collective import TREE_KINDS, Collective
from arborcast.synth.errors import InputError
from arborcast.synth.faults.backup_documents import is_spares, read_spares, spares_from_document, write_spares
from arborcast.synth.faults.backup_schedules import (
    BackupSchedules,
    Difference,
    Failure,
    Part,
    make_spares,
    single_failures,
)
from arborcast.synth.faults.faulty import without
from arborcast.synth.faults.repair import repair, repaired
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from tests.support.commands import Command, refused
from tests.support.strategies import topologies as graphs


def hops(transfers):
    return [(transfer.src, transfer.dst, transfer.step) for transfer in transfers]


def test_a_difference_drawn():
    """A broadcast along the shorter ways of a square, whose link 0-3 fails.

    0 - 1        0 - 1
    |   |   ->       |        like chunk 0: 0 -> 1 -> 2 stays, 0 -> 3 is gone by itself, 2 -> 3 is added
    3 - 2        3 - 2
    """
    square = catalog.load("ring:4")
    chain = [Transfer(0, 0, 1, 0), Transfer(0, 0, 3, 0), Transfer(0, 1, 2, 1)]
    limit = synth.bound(square, "broadcast")
    whole = Schedule.build(
        square, Collective.on(square, "broadcast"), Method("hand"), limit, [Chunk(Fraction(1), 0)], chain
    )
    failure = Failure.of([(3, 0)])
    after = repair(whole, without_links=[(0, 3)])
    difference = Difference.between(whole, after, failure)
    (part,) = difference.parts
    assert (part.chunk, part.like, part.left_out) == (Chunk(Fraction(1), 0), 0, ())
    assert hops(part.added) == [(2, 3, 2)]
    assert difference.applied(whole) == after


def test_ranks_that_are_gone_are_not_named():
    """Rank 1 of a chain's end: the others are renumbered, and nothing has to be said of its transfers."""
    mesh = catalog.load("full:4")
    whole = synth.solve(mesh, "broadcast", root=0, method="trees")
    failure = Failure.of(ranks=[3])
    copies = tuple(Part(chunk, number, (), ()) for number, chunk in enumerate(whole.chunks))
    left = failure.left_of(mesh).topology
    difference = Difference(failure, whole.method, synth.bound(left, "broadcast"), whole.rate, copies)
    found = difference.applied(whole)
    assert all(transfer.dst < 3 and transfer.src < 3 for transfer in found.transfers)
    assert found.collective.ranks == (0, 1, 2)


@given(graphs(max_ranks=5, switches=1), st.sampled_from(sorted(TREE_KINDS)), st.integers(0, 2))
@settings(max_examples=15)
def test_every_single_failure_of_random_fabrics(topology, kind, pick):
    whole = synth.solve(topology, kind)
    failures = single_failures(topology, ranks=True)
    spares = make_spares(whole, failures)
    assert len(spares.differences) + len(spares.without) == len(failures)
    assert list(spares.flaws()) == []
    for failure, _ in spares.without:
        assert not spares.has(failure)
    for difference in spares.differences[pick::3]:
        expected = repaired(whole, difference.failure.left_of(topology))
        assert spares.after(difference.failure) == expected
        fresh = synth.bound(expected.topology, expected.collective)
        assert difference.rate == difference.bound.rate == fresh.rate


@pytest.fixture(scope="module")
def dgx1() -> BackupSchedules:
    whole = synth.solve(catalog.load("dgx1"), "allgather")
    return make_spares(whole, [Failure(((0, 3),)), Failure(((0, 1),)), Failure(ranks=(5,))])


def test_files_give_back_the_same_and_are_small(dgx1, tmp_path):
    path, one = tmp_path / "spares.json", tmp_path / "one.json"
    write_spares(dgx1, path)
    assert is_spares(path)
    assert read_spares(path) == dgx1
    synth.write_schedule(dgx1.whole, tmp_path / "whole.json")
    assert not is_spares(tmp_path / "whole.json")
    synth.write_schedule(dgx1.after(Failure(((0, 3),))), one)
    each = (path.stat().st_size - (tmp_path / "whole.json").stat().st_size) / 3
    assert each < one.stat().st_size / 4


def test_a_failure_nobody_foresaw_is_refused(dgx1):
    with pytest.raises(InputError, match="dgx1 without link 0-2: is none of the 3 failures with a spare"):
        dgx1.after(Failure(((0, 2),)))
    told = replace(dgx1, without=((Failure(ranks=(1,)), "it is the root"),))
    with pytest.raises(InputError, match="dgx1 without rank 1: it is the root"):
        told.after(Failure(ranks=(1,)))


def test_what_no_schedule_is_left_for_is_said():
    """A chain of four ranks, from the first of which the others are told: only the last may be gone."""
    chain = without(catalog.load("ring:4"), links=[(0, 3)]).topology
    spares = make_spares(synth.solve(chain, "broadcast"), single_failures(chain, ranks=True))
    why = dict(spares.without)
    assert set(why) == {Failure(((at, at + 1),)) for at in range(3)} | {
        Failure(ranks=(at,)) for at in range(3)
    }
    assert "its root 0" in why[Failure(ranks=(0,))]
    assert [it.failure for it in spares.differences] == [Failure(ranks=(3,))]


def test_the_verifier_finds_a_spare_that_is_wrong(dgx1):
    first, *others = dgx1.differences
    short = replace(
        first, parts=(replace(first.parts[0], like=None, added=(), left_out=()), *first.parts[1:])
    )
    wrong = replace(dgx1, differences=(short, *others))
    flaws = list(wrong.flaws())
    assert flaws
    assert all(flaw.startswith("link 0-3: ") for flaw in flaws)


def test_files_that_are_wrong(dgx1, tmp_path):
    write_spares(dgx1, tmp_path / "spares.json")
    text = (tmp_path / "spares.json").read_text()

    def refused(edit):
        document = json.loads(text)
        edit(document)
        with pytest.raises(InputError) as caught:
            spares_from_document(document, "f")
        return str(caught.value)

    def first(document):
        return document["failures"][0]

    def chunk(document):
        return first(document)["chunks"][0]

    for edit, said in (
        (lambda it: it.update(format="arborcast.spares/9"), "f: format: must be arborcast.spares/1"),
        (lambda it: first(it).update(links=[[0, 5, 2]]), "f: failures[0].links: must be pairs of vertices"),
        (lambda it: first(it).update(links=[[0, 99]]), "f: failures[0]: link"),
        (
            lambda it: it["failures"][1].update(links=[[3, 0]]),
            "must not be the failure of f: failures[0] again",
        ),
        (lambda it: chunk(it).update(like=900), "f: failures[0]: chunk 0: like must be below"),
        (lambda it: chunk(it).update(left_out=[99]), "f: failures[0]: chunk 0: left_out must be below"),
        (lambda it: chunk(it).update(chunk=[0]), "chunks[0].chunk: must be owner, target and demand"),
        (
            lambda it: chunk(it).update(added=[[0, 1]]),
            "chunks[0].added[0]: must be source, destination, step",
        ),
        (lambda it: chunk(it).update(added=[[0, 88, 0, 0]]), "chunks[0].added[0]: vertex must be in 0..7"),
        (lambda it: chunk(it).update(added=[[0, 3, 0, 0]]), "there is no link 0->3"),
        (lambda it: chunk(it).update(share="-1/2"), "share must be positive"),
        (lambda it: chunk(it).pop("like"), "chunks[0].like"),
    ):
        assert said in refused(edit)


def test_the_commands(command: Command, tmp_path):
    whole, spares, out = (str(tmp_path / name) for name in ("w.json", "s.json", "o.json"))
    assert command("solve", "full:4", "broadcast", "-o", whole).status == 0
    made = command("repair", whole, "--each-link", "--each-rank", "-o", spares)
    assert made.status == 0
    assert "10 failures in" in made.out
    assert "broadcast: its root 0 is among the ranks that are gone" in made.out
    assert command("verify", spares).out == f"{spares}: correct\n  10 schedules\n"
    taken = command("repair", spares, "--without-link", "2-0", "-o", out, "--json")
    found = synth.read_schedule(out)
    assert json.loads(taken.out)["rate"] == str(found.rate)
    assert found == repair(synth.read_schedule(whole), without_links=[(0, 2)])
    document = json.loads((tmp_path / "s.json").read_text())
    document["failures"][0]["chunks"][0]["added"] = []
    document["failures"][0]["chunks"][0]["like"] = None
    (tmp_path / "s.json").write_text(json.dumps(document))
    assert command("verify", spares).status == 1
    first = document["failures"][0]["links"][0]
    link = f"{first[0]}-{first[1]}"
    refused(command("repair", spares, "--without-link", link), f"link {link}: not correct", status=1)
    refused(command("repair", whole, "--each-link", "--without-rank", "1"), "--each-link", "--without-rank")
    refused(command("verify", spares, "--every-translate"), "--every-translate")

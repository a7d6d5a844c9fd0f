"""Names as users bring them: collectives and topologies in other cases and with other hyphens."""

from __future__ import annotations

from typing import Any

import pytest

from arborcast import synth
from arborcast.synth.collective import Kind
from arborcast.synth.errors import CollectiveError
from arborcast.topologies import load
from tests.support.commands import Command

SPELLINGS = {
    Kind.ALLREDUCE: ("allreduce", "AllReduce", "all-reduce", "all_reduce", "ALLREDUCE", "All Reduce"),
    Kind.ALLGATHER: ("all_gather", "AllGather"),
    Kind.REDUCE_SCATTER: ("reducescatter", "ReduceScatter", "reduce_scatter", "reduce-scatter"),
    Kind.ALLTOALL: ("all-to-all", "AllToAll", "all_to_all"),
    Kind.BROADCAST: ("bcast", "Broadcast"),
}


@pytest.mark.parametrize(
    ("kind", "text"), [(kind, text) for kind, texts in SPELLINGS.items() for text in texts]
)
def test_every_spelling_is_understood(kind: Kind, text: str, command: Command) -> None:
    ring = load("ring:4")
    assert synth.Collective.on(ring, text) == synth.Collective.on(ring, kind)
    ran = command("bound", "ring:4", text, "--json")
    assert (ran.status, ran.document["collective"]) == (0, kind.value)


def test_each_kind_is_its_own_name() -> None:
    assert [Kind.named(kind.value) for kind in Kind] == list(Kind)


@pytest.mark.parametrize("text", ["DGX1", "dgx1", "Dgx_A100:boxes=2", "Torus:3x3"])
def test_topologies_in_any_case(text: str) -> None:
    assert load(text) == load(text.lower().replace("_", "-"))
    assert load(text).name == text.lower().replace("_", "-")


def test_who_is_near_is_named() -> None:
    with pytest.raises(CollectiveError, match=r"collective alreduce: must .*; did you mean allreduce\?"):
        synth.bound(load("ring:4"), "alreduce")
    with pytest.raises(CollectiveError, match=r"file of blocks$"):
        synth.bound(load("ring:4"), "magic")


def test_commands_about_part_of_a_machine(command: Command, tmp_path: Any) -> None:
    ran = command(
        "groups", "dgx1", "--ranks", "0-3", "--group", "AllReduce:0,1", "--group", "bcast:2,3", "--json"
    )
    assert [group["kind"] for group in ran.document["groups"]] == ["allreduce", "broadcast"]
    folder = str(tmp_path / "table")
    ran = command("sweep", "dgx1", "--ranks", "1,4,5", "--collectives", "AllReduce", "-o", folder, "--json")
    (answer,) = ran.document["answers"]
    assert (answer["ranks"], answer["status"]) == ([0, 1, 2], "solved")

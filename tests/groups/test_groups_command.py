"""`synth groups`: what it prints, what it writes, and one line for whatever is wrong."""

from __future__ import annotations

import json
import sys

import pytest

from arborcast.synth.cli import app as cli
from arborcast.synth.groups import verify_groups
from arborcast.synth.groups.group_folder import read_groups
from tests.support.refusals import refuses


@pytest.fixture
def synth_groups(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["synth", "groups", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def test_rows_and_columns_in_a_folder(synth_groups, tmp_path):
    folder = tmp_path / "groups"
    code, out, _ = synth_groups(
        "torus:3x3", "--mesh", "3x3", "--along", "0:allreduce", "--along", "1:allgather",
        "--size", "1MiB", "-o", str(folder), "--json",
    )  # fmt: skip
    document = json.loads(out)
    assert code == 0
    assert [entry["ranks"] for entry in document["groups"][:2]] == [[0, 3, 6], [1, 4, 7]]
    assert [entry["ranks"] for entry in document["groups"][3:5]] == [[0, 1, 2], [3, 4, 5]]
    assert document["optimal"] and document["worst"] == document["bound"]
    assert all(entry["bound"] == entry["rate"] and entry["time_us"] > 0 for entry in document["groups"])
    found = read_groups(folder)
    assert verify_groups(found).correct
    assert [str(rate) for rate in found.rates] == [entry["rate"] for entry in document["groups"]]


def test_a_table_for_people(synth_groups):
    code, out, _ = synth_groups(
        "dgx1", "--group", "allreduce:0-3", "--group", "broadcast:5,4", "--weight", "1", "--weight", "2"
    )
    assert code == 0
    assert "dgx1: 2 groups at once, ranks outside a group may forward for it" in out
    assert "proved to be the best" in out
    assert "of alone" in out


@refuses("arguments", "message")  # fmt: skip
def test_wrong_input_is_one_line(synth_groups, arguments, message):
    code, out, err = synth_groups("ring:4", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_what_cannot_be_done_is_the_answer(synth_groups):
    code, out, err = synth_groups("ring:4", "--group", "allreduce:0,2", "--no-relays", "--json")
    assert code == 1
    assert json.loads(out)["infeasible"]
    assert "group 0: allreduce: rank 2 cut off" in err


def test_able_switches_only_forward_for_groups_and_that_is_said(synth_groups):
    asked = ("star:4,in-network=turn", "--group", "allreduce:0-3")
    _, out, _ = synth_groups(*asked)
    assert "model    switches only forward here, whatever else they can do" in out
    _, out, _ = synth_groups(*asked, "--json")
    document = json.loads(out)
    assert document["worst"] == document["bound"] == "2/3" and document["model"] == "switches only forward"

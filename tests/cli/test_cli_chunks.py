"""The commands about chunk schedules as a user runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.chunk_replay import no_time_from
from tests.support.commands import Command, refused

RATES = ("10", "10", "2048/65")

EXCHANGE = """
name: halo-exchange
blocks:
  - {at: [0], to: [1, 3]}
  - {at: [1, 2], to: [0]}
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARBORCAST_CACHE", str(tmp_path / "cache"))


def test_pareto_prints_a_table_with_proofs(command: Command) -> None:
    ran = command("pareto", "dgx1", "gather", "--root", "0")
    assert ran.status == 0 and ran.err == ""
    assert "(6, 2, 7)" in ran.out and "proved" in ran.out and "complete yes" in ran.out


def test_pareto_of_an_allreduce_says_over_which_schedules(command: Command) -> None:
    ran = command("pareto", "full:2", "allreduce")
    assert ran.status == 0 and "(1, 1, 1)" in ran.out and "complete yes" in ran.out
    (point,) = command("pareto", "full:2", "allreduce", "--json").document["frontier"]
    assert (point["scope"], point["limit"], point["proved"]) == ("every schedule", None, True)
    document = command("pareto", "ring:5", "allreduce", "--max-steps", "3", "--json").document
    (point,) = document["frontier"]
    assert (point["proved"], point["limit"], document["complete"]) == (False, "11/10", False)
    refused_steps = command("pareto", "dgx1", "allreduce", "--max-steps", "1")
    assert refused_steps.status == 1 and "needs at least 2 steps" in refused_steps.err


def test_pareto_says_that_able_switches_only_forward_in_it(command: Command) -> None:
    fabric = "star:3,in-network=turn"
    said = "model    switches only forward here, whatever else they can do"
    assert said in command("pareto", fabric, "allreduce").out
    assert command("pareto", fabric, "allreduce", "--json").document["model"] == "switches only forward"
    assert said not in command("pareto", "star:3", "allreduce").out


def test_pareto_writes_a_folder_whose_schedules_verify_and_simulate(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "frontier"
    document = command("pareto", "dgx1", "allgather", "--json", "-o", str(folder)).document
    keys = ("chunks", "steps", "rounds", "ratio", "proved")
    assert [tuple(entry[key] for key in keys) for entry in document["frontier"]] == [
        (2, 2, 3, "3/2", True),
        (6, 3, 7, "7/6", True),
    ]
    assert [entry["proved_by"] for entry in document["frontier"]] == [["exact limit"]] * 2
    assert document["complete"] and document["folder"] == str(folder)
    assert {"why_stopped", "seconds", "static_ratio", "open_steps"} <= document.keys()
    for entry in document["frontier"]:
        assert command("verify", entry["file"], "--json").document["correct"]
    last = document["frontier"][-1]["file"]
    assert command("simulate", last, "--sizes", "1MiB", "--json").status == 0


def test_without_o_pareto_writes_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert command("pareto", "ring:4", "broadcast", "--max-steps", "3").status == 0
    assert not list((tmp_path / "here").iterdir())


def test_pareto_out_of_time_says_what_it_has(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    no_time_from(monkeypatch, 4)
    ran = command("pareto", "dgx1", "broadcast", "--max-steps", "40", "--deadline", "1000", "--json")
    assert ran.status == 3
    assert not ran.document["complete"] and ran.document["timed_out"]
    assert "the deadline of 1000 s passed at 4 steps" in ran.err


def test_a_custom_collective_is_a_file(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "exchange.yaml"
    file.write_text(EXCHANGE)
    found = command("pareto", "ring:4", str(file), "--json", "--max-steps", "3").document["frontier"]
    assert [(entry["chunks"], entry["steps"], entry["rounds"]) for entry in found] == [(1, 1, 1), (4, 3, 3)]
    file.write_text(EXCHANGE.replace("[1, 3]", "[1, 9]"))
    refused(command("bound", "ring:4", str(file)), "exchange.yaml", "9", "0..3")


def test_one_instance(command: Command, tmp_path: Path) -> None:
    size, method = ("--chunks", "6", "--steps", "3", "--rounds", "7"), "sat"
    file = tmp_path / "schedule.json"
    document = command(
        "solve", "dgx1", "allgather", "--method", method, *size, "--json", "-o", str(file)
    ).document
    assert (document["method"], document["steps"], document["rounds"]) == (method, 3, 7)
    assert document["settings"] == {"chunks": 6, "steps": 3, "rounds": 7}
    assert document["optimal"] and document["rate"] == "1200/7"
    assert command("verify", str(file)).status == 0


def test_there_is_none_with_its_proof(command: Command) -> None:
    size = ("--chunks", "5", "--steps", "2", "--rounds", "7")
    ran = command("solve", "dgx1", "allgather", "--method", "sat", *size, "--json")
    assert ran.status == 1
    assert ran.document["infeasible"] and ran.document["proved"] is True
    assert ran.document["proved_by"] == ["exact limit"]
    assert ran.document["certificate"]["ratio"] == "3/2"
    assert ran.document["certificate"]["certificate"]["kind"] == "flows"
    assert "2 steps need at least 3/2 rounds per chunk" in ran.document["why"]


def test_a_proof_is_written_where_there_is_none(command: Command, tmp_path: Path) -> None:
    question = (
        "solve",
        "hypercube:3",
        "broadcast",
        "--chunks",
        "6",
        "--steps",
        "3",
        "--rounds",
        "5",
        "--json",
    )
    proof = tmp_path / "none.drat"
    ran = command(*question, "--method", "sat", "--proof", str(proof))
    assert (ran.status, ran.document["proved"], ran.document["proved_by"]) == (1, True, ["CaDiCaL"])
    assert ran.document["certificate"] is None
    assert (ran.document["proof_file"], ran.document["formula_file"]) == (str(proof), f"{proof}.cnf")
    assert proof.read_text().endswith("\n0\n")
    assert "c broadcast on hypercube:3" in Path(f"{proof}.cnf").read_text()
    ran = command(*question, "--method", "ilp")
    assert (ran.status, ran.document["infeasible"], ran.document["proved"]) == (1, True, False)
    assert ran.document["proved_by"] == ["HiGHS, floating point"]
    assert "not proved: according to HiGHS, floating point" in ran.document["why"]
    assert (ran.document["proof_file"], ran.document["formula_file"]) == (None, None)


def test_a_size_shows_where_the_choice_changes(command: Command) -> None:
    asked = ("solve", "mesh:2x3", "broadcast", "--size", "64KiB")
    document = command(*asked, "--json").document
    choices = document["choices"]
    assert len(choices) >= 2
    assert [choice["from_bytes"] for choice in choices] == sorted({c["from_bytes"] for c in choices})
    assert "pareto" in {choice["method"] for choice in choices}
    at = [choice for choice in choices if choice["from_bytes"] <= 64 << 10][-1]
    assert at["method"] == document["method"]
    words = command(*asked).out
    assert "fastest by simulation, or within 1 %" in words and "1KiB" in words.replace(" ", "")


def test_times_stand_beside_limits_of_their_own_kind(command: Command) -> None:
    """Priced ones beside what is priced, those of links alone beside the limit of links."""
    asked = ("solve", "dgx1", "broadcast", "--ranks", "0,1,2,3", "--size", "64KiB")
    found = command(*asked, "--json").document
    assert found["least_us"] <= found["time_us"] < found["priced_least_us"] <= found["priced_us"]
    words = command(*asked).out
    for time, least in (("priced_us", "priced_least_us"), ("time_us", "least_us")):
        assert re.search(
            rf"{found[time]:.1f} us \D*; every schedule takes at least {found[least]:.1f} us", words
        )


def test_too_few_steps_is_an_answer_that_says_the_bound(command: Command) -> None:
    size = ("--chunks", "1", "--steps", "1", "--rounds", "4")
    refused(
        command("solve", "dgx1", "allgather", "--method", "ilp", *size), "at least 2 steps", "1", status=1
    )
    refused(command("pareto", "dgx1", "allgather", "--max-steps", "1"), "at least 2 steps", "1", status=1)


def test_pareto_with_no_point_is_a_document_too(command: Command) -> None:
    ran = command("pareto", "dgx1", "allgather", "--max-steps", "1", "--json")
    assert ran.status == 1 and ran.document["infeasible"]
    assert ran.document["why"] == "allgather: needs at least 2 steps, got a maximum of 1"
    assert (ran.document["proved"], ran.document["proved_by"]) == (True, ["exact limit"])


def test_frontier_files_are_whole_json(command: Command, tmp_path: Path) -> None:
    assert command("pareto", "ring:4", "reduce", "--max-steps", "3", "-o", str(tmp_path / "out")).status == 0
    document = json.loads((tmp_path / "out" / "frontier.json").read_text())
    for entry in document["frontier"]:
        (certificate,) = entry["certificates"]
        assert certificate["ratio"] == entry["least"]


def test_odd_rates_are_told_with_what_they_cost(command: Command, tmp_path: Path) -> None:
    cables = "".join(
        f"  - {{between: [{rank}, hub], bandwidth: {rate}}}\n" for rank, rate in enumerate(RATES)
    )
    (tmp_path / "star.yaml").write_text(f"name: star\nranks: 3\nswitches: [hub]\nlinks:\n{cables}")
    star = str(tmp_path / "star.yaml")
    # The last rank gets all from two at 10 GB/s each: what its own link could do more is not needed.
    document = command("pareto", star, "gather", "--root", "2", "--json", "-o", str(tmp_path / "f")).document
    grid = {"unit": "10", "rates": {"2048/65": "30"}, "bound": "30", "true_bound": "30"}
    assert document["grid"] == grid
    assert {point["scope"] for point in document["frontier"]} == {"every schedule at rates rounded down"}
    assert command("verify", document["frontier"][0]["file"], "--json").document["correct"]
    told = command("pareto", star, "gather", "--root", "2").out
    assert "proved at rates rounded down" in told
    words = "  grid     rates rounded down to multiples of 10 GB/s: 31.51 to 30; the limit stays as it is; "
    assert f"{words}--rate-tolerance 0 takes them as they are\n" in told
    # A broadcast from there is limited by the slowest, one to there by what is rounded.
    size = ("--method", "sat", "--chunks", "1", "--steps", "1")
    solved = command("solve", star, "scatter", "--root", "2", *size, "--rounds", "1", "--json").document
    assert (solved["grid"], solved["rate"], solved["bound"]) == (grid, "30", "30")
    exact = command(
        "solve", star, "scatter", "--root", "2", *size, "--rounds", "325", "--rate-tolerance", "0", "--json"
    )
    assert exact.document["grid"] is None
    none = command("solve", star, "allgather", *size, "--rounds", "1")
    assert none.status == 1 and "; rates rounded down to multiples of 10 GB/s: 31.51 to 30 (rate" in none.err
    refused(
        command("pareto", star, "gather", "--rate-tolerance", "1"), "--rate-tolerance: must be at least 0"
    )
    refused(
        command("pareto", star, "gather", "--rate-tolerance", "1/9999"),
        "rate tolerance must be 0, or at least",
    )
    refused(
        command("solve", star, "gather", "--method", "ring", "--rate-tolerance", "0"),
        "takes no rate tolerance",
    )

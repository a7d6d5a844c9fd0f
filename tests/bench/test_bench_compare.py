"""The guard between two results files: what is worse, what is only noise, what cannot be compared."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.bench import compare as guard
from arborcast.bench.compare import compare, format_comparison
from arborcast.bench.harness.document import timed_row, write_document
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.formats.results import TIME, Measure, document

KEYS = ("method", "bytes")
MACHINE = {"processor": "one", "cores": 2, "system": "Linux", "load_at_the_end": 0.5}


def drawn(rows: list[dict[str, Any]], measures: dict[str, Measure], **more: Any) -> dict[str, Any]:
    """A document in circumstances that are the same in all of them."""
    found = document("How fast?", rows, keys=KEYS, measures=measures)
    return found | {"machine": MACHINE, "versions": {"python": "3.11"}, "code": {}} | more


def timed(time_us: float, spread: float = 0.0, method: str = "ring", **more: Any) -> dict[str, Any]:
    return {"method": method, "bytes": 8, "time_us": time_us, "spread": spread, **more}


TIMED = {"time_us": Measure("less", "spread")}


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        # median and spread   what it is
        ((100, 10), (109, 10), "unchanged"),  # within the spread
        ((100, 10), (111, 10), "worse"),
        ((100, 10), (111, 12), "unchanged"),  # the larger of both spreads
        ((100, 12), (111, 10), "unchanged"),
        ((100, 1), (104, 1), "unchanged"),  # beyond the spread, but within the tolerance of 1/20
        ((100, 1), (106, 1), "worse"),
        ((100, 10), (89, 10), "better"),
        ((100, 0), (105, 0), "unchanged"),
        ((100, 0), (105.1, 0), "worse"),
    ],
)
def test_a_time_is_judged_by_spread_and_tolerance(
    old: tuple[float, float], new: tuple[float, float], verdict: str
) -> None:
    found = compare(drawn([timed(*old)], TIMED), drawn([timed(*new)], TIMED))
    counts = {"worse": len(found.worse), "better": len(found.better), "unchanged": found.unchanged}
    assert counts == {"worse": 0, "better": 0, "unchanged": 0} | {verdict: 1}


def test_exact_figures_may_not_move_at_all() -> None:
    measures = {"rate": Measure("more"), "trees": Measure("less"), "correct": Measure("more")}

    def figures(rate: object, trees: int, correct: bool) -> dict[str, Any]:
        return drawn(
            [{"method": "ring", "bytes": 8, "rate": rate, "trees": trees, "correct": correct}], measures
        )

    before = figures("200/7", 10, True)
    assert compare(before, figures(200 / 7, 10, True)).unchanged == 3
    found = compare(before, figures(200 / 7 * (1 - 1e-8), 11, False))
    assert [change.figure for change in found.worse] == ["correct", "trees", "rate"]  # the worst first
    assert found.worse[0].factor == math.inf and found.worse[1].factor == pytest.approx(1.1)
    found = compare(before, figures("30", 9, True))
    assert {change.figure for change in found.better} == {"rate", "trees"} and not found.worse


def test_what_follows_a_time_is_as_noisy_and_is_told_once() -> None:
    def row(times: list[float], share: float) -> dict[str, Any]:
        return timed_row(
            topology="full:4",
            ranks=4,
            collective=Kind.ALLREDUCE,
            root=None,
            method="ring",
            size_bytes=1 << 20,
            times_us=times,
        ) | {"share_of_optimum": share}

    measures = TIME | {"share_of_optimum": Measure("more", follows="time_us")}
    before = drawn([row([90, 95, 100, 105, 110], 0.9)], measures)  # a spread of 20 in 100
    noisy = compare(before, drawn([row([105, 110, 115, 120, 115], 0.9 / 1.15)], measures))
    assert (len(noisy.worse), noisy.unchanged) == (0, 4)
    slower = compare(before, drawn([row([125, 125, 125, 125, 125], 0.72)], measures))
    assert [change.figure for change in slower.worse] == ["time_us"]
    assert slower.worse[0].factor == pytest.approx(1.25)
    # The same time, but the links delivered more: a share can become worse by itself.
    shared = compare(before, drawn([row([90, 95, 100, 105, 110], 0.6)], measures))
    assert [(change.figure, change.spread) for change in shared.worse] == [
        ("share_of_optimum", pytest.approx(0.18))
    ]


def test_a_spread_may_be_said_by_its_ends() -> None:
    measures = {"speed": Measure("more", "range")}

    def speed(value: float, ends: list[float]) -> dict[str, Any]:
        return drawn([{"method": "ring", "bytes": 8, "speed": value, "range": ends}], measures)

    assert compare(speed(2.0, [1.5, 2.5]), speed(1.1, [1.0, 1.2])).unchanged == 1
    assert compare(speed(2.0, [1.9, 2.1]), speed(1.1, [1.0, 1.2])).worse[0].spread == pytest.approx(0.2)


def test_single_runs_are_not_judged_and_lost_figures_are_worse() -> None:
    once, thrice = timed(100, 0, runs=1), timed(300, 0, runs=1)
    found = compare(drawn([once], TIMED), drawn([thrice], TIMED))
    assert (found.unjudged, found.worse, found.unchanged) == (1, (), 0)
    # One side that has several runs is enough.
    assert compare(drawn([timed(100, 5, runs=5)], TIMED), drawn([thrice], TIMED)).worse
    gone = compare(drawn([timed(100, 5)], TIMED), drawn([timed(100) | {"time_us": None}], TIMED))
    assert [(change.old, change.new) for change in gone.worse] == [(100, None)]
    back = compare(drawn([timed(100) | {"time_us": None}], TIMED), drawn([timed(100, 5)], TIMED))
    assert (back.worse, back.better, back.unchanged) == ((), (), 0)


def test_rows_are_told_apart_by_keys_and_those_of_one_side_are_named() -> None:
    old = drawn([timed(100, method="ring"), timed(10, method="trees"), timed(1, method="gone")], TIMED)
    new = drawn([timed(10, method="trees"), timed(100, method="ring"), timed(1, method="come")], TIMED)
    found = compare(old, new)
    assert (found.vanished, found.new, found.unchanged) == (("gone, bytes 8",), ("come, bytes 8",), 2)
    lines = format_comparison(found)
    assert lines == ["worse 0, better 0, unchanged 2", "vanished: gone, bytes 8", "new: come, bytes 8"]


def test_lists_may_be_keys() -> None:
    row = timed(100) | {"bytes": [2, 2, 3]}
    other = timed(100, method="ring") | {"bytes": [2, 2, 4]}
    assert compare(_listed(row, other), _listed(other, row)).unchanged == 2


def _listed(*rows: dict[str, Any]) -> dict[str, Any]:
    return drawn([], TIMED) | {"rows": list(rows)}


def test_other_circumstances_are_said_in_one_line_each() -> None:
    old = drawn([timed(100)], TIMED)
    machine = MACHINE | {"processor": "another", "cores": 8, "load_at_the_end": 3.0}
    new = drawn([timed(100)], TIMED | {"more": Measure("more")}, machine=machine, versions={"torch": "2.13"})
    assert compare(old, new).warnings == (
        "only one file has more",
        "this compares two machines: processor one and another; cores 2 and 8",
        "the load differs: 0.5 and 3.0",
        "versions differ: python 3.11 and None; torch None and 2.13",
    )
    assert compare(old, old).warnings == ()
    dirty = drawn([timed(100)], TIMED, code={"commit": "1f5f065" * 6, "dirty": True})
    assert compare(old, dirty).warnings == ("new file: measured with uncommitted changes on 1f5f0651f",)
    slightly = drawn([timed(100)], TIMED, machine=MACHINE | {"load_at_the_end": 1.4})
    assert compare(old, slightly).warnings == ()


def test_what_cannot_be_compared_is_refused() -> None:
    good = drawn([timed(100)], TIMED)
    for changed, words in (
        ({"question": "How small?"}, "question: must be the same, got 'How fast\\?' and 'How small\\?'"),
        ({"keys": ["method"]}, "keys: must be the same"),
        ({"keys": []}, r"new file: must say its keys, got \[\]"),
        ({"measures": None}, "new file: must say its measures, got None"),
        ({"measures": {"time_us": {"better": "more", "spread": "spread"}}}, "better must be the same"),
        (
            {"rows": [timed(1), timed(2)]},
            r"new file: rows\[1\]: another row has the same keys: ring, bytes 8",
        ),
        ({"rows": [{"method": "ring"}]}, r"new file: rows\[0\]: lacks bytes"),
        ({"rows": [timed(1) | {"time_us": "fast"}]}, "time_us: must be a number or null, got 'fast'"),
    ):
        with pytest.raises(InputError, match=words):
            compare(good, good | changed)
    with pytest.raises(InputError, match="tolerance: must be at least 0, got nan"):
        compare(good, good, tolerance=math.nan)
    lost = {"time_us": {"better": "less", "spread": None, "follows": "speed"}}
    with pytest.raises(InputError, match="measure time_us: must follow another measure, got 'speed'"):
        compare(good | {"measures": lost}, good | {"measures": lost})


rows_of_times = st.dictionaries(
    st.integers(0, 5), st.tuples(st.floats(1, 1e6), st.floats(0, 1e5)), max_size=6
).map(lambda found: [timed(time, spread, f"m{number}") for number, (time, spread) in found.items()])


@given(rows_of_times, rows_of_times)
def test_every_figure_has_one_verdict_and_the_way_back_turns_it(
    old: list[dict[str, Any]], new: list[dict[str, Any]]
) -> None:
    there = compare(drawn(old, TIMED), drawn(new, TIMED), tolerance=0)
    back = compare(drawn(new, TIMED), drawn(old, TIMED), tolerance=0)
    both = {row["method"] for row in old} & {row["method"] for row in new}
    assert len(there.worse) + len(there.better) + there.unchanged == len(both)
    assert {change.row for change in there.worse} == {change.row for change in back.better}
    assert {change.row for change in there.better} == {change.row for change in back.worse}
    assert (there.vanished, there.new) == (back.new, back.vanished)
    factors = [change.factor for change in there.worse]
    assert factors == sorted(factors, reverse=True) and all(factor >= 1 for factor in factors)


def test_the_table_shows_all_that_is_worse_and_little_that_is_better() -> None:
    names = [f"m{number:02}" for number in range(30)]
    old = drawn([timed(100, 1, name) for name in names], TIMED)
    new = drawn([timed(200 if name < "m15" else 50, 1, name) for name in names], TIMED)
    lines = format_comparison(compare(old, new))
    worse, better = lines.index("worse         figure   old  new  factor  spread"), lines.index("and 5 more")
    assert lines[worse + 1] == "m00, bytes 8  time_us  100  200  2.00 x       1"
    assert len([line for line in lines[worse:better] if line.startswith("m")]) == 15 + guard.MOST_BETTER
    assert lines[-1] == "worse 15, better 15, unchanged 0"


# ------------------------------------------------------------------------------------------ the command


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with one file in common that became slower, and one that only the old one has."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, time_us in ((old, 100), (new, 200)):
        folder.mkdir()
        write_document(folder / "times.json", drawn([timed(time_us, 1)], TIMED))
    write_document(old / "lost.json", drawn([timed(1)], TIMED))
    return old, new


def test_what_is_worse_is_told_by_file(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = folders
    assert guard.compared(old, new)
    said = capsys.readouterr().out
    assert f"lost.json: only in {old}" in said and "times.json: How fast?" in said
    assert "ring, bytes 8" in said
    assert not guard.compared(new / "times.json", old / "times.json")
    assert not guard.compared(old, new, tolerance=1.5)


def test_status_2_and_one_line_where_the_input_is_bad(
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, new = folders
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    other = tmp_path / "other.json"
    write_document(other, drawn([], TIMED) | {"question": "How small?"})
    for arguments, words, status in (
        ((old, new), "worse 1", 1),
        ((old, new / "times.json"), "must be two files or two folders", 2),
        ((old, empty), "must have a results file of the same name", 2),
        ((tmp_path / "none.json", broken), "none.json: No such file", 2),
        ((old / "times.json", broken), "broken.json: must be a results file in JSON", 2),
        ((old / "times.json", other), "question: must be the same", 2),
    ):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            guard.main()
        assert int(end.value.code or 0) == status
        said = capsys.readouterr()
        assert words in said.out + said.err
        assert status == 1 or (said.err.startswith("compare: ") and said.err.count("\n") == 1)


@pytest.mark.parametrize("name", ["frontier", "loopback", "synthesis"])
def test_the_results_that_we_keep_can_be_compared(name: str) -> None:
    path = Path(guard.__file__).parent / "results" / f"{name}.json"
    found = json.loads(path.read_text())
    same = compare(found, found)
    assert (same.worse, same.better, same.vanished, same.warnings) == ((), (), (), ())
    assert same.unchanged >= len(found["rows"])
    slower = found | {"rows": [row | {"time_us": row["time_us"] * 100} for row in found["rows"]]}
    judged = [row for row in found["rows"] if row["runs"] > 1 and row["spread"] < row["time_us"] * 99]
    assert len(compare(found, slower).worse) == len(judged)


# ------------------------------------------------------------------------------------ results of trainings

CANNED = Path(__file__).parents[1] / "canned_results"


@pytest.mark.parametrize("part", sorted(path.stem[9:] for path in CANNED.glob("pipeline_*.json")))
def test_results_can_be_compared(part: str) -> None:
    content = json.loads((CANNED / f"pipeline_{part}.json").read_text())
    found = compare(content, content)
    assert found.worse == found.better == found.vanished == found.new == ()
    assert found.unchanged + found.unjudged > 0

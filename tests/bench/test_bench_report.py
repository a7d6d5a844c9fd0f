"""The report of the benchmarks: every figure from the results, nothing from outside, refusals in words."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.bench import report
from arborcast.bench.harness.standing import Standing
from arborcast.bench.page.console import print_results
from arborcast.bench.page.render import (
    BEGIN,
    END,
    between_markers,
    escape_markdown,
    prose_markdown,
    table_markdown,
)
from arborcast.bench.page.results import Document, Row, number, read_results
from arborcast.bench.page.sections import SECTIONS, _shape
from arborcast.bench.page.tables import Table, strong
from arborcast.bench.page.words import count, digits, duration, percent, size, times, tiny
from arborcast.bench.report import judged, main, summary, write_tables
from arborcast.synth.errors import InputError

CANNED = Path(__file__).parents[1] / "canned_results"
SNAPSHOT = Path(__file__).with_name("figures_of_canned_results.md")
FIGURE = r"\d[\d.,]* ?(?:×|%|ms|us|s\b|GB/s|Mbit)"
LOST = Standing("measured at 0123abcd0, a commit that this history lacks")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A copy of the canned results that a test may change."""
    return Path(shutil.copytree(CANNED, tmp_path / "results"))


def change(results: Path, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
    path = results / f"{name}.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def test_figures_of_canned_results_are_those_of_the_snapshot() -> None:
    """After a wanted change: `python -m tests.bench.test_bench_report` writes it anew."""
    assert summary(read_results(CANNED)) + "\n" == SNAPSHOT.read_text()


def test_every_figure_of_the_tables_follows_its_row(results: Path) -> None:
    """A figure of each results file is changed, and no table stays as it was."""
    before = read_results(results)
    for section in SECTIONS:
        rows = before[section.file].content["rows"]

        def edit(document: dict[str, Any]) -> None:
            for row in document["rows"]:
                row.update({key: value * 3 for key, value in row.items() if type(value) in (int, float)})

        assert rows
        change(results, section.file, edit)
        after = Document(section.file, json.loads((results / f"{section.file}.json").read_text()))
        assert section.table(after) != section.table(before[section.file]), section.file


def test_figures_all_come_from_the_results(results: Path) -> None:
    """Without rows, no figure with a unit is left, but for those of what was asked."""
    none = {"rows": [], "targets": [], "limit": None, "target": None, "target_of_median": None}
    for path in results.glob("*.json"):
        change(results, path.stem, lambda document: document.update(none))
    page = summary(read_results(results))
    for section in SECTIONS:
        page = page.replace(prose_markdown(section.about), "")
    assert re.findall(FIGURE, page) == []


def test_every_section_says_how_its_figures_came_about() -> None:
    page = summary(read_results(CANNED))
    assert re.findall(r"^## (.*)", page, re.MULTILINE) == [escape_markdown(one.title) for one in SECTIONS]
    assert (
        "`bench/results/testbed.json`, measured on emulated links by `python bench/testbed.py` on 2031-02-03"
        in page
    )
    assert "; Canned CPU, 2 cores; medians of 5 runs; " in page
    assert all(prose_markdown(section.about) in page for section in SECTIONS)


HOSTILE = '<script>alert("x")</script>&\'"`*|'


def test_hostile_text_is_only_text(results: Path) -> None:
    free = {"topology", "title", "why", "model"}
    for path in results.glob("*.json"):

        def poison(document: dict[str, Any]) -> None:
            for row in document["rows"]:
                row.update({key: HOSTILE + str(value) for key, value in row.items() if key in free})
            document["command"] = document["question"] = HOSTILE

        change(results, path.stem, poison)
    page = summary(read_results(results))
    assert "<script" not in page and "alert(" in page


@given(st.text(), st.text())
def test_any_text_stays_within_its_cell(first: str, second: str) -> None:
    lines = table_markdown(Table(("a", ">b"), ((first, second),))).split("\n")
    assert len(lines) == 3
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", lines[2])) == 3


def test_columns_that_are_missing_are_dashes(results: Path) -> None:
    def strip(document: dict[str, Any]) -> None:
        keep = {"topology", "collective", "method", "bytes", "time_us", "title", "box", "backend"}
        document["rows"] = [{key: row[key] for key in keep & set(row)} for row in document["rows"]]

    for path in results.glob("*.json"):
        change(results, path.stem, strip)
    assert "| – |" in summary(read_results(results))


def test_a_missing_file_says_what_to_run_and_an_unknown_one_is_listed(results: Path) -> None:
    (results / "testbed.json").unlink()
    (results / "new.json").write_text(json.dumps({"question": "How cold is it?", "rows": [{"degrees": 3}]}))
    documents = read_results(results)
    assert "Not measured yet: run `python bench/testbed.py`." in summary(documents)
    assert "How close to the limit on real links is not measured yet." in summary(documents)
    assert summary(documents).endswith("| new.json | How cold is it? | 1 |")


def test_tables_have_every_row_and_key_of_a_document(tmp_path: Path) -> None:
    documents = read_results(CANNED)
    written = write_tables(documents, tmp_path)
    assert [path.stem for path in written] == list(documents)
    for name, document in documents.items():
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            table = csv.DictReader(file)
            assert len(list(table)) == len(document.rows)
            assert {key.partition(".")[0] for key in table.fieldnames or ()} == {
                key for row in document.rows for key in row if row[key] != {}
            }


def test_the_terminal_shows_every_row_and_the_table_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    for name, document in read_results(CANNED).items():
        print_results(document.content, "verdict", section=name)
        section = next(one for one in SECTIONS if one.file == name)
        said = [line for line in capsys.readouterr().out.splitlines() if line]
        assert len(said) == 2 + len(document.rows) + len(section.table(document).rows)
        assert said[0].split()[0] == document.content["keys"][0]


def test_what_misses_its_target_says_so(results: Path) -> None:
    assert "**2 of 4 targets met, 1 missed, 1 not measured.**" in summary(read_results(results))
    late = {
        "pipeline_memory": ("off", 9.0),
        "pipeline_prediction": ("error", 9.0),
        "pipeline_planner": ("seconds", 9e9),
        "pipeline_intra": ("cpu_seconds", 9e9),
        "pipeline_runtimes": ("ratio", 9.0),
    }
    for name, (figure, value) in late.items():
        section = next(one for one in SECTIONS if one.file == name)
        change(results, name, lambda document, at=(figure, value): document["rows"][0].update([at]))
        assert "(missed)" in str(section.table(read_results(results)[name])), name


# ------------------------------------------------------------------------ what speaks against results


def against(results: Path, **standings: Standing) -> dict[str, Document]:
    return {
        name: replace(one, standing=standings.get(name, Standing()))
        for name, one in read_results(results).items()
    }


def test_no_figure_of_refused_results_is_shown(results: Path, tmp_path: Path) -> None:
    documents = against(results, **dict.fromkeys((path.stem for path in results.glob("*.json")), LOST))
    assert re.findall(FIGURE, summary(documents)) == [] == re.findall(FIGURE, summary({}))
    refused = f"Refused: `bench/results/ddp.json` was {LOST.refused}. Measure it anew: `python bench/ddp.py`."
    assert refused in summary(documents)
    assert summary(documents).count("Refused: `bench/results/") == len(SECTIONS)
    assert write_tables(documents, tmp_path / "tables") == []


def test_results_of_changed_code_say_so_in_words(results: Path) -> None:
    changed = Standing(changed="synth/api.py")
    documents = against(results, ddp=changed, loopback=changed)
    lines = [line for line in summary(documents).splitlines() if "code changed since" in line]
    assert [line.partition("`")[2].partition("`")[0] for line in lines] == [
        "",
        "bench/results/loopback.json",
        "bench/results/ddp.json",
    ]
    assert lines[0] == "- Measured on Canned CPU; code changed since: loopback and ddp."


def test_one_headline_has_results_of_one_processor(results: Path) -> None:
    for name in ("synthesis", "peers"):
        change(results, name, lambda document: document["machine"].update(processor="Another CPU"))
    mixed = summary(read_results(results)).partition("## ")[0]
    assert "How long synthesis takes is not measured yet." in mixed
    assert "- Measured on Canned CPU; left out as measured on other processors: synthesis and peers." in mixed


MARKED = f"# Title\r\n\r\nbefore | <b>\n{BEGIN}\nold figures\n{END}\nafter\n\ttabs, no newline at the end"


def test_the_check_names_file_and_line_that_differ(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme, figures = tmp_path / "README.md", tmp_path / "figures.md"
    for file in (readme, figures):
        file.write_bytes(MARKED.encode())
    arguments = ["--results", str(results), "--headline", str(readme), "--tables", str(figures)]

    def status(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", ["report.py", *arguments, *more])
        try:
            main()
        except SystemExit as stopped:
            return int(stopped.code or 0)
        return 0

    assert status("--check") == 1 and readme.read_bytes() == MARKED.encode()
    assert capsys.readouterr().err.endswith("run make pages\n")
    assert status() == 0 and status("--check") == 0
    before, after = MARKED.split("old figures")
    written = readme.read_bytes().decode()
    assert written.startswith(before) and written.endswith(after) and "old figures" not in written
    lines = figures.read_text().split("\n")
    at = next(number for number, line in enumerate(lines) if line.startswith("## "))
    lines[at] += " "
    figures.write_text("\n".join(lines))
    capsys.readouterr()
    assert status("--check") == 1
    assert capsys.readouterr().err.startswith(f"{figures}:{at + 1}: has '## ")
    assert status("-o", str(tmp_path / "page.md")) == 0
    assert figures.read_text().split("\n") == lines, "the page went elsewhere"
    assert (tmp_path / "page.md").read_text().startswith("# Figures\n\n- ")
    monkeypatch.setattr(report, "history", lambda: None)
    assert status("--check") == 0
    assert "history unknown here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("no markers", f"must hold the line {BEGIN} once, got it 0 times"),
        (BEGIN, f"must hold the line {END} once, got it 0 times"),
        (f"{BEGIN}{BEGIN}{END}", f"must hold the line {BEGIN} once, got it 2 times"),
        (f"{END} {BEGIN}", f"{BEGIN} must come before {END}"),
    ],
)
def test_a_readme_without_its_markers_is_refused(tmp_path: Path, content: str, why: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(content)
    with pytest.raises(InputError, match=re.escape(f"{readme}: {why}")):
        between_markers(readme, "new")
    assert readme.read_text() == content


def test_results_without_their_commit_are_refused_on_the_page(results: Path) -> None:
    (results / "ddp.json").write_text('{"question": "?", "rows": []}')
    assert "ddp.json` was measured at a commit that was not recorded" in summary(judged(results))


def test_what_is_no_results_file_is_refused(results: Path) -> None:
    (results / "testbed.json").write_text("{")
    with pytest.raises(InputError, match=r"testbed\.json: must be a results file in JSON"):
        read_results(results)
    with pytest.raises(InputError, match="must be a folder of results files"):
        read_results(results / "nothing")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (digits(0.0012345), "0.00123"),
        (digits(123456.0), "123,456"),
        (digits(None), "–"),
        (digits(float("nan")), "–"),
        (duration(0.5), "0.500 us"),
        (duration(999.4), "999 us"),
        (duration(999.6), "1.00 ms"),
        (duration(999_600.0), "1.00 s"),
        (times(2.956), "2.96×"),
        (percent(0.9695), "97.0 %"),
        (size(65536.0), "64 KiB"),
        (count(1037.0), "1,037"),
        (tiny(9.8e-8), "9.8e-8"),
        (number("1200/7"), 1200 / 7),
        (str(number("1/0")), "nan"),
        (str(number(True)), "nan"),
        (_shape(Row(replicas=[1, 1, 1])), "3 stages"),
        (_shape(Row(replicas=[6])), "6 replicas"),
        (_shape(Row(replicas="1+4")), "1+4"),
        (_shape(Row()), "–"),
        (escape_markdown("a|b <i> *c* \\"), "a\\|b &lt;i&gt; \\*c\\* \\\\"),
        (prose_markdown(f"run `x<y`, {strong('&')}"), "run `x&lt;y`, **&amp;**"),
    ],
)
def test_figures_in_words(shown: object, expected: object) -> None:
    assert shown == expected


if __name__ == "__main__":
    SNAPSHOT.write_text(summary(read_results(CANNED)) + "\n")

"""README's generated figures recomputed from the results in plain Python; what the headline leaves out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.bench.page.contest import cases, cases_that_count
from arborcast.bench.page.headline import headline
from arborcast.bench.page.results import Document
from arborcast.bench.page.sections import SECTIONS
from arborcast.synth.baselines import BASELINES
from arborcast.synth.errors import CollectiveError, InfeasibleError

HOME = Path(__file__).resolve().parents[2]
RIVALS = ("gloo", "ring", "levels")
CASE = {"topology": "full:4", "collective": "allreduce"}


def row(method: str, time_us: float, size: int, **more: Any) -> dict[str, Any]:
    keys = CASE | {"method": method, "bytes": size}
    return keys | {"time_us": time_us, "cpu_limited": False} | more


@given(
    st.lists(
        st.tuples(
            st.floats(1, 1000),
            st.lists(st.none() | st.floats(1, 1000), min_size=len(RIVALS), max_size=len(RIVALS)),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sets(st.sampled_from(RIVALS)),
)
def test_a_case_with_a_missing_baseline_is_left_out_and_said(
    drawn: list[tuple[float, list[float | None]]], ruled_out: set[str]
) -> None:
    """Unless there is a reason why the baseline has no schedule there."""
    rows, expected = [], []
    for number, (ours, times) in enumerate(drawn):
        rows.append(row("selection", ours, 1 << number))
        rows += [row(name, at, 1 << number) for name, at in zip(RIVALS, times, strict=True) if at is not None]
        ran = [at for at in times if at is not None]
        is_whole = all(at is not None or name in ruled_out for name, at in zip(RIVALS, times, strict=True))
        if is_whole and ran:
            expected.append(min(ran) / ours)
    unavailable = [CASE | {"method": it, "why": f"no {it}", "ruled_out": True} for it in ruled_out]
    document = Document("testbed", {"rows": rows, "rivals": RIVALS, "unavailable": unavailable})
    found, incomplete, limited = cases_that_count(document)
    assert [case.over_best for case in found] == pytest.approx(expected)
    assert (incomplete, limited) == (len(drawn) - len(expected), 0)
    said = headline({"testbed": document})[0]
    assert ("left out, where a baseline did not run" in said) == bool(incomplete and found)
    assert len(SECTIONS[0].table(document).rows) == len(cases(document)) == len(drawn)


def test_a_baseline_that_was_not_found_in_time_is_not_ruled_out() -> None:
    rows = [row("selection", 1.0, 1), row("gloo", 2.0, 1), row("ring", 3.0, 1)]
    late = CASE | {"method": "levels", "why": "not found within 20 s", "ruled_out": False}
    document = Document("testbed", {"rows": rows, "rivals": RIVALS, "unavailable": [late]})
    assert cases_that_count(document) == ([], 1, 0)
    assert "not found within 20 s" in str(SECTIONS[0].table(document))


@pytest.mark.parametrize("method", ["selection", "gloo", "ring"])
def test_any_baseline_that_processors_slowed_down_leaves_the_case_out(method: str) -> None:
    times = {"selection": 1.0, "gloo": 2.0, "ring": 3.0}
    rows = [row(name, at, 1, cpu_limited=name == method) for name, at in times.items()]
    document = Document("testbed", {"rows": rows, "rivals": ["gloo", "ring"]})
    assert cases_that_count(document) == ([], 0, 1)


# ------------------------------------------------------------------------------ README from the results


def times_said(text: str) -> list[float]:
    return [float(word) for word in re.findall(r"(\d[\d,.]*)×", text.replace(",", ""))]


def test_readme_says_what_ten_lines_make_of_the_results() -> None:
    readme = (HOME / "README.md").read_text()
    block = readme.partition("<!-- bench:begin -->")[2].partition("<!-- bench:end -->")[0].splitlines()
    sentences = [line for line in block if line]  # the last says where it was measured
    slow = sentences.pop(1) if sentences[1].startswith("- Slower") else ""
    links, share, speed, *_ = sentences
    document = json.loads((HOME / "bench/results/testbed.json").read_text())
    absent = {
        (each["topology"], each["collective"], each["method"])
        for each in document["unavailable"]
        if each.get("ruled_out")
    }
    by_case: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for each in document["rows"]:
        by_case.setdefault((each["topology"], each["collective"], each["bytes"]), {})[each["method"]] = each
    rivals = document.get("rivals", [])
    counted = []
    for (topology, kind, _), ran in by_case.items():
        is_whole = bool(rivals) and all(name in ran or (topology, kind, name) in absent for name in rivals)
        if is_whole and not any(ran[name]["cpu_limited"] for name in ("selection", *rivals) if name in ran):
            counted.append(ran)
    assert counted, "README states what was measured, and where ours is slower"
    best = [
        min(ran[r]["time_us"] for r in rivals if r in ran) / ran["selection"]["time_us"] for ran in counted
    ]
    by_size: dict[int, list[float]] = {}
    for ran, ratio in zip(counted, best, strict=True):
        by_size.setdefault(ran["selection"]["bytes"], []).append(ratio)
    over = {
        name: [ran[name]["time_us"] / ran["selection"]["time_us"] for ran in counted if name in ran]
        for name in ("multiring", "gloo")
    }
    said = times_said(links)
    assert said[:3] == pytest.approx([median(best), min(best), max(best)], rel=0.005)
    of_sizes = [median(by_size[nbytes]) for nbytes in sorted(by_size)]
    assert said[3 : 3 + len(of_sizes)] == pytest.approx(of_sizes, rel=0.005)
    lost = [ratio for ratio in best if ratio < 0.995]
    assert sorted(times_said(slow)) == pytest.approx(sorted(lost), rel=0.005)
    rest = said[3 + len(of_sizes) :]
    assert rest == pytest.approx([f(v) for v in over.values() for f in (median, min, max)], rel=0.005)
    faster, slower = sum(ratio > 1.005 for ratio in best), sum(ratio < 0.995 for ratio in best)
    even = len(best) - faster - slower
    assert f"of {len(best)} cases" in links
    assert f": faster in {faster}, even within 0.5 % in {even}, slower in {slower}" in links
    large = [ran["selection"]["share_of_optimum"] for ran in counted if ran["selection"]["bytes"] >= 8 << 20]
    assert [float(word) for word in re.findall(r"([\d.]+) %", share)] == pytest.approx(
        [100 * median(large), 100 * min(large)], rel=0.002
    )
    trees = [
        each
        for each in json.loads((HOME / "bench/results/synthesis.json").read_text())["rows"]
        if each["method"] == "trees"
    ]
    ends = [min(trees, key=lambda each: each["ranks"]), max(trees, key=lambda e: (e["ranks"], e["seconds"]))]
    units = {"ms": 1e-3, "s": 1.0}
    assert [float(n) * units[u] for n, u in re.findall(r"\*\*([\d.]+) (m?s)\*\*", speed)] == pytest.approx(
        [each["seconds"] for each in ends], rel=0.005
    )


def test_the_sentences_about_six_gpus_name_the_best_baseline_there_is() -> None:
    six = topologies.load("dgx1").subset(range(6))
    rates = {}
    for name in BASELINES:
        try:
            rates[name] = float(synth.solve(six, "allreduce", method=name).rate)
        except (InfeasibleError, CollectiveError):
            continue
    best = max(rates, key=lambda name: rates[name])
    ours = float(synth.solve(six, "allreduce").rate)
    text = " ".join((HOME / "README.md").read_text().split())
    assert f"the best pattern of libraries ({best}) reaches {rates[best]:g} GB/s of allreduce" in text
    assert f"the best set of rings {rates['multiring']:g} GB/s" in text
    assert f"trees reach {ours:g} GB/s" in text
    picture = (HOME / "docs/pictures/dgx1-fragment.svg").read_text()
    assert all(f"<!-- {name} -->" in picture for name in rates)

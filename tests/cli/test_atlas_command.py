"""`synth atlas` as a user runs it: one's own machine, all of them, a run that was killed, the same bytes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.synth.atlas.figures import KINDS, Figures
from arborcast.synth.atlas.page import FIGURES, index_of, read_atlas
from arborcast.topologies.owned import owned
from tests.cli.test_explain_command import SQUARE
from tests.support.browser import BROWSER, FLAGS, needs_browser
from tests.support.commands import Command, refused

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "docs" / "atlas"
DEADLINE = "300"
"""Of the atlas that is kept."""

TINY = ("ring:3", "ring:2", "star:2,in-network=both")
OF_TINY = f"""
import sys
from arborcast.synth.cli import app
from arborcast.topologies import owned
owned.owned = lambda: [owned.Owned(spec) for spec in {TINY}]
sys.argv = ["synth", "atlas", "--catalog", "-o", *sys.argv[1:]]
app.main()
"""


def figures_in(folder: Path) -> Figures:
    return Figures.from_document((folder / FIGURES).read_bytes(), str(folder))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ----------------------------------------------------------------------------------- one's own machine


def test_a_page_of_ones_own_file(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("square.yaml").write_text(SQUARE)
    found = command("atlas", "square.yaml", "-o", "pages", "--json").document
    (page,) = (Path(each) for each in found["pages"])
    figures = figures_in(page.parent)
    fabric = topologies.load("square.yaml")
    for kind in KINDS:
        row = figures.of(kind)
        assert row.proved
        assert row.rate == row.limit == synth.bound(fabric, kind).rate
    rings = synth.solve(fabric, "allreduce", method="multiring").rate
    best = figures.of("allreduce")
    assert best.ring == rings < best.limit
    text = page.read_text()
    assert f"<b>{float(best.limit):.4g} GB/s</b>, proved" in text
    assert f"({int(100 * rings / best.limit)} % of the limit)" in text
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text)
    for name in re.findall(r'href="([^"#]+)"', text):
        assert (page.parent / name).stat().st_size
    offered = {each.name for each in figures.downloads if each.name}
    assert {"allreduce.json.gz", "allreduce.msccl.xml.gz"} <= offered
    assert command("verify", str(page.parent / "allreduce.json.gz")).status == 0
    for curve in figures.curves:
        assert [point.bytes for point in curve.points] == [1 << power for power in range(10, 31)]
        assert all(point.time_us >= point.least_us for point in curve.points)


def test_a_page_is_kept_until_its_fabric_changes(command: Command, tmp_path: Path) -> None:
    file, words = tmp_path / "pair.yaml", ("-o", str(tmp_path / "pages"), "--json")
    limits = []
    for rate, kept in ((25, 0), (25, 1), (50, 0)):
        file.write_text(f"ranks: 2\nlinks:\n  - {{between: [0, 1], bandwidth: {rate}}}\n")
        found = command("atlas", str(file), *words).document
        assert found["kept"] == kept
        folder = Path(found["pages"][0]).parent
        limits.append(figures_in(folder).of("allreduce").limit)
        assert {each.name for each in folder.parent.iterdir()} == {folder.name}
    assert limits == [25, 25, 50]


def test_what_was_not_reached_is_said(command: Command, tmp_path: Path) -> None:
    ran = command("atlas", "dgx1", "--ranks", "0-5", "--deadline", "0.001", "-o", str(tmp_path / "pages"))
    assert ran.status == 0, ran.err
    (folder,) = (tmp_path / "pages").iterdir()
    text = (folder / "index.html").read_text()
    assert "allreduce: no times, not reached in 0.001 s" in text
    assert figures_in(folder).of("allreduce").limit == Fraction(125, 2)


def test_what_has_no_page_leaves_no_folder(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "apart.yaml"
    file.write_text(
        "ranks: 4\nlinks:\n  - {between: [0, 1], bandwidth: 1}\n  - {between: [2, 3], bandwidth: 1}\n"
    )
    refused(command("atlas", str(file), "-o", str(tmp_path / "pages")), "rank", "--ranks", status=1)
    refused(command("atlas", "dgx7", "-o", str(tmp_path / "pages")), "dgx7", "dgx1")
    assert not (tmp_path / "pages").exists()


# ---------------------------------------------------------------------------------------- all of them


def started(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", OF_TINY, str(folder)], cwd=ROOT, start_new_session=True)


@pytest.mark.long
def test_an_atlas_that_was_killed_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """Another process has other hashes, so that the second run would differ where their order counted."""
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    first, killed = started(whole), started(ended)
    while not (ended / "ring-3").exists() or not [*ended.glob(".*.part")]:
        assert killed.poll() is None
        time.sleep(0.002)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert first.wait(200) == 0
    made = [path for path in ended.iterdir() if not path.name.startswith(".")]
    assert 1 <= len(made) < len(TINY)
    for folder in made:
        offered = {each.name for each in figures_in(folder).downloads if each.name}
        assert offered < {path.name for path in folder.iterdir()}
    kept = {path: path.stat().st_mtime_ns for path in ended.glob(f"*/{FIGURES}")}
    assert started(ended).wait(200) == 0
    assert bytes_of(ended) == bytes_of(whole)
    assert len(bytes_of(whole)) > 3 * len(TINY)
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())


def test_every_machine_of_the_catalog_is_owned() -> None:
    rows = [*owned()]
    names = {row.spec.partition(":")[0] for row in rows}
    assert names == {entry.name for entry in topologies.catalog() if entry.vendor}
    assert len(rows) == len(set(rows)) >= 60


# ------------------------------------------------------------------------------- the atlas that is kept

SMALL = sorted(path.parent.name for path in KEPT.glob(f"*/{FIGURES}") if figures_in(path.parent).ranks <= 8)


def test_the_kept_atlas_has_machines_and_stays_small() -> None:
    assert len(read_atlas(KEPT)) >= 60
    assert sum(map(len, bytes_of(KEPT).values())) < 8_000_000
    for machine in read_atlas(KEPT):
        folder = KEPT / machine.folder
        assert sum(path.stat().st_size for path in folder.iterdir()) < 200_000
        for file in machine.downloads:
            assert not file.name or (folder / file.name).stat().st_size == file.bytes


@pytest.mark.few(1)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(SMALL))
def test_a_drawn_machine_is_worked_out_to_the_same_figures(
    command: Command, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """Where answers changed on purpose, `ANSWERS` is raised and the atlas made anew."""
    before = json.loads((KEPT / name / FIGURES).read_text())
    folder = tmp_path_factory.mktemp("again")
    spec, *options = before["spec"].split()
    assert command("atlas", spec, *options, "--deadline", DEADLINE, "-o", str(folder)).status == 0
    now = json.loads((folder / name / FIGURES).read_text())
    curves = [each.pop("curves") for each in (before, now)]
    assert now == before  # rates and limits as exact fractions, proofs, downloads to the byte
    old, new = ([point for curve in each for point in curve["points"]] for each in curves)
    assert len(old) == len(new)
    for one, other in zip(old, new, strict=True):
        assert {**one, **times(other)} == {**other, **times(other)}
        assert times(one) == pytest.approx(times(other), rel=1e-6)


def times(point: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in point.items() if key.endswith("_us")}


# ------------------------------------------------------------------------------------------- the index


@needs_browser
def test_the_index_sorts_and_filters(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    machines = read_atlas(KEPT)
    script = (ROOT / "docs" / "assets" / "atlas.js").read_text()
    file = tmp_path / "index.html"
    file.write_text(f"<!doctype html><title>Atlas</title>{index_of(machines)}<script>{script}</script>")
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = running.new_page()
        page.goto(file.as_uri())
        page.get_by_role("button", name="ranks").click()
        shown = page.locator("tbody tr td:nth-child(2)").all_text_contents()
        assert [*map(int, shown)] == sorted((each.ranks for each in machines), reverse=True)
        page.get_by_role("button", name="ranks").click()
        shown = page.locator("tbody tr td:nth-child(2)").all_text_contents()
        assert [*map(int, shown)] == sorted(each.ranks for each in machines)
        page.get_by_role("searchbox").fill("DGX1 amd")
        assert page.locator("tbody tr:visible").count() == 0
        page.get_by_role("searchbox").fill("tpu google")
        names = page.locator("tbody tr:visible td:first-child a").all_text_contents()
        assert sorted(names) == sorted(each.name for each in machines if each.name.startswith("tpu"))
        running.close()

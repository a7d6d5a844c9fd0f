"""The page of `synth view` in a browser: what it shows, by keys, in words, and that it asks nobody."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from arborcast import load, solve, write_schedule
from arborcast.synth.viewer import page as pages
from arborcast.synth.viewer import scene_of
from tests.support.browser import BROWSER, FLAGS, needs_axe, needs_browser, violations
from tests.support.commands import Command, refused

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCRIPT = files("arborcast.synth.viewer") / "web" / pages.SCRIPT

shown_in_a_browser = [
    needs_browser,
    pytest.mark.skipif(not SCRIPT.is_file(), reason="the viewer's script was not built: make viewer"),
]
pytestmark = [pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Any]:
    """Opens a page, and sees afterwards that it asked for itself alone and that nothing went wrong."""
    asked: list[str] = []
    wrong: list[str] = []
    window = browser.new_page(viewport={"width": 1400, "height": 1000})
    window.on("request", lambda request: asked.append(request.url))
    window.on("pageerror", lambda error: wrong.append(str(error)))
    window.on("console", lambda message: wrong.append(message.text))

    def open_page(path: Path) -> Page:
        window.goto(path.as_uri())
        window.wait_for_selector("#now:not(:empty)")
        return window

    yield open_page
    assert wrong == []
    assert {re.sub(r"#.*", "", url) for url in asked if not url.startswith("blob:")} <= {window.url}
    window.close()


@pytest.fixture(scope="module")
def fragment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("view") / "fragment.json"
    write_schedule(solve(load("dgx1"), "allreduce", ranks=range(6)), path)
    return path


def said(page: Page) -> str:
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.inner_text("#now")


def table(page: Page) -> list[list[str]]:
    return [row.locator("td").all_inner_texts() for row in page.locator("article:first-child tbody tr").all()]


class TestInABrowser:
    pytestmark = shown_in_a_browser

    def test_keys_move_in_time_and_the_words_say_what_passes(
        self, command: Command, fragment: Path, opened: Any, tmp_path: Path
    ) -> None:
        path = tmp_path / "page.html"
        ran = command("view", str(fragment), "--sizes", "64KiB:128KiB", "--html", str(path), "--json")
        assert ran.document == {
            "file": str(path),
            "opened": False,
            "titles": ["allreduce on dgx1, trees"],
        }
        from arborcast import read_schedule

        runs = scene_of(read_schedule(fragment), [1 << 16, 1 << 17])["runs"]
        page = opened(path)
        assert page.locator("#size option").all_inner_texts() == ["64 KiB", "128 KiB"]
        for run in runs:
            page.select_option("#size", run["label"])
            page.click("#view0-Now")
            page.click("h1")  # arrows in the tabs would go from tab to tab
            for part in (0.25, 0.6):
                page.keyboard.press("Home")
                for _ in range(round(part * 10)):
                    page.keyboard.press("Shift+ArrowRight")
                at = round(part * 10) / 10 * run["time_us"]
                bars = run["bars"]
                passing = sorted(
                    (chunk, f"{start:.2f} to {end:.2f}")
                    for start, end, chunk in zip(bars["start_us"], bars["end_us"], bars["chunk"], strict=True)
                    if start <= at < end
                )
                assert said(page).startswith(f"{at:.2f} of {run['time_us']:.2f} µs: {len(passing)} of ")
                assert sorted((int(row[1]), row[3]) for row in table(page)) == passing

    def test_steps_chunks_bound_and_programs(
        self, command: Command, fragment: Path, opened: Any, tmp_path: Path
    ) -> None:
        from arborcast import read_schedule

        path = tmp_path / "page.html"
        assert command("view", str(fragment), "--html", str(path), "-q").status == 0
        schedule = read_schedule(fragment)
        page = opened(path)
        before = 0.0
        for step in range(1, schedule.steps):
            page.keyboard.press(".")
            words = said(page)
            assert f"{step + 1} of {schedule.steps} steps begun" in words
            assert before < float(words.split()[0]) or step == 1
            before = float(words.split()[0])
        page.keyboard.press(",")
        assert f", {schedule.steps - 1} of {schedule.steps} steps begun" in said(page)
        page.keyboard.press("]")
        page.keyboard.press("]")
        assert "with chunk 1" in said(page)
        page.click("#view0-Chunks")
        pressed = page.locator('.chunks button[aria-pressed="true"]').all_inner_texts()
        assert [text.split(":")[0] for text in pressed] == ["chunk 1"]
        page.keyboard.press("Escape")
        assert "with chunk" not in said(page)
        page.click("#view0-Rank")
        page.select_option("[role=tabpanel] select", "2")
        lines = table(page)
        assert len(lines) == sum(2 in (move.src, move.dst) for move in schedule.transfers)
        sends = [row for row in lines if "sends to" in row[1]]
        assert len(sends) == sum(move.src == 2 for move in schedule.transfers)
        page.click("#view0-Schedule")
        picture = page.locator(".map canvas").screenshot()
        page.check("text=Show the bound")
        said(page)
        assert page.locator(".map canvas").screenshot() != picture

    def test_two_schedules_have_one_clock(
        self, command: Command, fragment: Path, opened: Any, tmp_path: Path
    ) -> None:
        from playwright.sync_api import expect

        ring, path = tmp_path / "ring.json", tmp_path / "page.html"
        write_schedule(solve(load("dgx1"), "allreduce", ranks=range(6), method="ring"), ring)
        assert command("view", str(fragment), str(ring), "--html", str(path), "-q").status == 0
        page = opened(path)
        page.keyboard.press("End")
        times = [scene["runs"][0]["time_us"] for scene in json.loads(page.inner_text("#data"))["scenes"]]
        assert said(page).startswith(f"{max(times):.2f} of {max(times):.2f} µs")
        assert page.locator("article h1").count() == 2
        page.keyboard.press("Home")
        page.click("#play")
        expect(page.locator("#now")).not_to_have_text(re.compile("^0.00 of"))
        page.click("#play")
        assert page.inner_text("#play") == "Play"

    @needs_axe
    def test_axe_finds_nothing_in_either_colour_scheme(
        self, command: Command, fragment: Path, opened: Any, tmp_path: Path
    ) -> None:
        path = tmp_path / "page.html"
        assert command("view", str(fragment), "--html", str(path), "-q").status == 0
        page = opened(path)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for tab in ("Schedule", "Chunks", "Rank", "Links", "Now"):
                page.click(f"#view0-{tab}")
                assert violations(page) == []


def test_without_its_script_the_page_is_refused(
    command: Command, fragment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "SCRIPT", "absent.js")
    refused(
        command("view", str(fragment), "--html", str(tmp_path / "page.html"), "-q"),
        "absent.js",
        "make viewer",
    )
    assert not (tmp_path / "page.html").exists()


def test_text_of_a_schedule_cannot_end_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SCRIPT", "style.css")  # any file: the script is not what is tested
    path = tmp_path / "page.html"
    pages.write_page([{"title": "</script><script>alert(1)</script>"}], path)
    text = path.read_text()
    assert "<script>alert" not in text
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1]) == {"scenes": [{"title": "</script><script>alert(1)</script>"}]}

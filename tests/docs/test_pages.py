"""Pages keep to the code: options, words, schemas of files, and a README that stays short."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from arborcast import pipeline
from arborcast.backends import options
from arborcast.backends.measure.device_bench import read_device_results
from arborcast.bench.harness.standing import history
from tests.docs.given import square
from tests.docs.look import look
from tests.docs.snippets import PAGES, ROOT
from tests.support.browser import BROWSER, FLAGS, needs_axe, needs_browser, violations
from tests.support.commands import Command


def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("hooks_of_the_site", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


def test_the_readme_stays_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 120


def test_every_variable_of_the_environment_is_told() -> None:
    told = text_of("docs/reference/environment.md")
    known = {*options._VARIABLES, *options._ELSEWHERE}
    assert set(re.findall(r"`(ARBORCAST_[A-Z0-9_]+)`", told)) == known


def test_commits_that_pages_name_are_in_the_history() -> None:
    if (commits := history(ROOT)) is None:
        pytest.skip("no history, or not all of it")
    known = {commit[:length] for commit in commits for length in (8, 9)}
    named = re.compile(r"\b(?=\d*[a-f])(?=[a-f]*\d)[\da-f]{8,9}\b")
    assert {word for page in PAGES for word in named.findall(text_of(page))} <= known


def test_the_first_page_of_the_site_is_the_readme_without_its_figures() -> None:
    readme = text_of("README.md")
    first, end, rest = readme.partition(hooks().END_OF_THE_FIRST_PAGE)
    assert end
    assert "## I build runtimes" in first
    assert "<!-- bench:begin -->" in rest


def test_the_page_of_gpus_begins_with_what_has_run() -> None:
    found = [read_device_results(path) for path in sorted((ROOT / "bench/results/device").glob("*.json"))]
    first = text_of("docs/how-to/gpus.md").split("\n\n")[1]
    assert ("has run on no GPU yet" in first) == (not found)
    for one in found:
        device = one["device"]
        assert f"{device['count']} x {device['name']}" in first
        assert device["count"], "run on the host"
        assert one["code"]["dirty"] is False, "cannot be repeated"
        assert not any(it["wrong"] for it in one["checks"])


def test_the_glossary_has_each_word_once() -> None:
    rows = re.findall(r"^\| ([a-z, A-Z]+) \|", text_of("docs/reference/glossary.md"), re.M)
    words = [word for row in rows for word in row.split(", ") if word != "word"]
    assert len(words) > 30
    assert sorted(set(words)) == sorted(words)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    """Where only Markdown is shown, too; the site's own build checks anchors."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(page)):
        schema = "schemas/" in target
        assert schema or target.startswith("http") or (PAGES[page].parent / target).exists(), target


def test_commands_are_all_in_the_reference() -> None:
    told = hooks().commands()
    for name in ("synth solve", "synth bench run", "synth plan"):
        assert re.search(rf"^##+ {name}$", told, re.MULTILINE)
    assert told.count("--json") > 15


# ----------------------------------------------------------------------------------- schemas of files


def test_real_files_fit_their_schemas(command: Command, tmp_path: Path) -> None:
    schemas = {name: schema for name, (_, schema) in hooks().schemas().items()}
    asked: dict[str, tuple[str, ...]] = {
        "schedule": ("solve", "dgx1", "allreduce", "--ranks", "0-2"),
        "implicit-schedule": ("solve", "torus:4x4", "allgather", "--form", "implicit"),
        "plan": ("plan", str(tmp_path / "model.json"), "full:2,bandwidth=6", "--method", "gpipe"),
    }
    layers = tuple(pipeline.Layer(f"block.{at}", 1000, 2000, 1 << 20, 8 << 20, 1, 1, 2) for at in range(2))
    pipeline.write_profile(pipeline.Profile("drawn", 64, layers, source="drawn"), tmp_path / "model.json")
    found: dict[str, Any] = {"topology": yaml.safe_load(square())}
    for name, words in asked.items():
        file = tmp_path / f"{name}.json"
        assert command(*words, "-o", str(file)).status == 0
        found[name] = json.loads(file.read_text())
    along = ("--mesh", "2x2", "--along", "0:allreduce")
    assert command("groups", "torus:2x2", *along, "-o", str(tmp_path / "g")).status == 0
    found["groups"] = json.loads((tmp_path / "g" / "groups.json").read_text())
    collective = ROOT / "examples" / "collectives" / "neighbour-exchange.yaml"
    found["collective"] = yaml.safe_load(collective.read_text())
    for name, document in found.items():
        jsonschema.Draft202012Validator.check_schema(schemas[name])
        judge = jsonschema.Draft202012Validator(schemas[name])
        judge.validate(document)
        for key in schemas[name]["required"]:
            without = {other: document[other] for other in document if other != key}
            (error,) = judge.iter_errors(without)
            assert f"'{key}' is a required property" in error.message
        (error,) = judge.iter_errors(document | {"unexpected": 1})
        assert "unexpected" in error.message


# ------------------------------------------------------------------------------------------- the site


@needs_browser
def test_looking_at_a_site_names_each_fault(tmp_path: Path) -> None:
    (tmp_path / "fine.html").write_text("<!doctype html><title>fine</title><p>fine")
    wide = '<div style="width: 600px">wide</div><img src="none.png"><script>nothing()</script>'
    (tmp_path / "wrong.html").write_text(f"<!doctype html><title>wrong</title>{wide}")
    picture = f"broken picture {(tmp_path / 'none.png').as_uri()}"
    assert sorted(fault for fault in look(tmp_path) if "ERR_FILE" not in fault) == [
        f"wrong.html: 1280 pixels: {picture}",
        "wrong.html: 390 pixels: 218 pixels too wide",  # 600, and the 8 before it
        f"wrong.html: 390 pixels: {picture}",
        "wrong.html: nothing is not defined",
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(folder)]
    ran = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_built_site_asks_no_other_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]*\ssrc=\"?(?:https?:)?//|<link[^>]*\shref=\"?(?:https?:)?//"
    )
    for page in pages:
        assert not loads.search(page.read_text(encoding="utf-8")), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style


@pytest.mark.long
@pytest.mark.timeout(900)
@needs_browser
@needs_axe
def test_axe_finds_nothing_on_any_page_in_either_colour_scheme(site: Path) -> None:
    """Save on the page of a wrong address, which people meet as the server's, not as a file."""
    from playwright.sync_api import sync_playwright

    wrong = []
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        for scheme in ("light", "dark"):
            page = running.new_page(color_scheme=scheme)
            for path in sorted(site.rglob("*.html")):
                if path.name != "404.html":
                    page.goto(path.as_uri())
                    wrong += [(scheme, str(path.relative_to(site)), *one) for one in violations(page)]
        running.close()
    assert wrong == []

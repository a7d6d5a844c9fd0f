from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stdout
from fractions import Fraction
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest

from arborcast import synth
from tests.support.forked_workers import forks_workers

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the demo prints, and the folder that it leaves."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        forks_workers(patch)
        patch.setattr(sys, "argv", [str(DEMO), "--out", str(folder)])
        patch.syspath_prepend(DEMO.parent)
        runpy.run_path(str(DEMO), run_name="__main__")
    return printed.getvalue(), folder


def test_it_says_what_it_did(demo: tuple[str, Path]) -> None:
    printed, folder = demo
    assert re.search(r"^allreduce +at most 125/2 GB/s", printed, re.MULTILINE)
    assert re.search(r"^broadcast +at most 75 GB/s", printed, re.MULTILINE)
    assert len(re.findall(r"^trees .*exactly the bound", printed, re.MULTILINE)) == 2
    assert len(re.findall(r"^verified .*fullest link 100% full", printed, re.MULTILINE)) == 2
    assert len(re.findall(r"^ran .*6 processes.*every element right", printed, re.MULTILINE)) == 2
    assert str(folder / "report.html") in printed


@pytest.mark.parametrize(("kind", "rate"), [("allreduce", Fraction(125, 2)), ("broadcast", Fraction(75))])
def test_its_schedules_are_correct_and_optimal(demo: tuple[str, Path], kind: str, rate: Fraction) -> None:
    _, folder = demo
    schedule = synth.read_schedule(folder / f"{kind}.json")
    verdict = synth.verify(schedule)
    assert verdict.correct
    assert verdict.rate == schedule.bound.rate == rate


def test_its_report_is_one_self_contained_page(demo: tuple[str, Path]) -> None:
    _, folder = demo
    page = (folder / "report.html").read_text(encoding="utf-8")
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))  # closes every tag it opens
    svg = "{http://www.w3.org/2000/svg}svg"
    assert sum(element.tag == svg for element in root.iter()) == len(list(folder.glob("*.svg"))) == 7
    assert len(root.findall(".//table")) == 8
    for element in root.iter():
        for name, value in element.attrib.items():
            if name.endswith(("href", "src")):
                assert value.startswith("#")
    ids = Counter(element.get("id") for element in root.iter() if element.get("id"))
    assert ids.most_common(1)[0][1] == 1
    used = re.findall(r'(?:href="|url\()#([^")]+)', page)
    assert used
    assert set(used) <= set(ids)


def test_it_leaves_nothing_half_written(demo: tuple[str, Path]) -> None:
    _, folder = demo
    assert {path.suffix for path in folder.iterdir()} == {".json", ".svg", ".html"}


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    command = [sys.executable, str(DEMO), "--out", str(tmp_path / "taken")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("demo: ")
    assert done.stderr.count("\n") == 1

"""What every picture owes: the same bytes each time, a name that says the format, nothing left behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from arborcast.synth.errors import InputError
from tests.pictures import test_frontier_picture, test_pictures
from tests.planning import test_pipeline_pictures

DRAWINGS = test_pictures.DRAWINGS | test_frontier_picture.DRAWINGS | test_pipeline_pictures.DRAWINGS
every_drawing = pytest.mark.parametrize("draw", DRAWINGS.values(), ids=DRAWINGS)


@every_drawing
def test_svg_is_well_formed_and_the_same_each_time(draw: Callable[[Path], None], tmp_path: Path) -> None:
    draw(tmp_path / "first.svg")
    draw(tmp_path / "second.svg")
    assert ElementTree.parse(tmp_path / "first.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


@every_drawing
def test_png_by_the_suffix_and_nothing_else_left_behind(draw: Callable[[Path], None], tmp_path: Path) -> None:
    draw(tmp_path / "picture.PNG")
    assert (tmp_path / "picture.PNG").read_bytes().startswith(b"\x89PNG\r\n")
    assert [path.name for path in tmp_path.iterdir()] == ["picture.PNG"]


@every_drawing
def test_other_suffixes_are_refused(draw: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the name must end in \.svg or \.png, got \.pdf"):
        draw(tmp_path / "picture.pdf")
    assert not list(tmp_path.iterdir())


@every_drawing
def test_without_matplotlib_the_extra_is_named(
    draw: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"need matplotlib; install it with: pip install 'arborcast\[viz\]'"):
        draw(tmp_path / "picture.svg")

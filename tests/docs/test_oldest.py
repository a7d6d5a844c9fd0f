"""The oldest packages that are tested are the oldest that are allowed."""

from __future__ import annotations

import re
import tomllib

from tests.docs.snippets import ROOT


def test_the_oldest_packages_are_those_that_the_project_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    allowed = dict(
        re.match(r"([\w-]+)>=([\w.]+)", it).groups()  # type: ignore[union-attr]
        for it in (*project["dependencies"], *extras["torch"], *extras["viz"])
    )
    lowest = (ROOT / "tests" / "lowest.txt").read_text(encoding="utf-8")
    pinned = re.findall(r"^([\w-]+)==([\w.]+?)(?:\.\*)?$", lowest, re.MULTILINE)
    assert dict(pinned) == allowed

"""Every public function, and every class that users make, has an example that runs as shown."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path
from typing import Any

import pytest

from arborcast import backends, pipeline, synth, topologies
from arborcast.synth import groups
from tests.docs.snippets import PAGES, ROOT, snippets

torch = pytest.importorskip("torch")

MADE = {"AlltoallvPlanner", "Collective", "Divisible", "Executor", "LinkCosts"} | {
    "Options", "Plan", "Topology", "Trainer",
}  # fmt: skip
"""Classes that users make; all others are results."""
WITH_RANKS = ["Executor", "Trainer", "measure_links"]
"""What several processes call together: pages show it, and `test_snippets` runs them."""
GIVEN = {
    "Path": Path,
    "backends": backends,
    "groups": groups,
    "nn": torch.nn,
    "pipeline": pipeline,
    "synth": synth,
    "topologies": topologies,
    "torch": torch,
}
PUBLIC: dict[str, Any] = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (synth, groups, topologies, backends, pipeline)
    for name in package.__all__
    if (inspect.isfunction(getattr(package, name)) or name in MADE) and name not in WITH_RANKS
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_function_has_an_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if name.endswith("run_schedule"):
        request.getfixturevalue("forked_workers")
    if name.endswith(".view") and not (ROOT / "synth/viewer/web/viewer.js").is_file():
        pytest.skip("the viewer's script was not built: make viewer")
    text = inspect.getdoc(PUBLIC[name]) or ""
    found = doctest.DocTestParser().get_doctest(text, dict(GIVEN), name, None, None)
    assert found.examples
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(found, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("name", WITH_RANKS)
def test_what_ranks_call_together_is_shown_on_a_page(name: str) -> None:
    assert any(f".{name}(" in one.text for page in PAGES for one in snippets(page) if one.kind == "python")

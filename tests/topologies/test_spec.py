from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.errors import InputError, TopologyError
from arborcast.topologies import catalog, load
from tests.support.refusals import refuses

ONE_CABLE = "ranks: 2\nlinks: [{between: [0, 1], bandwidth: 3}]\n"


def test_fragments_and_relays() -> None:
    fragment = load("dgx1", ranks=[0, 2, 3])
    assert (fragment.ranks, fragment.bandwidth[1, 2]) == (3, 50)  # GPUs 2 and 3: two links
    whole = load("dgx1", ranks=[0, 2, 3], relays=True)
    assert (whole.ranks, whole.bandwidth[1, 2]) == (8, 50)
    with pytest.raises(TopologyError, match="relays need ranks that take part, got none"):
        load("dgx1", relays=True)
    with pytest.raises(TopologyError, match=r"rank must be in 0\.\.7, got 8"):
        load("dgx1", ranks=[0, 8])


@refuses("spec", "near")
def test_unknown_specs_suggest_near_names(spec: str, near: str) -> None:
    with pytest.raises(TopologyError, match=f"is neither in the catalog nor a file; did you mean .*{near}"):
        load(spec)


def test_an_unknown_spec_with_nothing_near_says_where_names_are() -> None:
    with pytest.raises(TopologyError, match="synth topologies lists the catalog"):
        load("qqqq")
    with pytest.raises(TopologyError, match="topology '': is neither in the catalog nor a file"):
        load("")


def test_what_counts_as_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cluster", "cluster.yaml", "dgx1", "odd:name"):
        (tmp_path / name).write_text(ONE_CABLE)
    for spec in ("cluster", "cluster.yaml", "./dgx1", str(tmp_path / "dgx1"), "odd:name"):
        assert load(spec).ranks == 2
    assert load("dgx1").ranks == 8  # the catalog's
    with pytest.raises(InputError, match=r"none\.yaml: cannot be read: No such file"):
        load("none.yaml")
    with pytest.raises(InputError, match="none/none: cannot be read: No such file"):
        load("none/none")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        load(str(tmp_path))


@refuses("arguments", "message")
def test_options_that_do_not_go_with_the_catalog(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        load("dgx1", **arguments)  # type: ignore[arg-type]


# Arguments stay short: hypercube:16 is a million links, and correct.
names = st.sampled_from([entry.name for entry in catalog()])
arguments = st.text("013x,=/.-+e:", max_size=4) | st.sampled_from(["boxes=2", "3x3", "8,latency=1"])


@given(st.builds("{}:{}".format, names, arguments) | st.text(max_size=12).filter(lambda text: text != "."))
@settings(max_examples=200)
def test_any_spec_is_a_topology_or_one_line(spec: str) -> None:
    try:
        load(spec)
    except InputError as error:
        assert len(str(error).splitlines()) == 1


def test_the_catalog_needs_no_heavy_imports() -> None:
    code = (
        "import sys, synth, topologies; topologies.load('dgx-a100:boxes=2');"
        "import arborcast.synth.formats;"
        "heavy = 'pydantic yaml defusedxml numpy numba highspy networkx torch matplotlib'.split();"
        "print([name for name in heavy if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"

"""Which code gave figures: recorded in results files, and compared with what the code is today."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from arborcast.bench.harness import standing as judge
from arborcast.bench.harness.standing import HOME, Standing, measured_code
from arborcast.synth.formats.results import provenance

CODE = {
    "arborcast/__init__.py": "",
    "arborcast/lazy.py": "",
    "synth/__init__.py": '_HOMES = {"solve": "arborcast.synth.solver", "view": "arborcast.synth.viewer"}\n'
    "__getattr__ = loader(__name__, _HOMES)\n",
    "synth/solver.py": "def solve():\n    from arborcast.synth.rate import rate\n    return rate(2)\n",
    "synth/rate.py": '"""Rates."""\n\n\ndef rate(n):\n    """Of n."""\n    return n * 1  # one\n',
    "synth/viewer.py": "view = 1\n",
    "backends/engine.py": "speed = 1\n",
    "bench/rate.py": "from arborcast import synth\nfrom arborcast.backends import engine\n"
    'CHILD = "child.py"\nprint(synth.solve(), engine)\n',
    "bench/child.py": "print(1)\n",
    "bench/other.py": "print(1)\n",
}


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "more")
    return git(folder, "rev-parse", "HEAD")


def write(folder: Path, path: str, text: str) -> None:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    for path, text in CODE.items():
        write(tmp_path, path, text)
    commit(tmp_path)
    return tmp_path


def result(home: Path, *folders: str) -> dict[str, Any]:
    return {"command": "python bench/rate.py --quick", "code": provenance(folders or ("synth",), home)}


def standing(content: dict[str, Any], home: Path) -> Standing:
    """As a process of its own says it, which sees one state of a checkout."""
    for each in vars(judge).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()
    return judge.standing(content, home)


def test_figures_of_todays_code_stand(checkout: Path) -> None:
    found = result(checkout)
    assert found["code"] == {
        "folders": ["synth"],
        "commit": git(checkout, "rev-parse", "HEAD"),
        "dirty": False,
    }
    assert standing(found, checkout) == Standing()
    commit(checkout)
    assert standing(found, checkout) == Standing()


def test_the_measured_code_is_what_the_script_imports_below_the_folders(checkout: Path) -> None:
    """What a package loads on use counts where it is used; the index of such names does not."""
    judge._files.cache_clear()
    found = measured_code(checkout, "bench/rate.py", ("synth",))
    inside = {"bench/rate.py", "bench/child.py", "synth/solver.py", "synth/rate.py", "arborcast/__init__.py"}
    assert found == inside
    assert measured_code(checkout, "bench/rate.py", ("synth", "backends")) == inside | {"backends/engine.py"}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("synth/rate.py", CODE["synth/rate.py"].replace("n * 1", "n * 2")),
        ("synth/rate.py", "import math\n" + CODE["synth/rate.py"]),
        ("bench/child.py", "print(2)\n"),
        ("synth/data.yaml", "rate: 2\n"),
    ],
)
def test_code_that_does_something_else_is_named(checkout: Path, path: str, text: str) -> None:
    write(checkout, "synth/data.yaml", "rate: 1\n")
    commit(checkout)
    found = result(checkout)
    write(checkout, path, text)
    assert standing(found, checkout) == Standing(changed=path)
    commit(checkout)
    assert standing(found, checkout) == Standing(changed=path)


def test_a_new_module_that_the_code_imports_is_a_change(checkout: Path) -> None:
    found = result(checkout)
    write(checkout, "synth/faster.py", "def rate(n):\n    return 0\n")
    write(checkout, "synth/solver.py", CODE["synth/solver.py"].replace("synth.rate", "synth.faster"))
    assert standing(found, checkout).changed == "synth/solver.py"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("synth/rate.py", "# two\ndef rate(\n    n,\n):\n    return n * 1\n"),
        ("synth/__init__.py", CODE["synth/__init__.py"].replace("{", '{"rate": "arborcast.synth.rate", ')),
        ("bench/other.py", "print(2)\n"),
        ("synth/viewer.py", "view = 2\n"),
        ("backends/engine.py", "speed = 2\n"),
        ("README.md", "# Arborcast\n"),
    ],
)
def test_comments_layout_and_code_that_is_not_imported_are_no_change(
    checkout: Path, path: str, text: str
) -> None:
    found = result(checkout)
    write(checkout, path, text)
    assert standing(found, checkout) == Standing()


def test_a_module_that_was_moved_is_no_change(checkout: Path) -> None:
    found = result(checkout)
    (checkout / "synth" / "rates").mkdir()
    git(checkout, "mv", "synth/rate.py", "synth/rates/linear.py")
    write(checkout, "synth/rates/other.py", "def rate(n):\n    return 0\n")
    for moved, changed in (("linear", False), ("other", True)):
        text = CODE["synth/solver.py"].replace("synth.rate ", f"synth.rates.{moved} ")
        write(checkout, "synth/solver.py", text)
        assert bool(standing(found, checkout).changed) == changed, moved


def test_a_script_that_was_moved_with_its_child_is_no_change(checkout: Path) -> None:
    found = result(checkout)
    (checkout / "bench" / "measure").mkdir()
    for name in ("rate.py", "child.py"):
        git(checkout, "mv", f"bench/{name}", f"bench/measure/{name}")
    assert standing(found, checkout) == Standing()
    write(checkout, "bench/measure/child.py", "print(2)\n")
    assert standing(found, checkout) == Standing(changed="bench/measure/child.py")
    write(checkout, "bench/other/rate.py", "print(1)\n")  # which of the two is it?
    assert standing(found, checkout) == Standing(changed="bench/rate.py")


def test_c_changes_with_its_code_alone(checkout: Path) -> None:
    write(checkout, "synth/fast.c", 'int f(void) { return 1; } /* one */\nchar *s = "//";\n')
    commit(checkout)
    found = result(checkout)
    write(checkout, "synth/fast.c", 'int f(void) {\n  return 1;  // two\n}\nchar *s = "//";\n')
    assert standing(found, checkout) == Standing()
    write(checkout, "synth/fast.c", 'int f(void) { return 1; }\nchar *s = "//2";\n')
    assert standing(found, checkout) == Standing(changed="synth/fast.c")


def test_uncommitted_and_untracked_code_is_refused(checkout: Path) -> None:
    write(checkout, "backends/engine.py", "speed = 2\n")
    write(checkout, "bench/results/rate.json", "{}")
    assert result(checkout)["code"]["dirty"] is False
    found = result(checkout, "synth", "backends")
    why = f"measured with uncommitted changes on {found['code']['commit'][:9]}"
    assert standing(found, checkout) == Standing(why)
    write(checkout, "synth/new.py", "")
    assert result(checkout)["code"]["dirty"] is True


def test_commits_that_history_lacks_are_refused_even_where_git_still_has_them(checkout: Path) -> None:
    write(checkout, "README.md", "gone")
    commit(checkout)
    lost = result(checkout)
    git(checkout, "reset", "-q", "--hard", "HEAD~1")
    name = lost["code"]["commit"][:9]
    assert standing(lost, checkout) == Standing(f"measured at {name}, a commit that this history lacks")
    assert standing({}, checkout) == Standing("measured at a commit that was not recorded")
    unsure = {"code": lost["code"] | {"dirty": None}}
    assert standing(unsure, checkout).refused.startswith("measured with uncommitted changes")


def test_without_history_nothing_is_known_but_what_the_file_says(
    checkout: Path, tmp_path_factory: Any
) -> None:
    found = result(checkout)
    outside = tmp_path_factory.mktemp("outside")
    assert provenance(["synth"], outside) == {"folders": ["synth"], "commit": None, "dirty": None}
    assert standing(found, outside) == Standing(known=False)
    commit(checkout)
    git(outside, "clone", "-q", "--depth", "1", checkout.as_uri(), "shallow")
    assert standing(found, outside / "shallow") == Standing(known=False)
    assert standing({}, outside).refused


def test_engines_measure_their_c_and_no_bench_measures_the_page() -> None:
    found = measured_code(HOME, "bench/ddp.py", ("synth", "topologies", "backends"))
    assert {"backends/native/channel.c", "backends/dataflow/engine.py", "synth/api.py"} <= found
    assert not any(path.startswith(("bench/page", "bench/report")) for path in found)

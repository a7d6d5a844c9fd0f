"""What people install who have no checkout: sdist and wheel, built from the files that git knows."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT

VIEWER = "synth/viewer/web/viewer.js"

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def run(*words: str | Path, folder: Path) -> str:
    """A command with no modules of this checkout."""
    ran = subprocess.run(
        list(map(str, words)), cwd=folder, env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return ran.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with sdist and wheel, the latter built from the former."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    known = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if known.returncode:
        pytest.skip("needs a checkout of git")
    # What `make viewer` builds is no file of git, but one of the wheel.
    script = [VIEWER] if (ROOT / VIEWER).exists() else []
    for name in (*filter(None, known.stdout.split("\0")), *script):
        if not (ROOT / name).exists():
            continue
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (source / name).symlink_to((ROOT / name).readlink())
        else:
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", ".", folder=source)
    return folder / "dist"


def test_they_hold_what_is_needed(built: Path) -> None:
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        f"backends/native/{name}" for name in ("arithmetic.c", "channel.c", "loop.c", "shelf.c", "native.h")
    } <= names
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"arborcast/py.typed", "arborcast/topologies/examples/two-boxes.yaml"} <= names
    assert any(name.startswith("arborcast/backends/native/built.") for name in names)
    web = {name.rpartition("/")[2] for name in names if name.startswith("arborcast/synth/viewer/web/")}
    assert web == {"page.html", "style.css"} | ({"viewer.js"} if (ROOT / VIEWER).exists() else set())
    assert not any(name.startswith(("tests/", "docs/", "synth/")) for name in names)
    assert wheel.stat().st_size < 10e6


def test_the_demo_runs_from_the_wheel(built: Path, tmp_path: Path) -> None:
    """In an environment of its own; what it depends on is lent by the one of these tests."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (wheel,) = built.glob("*.whl")
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed")
    run(python, *pip, "--prefix", tmp_path / "env", wheel, folder=tmp_path)
    where = run(python, "-c", "import arborcast; print(arborcast.__file__)", folder=tmp_path).strip()
    assert Path(where).is_relative_to(site)
    assert run(tmp_path / "env" / "bin" / "synth", "--version", folder=tmp_path).startswith("arborcast ")
    for name in ("demo.py", "demo_report.py"):
        (tmp_path / name).write_bytes((ROOT / "examples" / name).read_bytes())
    printed = run(python, "demo.py", "--out", "out", folder=tmp_path)
    assert printed.count("every element right") == 2
    assert (tmp_path / "out" / "report.html").exists()

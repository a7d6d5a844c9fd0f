"""Folders of caches: made for their owner alone, and not used where others could have written to them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from arborcast.synth.chunks.solvers.cache import ChunkCache
from arborcast.synth.errors import InputError
from arborcast.synth.kernels import compiled
from arborcast.synth.kernels.cache_folder import check_private, make_private

NOBODY = 65534


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of all caches; not there yet."""
    found = tmp_path / "somewhere" / "cache"
    monkeypatch.setenv("ARBORCAST_CACHE", str(found))
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_made_for_their_owner_alone_whatever_the_umask(root: Path) -> None:
    before = os.umask(0)
    try:
        ChunkCache().put_json("a", 1)
        assert compiled._prepared(root / "numba" / "abc")
    finally:
        os.umask(before)
    for path in (root, root / "chunks", root / "numba", root / "numba" / "abc"):
        assert mode(path) == 0o700
    assert ChunkCache().get_json("a") == 1


@pytest.mark.parametrize("part", [".", "chunks"])
@pytest.mark.parametrize("bits", [0o770, 0o777, 0o702])
def test_what_others_could_have_written_is_not_used(
    root: Path, part: str, bits: int, caplog: pytest.LogCaptureFixture
) -> None:
    ChunkCache(root / "chunks").put_json("a", 1)
    open_to_others = (root / part).resolve()
    open_to_others.chmod(bits)
    # A name of its own, because a process looks at a folder once.
    cache = ChunkCache(root / "chunks" / ".." / "chunks")
    with caplog.at_level(logging.WARNING):
        assert cache.get_json("a") is None
        cache.put_json("b", 2)
    assert not cache._path("b").exists()
    (line,) = caplog.messages
    assert f"{open_to_others}: others must not be able to write there, mode is {bits:04o}: chmod go-w" in line


def test_kernels_of_a_folder_that_others_can_write_never_run(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_private(root / "numba")
    root.chmod(0o775)
    with caplog.at_level(logging.WARNING):
        assert not compiled._prepared(root / "numba" / "abc")
    assert f"kernels are compiled anew: {root}: others must not be able to write there" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
def test_a_folder_of_another_user_is_refused_and_one_of_root_is_not(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_private(root / "chunks")
    os.chown(root / "chunks", NOBODY, NOBODY)
    with pytest.raises(InputError, match=f"chunks: must be of this user or of root, is of user {NOBODY}"):
        check_private(root / "chunks")
    os.chown(root, NOBODY, NOBODY)
    os.chown(root / "chunks", 0, 0)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    check_private(root / "chunks")

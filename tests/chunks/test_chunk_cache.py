"""Answers on disk: what makes a key, broken entries, several writers, folders that are full or closed."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkSend
from arborcast.synth.chunks.problem.outcome import Infeasible
from arborcast.synth.chunks.problem.prune import ChunkPlan
from arborcast.synth.chunks.solvers import cache as module
from arborcast.synth.chunks.solvers.cache import ChunkCache
from arborcast.synth.errors import Prover
from arborcast.synth.kernels.cache_folder import cache_folder
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.chunk_problems import problem_of

KEY = "ab" * 32
KINDS = (ChunkPlan, ChunkSend, Infeasible, Prover)
PLAN = ChunkPlan((1, 2), (ChunkSend(0, 0, 1, 0), ChunkSend(3, 1, 2, 1)))


def key(problem: ChunkProblem | None = None, **changed: object) -> str:
    asked: dict[str, object] = {"chunks": 2, "steps": 3, "rounds": 4, "encoding": "sat", "seed": 0}
    details: dict[str, Any] = {"subject": "instance"} | asked | changed
    return ChunkCache("unused").key(problem=problem or problem_of("ring:4"), **details)


def kept_in(kept: ChunkCache) -> object:
    return kept.get(KEY, KINDS, lambda value: value)


def test_an_answer_comes_back(tmp_path: Path) -> None:
    kept = ChunkCache(tmp_path / "made" / "when needed")
    assert kept_in(kept) is None
    kept.put(KEY, PLAN)
    assert kept_in(kept) == PLAN
    for prover in Prover:
        kept.put(KEY, Infeasible(prover))
        assert kept_in(ChunkCache(kept.folder)) == Infeasible(prover)
    assert kept.get_json("cd" * 32) is None


@pytest.mark.few(4)
@given(
    st.recursive(
        st.integers() | st.text() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
def test_any_document_comes_back(tmp_path_factory: pytest.TempPathFactory, document: object) -> None:
    kept = ChunkCache(tmp_path_factory.mktemp("cache"))
    kept.put_json(KEY, document)
    assert kept.get_json(KEY) == document


def test_a_key_is_what_the_answer_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = load("ring:4")
    slower = Topology.build(ring.name, 4, [replace(ring.links[0], bandwidth=Fraction(1, 2)), *ring.links[1:]])
    keys = [
        key(),
        key(chunks=3),
        key(steps=4),
        key(rounds=5),
        key(seed=1),
        key(encoding="ilp"),
        key(slices=3),
        key(slices=4),
        key(problem_of(ring, "alltoall")),
        key(problem_of(ring, "broadcast", 0)),
        key(problem_of(ring, "broadcast", 1)),
        key(problem_of(slower)),
        key(problem_of(replace(ring, symmetries=()))),
        key(problem_of("ring:5")),
        key(problem_of("star:4")),
        key(subject="bounds"),
    ]
    for name, value in (("_solver_versions", {"z3-solver": "0"}), ("_sources", "other")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda value=value: value)
            keys.append(key())
    assert len(set(keys)) == len(keys)


def test_names_and_latencies_play_no_part() -> None:
    ring = load("ring:4")
    links = [Link(link.src, link.dst, link.bandwidth, Fraction(7)) for link in ring.links]
    assert key(problem_of(Topology("other", 4, tuple(links), (), ring.symmetries))) == key()


def test_keys_are_the_same_in_every_process() -> None:
    code = "from tests.chunks import test_chunk_cache; print(test_chunk_cache.key())"
    paths = os.pathsep.join(path or "." for path in sys.path)
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"  # not ours
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": seed}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert shown.stdout.decode().strip() == key()


def _entry(**changed: object) -> str:
    content = changed.get("content", {"Infeasible": [{"Prover": ["CaDiCaL"]}]})
    entry = {"format": "arborcast.cache/2", "key": KEY, "sha256": module._digest(content), "content": content}
    return json.dumps(entry | changed)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        (_entry()[:-9], "Unterminated|Expecting"),
        ("[]", "list indices"),
        ("[" * 100_000, "recursion"),
        ('{"format": "arborcast.cache/2"}', "content"),
        ("\0" * 100, "NUL"),
        (b"\xff\xfe", "UTF-8"),
        (_entry(format="arborcast.cache/0"), "another key or format"),
        (_entry(key="cd" * 32), "another key or format"),
        (_entry(sha256="0" * 64), "is not what was written"),
        (_entry().replace("Infeasible", "Feasible"), "is not what was written"),
        (_entry(content={}), "holds no answer"),
        (_entry(content={"Maybe": []}), "holds no answer: .*Maybe"),
        (_entry(content={"Infeasible": []}), "holds no answer: .*proved_by"),
        (_entry(content={"Infeasible": [{"Prover": ["hearsay"]}]}), "holds no answer: .*hearsay"),
        (_entry(content={"ChunkPlan": [[1]]}), "holds no answer: .*sends"),
        (_entry(content={"ChunkPlan": [[1], [{"ChunkSend": [0, 0, 0]}]]}), "holds no answer: .*step"),
        (_entry(content={"ChunkPlan": [[1], [{"ChunkSend": [0, 0, 0, -1]}]]}), "natural number, got -1"),
        (_entry(content={"ChunkPlan": [[1.5], []]}), "natural number, got 1.5"),
        (_entry(content={"ChunkPlan": ["1/0", []]}), "holds no answer: ZeroDivisionError"),
        (_entry(content={"ChunkPlan": 1}), "holds no answer"),
    ],
)
def test_broken_entries_are_computed_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | bytes, words: str
) -> None:
    (tmp_path / f"{KEY}.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    kept = ChunkCache(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert kept_in(kept) is None
    (message,) = caplog.messages
    assert "ignored: " in message
    assert re.search(words, message), message
    kept.put(KEY, PLAN)
    assert kept_in(kept) == PLAN


def test_a_folder_in_the_place_of_an_entry(tmp_path: Path) -> None:
    (tmp_path / f"{KEY}.json").mkdir()
    assert kept_in(ChunkCache(tmp_path)) is None


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    for _ in range(2):
        kept = ChunkCache(tmp_path / "file" / "cache")
        kept.put(KEY, PLAN)
        kept.put(KEY, PLAN)
        assert kept_in(kept) is None
    (message,) = caplog.messages
    assert "answers are not kept" in message and "ARBORCAST_CACHE" in message


def test_the_oldest_entries_go(tmp_path: Path) -> None:
    kept = ChunkCache(tmp_path, max_bytes=5000)
    keys = [f"{number:064x}" for number in range(20)]
    for age, name in enumerate(keys):
        kept.put_json(name, "x" * 1000)  # about 1,200 bytes with the envelope
        os.utime(tmp_path / f"{name}.json", (age, age))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5000
    assert [kept.get_json(name) is not None for name in keys] == [False] * 16 + [True] * 4


def test_what_is_used_stays(tmp_path: Path) -> None:
    kept = ChunkCache(tmp_path, max_bytes=5000)
    keys = [f"{number:064x}" for number in range(10)]
    for age, name in enumerate(keys):
        kept.put_json(name, "x" * 800)
        os.utime(tmp_path / f"{name}.json", (age, age))
        assert kept.get_json(keys[0]) is not None  # which makes it the newest


def test_drafts_of_dead_writers_go(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.json.1.part", tmp_path / ".b.json.2.part"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (time.time() - 10_000,) * 2)
    ChunkCache(tmp_path).put(KEY, PLAN)
    assert not old.exists() and new.exists()


WRITER = """
import sys
from arborcast.synth.chunks.solvers.cache import ChunkCache
kept = ChunkCache(sys.argv[1], max_bytes=3000)
for turn in range(50):
    for number in range(4):
        key = f"{number:064x}"
        kept.put_json(key, [sys.argv[2]] * 100)
        found = kept.get_json(key)
        assert found is None or len(set(found)) == 1, found
"""


def test_two_processes_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name], env=environment, stderr=-1)
        for name in ("a", "b")
    ]
    for writer in writers:
        _, complaints = writer.communicate()
        # A file that the other one replaced or removed meanwhile is no reason to complain.
        assert writer.returncode == 0 and b"not kept" not in complaints, complaints
    assert not list(tmp_path.glob("*.part"))


def test_the_folder_of_all_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARBORCAST_CACHE", str(tmp_path))
    assert ChunkCache().folder == tmp_path / "chunks"
    monkeypatch.delenv("ARBORCAST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/arborcast")

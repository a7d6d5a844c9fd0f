"""Answers of solvers on disk, found again by everything that they depend on.

A key is a hash of the problem, of what was asked, of the solvers' versions and of our own sources, so that
nothing has to be declared out of date. An entry that is not whole is a warning and a recomputation; a folder
that cannot be written is one warning and no cache. Several processes may share a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from arborcast.synth.chunks.encodings.registry import ENCODINGS
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.errors import InputError
from arborcast.synth.formats.atomic import write_atomically
from arborcast.synth.formats.reading import read_text
from arborcast.synth.kernels.cache_folder import cache_folder, check_private, make_private
from arborcast.synth.topology import Topology

log = logging.getLogger(__name__)

Detail: TypeAlias = str | int | Sequence[str] | Sequence[int] | None

AnyValue = TypeVar("AnyValue")

MAX_BYTES = 256 << 20
"""Size of a folder beyond which the entries that were not used for the longest time go."""

_FORMAT = "arborcast.cache/2"
_MAX_ENTRY_BYTES = 64 << 20
_STALE_DRAFT_S = 3600.0  # a writer that has not renamed its draft after an hour is dead
_unwritable: set[Path] = set()
"""Folders of which it was said that they cannot be written."""

_private: dict[Path, bool] = {}
"""Whether only this user can write to a folder, of those that were looked at."""


class ChunkCache:
    """A folder of entries, each a JSON document under a key.

    Attributes:
        folder: where they are; made when the first one is written.
        max_bytes: size of all entries together beyond which the oldest are removed.
    """

    def __init__(self, folder: Path | str | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        """Nothing is read or written yet.

        Without a folder it is "chunks" in the folder of all caches (`synth.kernels.cache_folder`).
        """
        self.folder = cache_folder() / "chunks" if folder is None else Path(folder)
        self.max_bytes = max_bytes
        self._unchecked_bytes: int | None = None  # since the size of the folder was looked at; None: never

    def key(self, subject: str, problem: ChunkProblem, **details: Detail) -> str:
        """The key of anything about a problem.

        The names and latencies of the problem play no part; `details` are whatever else the answer depends
        on.
        """
        content = {
            "topology": keyed_topology(problem.topology),
            "demands": [[sorted(demand.sources), sorted(demand.targets)] for demand in problem.demands],
            "routes": [[route.src, *route.via, route.dst] for route in problem.routes],
            "details": details,
        }
        return self.key_of_content(subject, content)

    def key_of_content(self, subject: str, content: Mapping[str, object]) -> str:
        """The key of an answer that depends on plain JSON values, the solvers and our sources only."""
        state = {"solvers": _solver_versions(), "sources": _sources()}
        return hashlib.sha256(_canonical({"subject": subject, **content, **state}).encode()).hexdigest()

    def get(self, key: str, kinds: Sequence[type], check: Callable[[Any], Any]) -> Any:
        """The value that was kept, as `check` gives it back; None where there is none that can be read.

        Args:
            key: its key.
            kinds: the classes of which it and its parts are (see `value_to_json`).
            check: raises ValueError where the value is not to be believed.
        """
        document = self.get_json(key)
        if document is None:
            return None
        try:
            return check(value_from_json(document, {kind.__name__: kind for kind in (*kinds, str)}))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:  # InputError is a ValueError
            self._warn_of_entry(key, f"holds no answer: {error!r}")
            return None

    def put(self, key: str, value: object) -> None:
        """Keep a value (see `value_to_json`), if the folder can be written."""
        self.put_json(key, value_to_json(value))

    def get_json(self, key: str) -> Any:
        """The document that was kept; None where there is none that can be read."""
        path = self._path(key)
        if not self._is_private():
            return None
        try:
            if not path.is_file():
                return None
            entry = json.loads(read_text(path, max_bytes=_MAX_ENTRY_BYTES))
            content = entry["content"]
            if entry["format"] != _FORMAT or entry["key"] != key:
                raise ValueError("belongs to another key or format")
            if entry["sha256"] != _digest(content):
                raise ValueError("is not what was written")
        except (KeyError, TypeError, ValueError, RecursionError, OSError) as error:
            self._warn_of_entry(key, str(error))
            return None
        with contextlib.suppress(OSError):  # it may be gone, or not be ours; then it only looks older
            os.utime(path)
        return content

    def put_json(self, key: str, document: object) -> None:
        """Keep a document of plain JSON values other than null, if the folder can be written.

        One that is larger than the whole folder may be, or than 64 MB, is not kept.
        """
        entry = {"format": _FORMAT, "key": key, "sha256": _digest(document), "content": document}
        text = _canonical(entry)
        if self.folder in _unwritable or len(text) > min(_MAX_ENTRY_BYTES, self.max_bytes):
            return
        if not self._is_private():
            return
        try:
            make_private(self.folder)
            write_atomically(self._path(key), text)
            self._bound_size(len(text))
        except (OSError, InputError) as error:
            _unwritable.add(self.folder)
            log.warning("answers are not kept: %s (ARBORCAST_CACHE names another folder)", error)

    def _is_private(self) -> bool:
        """Whether the folder may be used; said once where not."""
        if self.folder not in _private:
            try:
                check_private(self.folder)
                _private[self.folder] = True
            except (OSError, InputError) as error:
                _private[self.folder] = False
                log.warning("nothing is taken or kept: %s (ARBORCAST_CACHE names another folder)", error)
        return _private[self.folder]

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _warn_of_entry(self, key: str, why: str) -> None:
        log.warning("cache entry %s ignored: %s", self._path(key), why)

    def _bound_size(self, written: int) -> None:
        """Remove the oldest entries, looking at the folder only after much was written."""
        if self._unchecked_bytes is not None:
            self._unchecked_bytes += written
            if self._unchecked_bytes < self.max_bytes // 16:
                return
        self._unchecked_bytes = 0
        entries = sorted(_entries(self.folder))
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def _entries(folder: Path) -> Iterable[tuple[float, int, Path]]:
    """Time of last use, size and path of each entry; drafts of dead processes are removed on the way."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            status = path.stat()
            if path.suffix == ".json":
                yield status.st_mtime, status.st_size, path
            elif path.suffix == ".part" and status.st_mtime < time.time() - _STALE_DRAFT_S:
                path.unlink()


def kept_or_found(
    cache: ChunkCache | None,
    subject: str,
    problem: ChunkProblem,
    find: Callable[[], AnyValue],
    kinds: Sequence[type],
    *,
    is_final: Callable[[AnyValue], bool],
    check: Callable[[AnyValue], AnyValue] = lambda value: value,
    **details: Detail,
) -> AnyValue:
    """What is known about a problem: from the cache where it was worked out to its end before.

    Args:
        cache: None to keep nothing.
        subject: the kind of question, for the key.
        problem: what is to be done.
        find: works it out.
        kinds: the classes of which what is found and its parts are.
        is_final: whether to keep it.
        check: what becomes of a kept one; raises ValueError where it is not to be believed.
        details: whatever else the answer depends on.
    """
    if cache is None:
        return find()
    key = cache.key(subject, problem, **details)
    kept: AnyValue | None = cache.get(key, kinds, check)
    if kept is not None:
        return kept
    found = find()
    if is_final(found):
        cache.put(key, found)
    return found


def value_to_json(value: object) -> Any:
    """A value as plain JSON: fractions are text such as "7/6", tuples lists; None, numbers and truths stay.

    Anything else names its class, `{"ChunkSend": [0, 1, 2, 3]}`: text, members of enumerations, and
    dataclasses with their fields in order.
    """
    match value:
        case None | bool() | int():
            return value
        case Fraction():
            return str(value)
        case tuple():
            return [value_to_json(each) for each in value]
        case str():
            content = [str(value)]
        case _:
            content = [value_to_json(getattr(value, each.name)) for each in fields(cast(Any, value))]
    return {type(value).__name__: content}


def value_from_json(document: Any, kinds: Mapping[str, type]) -> Any:
    """The inverse, of values that are made of these kinds.

    Raises:
        KeyError, TypeError, ValueError: the document is no such value; all numbers of ours are natural.
    """
    match document:
        case None | bool():
            return document
        case int() if document >= 0:
            return document
        case str():
            return Fraction(document)
        case list():
            return tuple(value_from_json(each, kinds) for each in document)
        case dict():
            ((name, content),) = document.items()
            if issubclass(kinds[name], str):
                return kinds[name](*content)
            return kinds[name](*(value_from_json(each, kinds) for each in content))
    raise ValueError(f"must be a natural number, got {document!r}")


def keyed_topology(topology: Topology) -> dict[str, Any]:
    """What chunk schedules depend on: all but names, messages and latencies, with declared symmetries."""
    return {
        "ranks": topology.ranks,
        "switches": [switch.abilities for switch in topology.switches],
        "links": [[link.src, link.dst, link.kind_without_latency] for link in topology.links],
        "symmetries": topology.symmetries,
        "streams": topology.streams,
    }


def _canonical(document: object) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(document: object) -> str:
    return hashlib.sha256(_canonical(document).encode()).hexdigest()


@cache
def _solver_versions() -> dict[str, str]:
    packages = [encoding.package for encoding in ENCODINGS.values()]
    return {package: importlib.metadata.version(package) for package in packages}


@cache
def _sources() -> str:
    """A name for the present state of the whole package: an answer depends on more than its encoding."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()

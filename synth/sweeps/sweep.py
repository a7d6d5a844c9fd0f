"""A table of schedules in a folder, worked out in parallel, taken up again where it was left.

`sweep.json` says what is asked of which machine; `answers/` holds a file for each question, written when all
its schedules are in `schedules/`. A question with an answer is not asked again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborcast.synth.errors import InputError
from arborcast.synth.formats import topology_to_document
from arborcast.synth.formats.atomic import make_folder, write_atomically
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.sweeps.answering import LATE, Answered, answered, as_text
from arborcast.synth.sweeps.questions import Question
from arborcast.synth.topology import Topology

SWEEP_FORMAT = "arborcast.sweep/1"
HEAD, ANSWERS, SCHEDULES = "sweep.json", "answers", "schedules"


@dataclass(frozen=True)
class Progress:
    """How far a sweep is.

    Attributes:
        done: questions with an answer, those of earlier runs included.
        total: all questions.
        document: the answer that came last; None before the first.
    """

    done: int
    total: int
    document: dict[str, Any] | None = None


def sweep(
    machine: Topology,
    asked: Sequence[Question],
    folder: Path,
    *,
    options: SolveOptions | None = None,
    sizes: Sequence[int] | None = None,
    jobs: int = 1,
    retry: bool = False,
    listen: Callable[[Progress], None] | None = None,
) -> int:
    """Answer all questions that have no answer yet; how many that were.

    Inside `joblib.parallel_config(backend="dask")` or `"ray"` the questions are answered on such a cluster.

    Args:
        machine: all of it.
        asked: questions about it, see `synth.sweeps.questions.questions`.
        folder: where answers are and go; made where it does not exist.
        options: seed, deadline for each question and the like.
        sizes: message sizes in bytes over which schedules are compared; None for the best rate alone.
        jobs: how many questions are worked on at once; -1 for all cores.
        retry: whether questions that ran out of time are asked again.
        listen: told of every answer.

    Raises:
        InputError: the folder holds another sweep or something else, or cannot be written.

    Examples:
        >>> from arborcast.synth.sweeps.questions import questions
        >>> machine = topologies.load("ring:4")
        >>> asked = list(questions(machine, failures=1, kinds=[synth.Kind.ALLREDUCE]))
        >>> synth.sweep(machine, asked, Path("answers"))  # the whole ring, and without a link
        2
    """
    from joblib import Parallel, delayed

    options = options or SolveOptions()
    _open(machine, folder, options, sizes)
    left = [question for question in asked if not _is_done(folder, question, retry)]
    done = len(asked) - len(left)
    tell = listen or (lambda progress: None)
    tell(Progress(done, len(asked)))
    results: Iterator[tuple[str, Answered]] = Parallel(n_jobs=jobs, return_as="generator_unordered")(
        delayed(_work)(machine, question, options, sizes) for question in left
    )
    for key, found in results:
        _keep(folder, key, found)
        done += 1
        tell(Progress(done, len(asked), found.document))
    return len(left)


def _work(
    machine: Topology, question: Question, options: SolveOptions, sizes: Sequence[int] | None
) -> tuple[str, Answered]:
    return question.key, answered(machine, question, options, sizes)


def _keep(folder: Path, key: str, found: Answered) -> None:
    """Schedules first: an answer names only files that are there."""
    for name, text in found.files.items():
        write_atomically(folder / SCHEDULES / name, text)
    write_atomically(folder / ANSWERS / f"{key}.json", as_text(found.document))


def _is_done(folder: Path, question: Question, retry: bool) -> bool:
    path = folder / ANSWERS / f"{question.key}.json"
    if not path.exists():
        return False
    return not (retry and read_json(path).get("status") == LATE)


def _open(machine: Topology, folder: Path, options: SolveOptions, sizes: Sequence[int] | None) -> None:
    """Make the folder, or see that it belongs to the same sweep."""
    head = {
        "format": SWEEP_FORMAT,
        "topology": topology_to_document(machine),
        "seed": options.seed,
        "sizes": None if sizes is None else list(sizes),
    }
    path = folder / HEAD
    if path.exists():
        before = read_json(path)
        for name, value in json.loads(json.dumps(head)).items():
            if before.get(name) != value:
                shown = "" if name == "topology" else f" must be {before.get(name)} as before, got {value};"
                raise InputError(
                    f"{path}: {name}:{shown} the folder holds another sweep; name another folder, or ask as "
                    "before"
                )
        _make_both(folder)
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: must be an empty folder or one with a sweep in it")
    make_folder(folder, parents=True)
    # First, so that a run that is stopped at once leaves a sweep that can go on.
    write_atomically(path, json.dumps(head, indent=1) + "\n")
    _make_both(folder)


def _make_both(folder: Path) -> None:
    make_folder(folder / ANSWERS)
    make_folder(folder / SCHEDULES)


def read_json(path: Path) -> dict[str, Any]:
    """An object in a file of ours.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: must be JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: must be an object, got {type(found).__name__}")
    return found

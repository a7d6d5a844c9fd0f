"""Processes that answer a bench: whole commands measured from outside, and a process for each rank.

Both sides of a comparison run through `run`, so that start-up and every child process count for both. Ranks
are forked from a server that has imported torch once; the first that fails ends them all.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Event, Timer
from typing import Any

HOME = Path(__file__).resolve().parents[2]
ONE_CORE = {
    "PYTHONPATH": str(HOME),
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Environment of a process that computes with one thread."""


WHOLE = ("process_seconds", "process_cpu_seconds", "process_MB")
"""What `answer` says of the whole process."""


class ChildError(Exception):
    """A process of ours failed; the first line of the message says which, and its last words."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a process ended.

    Attributes:
        status: its exit status; negative where a signal ended it.
        output: its standard output, up to the end or the time limit.
        errors: its standard error.
        seconds: from its start to its end by the clock.
        cpu_seconds: of it and of all its children that it waited for.
        peak_MB: the most memory that one of those processes held.
        timed_out: whether it was ended at the time limit.
    """

    status: int
    output: str
    errors: str
    seconds: float
    cpu_seconds: float
    peak_MB: float  # noqa: N815 - a unit
    timed_out: bool


def run(
    command: Sequence[str],
    limit_s: float,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run a command to its end or to the time limit, at which it is killed with all its children.

    Args:
        command: the program and its arguments.
        limit_s: seconds by the clock.
        folder: where it runs; None for here.
        environment: added to that of this process.
    """
    timed_out = Event()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # so that its children end with it
        )

        def stop() -> None:
            timed_out.set()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = Timer(limit_s, stop)
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            stop()
            raise
        finally:
            timer.cancel()
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        return Finished(
            process.returncode,
            output.read().decode(errors="replace"),
            errors.read().decode(errors="replace"),
            seconds,
            usage.ru_utime + usage.ru_stime,
            usage.ru_maxrss / 1e3,  # Linux counts in kB
            timed_out.is_set(),
        )


_CALL = """import importlib, json, sys
module, name, given = sys.argv[1:]
print(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(given))))"""


def answer(
    function: Callable[..., Mapping[str, Any]], *arguments: Any, limit_s: float = 3600
) -> dict[str, Any]:
    """What a function returns in a process of its own, on one core, with what that took as a whole.

    Args:
        function: of a module of `bench`, with values that JSON has.
        arguments: of it.
        limit_s: seconds by the clock.

    Returns:
        Its answer and, of the whole process, `process_seconds`, `process_cpu_seconds` and `process_MB`; only
        these and `timed_out` where it was ended at the time limit.

    Raises:
        ChildError: it failed.
    """
    file = Path(function.__code__.co_filename).resolve().relative_to(HOME).with_suffix("")
    asked = ".".join(("arborcast", *file.parts)), function.__name__, json.dumps(arguments)
    done = run([sys.executable, "-c", _CALL, *asked], limit_s, environment=ONE_CORE)
    found: dict[str, Any] = {"timed_out": True}
    if not done.timed_out:
        if done.status:
            last = (done.errors.strip().splitlines() or ["no message"])[-1]
            raise ChildError(f"{' '.join(asked)}: exit status {done.status}: {last}\n{done.errors}")
        found = json.loads(done.output.splitlines()[-1])
    whole = (done.seconds, done.cpu_seconds, done.peak_MB)
    return found | dict(zip(WHOLE, whole, strict=True))


def cpu_seconds() -> float:
    """That all threads of this process have used so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# --------------------------------------------------------------------------------------------------- ranks


@contextmanager
def started(
    context: Any, main: Callable[..., None], arguments: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[list[Any], list[Connection]]]:
    """A process for each rank and our ends of their pipes; all are gone at the end.

    Args:
        context: of `multiprocessing`, which says how they are started.
        main: called in each process with its end of the pipe and its arguments.
        arguments: by rank.
    """
    children: list[Any] = []
    pipes: list[Connection] = []
    is_forked = context.get_start_method() == "fork"
    try:
        for of_rank in arguments:
            ours, theirs = context.Pipe()
            pipes.append(ours)
            inherited = list(pipes) if is_forked else []  # which a rank must not keep open
            child = context.Process(target=_begin, args=(inherited, main, theirs, of_rank), daemon=True)
            child.start()
            theirs.close()
            children.append(child)
        yield children, pipes
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.join()
        for pipe in pipes:
            pipe.close()


def _begin(
    inherited: Sequence[Connection], main: Callable[..., None], pipe: Connection, arguments: tuple[Any, ...]
) -> None:
    for other in inherited:
        other.close()
    main(pipe, *arguments)


def collect(pipes: Sequence[Connection], timeout_s: float, kind: type[Exception] = RuntimeError) -> list[Any]:
    """The value of each rank; the first that fails ends the wait for the others.

    Args:
        pipes: by rank; each process sends (None, value), or (its failure in one line, more about it).
        timeout_s: for all of them together.
        kind: of the error that is raised: a line that names the rank, and a note with what more it said.
    """
    answers: dict[int, Any] = {}
    end = time.monotonic() + timeout_s
    while len(answers) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = wait(waiting, max(0.0, end - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in answers]
            raise kind(f"ranks {missing} did not finish within {timeout_s:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                failure, answers[rank] = pipe.recv()
            except (EOFError, ConnectionError):
                raise kind(f"rank {rank} ended without an answer") from None
            if failure:
                error = kind(f"rank {rank}: {failure}")
                error.add_note(answers[rank])
                raise error
    return [answers[rank] for rank in range(len(pipes))]


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 600,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Any]:
    """What `function(rank, *arguments)` returned on each rank, inside a default group of gloo.

    Args:
        size: number of ranks.
        function: of a module, not a local one.
        arguments: the same for all ranks.
        timeout_s: after which all processes are ended.
        within: the context that it runs in.

    Raises:
        RuntimeError: a rank failed, or the time ran out.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        common = (size, f"{folder}/store", timeout_s, within, function, arguments)
        with started(context, _main, [(rank, *common) for rank in range(size)]) as (_, pipes):
            return collect(pipes, timeout_s)


def _main(
    pipe: Connection,
    rank: int,
    size: int,
    store: str,
    timeout_s: float,
    within: Callable[[], AbstractContextManager[Any]],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    from arborcast.backends.tensors.torch_compat import FileStore

    torch.set_num_threads(1)
    answer: tuple[str | None, Any]
    try:
        dist.init_process_group(
            "gloo",
            store=FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        with within():
            answer = None, function(rank, *arguments)
    except Exception as error:
        answer = " ".join(f"{type(error).__name__}: {error}".split()), traceback.format_exc()
    pipe.send(answer)
    pipe.poll(None)  # until the starter ends us: what a group still has open must not end before the others

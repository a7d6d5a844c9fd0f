"""The processes that torchrun started, as one group: joined by the environment, left in any case.

For commands that torchrun starts on every rank (`synth probe`, `synth bench run`).
"""

from __future__ import annotations

import contextlib
import gc
import re
import traceback
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from arborcast.backends.errors import ExecutionError


@contextlib.contextmanager
def job_group(what: str, timeout_s: float) -> Iterator[None]:
    """The default group of all processes, over gloo; whatever gloo raises becomes one line.

    No thread of gloo is left afterwards, whatever was raised: a process that still has one when it ends may
    be aborted. They end with the last reference to their group. So none is handed out, and what has run
    keeps none: the local variables of all that an error went through are dropped. The caller must keep none
    in the function that holds this `with`.

    Args:
        what: the command, as messages call it.
        timeout_s: how long a rank may come late or be silent.

    Raises:
        ExecutionError: a rank is gone or does not come.
    """
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        yield
    except BaseException as error:
        _drop_variables(error)
        if not isinstance(error, RuntimeError) or isinstance(error, ExecutionError):
            raise
        raise one_line(what, error) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # errors that hold each other in a circle


def one_line(what: str, error: RuntimeError) -> ExecutionError:
    """What torch raised, where a rendezvous or a barrier failed, in one line."""
    # Gloo begins with a place in its source and ends with advice.
    reason = re.sub(r"^\[[^]]*\] ", "", str(error).strip().splitlines()[0]).partition(". ")[0]
    return ExecutionError(f"{what}: the ranks cannot reach each other any more: {reason}")


def _drop_variables(error: BaseException) -> None:
    """Empty all functions that an error, or one before it, has left; the traceback still names them."""
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            chain += [one.__cause__, one.__context__]

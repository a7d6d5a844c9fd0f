"""The processes that torchrun started, as one group: joined by the environment, left in any case.

For commands that torchrun starts on every rank (`synth probe`, `synth bench run`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from backends.errors import ExecutionError


@contextlib.contextmanager
def job_group(what: str, timeout_s: float) -> Iterator[dist.ProcessGroup]:
    """The default group of all processes, over gloo; whatever gloo raises becomes one line.

    Args:
        what: the command, as messages call it.
        timeout_s: how long a rank may come late or be silent.

    Raises:
        ExecutionError: a rank is gone or does not come.
    """
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        group = dist.group.WORLD
        assert group is not None
        yield group
    except ExecutionError:
        raise
    except RuntimeError as error:  # of torch: a rendezvous or a barrier that failed
        # Gloo begins with a place in its source and ends with advice.
        reason = re.sub(r"^\[[^]]*\] ", "", str(error).strip().splitlines()[0]).partition(". ")[0]
        raise ExecutionError(f"{what}: the ranks cannot reach each other any more: {reason}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

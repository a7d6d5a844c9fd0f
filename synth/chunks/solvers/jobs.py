"""Where jobs run: on this machine's cores, or on a Dask cluster that somebody else keeps.

joblib sees to both. In Python any of its backends will do, Ray's too: call `synth.pareto(..., jobs=n)` inside
`joblib.parallel_config(...)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from arborcast.synth.errors import InputError

CONNECT_S = 10
"""Seconds in which a scheduler must answer."""


@contextmanager
def running_on(scheduler: str | None) -> Iterator[None]:
    """Let joblib use a Dask cluster inside the block; None leaves it as it is.

    The scheduler is an address such as tcp://10.0.0.1:8786.

    Raises:
        InputError: Dask is not installed, or nothing answers at the address.
    """
    if scheduler is None:
        yield
        return
    try:
        import distributed
    except ImportError as error:
        raise InputError("--dask: needs Dask; install arborcast[dask]") from error
    from joblib import parallel_config

    untyped: Any = distributed
    try:
        client = untyped.Client(scheduler, timeout=CONNECT_S)
    except (OSError, ValueError, TimeoutError) as error:
        raise InputError(f"--dask {scheduler}: no scheduler answers there: {error}") from error
    with client, parallel_config(backend="dask"):
        yield

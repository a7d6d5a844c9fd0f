"""Makes the name "synth" known to torch.distributed; importing this module does it.

Where the package is installed, torch does it by itself: the entry point `torch.backends` of pyproject.toml,
`arborcast_for_torch`, calls `register` at the end of `import torch`. Nothing else is imported before a group
is made, so that this costs nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAME = "synth"


def register() -> None:
    """Tell torch how to make a group; a second call changes nothing."""
    import torch
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        # A ShardedTensor gathers on a GPU whenever the name has one, also where torch is built without.
        is_built = bool(torch.backends.cuda.is_built())  # type: ignore[no-untyped-call]
        devices = ["cpu", "cuda"] if is_built else ["cpu"]
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)


def _create(options: Any, backend_options: Any = None) -> Any:
    with _no_collection():
        from arborcast.backends.group.making import create

    return create(options, backend_options)


@contextmanager
def _no_collection() -> Iterator[None]:
    """While modules come, which stay: looking for garbage among all of torch takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


register()

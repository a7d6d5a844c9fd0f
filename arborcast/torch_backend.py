"""Makes the name "synth" known to torch.distributed; importing this module does it.

Where the package is installed, torch does it by itself: the entry point `torch.backends` of pyproject.toml
calls `register` at the end of `import torch`: nothing else is imported
before a group is made, so that this costs nothing and cannot fail.
"""

from __future__ import annotations

from typing import Any

NAME = "synth"


def register() -> None:
    """Tell torch how to make a group; a second call changes nothing."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any = None) -> Any:
    from arborcast.backends.group.process_group import create

    return create(options, backend_options)


register()

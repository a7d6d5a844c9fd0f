"""MSCCL++'s execution plans: `reader` and `writer`, and the limits of its executor.

`reader` reads a plan and its ranks, `lists` their channels and buffers, `blocks` thread blocks, `moves` what
their operations do to which `spans`; `entries` has the fields of JSON.
"""

from arborcast.backends.programs.mscclpp.reader import MAX_FILE_BYTES, read
from arborcast.backends.programs.mscclpp.writer import write

__all__ = ["MAX_FILE_BYTES", "read", "write"]

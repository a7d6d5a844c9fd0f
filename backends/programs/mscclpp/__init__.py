"""MSCCL++'s execution plans: `reader` and `writer`, and the limits of its executor.

`shapes` is the form of the JSON, `reader` what the runtime does with it.
"""

from arborcast.backends.programs.mscclpp.reader import read
from arborcast.backends.programs.mscclpp.writer import write

__all__ = ["read", "write"]

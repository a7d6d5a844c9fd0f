"""What tests of the kernel are marked with."""

from importlib.util import find_spec

import pytest

NEEDS_TRITON = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs triton: pip install arborcast[device]"
)

"""Tells numba what a kernel that another kernel calls is: its compiled function."""

from __future__ import annotations

from typing import Any

import numba
from numba.extending import typeof_impl

from arborcast.synth.kernels.compiled import Kernel


@typeof_impl.register(Kernel)
def _typeof(value: Kernel[..., Any], context: Any) -> Any:
    return numba.typeof(value.compiled())  # type: ignore[no-untyped-call]

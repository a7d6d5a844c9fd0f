"""The reduction operators: their names here, in nccl-tests, and what they mean on numpy arrays."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.errors import InputError

Array: TypeAlias = NDArray[Any]


class Reduction(StrEnum):
    """How contributions are combined."""

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"

    @classmethod
    def of(cls, name: str) -> Reduction:
        """The operator of that name.

        Raises:
            InputError: there is none.
        """
        known = [reduction.value for reduction in cls]
        if name.lower() not in known:
            raise InputError(f"reduction {name}: must be one of {', '.join(known)}")
        return cls(name.lower())

    @property
    def nccl_name(self) -> str:
        """What nccl-tests prints."""
        return "prod" if self is Reduction.PRODUCT else self.value


def combine(reduction: Reduction, into: Array, source: Array) -> None:
    """Combine `source` into `into`; an average is a sum until `finish` divides it."""
    match reduction:
        case Reduction.SUM | Reduction.AVG:
            np.add(into, source, out=into)
        case Reduction.MIN:
            np.minimum(into, source, out=into)
        case Reduction.MAX:
            np.maximum(into, source, out=into)
        case Reduction.PRODUCT:
            np.multiply(into, source, out=into)


def finish(reduction: Reduction, result: Array, contributors: int) -> None:
    """Divide an average by the number of contributors; integers round towards zero, as NCCL's do."""
    if reduction is not Reduction.AVG:
        return
    if np.issubdtype(result.dtype, np.integer):
        result[:] = np.sign(result) * (np.abs(result) // contributors)
    else:
        np.divide(result, contributors, out=result)

"""How a tensor of an operator lies on a mesh, where labels of the operator are divided along its axes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product

from arborcast.pipeline.meshes import SUM, Spec
from arborcast.pipeline.sharding.graph import Tensor

Assignment = tuple[int | None, ...]
"""For each axis the label of an operator that is divided along it, or None."""


def spec_of(tensor: Tensor, assignment: Assignment) -> Spec:
    """How a tensor lies when labels are divided along axes."""
    return tuple(
        tensor.labels.index(label) if label is not None and label in tensor.labels else None
        for label in assignment
    )


def divides(spec: Spec, shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether every dimension has equal parts."""
    return all(
        length % math.prod(size for at, size in zip(spec, sizes, strict=True) if at == dim) == 0
        for dim, length in enumerate(shape)
        if dim in spec
    )


def local_bytes(size_bytes: int, spec: Spec, sizes: tuple[int, ...]) -> int:
    """Bytes of one rank, of a tensor of so many; rounded up where a scalar type is odd."""
    parts = math.prod(size for at, size in zip(spec, sizes, strict=True) if at is not None and at != SUM)
    return -(-size_bytes // parts)


def refinements(spec: Spec, dims: Iterable[int]) -> list[Spec]:
    """The same with any replicated axes divided too."""
    choices = [None, *dims]
    return list(product(*(choices if at is None else [at] for at in spec)))

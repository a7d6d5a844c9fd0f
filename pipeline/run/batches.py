"""A whole batch as a rank is given it, or hears of it: what it looks like, and its microbatches' shares.

Dimension 0 counts samples, unless the model says otherwise for its inputs; for targets it is always 0.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from arborcast.pipeline.errors import BatchError
from arborcast.pipeline.model.module_structure import flatten
from arborcast.pipeline.stages import Plan

_SAMPLED = 1024
"""Values of a tensor that tell its data from other data."""

Tensors: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Any]
"""What a batch may be given as: one tensor, several, or named ones with words and numbers among them."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What must be alike on all ranks that are given it.

    Attributes:
        inputs: shape and data type of each, in words; None where there are none on this rank.
        targets: likewise.
        training: whether the batch is to be trained with.
        frozen: which parameters of the model are not trained, in words; empty for none, and in evaluation.
    """

    inputs: tuple[str, ...] | None
    targets: tuple[str, ...] | None
    training: bool
    frozen: str = ""

    def __str__(self) -> str:
        """As ranks tell each other."""
        inputs, targets = (_NOTHING if it is None else " ".join(it) for it in (self.inputs, self.targets))
        frozen = f"{_FROZEN}{self.frozen}" if self.frozen else ""
        return f"{'train' if self.training else 'evaluate'}{_INPUTS}{inputs}{_TARGETS}{targets}{frozen}"


_NOTHING, _INPUTS, _TARGETS, _FROZEN = "not given", " inputs ", ", targets ", ", frozen "


def said_differently(said: Sequence[str]) -> tuple[int, int] | None:
    """Two ranks whose words of a batch (`Signature`) do not go together; None where all do."""
    first: dict[str, int] = {}
    for rank, words in enumerate(said):
        for part, value in _parts_of(words).items():
            other = first.setdefault(part, rank)
            if _parts_of(said[other]).get(part) != value:
                return other, rank
    return None


def said_of(part: str, said: Sequence[str]) -> tuple[str, ...] | None:
    """Shapes and types of the "inputs" or "targets" of a batch, in words of a rank that was given them."""
    found = (_parts_of(words).get(part) for words in said)
    text = next((it for it in found if it is not None), None)
    return None if text is None else tuple(f"{it}]" for it in text.removesuffix("]").split("] "))


def told(words: Sequence[str]) -> tuple[Tensor, ...]:
    """Tensors of these shapes and types, without values: on the device `meta`."""
    shapes = (it.removesuffix("]").split("[") for it in words)
    return tuple(
        torch.empty(json.loads(f"[{sizes}]"), dtype=getattr(torch, dtype), device="meta")
        for dtype, sizes in shapes
    )


def _parts_of(words: str) -> dict[str, str]:
    """What a rank says of a batch, without what it was not given; of a refusal all in one."""
    verb, is_batch, rest = words.partition(_INPUTS)
    inputs, _, rest = rest.partition(_TARGETS)
    targets, _, frozen = rest.partition(_FROZEN)
    if not is_batch or not targets:
        return {"verb": words, "samples": ""}
    parts = {"verb": verb, "frozen": frozen, "inputs": inputs, "targets": targets}
    return {part: text for part, text in parts.items() if text != _NOTHING}


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of all samples.

    Attributes:
        inputs: of the model; without values (`told`) where none were given here.
        targets: of the loss function; None where none were given here.
        dims: which dimension of each input counts samples.
        samples: how many there are.
        sizes: samples of each microbatch.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensors | None
    dims: tuple[int, ...]
    samples: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, inputs: Tensors, targets: Tensors | None, dims: Sequence[int], plan: Plan) -> Batch:
        """Check what a rank was given.

        Raises:
            BatchError: tensors do not count the same samples, or too few for the plan.
        """
        given = as_tuple("inputs", inputs)
        if len(dims) not in (1, len(given)):
            raise BatchError(
                f"batch: inputs must be {len(dims)} tensors, as the model takes, got {len(given)}"
            )
        spread = spread_dims(dims, len(given))
        counts = {
            f"inputs[{index}]": _samples(f"inputs[{index}]", tensor, dim)
            for index, (tensor, dim) in enumerate(zip(given, spread, strict=True))
        }
        for index, tensor in enumerate(as_tuple("targets", targets)) if targets is not None else ():
            counts[f"targets[{index}]"] = _samples(f"targets[{index}]", tensor, 0)
        first, samples = next(iter(counts.items()))
        for name, count in counts.items():
            if count != samples:
                raise BatchError(
                    f"batch: {name} must have as many samples as {first}, {samples}, got {count}"
                )
        if not isinstance(targets, Tensor) and targets is not None:
            targets = dict(targets) if isinstance(targets, Mapping) else tuple(targets)
        return cls(given, targets, spread, samples, plan.microbatch_sizes(samples))

    def signature(self, training: bool, frozen: str) -> Signature:
        """What the other ranks must have been given too."""
        return Signature(
            words_of(self.inputs),
            None if self.targets is None else words_of(as_tuple("targets", self.targets)),
            training,
            frozen,
        )

    @property
    def fingerprints(self) -> tuple[int | None, int | None]:
        """Of inputs and targets a number below 65,536 each, another one for other data; None without any.

        It is of about a thousand values of each tensor.
        """
        inputs = None if any(it.is_meta for it in self.inputs) else fingerprint(self.inputs)
        targets = None if self.targets is None else fingerprint(as_tuple("targets", self.targets))
        return inputs, targets

    def inputs_of(self, microbatch: int, share: tuple[int, int]) -> tuple[Tensor, ...]:
        """Samples [start, stop) of the inputs of a microbatch."""
        start = sum(self.sizes[:microbatch]) + share[0]
        return tuple(
            tensor.narrow(dim, start, share[1] - share[0])
            for tensor, dim in zip(self.inputs, self.dims, strict=True)
        )

    def targets_of(self, microbatch: int, share: tuple[int, int]) -> Tensors:
        """Likewise of the targets, as they were given: one tensor, a tuple, or a dict."""
        start = sum(self.sizes[:microbatch]) + share[0]
        assert self.targets is not None, "the last stage was given some"
        tensors, structure = flatten(self.targets)
        found: Tensors = structure.rebuild(it.narrow(0, start, share[1] - share[0]) for it in tensors)
        return found


def as_tuple(name: str, tensors: Tensors) -> tuple[Tensor, ...]:
    """One tensor or several, as several.

    Raises:
        BatchError: there is none, or something else is among them.
    """
    if isinstance(tensors, Mapping):
        given, structure = flatten(dict(tensors))
        for path, kind in structure.left_out.items():
            raise BatchError(f"batch: {name} must be tensors, words and numbers, got {kind} for {path}")
    else:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not given:
        raise BatchError(f"batch: {name} must be at least one tensor, got none")
    for tensor in given:
        if not isinstance(tensor, Tensor):
            raise BatchError(f"batch: {name} must be tensors, got {type(tensor).__name__}")
    return tuple(given)


def spread_dims(dims: Sequence[int], count: int) -> tuple[int, ...]:
    """The dimension that counts samples for each of `count` tensors; one given for all stands for all."""
    return tuple(dims) * count if len(dims) == 1 else tuple(dims)


def words_of(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """Data type and shape of each."""
    return tuple(described(tensor) for tensor in tensors)


def described(tensor: Tensor) -> str:
    """Data type and shape, such as `float32[8, 4]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def fingerprint(tensors: Sequence[Tensor]) -> int:
    """A number below 65,536, another one for other data: of about a thousand values of each tensor."""
    digest = 0
    for tensor in tensors:
        most = max(1, int(_SAMPLED ** (1 / max(1, tensor.dim()))))
        steps = (max(1, -(-size // most)) for size in tensor.shape)
        some = tensor.detach()[tuple(slice(None, None, step) for step in steps)]
        some = some.resolve_conj().resolve_neg().contiguous()
        digest = zlib.crc32(some.view(-1).view(torch.uint8).cpu().numpy().data, digest)
    return digest & 0xFFFF


def _samples(name: str, tensor: Tensor, dim: int) -> int:
    if tensor.dim() <= dim:
        raise BatchError(
            f"batch: {name} must have a dimension {dim} that counts samples, got {described(tensor)}"
        )
    return tensor.shape[dim]

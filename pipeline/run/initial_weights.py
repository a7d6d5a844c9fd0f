"""The weights of a rank: of all its stages in one module, where they come from, the same on replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.model.deferred_init import Initialiser, allocate, fill, root_of, tensors_on_meta
from arborcast.pipeline.model.layered import Layered
from arborcast.pipeline.model.module_structure import named_tensors
from arborcast.pipeline.run.checkpoint_reader import open_weights
from arborcast.synth.errors import InputError

Weights = Path | str | Initialiser
"""Where values come from: a file or folder (`open_weights`), or what gives modules their first values."""


class Stages(nn.Module):
    """Several stages of a model, whose parameters and buffers keep their names in the whole."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of one module; a shared one under its first name."""
        found = (
            pair for it in self.stages for pair in it.named_parameters(prefix, recurse, remove_duplicate)
        )
        yield from _distinct(found) if remove_duplicate else found

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Likewise."""
        found = (pair for it in self.stages for pair in it.named_buffers(prefix, recurse, remove_duplicate))
        yield from _distinct(found) if remove_duplicate else found

    def state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        """Of all stages."""
        return {
            name: it for stage in self.stages for name, it in stage.state_dict(*arguments, **named).items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
        """Give every stage what it has; nothing may be missing."""
        for stage in self.stages:
            stage.load_state_dict(
                {name: state_dict[name] for name in stage.state_dict()}, *arguments, **named
            )


def give_values(
    model: Layered, ranges: Sequence[tuple[int, int]], weights: Weights | None, seed: int
) -> None:
    """Give what some stages hold its values; the rest of the model stays on "meta", if it is there.

    Args:
        model: the whole.
        ranges: the layers [start, end) of each stage of this rank.
        weights: a file or folder takes the place of all values, of those of a model that has some too.
        seed: of first values.

    Raises:
        CheckpointError: what is stored is not of this model; then nothing is changed.
        PartitionError: a tensor is left over without a value.
        InputError: first values are to be given to a model that has values.
    """
    root = root_of(model)
    if not tensors_on_meta(root):
        if weights is None:
            return
        if callable(weights):
            raise InputError(f"weights: must be for a model on meta, got a {type(root).__name__} with values")
    whole, stages = model.divide(0, model.depth), [model.divide(*bounds) for bounds in ranges]
    files = None if weights is None or callable(weights) else open_weights(weights)
    keys = {} if files is None else files.keys_of(*_names_and_shapes(whole, root))
    mine = {id(tensor): name for stage in stages for name, tensor in named_tensors(stage)}
    made = allocate(root, set(mine.values()))
    every = whole.state_dict(keep_vars=True)
    read = {name: it for name, it in every.items() if name in keys and id(it) in mine}
    if files is not None:
        files.read({keys[name]: tensor for name, tensor in read.items()})
    known = {id(tensor) for tensor in read.values()}
    rest = {name: tensor for name, tensor in made.items() if id(tensor) not in known}
    fill(root, rest, seed, weights if callable(weights) else None)
    for stage in stages:
        for name in tensors_on_meta(stage):
            raise PartitionError(
                f"model: {name.removeprefix('_literal_')} is on meta and must be a parameter or a buffer of "
                "the model, or nothing gives it a value"
            )


def _names_and_shapes(
    whole: nn.Module, root: nn.Module
) -> tuple[dict[str, list[str]], dict[str, tuple[int, ...]]]:
    """Of all that is saved of a model, by first name: what else it may be called, and its shape.

    Of transformers' models, files may be of the model within (`transformer.h.0` is `h.0` there), or around.
    """
    base = getattr(root, "base_model_prefix", "")
    names: dict[str, list[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    first: dict[int, str] = {}
    for name, tensor in whole.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        own = first.setdefault(id(tensor), name)
        shapes[own] = tuple(tensor.shape)
        others = [name, name.removeprefix(f"{base}."), f"{base}.{name}"] if base else [name]
        names.setdefault(own, []).extend(others)
    return names, shapes


def joined(stages: Sequence[nn.Module]) -> nn.Module:
    """The stages of a rank as one module; the stage itself where there is one."""
    if len(stages) == 1:
        return stages[0]
    return Stages(stages) if stages else nn.Identity()


def _distinct(found: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, it in found:
        if id(it) not in seen:
            seen.add(id(it))
            yield name, it


def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None, source: int) -> None:
    """Give all ranks of a group the values of one of them, in place: one broadcast for each data type.

    It is one of bytes, so that any type goes.

    Args:
        tensors: as many of the same shapes and types on every rank.
        group: of the ranks.
        source: the rank of the job whose values count.
    """
    kinds: defaultdict[torch.dtype, dict[int, Tensor]] = defaultdict(dict)
    for tensor in tensors:
        kinds[tensor.dtype][id(tensor)] = distinct(tensor.detach())
    for members in kinds.values():
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in members.values()])
        if not flat.numel():
            continue
        dist.broadcast(flat, source, group=group)
        parts = torch.split(flat, [tensor.numel() * tensor.element_size() for tensor in members.values()])
        for tensor, part in zip(members.values(), parts, strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def distinct(tensor: Tensor) -> Tensor:
    """A tensor's values without those that `expand` repeats, which torch does not let be written."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor

"""From the stages of a pipeline to the whole model and back: what a checkpoint holds.

Everything is keyed by the names that parameters have in the whole model, so that a checkpoint of one
division loads into any other, and into serial training: a folder of torch.distributed.checkpoint, to which
every rank writes its part, and of which every rank reads what it holds.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from arborcast.pipeline.errors import CheckpointError
from arborcast.pipeline.run.checkpoint_reader import CheckpointFolder, cause_of, check_fits
from arborcast.pipeline.run.prepared_layers import full, like
from arborcast.synth.errors import InputError
from arborcast.synth.formats.reading import shorten_path

Result = TypeVar("Result")


def gather_state(
    stage_state: Mapping[str, Tensor] | None, group: dist.ProcessGroup | None, firsts: Sequence[int]
) -> dict[str, Tensor]:
    """The state of the whole model on every rank, in the order of the stages, on the CPU.

    Args:
        stage_state: the `state_dict` of this rank's stage; None on a rank without work.
        group: of all ranks of the job (all call it); None for the default group.
        firsts: a rank of each stage, which sends.

    Raises:
        CheckpointError: an entry is no tensor, or stages disagree on one's shape or type.
    """
    mine = {name: _on_cpu(it) if isinstance(it, Tensor) else None for name, it in (stage_state or {}).items()}
    whole: dict[str, Tensor] = {}
    for state in _of_every_stage(mine, firsts, group):
        for name, value in state.items():
            if value is None:
                raise CheckpointError(f"checkpoint: entry {name} of the model must be a tensor")
            known = whole.setdefault(name, value)  # held by an earlier stage too: copies are equal
            if (known.shape, known.dtype) != (value.shape, value.dtype):
                raise CheckpointError(
                    f"checkpoint: {name} must be the same on all stages, got {tuple(known.shape)} "
                    f"{known.dtype} and {tuple(value.shape)} {value.dtype}"
                )
    return whole


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put the entries of a whole model's state that a stage has into it; the others are other stages'.

    Raises:
        CheckpointError: an entry is missing or has another shape.
    """
    own = module.state_dict()
    check_state(shapes_of(own), state)
    module.load_state_dict({name: like(state[name], it) for name, it in own.items()})


def check_state(shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor]) -> None:
    """Refuse a state that does not fit the model.

    Args:
        shapes: of the entries that it must have, by name.
        state: of a whole model.

    Raises:
        CheckpointError: an entry is missing or has another shape.
    """
    stored = shapes_of(state)
    for name, shape in shapes.items():
        check_fits("checkpoint", name, name, shape, stored)


def shapes_of(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a state, by name."""
    return {name: tuple(it.shape) for name, it in state.items() if isinstance(it, Tensor)}


# ---------------------------------------------------------------------- folders, every rank its part


def write(folder: Path | str, entries: Callable[[], Mapping[str, Any]], group: dist.ProcessGroup) -> None:
    """Write a checkpoint, whole or not at all: beside the folder first, then under its name.

    Every rank of the group calls it, and writes what it alone has or its part of what several have.

    Args:
        folder: new, or a checkpoint, which is replaced. The ranks must share the file system that it is on.
        entries: gives what this rank has: tensors, numbers, strings, None and tuples, in dictionaries.
        group: of the ranks.

    Raises:
        CheckpointError: some rank cannot write, or has nothing that can be written; on all ranks.
    """
    where, target = shorten_path(folder), Path(folder).resolve()
    draft = target.with_name(f".{target.name}.part")
    is_first = dist.get_rank(group) == 0

    def begin() -> dict[str, Any]:
        if is_first:
            _begin(where, target, draft)
        return dict(entries())

    try:
        state = together(group, begin)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=dcp.FileSystemWriter(draft), process_group=group)
        together(group, lambda: _replace(where, target, draft) if is_first else None)
    except CheckpointException as error:
        raise CheckpointError(f"{where}: cannot be written: {cause_of(error)}") from error
    finally:
        if is_first:  # nobody else: it could be what was just renamed
            shutil.rmtree(draft, ignore_errors=True)


def together(group: dist.ProcessGroup, call: Callable[[], Result]) -> Result:
    """What a call gives, once no rank of the group has raised; every rank comes here.

    Raises:
        InputError: of the first rank that raised one; on all ranks.
    """
    fault: InputError | None = None
    try:
        result = call()
    except InputError as error:
        fault = error
    heard: list[InputError | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(heard, None if fault is None else type(fault)(str(fault)), group=group)
    first = next((it for it in heard if it is not None), None)
    if first is not None:
        raise first from fault
    return result


def _begin(where: str, target: Path, draft: Path) -> None:
    if target.exists() and not (target / ".metadata").is_file():
        raise CheckpointError(f"{where}: must be a new folder or a checkpoint, got something else")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be written: {error.strerror or error}") from error


def _replace(where: str, target: Path, draft: Path) -> None:
    """Put the new one in the place of an old one, which lies beside it for a moment."""
    old = target.with_name(f".{target.name}.old")
    try:
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        draft.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        if not target.exists():
            with contextlib.suppress(OSError):
                old.rename(target)
        raise CheckpointError(f"{where}: cannot be written: {error.strerror or error}") from error


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state of a module, once it is seen to be of tensors.

    Raises:
        CheckpointError: an entry is none.
    """
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"checkpoint: entry {name} of the model must be a tensor")
    return dict(state)


def optimizer_entries(
    optimizer: torch.optim.Optimizer | None, names: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """An optimizer's state and options by parameter, as torch flattens them.

    Such as `state.h.0.weight.exp_avg` and `param_groups.h.0.weight.lr`: what `get_optimizer_state_dict` with
    `flatten_optimizer_state_dict=True` gives, so that entries of all stages together are those of the model.

    Args:
        optimizer: None where there is nothing to train.
        names: all of its parameters by name; a shared one under its name in the whole model.

    Raises:
        CheckpointError: the optimizer has a parameter without a name.
    """
    if optimizer is None:
        return {}
    packed, by_place = optimizer.state_dict(), _names_by_place(optimizer, names)
    state = {
        f"state.{by_place[place]}.{key}": value
        for place, values in packed["state"].items()
        for key, value in values.items()
    }
    options = {
        f"param_groups.{by_place[place]}.{key}": value
        for group in packed["param_groups"]
        for place in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    return state | options


class OptimizerPart:
    """What a folder holds of an optimizer, for the parameters of one rank.

    Args:
        files: the folder.
        optimizer: that is to go on.
        names: as for `optimizer_entries`.

    Raises:
        CheckpointError: a parameter is missing, or those of one group had different options; nothing is
            changed.
    """

    def __init__(
        self, files: CheckpointFolder, optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]
    ) -> None:
        """Read and check the options."""
        self._files, self._optimizer, self._parameters = files, optimizer, names
        self._names = _names_by_place(optimizer, names)
        wanted = set(self._names)
        every = (*files.shapes, *files.others)
        self._state, said = (_by_name(every, f"optimizer.{it}.", wanted) for it in ("state", "param_groups"))
        for name in self._names:
            if name not in said:
                raise CheckpointError(f"{files.where}: must hold {name} of the optimizer, got no such entry")
        found = files.values([key for own in said.values() for key in own.values()], {})
        options = {name: {it: found[key] for it, key in own.items()} for name, own in said.items()}
        self._groups = []
        for index, group in enumerate(optimizer.state_dict()["param_groups"]):
            members = [self._names[place] for place in group["params"]]
            different = next((it for it in members if not _equal(options[it], options[members[0]])), None)
            if different is not None:
                raise CheckpointError(
                    f"{files.where}: all parameters of group {index} of the optimizer must have had the same "
                    f"options, got others for {members[0]} than for {different}"
                )
            kept = options[members[0]] if members else {k: v for k, v in group.items() if k != "params"}
            lacking = sorted(group.keys() - kept.keys() - {"params"})
            if lacking:
                raise CheckpointError(
                    f"{files.where}: must be of the same optimizer, {type(optimizer).__name__}, got none of "
                    f"its {lacking[0]}"
                )
            self._groups.append(kept | {"params": group["params"]})

    def load(self) -> None:
        """Let the optimizer go on from there; what it has of the right shape is written over."""
        before, files = self._optimizer.state_dict()["state"], self._files
        into: dict[str, Tensor] = {}
        for place, name in enumerate(self._names):
            parameter = self._parameters[name]
            for part, key in self._state.get(name, {}).items():
                old, kind = before.get(place, {}).get(part), (files.shapes.get(key), files.dtypes.get(key))
                if isinstance(old, Tensor) and (tuple(old.shape), old.dtype) == kind:
                    into[key] = old
                elif kind[0] == tuple(parameter.shape):  # of which a rank may hold a part
                    into[key] = torch.empty_like(parameter.detach(), dtype=kind[1])
        found = files.values([key for own in self._state.values() for key in own.values()], into)
        state = {
            place: {part: found[key] for part, key in self._state[name].items()}
            for place, name in enumerate(self._names)
            if name in self._state
        }
        self._optimizer.load_state_dict({"state": state, "param_groups": self._groups})


class Loading:
    """A checkpoint that fits, before anything of it is loaded.

    Args:
        folder: of torch.distributed.checkpoint.
        whole: the model, whose every entry must be there.
        module: what this rank holds of it.
        optimizer: None where there is nothing to train.
        names: as for `optimizer_entries`.

    Raises:
        CheckpointError: it cannot be read, or does not fit.
    """

    def __init__(
        self,
        folder: Path | str,
        whole: nn.Module,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        names: Mapping[str, nn.Parameter],
    ) -> None:
        """Check all that can be known without reading values."""
        self._files = files = CheckpointFolder(folder)
        shapes = shapes_of(whole.state_dict())
        keys = files.keys_of({name: [name] for name in shapes}, shapes)
        # Several names of one tensor stand for the same values.
        self._tensors = {keys[name]: it for name, it in module.state_dict().items() if name in keys}
        self._optimizer = None if optimizer is None else OptimizerPart(files, optimizer, names)

    def load(self) -> dict[str, Any]:
        """Put the values where they belong; what `trainer` has of numbers."""
        self._files.read(self._tensors)
        if self._optimizer is not None:
            self._optimizer.load()
        keys = [key for key in self._files.others if key.startswith("trainer.")]
        return {key.rpartition(".")[2]: it for key, it in self._files.values(keys, {}).items()}


def _by_name(keys: Iterable[str], prefix: str, wanted: Set[str]) -> dict[str, dict[str, str]]:
    """Keys by parameter and by the last part, which has no dot; names of parameters may have some."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        name, _, last = key.removeprefix(prefix).rpartition(".")
        if key.startswith(prefix) and name in wanted:
            found.setdefault(name, {})[last] = key
    return found


def _of_every_stage(mine: Any, firsts: Sequence[int], group: dist.ProcessGroup | None) -> list[Any]:
    """What some ranks have, one after another, on every rank."""
    found = []
    for rank in firsts:
        box = [mine if dist.get_rank() == rank else None]
        dist.broadcast_object_list(box, rank, group=group)
        found.append(box[0])
    return found


def _names_by_place(optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter]) -> list[str]:
    """Names of an optimizer's parameters in its own order, which numbers them in `state_dict`."""
    known = {id(parameter): name for name, parameter in reversed(list(names.items()))}
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, parameter in enumerate(members):
        if id(parameter) not in known:
            raise CheckpointError(
                f"optimizer: parameter {place} of shape {tuple(parameter.shape)} must have a name in the "
                f"model, got none"
            )
    return [known[id(parameter)] for parameter in members]


def _on_cpu(tensor: Tensor) -> Tensor:
    """A copy, which does not change with the model, without what lies around it in its storage."""
    return full(tensor.detach()).to("cpu", copy=True)


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether options are the same, tensors among them by value."""
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(other[key]))
        if isinstance(value, Tensor) or isinstance(other[key], Tensor)
        else value == other[key]
        for key, value in one.items()
    )

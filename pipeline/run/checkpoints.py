"""From the stages of a pipeline to the whole model and back: what a checkpoint holds.

Everything is keyed by the names that parameters have in the whole model, so that a checkpoint of one
division loads into any other, and into serial training. Not part of a step: memory and time are plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.pipeline.errors import CheckpointError
from arborcast.pipeline.run.sharded import full, like
from arborcast.pipeline.stages import Plan
from arborcast.synth.formats.atomic import replacing
from arborcast.synth.formats.reading import shorten_path

OptimizerState: TypeAlias = dict[str, Any]
"""`{"state": {name: {key: value}}, "groups": [{"names": [name], "options": {key: value}}],
"shapes": {name: [size]}}`, and what the trainer adds."""

_FORMAT = "arborcast training checkpoint 1"


def gather_state(
    stage_state: Mapping[str, Tensor] | None, group: dist.ProcessGroup | None, plan: Plan
) -> dict[str, Tensor]:
    """The state of the whole model on every rank, in the order of the stages, on the CPU.

    Args:
        stage_state: the `state_dict` of this rank's stage; None on a rank without work.
        group: of all ranks of the job (all call it); None for the default group.
        plan: whose stages' first ranks send.

    Raises:
        CheckpointError: an entry is no tensor, or stages disagree on one's shape or type.
    """
    mine = {name: _on_cpu(it) if isinstance(it, Tensor) else None for name, it in (stage_state or {}).items()}
    whole: dict[str, Tensor] = {}
    for state in _of_every_stage(mine, plan, group):
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
    check_state({name: tuple(it.shape) for name, it in own.items() if isinstance(it, Tensor)}, state)
    module.load_state_dict({name: like(state[name], it) for name, it in own.items()})


def check_state(shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor]) -> None:
    """Refuse a state that does not fit the model.

    Args:
        shapes: of the entries that it must have, by name.
        state: of a whole model.

    Raises:
        CheckpointError: an entry is missing or has another shape.
    """
    for name, shape in shapes.items():
        if name not in state:
            raise CheckpointError(f"checkpoint: must hold {name} of the model, got {len(state)} others")
        if tuple(state[name].shape) != shape:
            raise CheckpointError(
                f"checkpoint: {name} must have shape {shape} of the model, got {tuple(state[name].shape)}"
            )


def optimizer_state(
    optimizer: torch.optim.Optimizer | None, names: Mapping[str, nn.Parameter]
) -> OptimizerState:
    """The state of one optimizer by the names of its parameters: of a stage, or in serial training.

    Args:
        optimizer: None where there is nothing to train.
        names: all of its parameters by name; a shared one under its name in the whole model.

    Raises:
        CheckpointError: the optimizer has a parameter without a name.
    """
    if optimizer is None:
        return {"state": {}, "groups": [], "shapes": {}}
    packed = optimizer.state_dict()
    by_place = _names_by_place(optimizer, names)
    return {
        "state": {
            by_place[place]: {key: _copied(value) for key, value in values.items()}
            for place, values in packed["state"].items()
        },
        "groups": [
            {
                "names": [by_place[place] for place in group["params"]],
                "options": {key: value for key, value in group.items() if key != "params"},
            }
            for group in packed["param_groups"]
        ],
        "shapes": {name: list(names[name].shape) for name in by_place},
    }


def gather_optimizer_state(
    optimizer: torch.optim.Optimizer | None,
    names: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup | None,
    plan: Plan,
) -> OptimizerState:
    """The state of all stages' optimizers on every rank, on the CPU; all ranks of the group call it.

    Args:
        optimizer: of this rank's stage; None on a rank without work or without anything to train.
        names: as for `optimizer_state`; empty on a rank without work.
        group: of all ranks of the job; None for the default group.
        plan: whose stages' first ranks send.

    Raises:
        CheckpointError: an optimizer has a parameter without a name; on all ranks.
    """
    try:
        mine: OptimizerState | str = optimizer_state(optimizer, names)
    except CheckpointError as error:  # all ranks must hear of it, or they would wait for this one
        mine = str(error)
    whole: OptimizerState = optimizer_state(None, {})
    for state in _of_every_stage(mine, plan, group):
        if isinstance(state, str):
            raise CheckpointError(state)
        whole["state"] = state["state"] | whole["state"]
        _add_groups(whole["groups"], state["groups"], known=set(whole["shapes"]))
        whole["shapes"] = state["shapes"] | whole["shapes"]
    return whole


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], state: OptimizerState
) -> None:
    """Let an optimizer go on where those of another division, or the serial one, stopped.

    Args:
        optimizer: whose parameters get their state, and whose groups get their options (lr, ...).
        names: as for `optimizer_state`.
        state: of the whole model.

    Raises:
        CheckpointError: a parameter is missing or has another shape, or the parameters of one group had
            different options.
    """
    by_place = _names_by_place(optimizer, names)
    options = {name: group["options"] for group in state["groups"] for name in group["names"]}
    for name in by_place:
        if name not in options:
            raise CheckpointError(f"checkpoint: must hold {name} of the optimizer, got {len(options)} others")
        shape, saved = tuple(names[name].shape), tuple(state["shapes"][name])
        if shape != saved:
            raise CheckpointError(f"checkpoint: {name} must have shape {shape} of the model, got {saved}")
    groups = []
    for index, group in enumerate(optimizer.state_dict()["param_groups"]):
        members = [by_place[place] for place in group["params"]]
        different = next((it for it in members if not _equal(options[it], options[members[0]])), None)
        if different is not None:
            raise CheckpointError(
                f"checkpoint: all parameters of group {index} of the optimizer must have had the same "
                f"options, got others for {members[0]} than for {different}"
            )
        kept = options[members[0]] if members else {k: v for k, v in group.items() if k != "params"}
        groups.append(kept | {"params": group["params"]})
    # Copies: torch keeps tensors of the right type as they are, and steps would change the checkpoint.
    places = {
        place: {key: like(_copied(value), names[name]) for key, value in state["state"][name].items()}
        for place, name in enumerate(by_place)
        if name in state["state"]
    }
    optimizer.load_state_dict({"state": places, "param_groups": groups})


def save(path: Path | str, state: Mapping[str, Any]) -> None:
    """Write a checkpoint, whole or not at all; one rank does it.

    Args:
        path: of the file, which is replaced.
        state: of tensors, numbers, strings and None in dictionaries, lists and tuples.

    Raises:
        CheckpointError: it holds something else, which could not be read safely.
        InputError: the file cannot be written.
    """
    plain = _plain(state, "state")
    with replacing(path) as file:
        torch.save({"format": _FORMAT, "state": plain}, file)


def load(path: Path | str) -> dict[str, Any]:
    """What was saved, on the CPU; nothing in the file is executed.

    Raises:
        CheckpointError: the file cannot be read or is no checkpoint of ours.
    """
    where = shorten_path(path)
    rule = f"{where}: must be a checkpoint that this package saved, got another file or a part of one"
    try:
        file = Path(path).open("rb")  # noqa: SIM115 (what fails here is told apart from what torch finds)
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error.strerror or error}") from error
    with file:
        try:
            read = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch documents none: OSError, RuntimeError, UnpicklingError were seen
            raise CheckpointError(rule) from error
    if not isinstance(read, dict) or read.get("format") != _FORMAT or not isinstance(read.get("state"), dict):
        raise CheckpointError(rule)
    return dict(read["state"])


def _of_every_stage(mine: Any, plan: Plan, group: dist.ProcessGroup | None) -> list[Any]:
    """What the first rank of each worker has, worker by worker, on every rank."""
    found = []
    for worker in plan.workers:
        box = [mine if dist.get_rank() == worker.ranks[0] else None]
        dist.broadcast_object_list(box, worker.ranks[0], group=group)
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


def _copied(value: Any) -> Any:
    return _on_cpu(value) if isinstance(value, Tensor) else value


def _add_groups(groups: list[dict[str, Any]], more: list[dict[str, Any]], known: set[str]) -> None:
    """Join groups of another stage to those with the same options."""
    for group in more:
        names = [name for name in group["names"] if name not in known]
        if not names:
            continue
        same = next((it for it in groups if _equal(it["options"], group["options"])), None)
        if same is None:
            groups.append({"names": names, "options": group["options"]})
        else:
            same["names"] = same["names"] + names


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether options are the same, tensors among them by value."""
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(other[key]))
        if isinstance(value, Tensor) or isinstance(other[key], Tensor)
        else value == other[key]
        for key, value in one.items()
    )


def _plain(value: Any, where: str) -> Any:
    """A copy in containers that are read safely; tensors without what lies around them in their storage."""
    if isinstance(value, Tensor):
        return _on_cpu(value)
    if value is None:
        return None
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # numpy's numbers, say, are floats that could not be read safely
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, (str, int)):
                raise CheckpointError(f"checkpoint: keys of {where} must be names or numbers, got {key!r}")
        return {key: _plain(entry, f"{where}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        entries = [_plain(entry, f"{where}[{index}]") for index, entry in enumerate(value)]
        return entries if isinstance(value, list) else tuple(entries)
    raise CheckpointError(
        f"checkpoint: {where} must be a tensor, a number, a string, None or a container of them, "
        f"got {type(value).__name__}"
    )

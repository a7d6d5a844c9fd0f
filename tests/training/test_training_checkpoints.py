"""Checkpoints from stages to the whole and back: any division goes on exactly as serial training does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from arborcast.pipeline.errors import CheckpointError  # noqa: E402
from arborcast.pipeline.run import checkpoints  # noqa: E402
from arborcast.pipeline.stages import Plan  # noqa: E402
from arborcast.synth.errors import InputError  # noqa: E402
from tests.support.packed import pack, unpack  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

RANKS_IMPORT = ("torch._dynamo",)

THREE = Plan([(0, 1, (2,)), (1, 3, (0, 3)), (3, 4, (1,))], microbatches=1)
TWO = Plan([(0, 2, (3, 1)), (2, 4, (0,))], microbatches=1)  # rank 2 has no work
OPTIMIZERS = ("adam", "sgd", "adamw groups", "schedule")


def network() -> nn.Sequential:
    torch.manual_seed(5)
    layers = OrderedDict(
        embed=nn.Linear(3, 4),
        norm=nn.BatchNorm1d(4),
        middle=nn.Linear(4, 4),
        head=nn.Linear(4, 3, bias=False),
    )
    model = nn.Sequential(layers)
    model.head.weight = nn.Parameter(model.head.weight.detach())
    model.middle.bias.requires_grad_(False)
    return model


def division(start: int, end: int) -> nn.Module:
    """Layers of the model under the names they have in the whole."""
    return network()[start:end]


def optimizer_of(kind: str, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    members = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    plain = [parameter for _, parameter in members]
    if kind == "adam":
        return torch.optim.Adam(plain, lr=0.05)
    if kind == "sgd":
        return torch.optim.SGD(plain, lr=0.05, momentum=0.9, nesterov=True)
    if kind == "schedule":
        return torch.optim.SGD(plain, lr=0.05, momentum=0.9)
    decayed = [parameter for name, parameter in members if name.endswith("weight")]
    others = [parameter for name, parameter in members if not name.endswith("weight")]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.3}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.05, amsgrad=True)


def advance(kind: str, module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One update with gradients that depend on the name alone; `norm.bias` has one in step 2 only."""
    for name, parameter in module.named_parameters():
        seed = sum(map(ord, name)) + step
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        has = parameter.requires_grad and (name != "norm.bias" or step == 2)
        parameter.grad = drawn if has else None
    for name, buffer in module.named_buffers():
        buffer.add_(len(name) + step)
    optimizer.step()
    if kind == "schedule":
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)


def run_stages(plan: Plan, kind: str, state: dict[str, Any] | None, step: int) -> dict[str, Any]:
    """One step in this division, from a checkpoint (None: from the beginning); a checkpoint."""
    index = plan.worker_of(dist.get_rank())
    if index is None:
        return {
            "model": checkpoints.gather_state(None, None, plan),
            "optimizer": checkpoints.gather_optimizer_state(None, {}, None, plan),
        }
    stage = plan.stages[index]
    module = division(stage.start, stage.end)
    names = dict(module.named_parameters())
    optimizer = optimizer_of(kind, names.items())
    if state is not None:
        checkpoints.load_state(module, state["model"])
        checkpoints.load_optimizer_state(optimizer, names, state["optimizer"])
    advance(kind, module, optimizer, step)
    return {
        "model": checkpoints.gather_state(module.state_dict(), dist.group.WORLD, plan),
        "optimizer": checkpoints.gather_optimizer_state(optimizer, names, dist.group.WORLD, plan),
    }


def run_serially(kind: str, steps: Iterable[int], state: dict[str, Any] | None = None) -> dict[str, Any]:
    model = network()
    names = dict(model.named_parameters())
    optimizer = optimizer_of(kind, names.items())
    if state is not None:
        model.load_state_dict(state["model"])
        checkpoints.load_optimizer_state(optimizer, names, state["optimizer"])
    for step in steps:
        advance(kind, model, optimizer, step)
    return {"model": model.state_dict(), "optimizer": checkpoints.optimizer_state(optimizer, names)}


def divided(rank: int, size: int, folder: str) -> bytes:
    """Serial, three stages, two stages, three stages, one step in each; errors that all ranks must raise."""
    results: dict[str, Any] = {}
    for kind in OPTIMIZERS:
        if rank == 0:
            checkpoints.save(f"{folder}/{kind}", run_serially(kind, [0]))
        dist.barrier()
        after_three = run_stages(THREE, kind, checkpoints.load(f"{folder}/{kind}"), 1)
        after_two = run_stages(TWO, kind, after_three, 2)
        results[kind] = [after_three, after_two, run_stages(THREE, kind, after_two, 3)]
        results[f"{kind} fresh"] = run_stages(TWO, kind, None, 0)
    messages = []
    whole = Plan([(0, 2, (1,)), (2, 4, (0,))], microbatches=1)
    entry: Any = {0: {"w": torch.ones(2)}, 1: {"w": torch.ones(3)}}.get(rank)
    broken: Any = {0: {}, 1: {"odd": 3}}.get(rank)
    for state in (entry, broken):
        with pytest.raises(CheckpointError) as caught:
            checkpoints.gather_state(state, None, whole)
        messages.append(str(caught.value))
    nameless = torch.optim.SGD([nn.Parameter(torch.ones(4, 2))], lr=1.0) if rank == 1 else None
    with pytest.raises(CheckpointError) as caught:
        checkpoints.gather_optimizer_state(nameless, {}, None, whole)
    messages.append(str(caught.value))
    kinds = (torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float64)
    odd = {str(kind): torch.ones(3, 2).to(kind).t() for kind in kinds} | {"none": torch.ones(0, 4)}
    odd["scalar"] = torch.tensor(3)
    moved = checkpoints.gather_state(odd if rank < 2 else None, None, whole)
    assert all(
        torch.equal(moved[name], value) and moved[name].dtype == value.dtype for name, value in odd.items()
    )
    return pack((results, messages))


def equal(one: Any, other: Any) -> bool:
    """Whether two states hold the same, bit by bit; lists of groups and names in any order."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def by_name(state: dict[str, Any]) -> dict[str, Any]:
    """Options of an optimizer by name: the order of groups differs between divisions."""
    options = {name: group["options"] for group in state["groups"] for name in group["names"]}
    return {"state": state["state"], "options": options, "shapes": state["shapes"]}


def test_every_division_goes_on_as_serial_training_does(tmp_path: Path) -> None:
    for packed in run_ranks(4, divided, str(tmp_path)):
        results, messages = unpack(packed)
        for kind in OPTIMIZERS:
            for steps, state in enumerate(results[kind], start=2):
                want = run_serially(kind, range(steps))
                assert list(state["model"]) == list(want["model"])
                assert equal(state["model"], want["model"])
                assert equal(by_name(state["optimizer"]), by_name(want["optimizer"]))
            # And the last one back into serial training.
            assert equal(
                run_serially(kind, [4], results[kind][-1])["model"], run_serially(kind, range(5))["model"]
            )
            fresh = run_serially(kind, [0])
            assert equal(results[f"{kind} fresh"]["model"], fresh["model"])
            assert equal(by_name(results[f"{kind} fresh"]["optimizer"]), by_name(fresh["optimizer"]))
        assert messages == [
            "checkpoint: w must be the same on all stages, got (3,) torch.float32 and (2,) torch.float32",
            "checkpoint: entry odd of the model must be a tensor",
            "optimizer: parameter 0 of shape (4, 2) must have a name in the model, got none",
        ]


def test_steps_are_what_the_momentum_says() -> None:
    # What the test above relies on: the state that is carried matters.
    for kind in OPTIMIZERS:
        first = run_serially(kind, [0])
        first["optimizer"] = run_serially(kind, [])["optimizer"]
        assert not equal(run_serially(kind, [1], first)["model"], run_serially(kind, [0, 1])["model"])


def test_a_file_holds_what_was_saved_and_no_more(tmp_path: Path) -> None:
    large = torch.zeros(100_000)
    state = {
        "step": 3,
        "part": large[:2],
        "scaler": {},
        "list": [1.5, None, ("a", True)],
        "size": large.shape,
        7: OrderedDict(a=1),
    }
    checkpoints.save(tmp_path / "c.pt", state)
    read = checkpoints.load(tmp_path / "c.pt")
    assert equal(read, dict(state))
    assert (tmp_path / "c.pt").stat().st_size < 10_000
    checkpoints.save(tmp_path / "c.pt", state | {"step": numpy.float64(2.5)})
    assert checkpoints.load(tmp_path / "c.pt")["step"] == 2.5
    checkpoints.save(tmp_path / "c.pt", state)
    with pytest.raises(CheckpointError, match=r"state\['step'\] must be a tensor, a number, .* got object"):
        checkpoints.save(tmp_path / "c.pt", {"step": object()})
    with pytest.raises(
        CheckpointError, match=r"keys of state\['step'\] must be names or numbers, got \(1, 2\)"
    ):
        checkpoints.save(tmp_path / "c.pt", {"step": {(1, 2): 3}})
    assert equal(checkpoints.load(tmp_path / "c.pt"), dict(state))  # still there
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]
    with pytest.raises(InputError, match="cannot be written: No such file or directory"):
        checkpoints.save(tmp_path / "none" / "c.pt", {})


class Trap:
    """Says so where it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("code of the file was run",))


@pytest.mark.parametrize("content", ["empty", "text", "truncated", "trap", "other", "old", "folder"])
def test_files_that_are_no_checkpoints(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.pt"
    checkpoints.save(path, {"model": {"w": torch.ones(1000)}})
    match content:
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_text("not a checkpoint")
        case "truncated":
            path.write_bytes(path.read_bytes()[:-200])
        case "trap":
            torch.save(Trap(), path)
        case "other":
            torch.save({"model": {}}, path)
        case "old":
            torch.save(network().state_dict(), path, _use_new_zipfile_serialization=False)
        case "folder":
            path = tmp_path
    rule = (
        "cannot be read: Is a directory"
        if content == "folder"
        else "must be a checkpoint that this package saved"
    )
    with pytest.raises(CheckpointError, match=rule) as caught:
        checkpoints.load(path)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(str(path))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"c\.pt: cannot be read: No such file or directory"):
        checkpoints.load(tmp_path / "c.pt")


def test_checkpoints_of_another_model() -> None:
    state = run_serially("adam", [0])
    other = nn.Sequential(OrderedDict(embed=nn.Linear(2, 4)))
    with pytest.raises(
        CheckpointError, match=r"embed.weight must have shape \(4, 2\) of the model, got \(4, 3\)"
    ):
        checkpoints.load_state(other, state["model"])
    with pytest.raises(CheckpointError, match=r"must hold 0\.weight of the model, got 10 others"):
        checkpoints.load_state(nn.Sequential(nn.Linear(2, 4)), state["model"])
    optimizer = torch.optim.Adam(other.parameters())
    with pytest.raises(
        CheckpointError, match=r"embed.weight must have shape \(4, 2\) of the model, got \(4, 3\)"
    ):
        checkpoints.load_optimizer_state(optimizer, dict(other.named_parameters()), state["optimizer"])
    with pytest.raises(CheckpointError, match=r"must hold new\.weight of the optimizer, got 6 others"):
        names = {f"new.{name.split('.')[1]}": parameter for name, parameter in other.named_parameters()}
        checkpoints.load_optimizer_state(optimizer, names, state["optimizer"])
    with pytest.raises(CheckpointError, match=r"parameter 1 of shape \(4,\) must have a name in the model"):
        checkpoints.optimizer_state(optimizer, {"embed.weight": other.embed.weight})


def test_groups_must_have_had_equal_options() -> None:
    state = run_serially("adamw groups", [0])
    model = network()
    one = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], amsgrad=True)
    with pytest.raises(
        CheckpointError, match="all parameters of group 0 of the optimizer must have had the same"
    ):
        checkpoints.load_optimizer_state(one, dict(model.named_parameters()), state["optimizer"])

"""Checkpoints from stages to the whole and back: any division goes on exactly as serial training does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from arborcast.pipeline.errors import CheckpointError
from arborcast.pipeline.run import checkpoints
from arborcast.pipeline.run.checkpoint_reader import CheckpointFolder
from arborcast.pipeline.stages import Plan
from tests.support.packed import pack, unpack
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("torch._dynamo",)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")

THREE = Plan([(0, 1, (2,)), (1, 3, (0, 3)), (3, 4, (1,))], microbatches=1)
TWO = Plan([(0, 2, (3, 1)), (2, 4, (0,))], microbatches=1)  # rank 2 has no work
OPTIMIZERS = ("adam", "sgd", "adamw groups", "schedule")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def network() -> nn.Sequential:
    torch.manual_seed(5)
    layers = OrderedDict(
        embed=nn.Linear(3, 4),
        norm=nn.BatchNorm1d(4),
        middle=nn.Linear(4, 4),
        head=nn.Linear(4, 3, bias=False),
    )
    model = nn.Sequential(layers)
    model.middle.bias.requires_grad_(False)
    return model


def division(start: int, end: int) -> nn.Module:
    """Layers of the model under the names they have in the whole."""
    return network()[start:end]


def optimizer_of(kind: str, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    members = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    plain = [parameter for _, parameter in members]
    if kind == "adam":
        return torch.optim.Adam(plain, lr=torch.tensor(0.05))
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


def run_stages(plan: Plan, kind: str, before: str, step: int, after: str) -> None:
    """One step in this division, from a checkpoint to the next."""
    index = plan.worker_of(dist.get_rank())
    if index is None:
        checkpoints.write(after, lambda: {}, dist.group.WORLD)
        return
    stage = plan.stages[index]
    module = division(stage.start, stage.end)
    names = dict(module.named_parameters())
    optimizer = optimizer_of(kind, names.items())
    checkpoints.Loading(before, network(), module, optimizer, names).load()
    advance(kind, module, optimizer, step)

    def entries() -> dict[str, Any]:
        own = checkpoints.optimizer_entries(optimizer, names)
        return {"model": checkpoints.tensors_of(module.state_dict()), "optimizer": own}

    checkpoints.write(after, entries, dist.group.WORLD)


def serially(
    kind: str, steps: Iterable[int], before: str | None = None, *, by_torch: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """From a checkpoint, which torch's own functions read where every parameter has a state."""
    model = network()
    optimizer = optimizer_of(kind, model.named_parameters())
    if before is not None and by_torch:
        state, own = get_state_dict(model, optimizer, options=FLAT)
        dcp.load({"model": state, "optimizer": own}, checkpoint_id=before)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=own, options=FLAT)
    elif before is not None:
        checkpoints.Loading(before, model, model, optimizer, dict(model.named_parameters())).load()
    for step in steps:
        advance(kind, model, optimizer, step)
    model.zero_grad()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State and options, by name."""
    return model.state_dict() | checkpoints.optimizer_entries(optimizer, dict(model.named_parameters()))


def divided(rank: int, size: int, folder: str) -> bytes:
    """Three stages, two stages, three stages, one step in each; errors that all ranks must raise."""
    for kind in OPTIMIZERS:
        for step, plan in enumerate((THREE, TWO, THREE), start=1):
            run_stages(plan, kind, f"{folder}/{kind} {step - 1}", step, f"{folder}/{kind} {step}")
    messages = []
    whole = Plan([(0, 2, (1,)), (2, 4, (0,))], microbatches=1)
    entry: Any = {0: {"w": torch.ones(2)}, 1: {"w": torch.ones(3)}}.get(rank)
    broken: Any = {0: {}, 1: {"odd": 3}}.get(rank)
    for state in (entry, broken):
        with pytest.raises(CheckpointError) as caught:
            checkpoints.gather_state(state, None, [it.ranks[0] for it in whole.workers])
        messages.append(str(caught.value))
    nameless = torch.optim.SGD([nn.Parameter(torch.ones(4, 2))], lr=1.0) if rank == 1 else None
    Path(folder, "taken").mkdir(exist_ok=True)
    for name, own in (("new", nameless), ("none/x", None), ("taken", None)):
        with pytest.raises(CheckpointError) as caught:
            checkpoints.write(
                f"{folder}/{name}", partial(checkpoints.optimizer_entries, own, {}), dist.group.WORLD
            )
        messages.append(str(caught.value).replace(folder, ""))
    kinds = (torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float64)
    odd = {str(kind): torch.ones(3, 2).to(kind).t() for kind in kinds} | {"none": torch.ones(0, 4)}
    odd["scalar"] = torch.tensor(3)
    moved = checkpoints.gather_state(odd if rank < 2 else None, None, [it.ranks[0] for it in whole.workers])
    assert all(
        torch.equal(moved[name], value) and moved[name].dtype == value.dtype for name, value in odd.items()
    )
    return pack(messages)


def equal(one: Any, other: Any) -> bool:
    """Whether two states hold the same, bit by bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def test_every_division_goes_on_as_serial_training_does(tmp_path: Path) -> None:
    for kind in OPTIMIZERS:
        model, optimizer = serially(kind, [0])
        state, own = get_state_dict(model, optimizer, options=FLAT)
        if kind == "adamw groups":  # what torch writes and what we write have the same keys
            assert (
                own.keys() == checkpoints.optimizer_entries(optimizer, dict(model.named_parameters())).keys()
            )
        dcp.save({"model": state, "optimizer": own}, checkpoint_id=tmp_path / f"{kind} 0")
    found = [unpack(it) for it in run_ranks(4, divided, str(tmp_path))]
    assert found[1:] == found[:-1]
    assert found[0] == [
        "checkpoint: w must be the same on all stages, got (3,) torch.float32 and (2,) torch.float32",
        "checkpoint: entry odd of the model must be a tensor",
        "optimizer: parameter 0 of shape (4, 2) must have a name in the model, got none",
        "/none/x: cannot be written: No such file or directory",
        "/taken: must be a new folder or a checkpoint, got something else",
    ]
    for kind in OPTIMIZERS:
        for step in (1, 2, 3):
            found = everything(*serially(kind, [], f"{tmp_path}/{kind} {step}", by_torch=step == 3))
            assert equal(found, everything(*serially(kind, range(step + 1)))), (kind, step)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    parts = {path.name[:3] for path in (tmp_path / "adam 3").glob("*.distcp")}
    assert parts == {"__0", "__1", "__2", "__3"}  # both replicas of the middle write


def test_steps_are_what_the_momentum_says() -> None:
    # What the test above relies on: the state that is carried matters.
    for kind in OPTIMIZERS:
        model, _ = serially(kind, [0])
        without = optimizer_of(kind, model.named_parameters())
        advance(kind, model, without, 1)
        assert not equal(model.state_dict(), serially(kind, [0, 1])[0].state_dict())


class Trap:
    """Says so where it is unpickled."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("code of the file was run",))


BROKEN = {
    "missing": r"c: must be a folder of torch.distributed.checkpoint, got FileNotFoundError",
    "empty": r"c: must be a folder of torch.distributed.checkpoint, got EOFError",
    "trap": r"got UnpicklingError: it names \S+, which no description of tensors does",
    "trap within": r"c: must be a folder of torch.distributed.checkpoint, got UnpicklingError",
    "truncated": r"c/__0_0.distcp: must have \d+ bytes, got \d+",
    "lost": r"c/__0_0.distcp: must have \d+ bytes, got no such file",
    "garbled": r"c: must be a folder of torch.distributed.checkpoint, got ",
}


@pytest.mark.parametrize("way", BROKEN)
def test_folders_that_are_no_checkpoints(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "c"
    content = {"model": {"w": torch.ones(1000)}, "step": Trap() if way == "trap within" else 3}
    dcp.save(content, checkpoint_id=folder)
    described, data = folder / ".metadata", folder / "__0_0.distcp"
    match way:
        case "missing":
            described.unlink()
        case "empty":
            described.write_bytes(b"")
        case "trap":
            import pickle

            described.write_bytes(pickle.dumps(Trap()))
        case "truncated":
            data.write_bytes(data.read_bytes()[:-200])
        case "lost":
            data.unlink()
        case "garbled":
            data.write_bytes(b"x" * data.stat().st_size)
    with pytest.raises(CheckpointError, match=BROKEN[way]) as caught:
        files = CheckpointFolder(folder)
        files.read({"model.w": torch.zeros(1000)})
        files.values(["step"], {})
    assert "\n" not in str(caught.value)


def written(folder: Path, kind: str = "adam") -> Path:
    model, optimizer = serially(kind, [0])
    state, own = get_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": state, "optimizer": own}, checkpoint_id=folder)
    return folder


def test_checkpoints_of_another_model(tmp_path: Path) -> None:
    folder = written(tmp_path / "c")
    other = nn.Sequential(OrderedDict(embed=nn.Linear(2, 4)))
    with pytest.raises(
        CheckpointError, match=r"c: embed.weight must have shape \(4, 2\) of the model, got \(4, 3\)"
    ):
        checkpoints.Loading(folder, other, other, None, {})
    with pytest.raises(CheckpointError, match=r"c: must hold 0\.weight of the model, got \d+ others"):
        checkpoints.Loading(folder, nn.Sequential(nn.Linear(2, 4)), other, None, {})
    model = network()
    names = dict(model.named_parameters())
    all_of_them = torch.optim.Adam(model.parameters())
    with pytest.raises(CheckpointError, match=r"c: must hold middle\.bias of the optimizer, got no such"):
        checkpoints.Loading(folder, model, model, all_of_them, names)
    with pytest.raises(CheckpointError, match=r"parameter 1 of shape \(4,\) must have a name in the model"):
        checkpoints.optimizer_entries(all_of_them, {"embed.weight": model.embed.weight})


def test_groups_must_have_had_equal_options(tmp_path: Path) -> None:
    folder = written(tmp_path / "c", "adamw groups")
    model = network()
    one = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], amsgrad=True)
    with pytest.raises(
        CheckpointError, match="all parameters of group 0 of the optimizer must have had the same"
    ):
        checkpoints.Loading(folder, model, model, one, dict(model.named_parameters()))


def test_checkpoints_of_another_optimizer(tmp_path: Path) -> None:
    folder = written(tmp_path / "c", "sgd")
    model = network()
    adam = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(CheckpointError, match=r"c: must be of the same optimizer, Adam, got none of its "):
        checkpoints.Loading(folder, model, model, adam, dict(model.named_parameters()))


class Counting(torch.optim.SGD):
    """Counts its steps in numbers that are no tensors."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
        return super().step(closure)


def test_state_that_is_no_tensor_is_kept(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, Counting, dict[str, nn.Parameter]]:
        model = nn.Linear(2, 3)
        return model, Counting(model.parameters(), lr=0.1), dict(model.named_parameters())

    model, optimizer, names = made()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.step()
    entries = checkpoints.optimizer_entries(optimizer, names)
    dcp.save({"model": model.state_dict(), "optimizer": entries}, checkpoint_id=tmp_path / "c")
    other, going, theirs = made()
    checkpoints.Loading(tmp_path / "c", other, other, going, theirs).load()
    assert [going.state[it]["count"] for it in theirs.values()] == [2, 2]


def test_a_checkpoint_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, draft = tmp_path / "c", tmp_path / ".c.part"
    for place in (folder, draft):
        place.mkdir()
        (place / "of").write_text(place.name)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self == draft:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="c: cannot be written: No space left on device"):
        checkpoints._replace("c", folder, draft)
    assert (folder / "of").read_text() == "c"

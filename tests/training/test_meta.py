"""Models without values: each part begins as the whole does, or as files say, and nothing is left over."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from arborcast.pipeline.errors import CheckpointError, PartitionError
from arborcast.pipeline.model.deferred_init import (
    allocate,
    fill,
    initialise,
    on_meta,
    tensors_on_meta,
)
from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.model.traced import trace
from arborcast.pipeline.run.initial_weights import give_values
from arborcast.synth.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")


class Orthogonal(nn.Module):
    """Draws something else than its parameter, on two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight, self.bias = nn.Parameter(torch.empty(4, 4)), nn.Parameter(torch.empty(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)
        self.bias.data.copy_(torch.rand(4))
        nn.init.normal_(self.inner.bias)  # over what that had from its own


class Zoo(nn.Module):
    """Modules of many kinds, one of them twice, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, padding_idx=2)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.BatchNorm1d(4)])
        self.memory = nn.GRU(4, 4)
        self.again = self.norms[0]
        self.odd = Orthogonal()
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("table", torch.arange(5.0) if not torch.empty(0).is_meta else torch.zeros(5))


def held(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


def made(context: Callable[[], AbstractContextManager[Any]] = on_meta) -> Zoo:
    with context():
        return Zoo()


NAMES = sorted(held(made()).keys() - {"table"})


@given(st.sets(st.sampled_from(NAMES)), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_every_part_begins_as_the_whole(names: set[str], seed: int) -> None:
    whole, part = made(), made()
    initialise(whole, seed)
    fill(part, allocate(part, names), seed)
    for name, tensor in held(part).items():
        assert tensor.is_meta == (
            name not in names and name != "table" and "running" not in name and "num_batches" not in name
        ), name
        if not tensor.is_meta:
            assert torch.equal(tensor, held(whole)[name]), name


def test_first_values_are_as_the_modules_draw_them() -> None:
    model, other = made(), made()
    state = torch.random.get_rng_state()
    optimizer = torch.optim.Adam(model.parameters())  # holds them already
    initialise(model, 1)
    initialise(other, 2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {id(it) for it in model.parameters()} == {id(it) for it in optimizer.param_groups[0]["params"]}
    assert model.head.weight is model.words.weight
    assert not model.words.weight[2].any() and model.words.weight[1].any()
    assert torch.allclose(model.odd.weight @ model.odd.weight.T, torch.eye(4), atol=1e-6)
    assert 0 < model.attention.in_proj_weight.abs().max() <= (6 / 16) ** 0.5  # xavier
    assert not model.attention.in_proj_bias.any() and (model.norms[0].weight == 1).all()
    assert not torch.equal(model.words.weight, other.words.weight)
    assert not torch.equal(model.memory.weight_hh_l0, model.memory.weight_ih_l0)
    assert torch.equal(model.table, torch.arange(5.0))


def test_what_has_values_keeps_them() -> None:
    model = made()
    model.norms[1].running_mean.fill_(3)
    model.odd.bias = nn.Parameter(torch.full((4,), 9.0))
    initialise(model)
    assert (model.norms[1].running_mean == 3).all() and (model.odd.bias == 9).all()
    kept = {name: it.clone() for name, it in held(model).items()}
    initialise(model, 5)  # nothing is on meta any more
    assert all(torch.equal(it, kept[name]) for name, it in held(model).items())


def test_first_values_of_ones_own() -> None:
    model = made()
    initialise(
        model, how=lambda module: [nn.init.constant_(it, 4) for it in module.parameters(recurse=False)]
    )
    assert all((it == 4).all() for it in model.parameters())


def test_what_nothing_gives_a_value_is_named() -> None:
    with pytest.raises(PartitionError, match=r"^model Zoo: table is on meta .* \(of Zoo, table\): build the"):
        initialise(made(lambda: torch.device("meta")))
    with pytest.raises(PartitionError, match=r"model Zoo: words.weight is on meta"):
        initialise(made(), how=lambda module: None)


@pytest.mark.long
@pytest.mark.parametrize("context", [on_meta, lambda: torch.device("meta")])
@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForSequenceClassification"])
def test_models_of_transformers(kind: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, kind)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 300}
    config = cls.config_class(**sizes)
    torch.manual_seed(0)
    plain = cls(config)
    with context():
        model = cls(config)
    assert all(it.is_meta for it in model.parameters())
    initialise(model)
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name]), name  # positions, rotary tables
    for name, parameter in plain.named_parameters():
        ours = dict(model.named_parameters())[name]
        assert float(ours.detach().std(correction=0)) == pytest.approx(
            float(parameter.detach().std(correction=0)), rel=0.35
        ), name


# ---------------------------------------------------------------------- files


class Inner(nn.Module):
    """As transformers has them: a model within a model, with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)


class Outer(nn.Module):
    base_model_prefix = "inner"

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(4, 3, bias=False)
        self.head.weight = self.inner.second.weight
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner.norm(self.inner.second(torch.relu(self.inner.first(x))))
        return self.head(torch.tanh(h @ self.inner.second.weight)) * self.scale  # type: ignore[no-any-return]


def outer(seed: int) -> Outer:
    torch.manual_seed(seed)
    return Outer()


def within(name: str) -> str:
    return name.removeprefix("inner.")


def stored(way: str, folder: Path) -> Path:
    """What `outer(7)` has, in a file or folder."""
    from safetensors.torch import save_file

    folder.mkdir()
    state = {name: it for name, it in outer(7).state_dict().items() if name != "head.weight"}
    named = {within(name): it for name, it in state.items()}
    match way:
        case "file":
            save_file(state, folder / "a.safetensors")
            return folder / "a.safetensors"
        case "files":
            for index, (name, it) in enumerate(state.items()):
                save_file({name: it}, folder / f"{index}.safetensors")
        case "index":
            homes = {name: f"{index % 2}.safetensors" for index, name in enumerate(state)}
            for home in ("0.safetensors", "1.safetensors"):
                save_file({name: state[name] for name in state if homes[name] == home}, folder / home)
            save_file({"inner.first.weight": torch.zeros(9)}, folder / "unused.safetensors")
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
        case "model within":
            save_file(named, folder / "model.safetensors")
        case "half as long":
            small = {name: it.bfloat16() if it.is_floating_point() else it for name, it in state.items()}
            save_file(small, folder / "a.safetensors")
        case "checkpoint":
            dcp.save({"model": outer(7).state_dict(), "step": 3}, checkpoint_id=folder)
        case "checkpoint of the state":
            dcp.save(outer(7).state_dict(), checkpoint_id=folder)
    return folder


RARE = ("file", "files", "model within", "half as long", "checkpoint of the state")
WAYS = ("index", "checkpoint", *(pytest.param(way, marks=pytest.mark.long) for way in RARE))


@pytest.mark.parametrize("way", WAYS)
def test_a_stage_reads_what_it_holds(tmp_path: Path, way: str) -> None:
    path = stored(way, tmp_path / "stored")
    with on_meta():
        model = Outer()
    layered = trace(model, torch.randn(4, 3), layers=3, evaluation=False)
    give_values(layered, [(0, 1)], path, 0)
    expected, own = outer(7).state_dict(), set(layered.divide(0, 1).state_dict())
    assert own < set(expected)
    for name, it in model.state_dict().items():
        if name in own:
            precise = way != "half as long"
            assert torch.allclose(it, expected[name], rtol=0 if precise else 1e-2, atol=0), name
    assert sum(it.is_meta for it in model.parameters()) == sum(
        name not in own for name, _ in model.named_parameters()
    )
    give_values(layered, [(0, layered.depth)], path, 0)
    x = torch.randn(5, 3)
    assert torch.allclose(layered.divide(0, layered.depth)(x), outer(7)(x), atol=0 if precise else 0.1)
    real = outer(3)  # has values, which give way
    give_values(trace(real, x, layers=3, evaluation=False), [(0, 1)], path, 0)
    assert torch.allclose(real.inner.first.weight, expected["inner.first.weight"], atol=1e-2)


def broken(way: str, path: Path) -> None:
    from safetensors.torch import load_file, save_file

    content = load_file(path)
    match way:
        case "truncated":
            path.write_bytes(path.read_bytes()[:-20])
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_text("no tensors")
        case "gone":
            path.unlink()
        case "shape":
            save_file(content | {"inner.first.bias": torch.zeros(5)}, path)
        case "missing":
            save_file({name: it for name, it in content.items() if name != "inner.norm.running_mean"}, path)


@cache
def without_values() -> Any:
    with on_meta():
        return trace(Outer(), torch.randn(4, 3), layers=3, evaluation=False)


FAULTS = {
    "truncated": r"a.safetensors: must be a safetensors file, got SafetensorError: ",
    "empty": r"a.safetensors: must be a safetensors file, got ",
    "text": r"a.safetensors: must be a safetensors file, got ",
    "gone": r"a.safetensors: cannot be read: No such file or directory",
    "shape": r"a.safetensors: inner.first.bias must have shape \(4,\) of the model, got \(5,\)",
    "missing": r"a.safetensors: must hold inner.norm.running_mean of the model, got 8 others",
}


@pytest.mark.parametrize("way", FAULTS)
def test_files_that_do_not_fit(tmp_path: Path, way: str) -> None:
    path = stored("file", tmp_path / "stored")
    broken(way, path)
    layered = without_values()
    with pytest.raises(CheckpointError, match=FAULTS[way]) as caught:
        give_values(layered, [(0, 1)], path, 0)
    assert "\n" not in str(caught.value)
    assert all(it.is_meta for it in layered.model.parameters())


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"must hold .safetensors files, or the .metadata of a checkpoint"
    ):
        give_values(Divisible(Outer()), [], tmp_path, 0)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(
        CheckpointError, match=r"index.json: must be an index of safetensors files, got KeyError"
    ):
        give_values(Divisible(Outer()), [], tmp_path, 0)


def test_first_values_are_not_for_a_model_that_has_some() -> None:
    with pytest.raises(
        InputError, match=r"^weights: must be for a model on meta, got a Divisible with values$"
    ):
        give_values(Divisible(Outer()), [], lambda module: None, 0)


def test_literals_on_meta_are_named() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(3, 3), torch.ones(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale  # type: ignore[no-any-return]

    with torch.device("meta"):
        model = Plain()
    with pytest.raises(PartitionError, match=r"(scale|meta)"):
        layered = trace(model, torch.randn(4, 3), evaluation=False)
        give_values(layered, [(0, layered.depth)], None, 0)
    assert tensors_on_meta(model)

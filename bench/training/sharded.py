"""Operators divided over meshes: which layout is chosen, beside each fixed one, and how long that takes.

All layouts are priced alike, by simulated schedules of exactly these ranks; each has its best mesh.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from arborcast.pipeline.sharding.graph import Graph
    from arborcast.pipeline.sharding.mesh_choice import MeshChoice
    from arborcast.pipeline.sharding.sharding_program import Sharding

FABRICS = (
    ("four GPUs of a DGX-1", "dgx1", (0, 1, 2, 3)),
    ("two boxes of four, 100 Gbit/s between", "boxes:2,gpus=4,inside=150,nic=12.5,nics=1", None),
    ("torus 2x4 of 25 GB/s", "torus:2x4,bandwidth=25", None),
)
"""Name, spec, and the ranks where not all are used."""

MODELS = ((4, 1024, 64, 256), (4, 1024, 8, 64), (2, 4096, 8, 64))
"""Blocks of a GPT, their width, samples of a step and tokens of a sample."""

WORDS = 32_000
DEVICE = "v100"
TIMED = (
    (24, "dgx1", 30.0),
    (24, "dgx-a100:boxes=2", 30.0),
    (96, "dgx1", 60.0),
    (96, "dgx-a100:boxes=2", 60.0),
)
"""Blocks, topology, and the seconds that planning may take."""

FREE = "chosen freely"


class Block(nn.Module):
    """Attention to what comes before, and feed-forward, each behind a norm and added to what it reads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (samples, tokens, width)."""
        read = self.norms[0](hidden)
        query, key, value = (
            made(read).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for made in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        widened: Tensor = self.down(functional.gelu(self.up(self.norms[1](hidden))))
        return hidden + widened


class Gpt(nn.Module):
    """A GPT whose queries, keys and values have weights of their own."""

    def __init__(self, blocks: int, width: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Scores (samples, tokens, words)."""
        scores: Tensor = self.head(self.norm(self.blocks(self.words(words) + self.places.weight)))
        return scores


def graph_of(blocks: int, width: int, samples: int, tokens: int) -> Graph:
    """The operators of a GPT and its loss, traced without allocating anything."""
    from arborcast.pipeline import trace
    from arborcast.pipeline.model.traced.operator_reader import operator_trace
    from arborcast.pipeline.sharding.graph import merged

    with torch.device("meta"):
        words = torch.zeros(2, tokens, dtype=torch.long)
        traced = trace(Gpt(blocks, width, tokens), (words, words), _loss, evaluation=False)
    return merged(operator_trace(traced, samples))


def _loss(scores: Tensor, words: Tensor) -> Tensor:
    return functional.cross_entropy(scores.transpose(1, 2), words)


def layout_rows(fabrics: Sequence[tuple[str, str, tuple[int, ...] | None]] = FABRICS) -> list[dict[str, Any]]:
    """For each fabric and model the free choice, then each fixed layout, on the mesh that is best for it."""
    from arborcast.pipeline.costs.devices import device_named
    from arborcast.pipeline.sharding.mesh_choice import choose
    from arborcast.topologies import load

    device = device_named(DEVICE)
    rows = []
    for name, spec, ranks in fabrics:
        for shape in MODELS:
            blocks, width, samples, tokens = shape
            found = choose(
                graph_of(*shape), load(spec), device, ranks=ranks, memory_bytes=device.memory_bytes
            )
            best = found.sharding.total_ps
            for method, mesh, sharding in _layouts(found, device.memory_bytes):
                rows.append(
                    {
                        "title": name,
                        "topology": spec,
                        "ranks": len(found.best.mesh.ranks),
                        "model": f"{blocks} blocks of {width}, {samples} samples of {tokens} tokens",
                        "method": method,
                        "mesh": mesh,
                        "how": "" if sharding is None else _how(sharding),
                        "time_us": None if sharding is None else sharding.total_ps / 1e6,
                        "ratio": None if sharding is None else sharding.total_ps / best,
                        "memory_bytes": None if sharding is None else sharding.cost.memory_bytes,
                        "optimal": None if sharding is None else sharding.is_optimal,
                    }
                )
    return rows


def _layouts(found: MeshChoice, memory_bytes: int) -> Iterator[tuple[str, str, Sharding | None]]:
    """Name, mesh and sharding by schedules of the free choice and of each layout; None where nothing fits."""
    from arborcast.pipeline.errors import PlanError
    from arborcast.pipeline.sharding.fabric_prices import FabricPrices
    from arborcast.pipeline.sharding.layouts import LAYOUTS
    from arborcast.pipeline.sharding.sharding_program import shard

    yield FREE, str(found.best.mesh), found.sharding
    for name, layout in LAYOUTS.items():
        fitting = []
        for tried in found.tried:
            prices = tried.setting.prices
            assert isinstance(prices, FabricPrices)
            real = replace(tried.setting, prices=replace(prices, by_schedule=True))
            try:
                sharding = shard(
                    found.graph, real, memory_bytes=memory_bytes, allowed=layout(tried.mesh.shape)
                )
            except PlanError:
                continue
            fitting.append((sharding.total_ps, str(tried.mesh), sharding))
        yield (name, *min(fitting)[1:]) if fitting else (name, "", None)


def _how(sharding: Sharding) -> str:
    """What the second block makes of its parts, as DTensor writes placements, for each axis of the mesh."""
    from arborcast.pipeline.sharding.specs import shown

    found = []
    for operator, way in zip(sharding.graph.operators, sharding.chosen, strict=True):
        module = operator.module.rpartition(".")
        if way is not None and module[0] == "blocks.1" and module[2] in ("query", "out", "up", "down"):
            found.append(f"{module[2]} {shown(way.outputs[0])}")
    return ", ".join(found)


def time_rows(cases: Sequence[tuple[int, str, float]] = TIMED) -> list[dict[str, Any]]:
    """How long tracing and planning take, each case once, in a process of its own."""
    rows = []
    for blocks, spec, target_s in cases:
        with get_context("spawn").Pool(1) as pool:
            found = pool.apply(plan_once, (blocks, spec))
        rows.append(found | {"spread": None, "runs": 1, "target_s": target_s})
    return rows


def plan_once(blocks: int, spec: str) -> dict[str, Any]:
    """A GPT of these blocks traced and planned; the time of a process's imports is left out."""
    from arborcast.pipeline.costs.devices import device_named
    from arborcast.pipeline.sharding.mesh_choice import choose
    from arborcast.pipeline.sharding.sharding_program import shard
    from arborcast.topologies import load

    graph_of(1, 64, 8, 16)  # what the first trace imports
    topology, device = load(spec), device_named(DEVICE)
    begin, used = time.perf_counter(), _cpu()
    graph = graph_of(blocks, 1024, topology.ranks, 256)
    traced = _cpu() - used
    found = choose(graph, topology, device)
    seconds, cpu_seconds = time.perf_counter() - begin, _cpu() - used
    before = _cpu()
    shard(graph, found.best.setting)
    return {
        "topology": topology.name,
        "devices": topology.ranks,
        "layers": blocks,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "trace_seconds": traced,
        "program_seconds": _cpu() - before,
        "mesh": str(found.best.mesh),
        "optimal": found.sharding.is_optimal,
    }


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

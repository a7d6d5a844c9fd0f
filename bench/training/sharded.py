"""How long it takes to divide the operators of a GPT over meshes: from the module to the best layout."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from arborcast.bench.harness.processes import answer

if TYPE_CHECKING:
    from arborcast.pipeline.sharding.graph import Graph

WORDS = 32_000
DEVICE = "v100"
TIMED = (
    (24, "dgx1", 30.0),
    (24, "dgx-a100:boxes=2", 30.0),
    (96, "dgx1", 60.0),
    (96, "dgx-a100:boxes=2", 60.0),
)
"""Blocks, topology, and the seconds that planning may take."""


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


def time_rows(cases: Sequence[tuple[int, str, float]] = TIMED) -> list[dict[str, Any]]:
    """How long tracing and planning take, each case once, in a process of its own."""
    rows = []
    for blocks, spec, target_s in cases:
        found = answer(plan_once, blocks, spec)
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
    shard(graph, found.priced.setting)
    return {
        "topology": topology.name,
        "devices": topology.ranks,
        "layers": blocks,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "trace_seconds": traced,
        "program_seconds": _cpu() - before,
        "mesh": str(found.priced.setting.prices.mesh),
        "optimal": found.sharding.is_optimal,
    }


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

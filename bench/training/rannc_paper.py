"""RaNNC's two experiments, planned: BERT-Tall on 8 to 480 devices, and a growing BERT-Large on 8.

The source (Tanaka et al., seed report of 2020) names the machine: hosts of 8 V100 of 32 GB and one InfiniBand
port of 100 Gbit/s, here `ndv2` (NVLink as in a DGX-1). Costs are analytic, of float16 with the optimizer's
three float32 values for each parameter, 128 tokens a sample; nothing is allocated, nothing is trained.

Megatron-LM's layout stands beside it on the same costs: each rank has a share of the heads, of the inner
width and of the vocabulary, costed as the model that it is; two allreduces forward and two backward in each
block, one behind the embedding, one before the head, by the schedules of exactly those ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

from arborcast.pipeline.costs.devices import DEVICES
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.planning.alternatives import data_parallel
from arborcast.pipeline.planning.plan_prediction import predict
from arborcast.pipeline.planning.planner import plan as planned
from arborcast.pipeline.planning.rannc import rannc
from arborcast.pipeline.profiles import Layer, Profile
from arborcast.pipeline.simulation.pass_simulator import simulate
from arborcast.pipeline.stages import Plan, Stage, divided
from arborcast.synth.topology import Topology
from arborcast.topologies import load

TOKENS = 128
"""Of a sample: the first phase of BERT's pre-training."""

DEVICE = DEVICES["v100-32"]
RESERVED = Fraction(1, 10)
"""Of a device's memory, left to the framework: assumed, as in `spp_testbeds`."""

LIMIT_BYTES = int(DEVICE.memory_bytes * (1 - RESERVED))

STATE = 6
"""Bytes of optimizer state for each byte of float16 parameters: a float32 copy and two float32 moments."""

MOST_LAYERS = 96
"""Into which the blocks of larger models are merged for planners."""

SPLITS = (2, 4, 8)
"""Parts of the model, by stages or by Megatron's layout."""

LAYERS = (24, 48, 72, 96, 120, 144, 192, 240)
DEVICE_COUNTS = (8, 32, 64, 128, 480)
MOST_MICROBATCHES = 128
TALL_BATCH = 4096
LARGE_BATCH, LARGE_SAMPLES = 64, 8
"""Samples of all processes, and of a microbatch where there are 32."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A BERT, as the source's table has it."""

    name: str
    blocks: int
    width: int
    heads: int
    inner: int
    vocabulary: int


TALL = Shape("BERT-Tall", 54, 1920, 20, 4096, 100_000)
"""All but its table is BERT-Large's, the inner width as well: only so has it the 1.85 billion parameters."""

LARGE = Shape("BERT-Large", 24, 1024, 16, 4096, 30_522)


def costs(shape: Shape, samples: int, parts: int = 1, most: int | None = None) -> Profile:
    """The profile of a BERT for masked tokens; all of its blocks cost what the first one does.

    Args:
        shape: of the model.
        samples: of the profile.
        parts: that Megatron-LM divides it into: then of what one rank has, without messages.
        most: layers that blocks are merged into at most, for planners whose time grows with their square.
    """
    profile = _few_blocks(replace(shape, blocks=1), samples, parts)
    head, block, tail = profile.layers
    sizes = divided(shape.blocks, min(shape.blocks, most or shape.blocks))
    blocks = (_repeated(block, f"blocks {index}", size) for index, size in enumerate(sizes))
    layers = tuple(
        replace(layer, optimizer_bytes=STATE * layer.gradient_bytes) for layer in (head, *blocks, tail)
    )
    ties = tuple(replace(tie, layers=(0, len(layers) - 1)) for tie in profile.ties)
    return Profile(shape.name, samples, layers, ties, source=profile.source)


def _repeated(layer: Layer, name: str, count: int) -> Layer:
    """So many equal layers as one."""
    return replace(
        layer,
        name=name,
        forward_us=layer.forward_us * count,
        backward_us=layer.backward_us * count,
        saved_bytes=layer.saved_bytes * count - layer.passing_bytes * (count - 1),
        parameter_bytes=layer.parameter_bytes * count,
        gradient_bytes=layer.gradient_bytes * count,
        optimizer_bytes=0,
        forward_fixed_us=layer.forward_fixed_us * count,
        backward_fixed_us=layer.backward_fixed_us * count,
    )


@cache
def _few_blocks(shape: Shape, samples: int, parts: int) -> Profile:
    import torch
    from torch import Tensor
    from torch.nn import functional

    from arborcast.pipeline.costs.analytic import analyse
    from arborcast.pipeline.zoo.bert import bert_for_tokens

    def loss(scores: Tensor, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())

    with torch.device("meta"):
        model = bert_for_tokens(
            shape.width,
            shape.heads,
            shape.blocks,
            inner=shape.inner,
            vocabulary=shape.vocabulary,
            parts=parts,
        ).half()
        tokens = torch.zeros(samples, TOKENS, dtype=torch.long)
        inputs = tokens, tokens, torch.zeros_like(tokens, dtype=torch.bool)
    return analyse(model, (inputs, tokens), DEVICE, loss_fn=loss, name=shape.name)


def parameters(profile: Profile) -> int:
    """Of a float16 model, those that are shared once."""
    return profile.gradient_bytes(0, profile.depth) // 2


def cluster(devices: int) -> Topology:
    """Hosts of 8."""
    return load("ndv2" if devices == 8 else f"ndv2:boxes={devices // 8}")


# ---------------------------------------------------------------------------------------------- BERT-Tall


def tall_rows(counts: Sequence[int] = DEVICE_COUNTS) -> list[dict[str, Any]]:
    """BERT-Tall on so many devices: RaNNC's plan, ours repeated over hosts, data parallelism."""
    return [row for devices in counts for row in _tall(cluster(devices))]


def _tall(topology: Topology) -> Iterator[dict[str, Any]]:
    profile, network = costs(TALL, 16), LinkCosts(topology)
    case = {
        "experiment": "tall",
        "devices": topology.ranks,
        "parts": None,
        "asked": None,
        "layers": TALL.blocks,
        "batch": TALL_BATCH,
        "parameters": parameters(profile),
    }
    limited: dict[str, Any] = {"batch": TALL_BATCH, "memory_bytes": LIMIT_BYTES}
    methods: Mapping[str, Callable[[int], Plan]] = {
        "rannc": lambda m: rannc(profile, network, microbatches=m, **limited),
        "arborcast": lambda m: over_hosts(profile, network, TALL_BATCH),
        "data-parallel": lambda m: data_parallel(profile, network, microbatches=m, **limited),
    }
    most = min(TALL_BATCH // topology.ranks, MOST_MICROBATCHES)
    counts = [1 << power for power in range(most.bit_length())]
    for method, ask in methods.items():
        tried = [0] if method == "arborcast" else counts  # it chooses itself
        yield case | {"method": method} | _fastest(ask, profile, network, TALL_BATCH, tried)


def over_hosts(profile: Profile, network: LinkCosts, batch: int) -> Plan:
    """Our plan for one host, the same on all: pipelines inside, allreduces across.

    The planner itself is for tens of ranks; each host is asked about with its share of the batch.

    Raises:
        PlanError: nothing fits.
        BatchError: a host has no sample.
    """
    hosts = network.topology.ranks // 8
    plan = planned(profile, cluster(8), batch=batch // hosts, memory_bytes=LIMIT_BYTES)
    stages = (
        Stage(it.start, it.end, tuple(8 * host + rank for host in range(hosts) for rank in it.ranks))
        for it in plan.stages
    )
    return replace(plan, stages=tuple(stages), topology=network.topology)


def _fastest(
    ask: Callable[[int], Plan], profile: Profile, network: LinkCosts, batch: int, counts: Sequence[int]
) -> dict[str, Any]:
    """The fastest plan over the numbers of microbatches, as columns; it is chosen by rates of allreduces."""
    found: list[tuple[float, Plan]] = []
    refusal = "there are fewer samples than ranks"
    for count in counts:
        try:
            plan = ask(count)
            found.append((simulate(plan, profile, network, batch=batch).time_us, plan))
        except (PlanError, BatchError) as error:
            refusal = str(error)
    if not found:
        return dict.fromkeys(_COLUMNS) | {"fits": False, "why_not": refusal}
    return _columns(min(found, key=lambda it: it[0])[1], profile, network, batch)


def _columns(plan: Plan, profile: Profile, network: LinkCosts, batch: int) -> dict[str, Any]:
    predicted = predict(plan, profile, network, batch=batch)
    return {
        "samples_per_second": predicted.samples_per_s,
        "time_us": predicted.time_us,
        "replicas": [len(worker.ranks) for worker in plan.workers],
        "stages": len(plan.stages),
        "microbatches": plan.microbatches,
        "order": plan.order,
        "recompute": plan.recompute,
        "bubble": predicted.bubble,
        "inside_us": None,
        "memory_bytes": max(memory.total for memory in predicted.memory),
        "fits": True,
        "why_not": None,
    }


_COLUMNS = (
    "samples_per_second",
    "time_us",
    "replicas",
    "stages",
    "microbatches",
    "order",
    "recompute",
    "bubble",
    "inside_us",
    "memory_bytes",
)


# --------------------------------------------------------------------------------------------- BERT-Large


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train on 8 processes.

    Attributes:
        method: in rows.
        parts: of the model; 1 for data parallelism, None for what the planner chooses.
        microbatches: None for the best.
        batch: samples of a step.
    """

    method: str
    parts: int | None
    microbatches: int | None
    batch: int


def ways() -> Iterator[Way]:
    """All that are compared."""
    yield Way("data-parallel", 1, None, LARGE_BATCH)
    for parts in SPLITS:
        yield Way("megatron", parts, None, LARGE_BATCH)
        yield Way("rannc", parts, 2, LARGE_BATCH)
        yield Way("rannc", parts, 32, 32 * LARGE_SAMPLES)
    yield Way("arborcast", None, None, LARGE_BATCH)


def large_rows(layers: Sequence[int] = LAYERS) -> list[dict[str, Any]]:
    """Samples per second of BERT-Large with so many layers; null with the reason where it does not fit."""
    return [{"experiment": "large"} | _large(way, blocks) for way in ways() for blocks in layers]


def largest_rows(most: int = 2048) -> list[dict[str, Any]]:
    """The most layers of BERT-Large that fit, by bisection."""
    rows = []
    for way in ways():
        low, high = 0, most + 1  # fits, and does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _large(way, middle)["fits"] else (low, middle)
        found = _large(way, max(low, 1))
        assert found["fits"] and low < most, f"{way}: no largest number of layers in 1..{most}"
        rows.append({"experiment": "largest"} | found)
    return rows


def _large(way: Way, blocks: int) -> dict[str, Any]:
    shape = replace(LARGE, blocks=blocks)
    network = _one_host()
    whole = costs(shape, LARGE_SAMPLES, most=MOST_LAYERS)
    case = {
        "devices": 8,
        "method": way.method,
        "parts": way.parts,
        "asked": way.microbatches,
        "layers": blocks,
        "batch": way.batch,
        "parameters": parameters(whole),
    }
    if way.method == "megatron":
        assert way.parts is not None
        return case | megatron(shape, network, way.parts, way.batch)
    if way.method == "data-parallel":
        return case | _fastest(
            lambda m: data_parallel(
                whole, network, batch=way.batch, microbatches=m, memory_bytes=LIMIT_BYTES
            ),
            whole,
            network,
            way.batch,
            (1, 2, 4, 8),
        )
    if way.method == "rannc":
        assert way.microbatches is not None
        return case | _fastest(
            lambda m: rannc(
                whole,
                network,
                batch=way.batch,
                microbatches=m,
                memory_bytes=LIMIT_BYTES,
                count=way.parts,
                recompute=m == 32,
            ),
            whole,
            network,
            way.batch,
            (way.microbatches,),
        )
    return case | _fastest(
        lambda m: planned(
            whole,
            network.topology,
            batch=way.batch,
            memory_bytes=LIMIT_BYTES,
            network=network,
        ),
        whole,
        network,
        way.batch,
        (0,),  # it chooses itself
    )


@cache
def _one_host() -> LinkCosts:
    return LinkCosts(cluster(8))


def megatron(shape: Shape, network: LinkCosts, parts: int, batch: int) -> dict[str, Any]:
    """Megatron-LM's layout on one host, as columns: the fastest that fits of keeping and recomputing.

    Ranks in a row share a model, and those at the same place of each row sum its gradients. A group takes
    its samples at once, or in microbatches whose gradients add up.
    """
    profile = costs(shape, LARGE_SAMPLES, parts)
    groups = network.topology.ranks // parts
    scheduled = replace(network, by_schedule=True)
    found = [
        _megatron(profile, shape, scheduled, parts, batch // groups, count, again)
        for count in (1, 2, 4, 8)
        if batch // groups >= count
        for again in (False, True)
    ]
    fit = [it for it in found if it["memory_bytes"] <= LIMIT_BYTES]
    if fit:
        return max(fit, key=lambda it: it["samples_per_second"]) | {"fits": True, "why_not": None}
    least = min(it["memory_bytes"] for it in found)
    why = f"a rank must fit into {LIMIT_BYTES} bytes, got {least}"
    return dict.fromkeys(_COLUMNS) | {"fits": False, "why_not": why}


def _megatron(
    profile: Profile, shape: Shape, network: LinkCosts, parts: int, samples: int, count: int, again: bool
) -> dict[str, Any]:
    """A step of `samples` on each group in `count` microbatches."""
    share, depth, ranks = samples / count, profile.depth, range(network.topology.ranks)
    forward = profile.forward_us(0, depth, share)
    backward = profile.backward_us(0, depth, share) + again * profile.forward_us(1, depth - 1, share)
    message = share * TOKENS * shape.width * 2  # float16
    calls = shape.blocks * (6 if again else 4) + 2
    sums = calls * network.allreduce_us(ranks[:parts], message)
    gradients = network.allreduce_us(ranks[::parts], profile.gradient_bytes(0, depth))
    time_us = count * (forward + backward + sums) + gradients
    weights = profile.parameter_bytes(0, depth) + profile.gradient_bytes(0, depth)
    state = sum(layer.optimizer_bytes for layer in profile.layers)
    kept = profile.saved_bytes(0, depth, share)
    if again:  # inputs of blocks, and one of them repeated
        kept -= (shape.blocks - 1) * profile.saved_bytes(1, 2, share)
        kept += shape.blocks * profile.output_bytes(1, share)
    groups = network.topology.ranks // parts
    return {
        "samples_per_second": groups * samples / time_us * 1e6,
        "time_us": time_us,
        "replicas": [groups],
        "stages": 1,
        "microbatches": count,
        "order": None,
        "recompute": again,
        "bubble": None,
        "inside_us": count * sums,
        "memory_bytes": math.ceil(weights + state + kept),
    }

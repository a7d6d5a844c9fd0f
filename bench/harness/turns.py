"""Contenders that all ranks measure in turns, round by round: samples, and a row beside gloo."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from arborcast.bench.harness.processes import cpu_seconds
from arborcast.synth.formats.results import Measure

MEASURES = {
    "times_gloo": Measure("more", "times_gloo_spread"),
    "cpu_saving": Measure("more", "cpu_saving_spread"),
}
UNITS = {
    "spread": "largest minus smallest, us",
    "times_gloo": "gloo's time over this one's in the same round; median over the rounds",
    "cpu_saving": "gloo's CPU time over this one's in the same round; median over the rounds",
}
"""Of what `beside_gloo` adds to a row."""

_Name = TypeVar("_Name", bound=Hashable)
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Sample:
    """One contender in one round: of one call, the slowest rank's time and the CPU time of all ranks."""

    seconds: float
    cpu_seconds: float
    calls: int


def median_of(name: str, values: Sequence[float], spread: str = "spread") -> dict[str, float]:
    """A column with the median of the runs, and one with the largest less the smallest of them."""
    return {name: statistics.median(values), spread: max(values) - min(values)}


def sample(work: Callable[[], None], calls: int = 1) -> Sample:
    """What one of so many calls takes; all ranks of the default group do this, and get the same."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    cpu, start = cpu_seconds(), time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    dist.barrier()  # what other threads still do for this rank's peers counts, too
    slowest = torch.tensor([seconds], dtype=torch.float64)
    total = torch.tensor([cpu_seconds() - cpu], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return Sample(slowest.item() / calls, total.item() / calls, calls)


def in_turns(
    steps: Mapping[_Name, Callable[[], _Found]], turns: int, *, warm_ups: int = 1
) -> tuple[dict[_Name, list[float]], dict[_Name, _Found]]:
    """Seconds of each kind of step on this rank, and what its last one gave.

    Args:
        steps: the same names in the same order on every rank, which begin each step together.
        turns: that are counted; every other one goes through the steps backwards.
        warm_ups: turns before, which find shapes and buffers.
    """
    import torch.distributed as dist

    names = tuple(steps)
    seconds: dict[_Name, list[float]] = {name: [] for name in names}
    last: dict[_Name, _Found] = {}
    for turn in range(warm_ups + turns):
        for name in names if turn % 2 else reversed(names):
            dist.barrier()
            begin = time.perf_counter()
            last[name] = steps[name]()
            if turn >= warm_ups:
                seconds[name].append(time.perf_counter() - begin)
    return seconds, last


def beside_prediction(predicted_us: float, seconds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The part of a row that compares a predicted time with those of each rank, which end with the last."""
    times = [1e6 * max(each) for each in zip(*seconds, strict=True)]
    found = median_of("time_us", times)
    time_us, spread = found.values()
    return {
        "predicted_us": predicted_us,
        **found,
        "runs": len(times),
        "error": abs(predicted_us / time_us - 1),
        "error_spread": predicted_us * spread / time_us**2,  # d(p / t) = p * d(t) / t**2
    }


def beside_gloo(gloo: Sequence[Sample], samples: Sequence[Sample], target: float | None) -> dict[str, Any]:
    """The part of a row that compares one contender with gloo, round by round.

    Args:
        gloo: its samples, one of each round.
        samples: the contender's, of the same rounds.
        target: how many times gloo's speed is asked for; None where nothing is.
    """
    seconds = [sample.seconds for sample in samples]
    pairs = list(zip(gloo, samples, strict=True))
    ratios = [base.seconds / sample.seconds for base, sample in pairs]
    savings = [base.cpu_seconds / sample.cpu_seconds for base, sample in pairs]
    speed = statistics.median(ratios)
    return {
        **median_of("time_us", [1e6 * each for each in seconds]),
        "cpu_us": statistics.median(sample.cpu_seconds for sample in samples) * 1e6,
        "times_gloo": speed,
        "times_gloo_spread": [min(ratios), max(ratios)],
        "cpu_saving": statistics.median(savings),
        "cpu_saving_spread": [min(savings), max(savings)],
        "target": target,
        "met": None if target is None else speed >= target,
        "runs": len(samples),
    }

"""Profiles and fabrics for tests of planning, by hand and at random; every way to cut layers over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations, pairwise, product
from typing import Any

from hypothesis import strategies as st

from arborcast.pipeline.costs.saved_bytes import Segment, Treatment
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.planning.activation_search import ActivationOptions
from arborcast.pipeline.profiles import Layer, Profile, Tie
from arborcast.pipeline.stages import Stage
from arborcast.synth.topology import Link, Topology

MB = 1_000_000

PLANNED = sorted(name for name, order in ORDERS.items() if order.in_flight is not None)
"""Orders that planners ask what is in flight before there is a plan; the others are made from 1F1B."""


def model(
    times: Sequence[float | tuple[float, float]],
    *,
    samples: int = 1,
    output: int = 0,
    saved: int = 0,
    weights: int = 0,
    frozen: int = 0,
    ties: Sequence[Tie] = (),
    **more: Any,
) -> Profile:
    """A layer for each time forward (backward it is twice that), or each pair of both, all else alike.

    Args:
        times: us of both passes of so many samples.
        samples: of the profile.
        output: bytes that cross behind each layer.
        saved: bytes that it keeps.
        weights: bytes of parameters and of their gradients.
        frozen: bytes of parameters besides.
        ties: of the profile.
        **more: other attributes of a layer.
    """
    both = (it if isinstance(it, tuple) else (it, 2 * it) for it in times)
    layers = (
        Layer(f"layer{i}", *pair, output, saved, weights + frozen, weights, **more)
        for i, pair in enumerate(both)
    )
    return Profile("drawn", samples, tuple(layers), tuple(ties))


def wired(
    ranks: int,
    rates: Mapping[tuple[int, int], Fraction | int],
    *,
    switches: Sequence[str] = (),
    latency_us: int = 0,
    both: bool = True,
    name: str = "wired",
) -> Topology:
    """A fabric of links with these GB/s, each way unless `both` is false."""
    ends = {hop: rate for (a, b), rate in rates.items() for hop in ([(a, b), (b, a)] if both else [(a, b)])}
    links = [Link(*hop, Fraction(rate), Fraction(latency_us)) for hop, rate in ends.items()]
    return Topology.build(name, ranks, links, list(switches))


def line(ranks: int, latency_us: int = 0) -> Topology:
    """Neighbours have a link each way, of 1000 bytes per us."""
    return wired(ranks, dict.fromkeys(pairwise(range(ranks)), 1), latency_us=latency_us, name="line")


@st.composite
def profiles(draw: Callable, max_layers: int = 4, samples: int = 8) -> Profile:
    """Layers with times up to 1 ms and bytes up to 1 MB, some without fixed times, outputs or gradients."""
    layers = []
    for index in range(draw(st.integers(1, max_layers))):
        forward, backward = draw(st.integers(0, 1000)), draw(st.integers(0, 1000))
        sizes = [draw(st.sampled_from([0, 1, 1000])) * draw(st.integers(1, 1000)) for _ in range(5)]
        fixed = draw(st.sampled_from([0.0, 0.5]))
        working, update = (draw(st.sampled_from([0, 8, 8000])) * draw(st.integers(1, 1000)) for _ in range(2))
        layers.append(
            Layer(
                f"layer{index}",
                forward,
                backward,
                *sizes,  # type: ignore[arg-type]
                forward_fixed_us=fixed * forward,
                backward_fixed_us=fixed * backward,
                working_bytes=working,
                working_fixed_bytes=int(fixed * working),
                update_bytes=update,
                passing_bytes=int(fixed * sizes[1]),
                split_bytes=int(2 * fixed * sizes[1]) if sizes[3] else 0,
                tail_bytes=int(fixed * sizes[1]),
                split_working_bytes=int(fixed * working),
            )
        )
    tied = draw(st.lists(st.integers(0, len(layers) - 1), max_size=3, unique=True))
    ties = [] if len(tied) < 2 else [Tie("weight", 0, tuple(sorted(tied)))]
    return Profile("drawn", samples, tuple(layers), tuple(ties))


def divisions(
    depth: int, order: tuple[int, ...], cuts_allowed: tuple[int, ...]
) -> Iterator[tuple[Stage, ...]]:
    """Every partition of the layers, with every choice of consecutive places of the order."""
    count = len(order)
    for stages in range(1, min(len(cuts_allowed) + 1, count) + 1):
        for cuts in combinations(cuts_allowed, stages - 1):
            bounds = list(pairwise((0, *cuts, depth)))
            for places in combinations(range(count + 1), stages + 1):
                yield tuple(
                    Stage(start, end, order[first:last])
                    for (start, end), (first, last) in zip(bounds, pairwise(places), strict=True)
                )


def every_choice(start: int, end: int, menu: ActivationOptions) -> Iterator[tuple[Segment, ...]]:
    """All ways to treat the layers [start, end), kept and offloaded ones one at a time."""
    if start == end:
        yield ()
        return
    for stop in range(start + 1, end + 1):
        treatments = [Treatment.RECOMPUTE] * menu.recompute
        if stop == start + 1:
            treatments += [Treatment.KEEP, *([Treatment.OFFLOAD] if menu.offload_gbps else [])]
        for treatment, rest in product(treatments, every_choice(stop, end, menu)):
            yield (Segment(start, stop, treatment), *rest)

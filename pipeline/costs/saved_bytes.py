"""What becomes of the results of forward passes until the backward pass: bytes and time of each choice.

    keep       autograd keeps them
    recompute  a run of layers keeps what it takes in, and repeats its forward pass before its backward pass
    offload    a layer's results are copied to host memory, and back before its backward pass

A stage is a list of segments, each a run of layers that are treated alike. Kept and offloaded layers count
one at a time; the layers of a recomputed segment are repeated together (one checkpoint). With a_l the bytes
that autograd keeps of layer l, its input i_l included where anybody keeps it, a unit (a layer, or a
recomputed segment [l, m)) has

               kept of each microbatch     besides, while its own backward pass runs
    keep       a_l                         0
    recompute  i_l                         a_l + ... + a_(m-1) - i_l
    offload    0 (the stage's input i_l)   a_l (less the stage's input)

Copies are buffered twice: what a layer has made goes out while the layer behind it runs forward, and comes
back while that one runs backward, so that both lie there for a while. With P_j what units 0..j keep, t_j what
unit j needs besides and o_(j-1) the same of the unit before it if that is offloaded, else 0, a rank that has
k microbatches in flight holds at most

    (k - 1) P + max_j (P_j + t_j + o_(j-1))

bytes: autograd lets go of what lies behind a layer before its backward pass begins. A pass takes longer by
the forward time of what is recomputed, and by what a copy takes longer than the layer beside which it runs;
there is none behind the last layer of a stage.

Sources: recomputation of segments, Chen et al. 2016 (arXiv 1604.06174); choosing it selectively, Korthikanti
et al. 2022 (arXiv 2205.05198), and by stage of a pipeline, AdaPipe (ASPLOS 2024); offload beside it, Beaumont
et al. 2021 (NeurIPS, "Efficient combination of rematerialization and offloading").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby, pairwise

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.profiles import Profile

BYTES_PER_US = 1000
"""Of 1 GB/s."""


class Treatment(StrEnum):
    """What becomes of the results of some layers."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class Segment:
    """The layers [start, end), whose results are treated alike: "keep", "recompute" or "offload".

    Raises:
        PlanError: another treatment.
    """

    start: int
    end: int
    treatment: Treatment

    def __post_init__(self) -> None:
        """Take a treatment by its name too."""
        if self.treatment not in tuple(Treatment):
            names = ", ".join(Treatment)
            raise PlanError(f"segment: treatment must be one of {names}, got {self.treatment}")
        object.__setattr__(self, "treatment", Treatment(self.treatment))


Segments = tuple[Segment, ...]
"""Of a stage: together all its layers, in order."""


def units(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Segments with kept and offloaded layers one at a time."""
    for it in segments:
        if it.treatment is Treatment.RECOMPUTE:
            yield it
        else:
            yield from (Segment(layer, layer + 1, it.treatment) for layer in range(it.start, it.end))


def merged(parts: Iterable[Segment]) -> Segments:
    """Units as segments: kept layers beside each other as one, and likewise offloaded ones."""
    made: list[Segment] = []
    for treatment, run in groupby(parts, key=lambda it: it.treatment):
        several = list(run)
        whole = [Segment(several[0].start, several[-1].end, treatment)]
        made += several if treatment is Treatment.RECOMPUTE else whole
    return tuple(made)


def held_bytes(profile: Profile, segments: Sequence[Segment], share: int, in_flight: int) -> int:
    """What a stage holds of so many microbatches at the fullest moment, where operators run.

    Args:
        profile: of the model.
        segments: of the stage.
        share: samples of a microbatch that the rank works on.
        in_flight: microbatches.
    """
    found = moments(profile, segments, share)
    return (in_flight - 1) * found[-1].kept + max(it.held + it.working for it in found)


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes of a microbatch's results while a layer of a stage runs, forward or backward.

    Attributes:
        kept: of this layer and those before it, between the passes.
        held: these, and what is repeated or copied for the layer's backward pass.
        working: what its operators need besides.
        fixed: the part of that which gradients of parameters take.
        between: what layers up to this one keep besides between the halves of a split backward pass.
        split: what its operators need besides in the first of them.
        tail: what goes with the first of them of what a stage keeps that ends behind this layer.
    """

    kept: int
    held: int
    working: int
    fixed: int
    between: int
    split: int
    tail: int


def moments(profile: Profile, segments: Sequence[Segment], share: int) -> tuple[Moment, ...]:
    """Of each layer of a stage, from the first to the last, as in the formula above.

    Args:
        profile: of the model.
        segments: of the stage.
        share: samples of a microbatch that the rank works on.
    """

    def scaled(size: int) -> int:
        return -(-size * share // profile.samples)

    found, kept, before, between, tail = [], 0, 0, 0, 0
    for it in units(segments):
        first = it.start == segments[0].start
        each, besides = unit_bytes(profile, it, first=first)
        kept += each
        for index in range(it.start, it.end):
            layer = profile.layers[index]
            between += layer.split_bytes
            if it.treatment is not Treatment.KEEP:
                tail = 0
            else:
                tail = layer.tail_bytes if layer.gradient_bytes else tail + each
            fixed = layer.working_fixed_bytes
            working = layer.working_bytes - fixed - (-fixed * profile.samples // share)
            held = kept + unit_bytes(profile, replace(it, end=index + 1), first=first)[1] + before
            if it.treatment is Treatment.RECOMPUTE:
                taken = profile.layers[it.start - 1].output_bytes if it.start else 0
                working += min(profile.kept_bytes(it.start, index + 1) - taken, 0)
            sizes = scaled(kept), scaled(held)
            most = scaled(max(held + working, held))
            working = most - sizes[1]
            others = (scaled(size) for size in (between, layer.split_working_bytes, tail))
            found.append(Moment(*sizes, working, min(fixed, working), *others))
        before = besides if it.treatment is Treatment.OFFLOAD else 0
    return tuple(found)


def unit_bytes(profile: Profile, unit: Segment, *, first: bool) -> tuple[int, int]:
    """What a unit keeps of each microbatch, and what it needs besides; with all samples of the profile.

    Args:
        profile: of the model.
        unit: a layer, or a recomputed segment.
        first: whether it takes the stage's input, which stays.
    """
    layers = profile.layers[unit.start : unit.end]
    saved = profile.kept_bytes(unit.start, unit.end)
    if not first and unit.treatment is not Treatment.RECOMPUTE:
        saved -= layers[0].passing_bytes  # nobody keeps it
    taken = profile.layers[unit.start - 1].output_bytes if unit.start else 0  # the batch is there anyway
    if unit.treatment is Treatment.KEEP:
        return saved, 0
    if unit.treatment is Treatment.RECOMPUTE:
        return taken, max(saved - taken, 0)
    stays = min(taken, saved) if first else 0
    return stays, saved - stays


def extra_us(
    profile: Profile, segments: Sequence[Segment], samples: float, offload_gbps: float | None
) -> tuple[float, float]:
    """By how much a forward and a backward pass of a stage take longer than where all is kept.

    Args:
        profile: of the model.
        segments: of the stage.
        samples: of the pass.
        offload_gbps: GB/s between the rank and host memory, each way; None where nothing is offloaded.
    """
    forward = backward = 0.0
    for it in units(each for each in segments if each.treatment is not Treatment.KEEP):
        if it.treatment is Treatment.RECOMPUTE:
            backward += profile.forward_us(it.start, it.end, samples)
        else:
            assert offload_gbps is not None, "plans see to that"
            ours = copy_us(profile, it.start, (segments[0].start, segments[-1].end), samples, offload_gbps)
            forward += ours[0]
            backward += ours[1]
    return forward, backward


def copy_us(
    profile: Profile, layer: int, stage: tuple[int, int], samples: float, offload_gbps: float
) -> tuple[float, float]:
    """What the copies of an offloaded layer add to a forward and to a backward pass.

    Args:
        profile: of the model.
        layer: its index.
        stage: its first layer and the one behind its last.
        samples: of the pass.
        offload_gbps: GB/s of the copy.
    """
    unit = Segment(layer, layer + 1, Treatment.OFFLOAD)
    _, moved = unit_bytes(profile, unit, first=layer == stage[0])
    time_us = moved * samples / profile.samples / (offload_gbps * BYTES_PER_US)
    behind = (layer + 1, min(layer + 2, stage[1]))
    return (
        max(time_us - profile.forward_us(*behind, samples), 0.0),
        max(time_us - profile.backward_us(*behind, samples), 0.0),
    )


def described(segments: Sequence[Segment]) -> str:
    """In words: `keep 3, recompute 2+2, offload 1`, a number of layers for each segment."""
    return ", ".join(
        f"{treatment} {'+'.join(str(it.end - it.start) for it in run)}"
        for treatment, run in groupby(segments, key=lambda it: it.treatment)
    )


def check_segments(segments: Sequence[Segment], start: int, end: int) -> str:
    """What is wrong with the segments of a stage of the layers [start, end), "" if nothing is."""
    bounds = [start, *(it.end for it in segments)]
    for (begin, stop), it in zip(pairwise(bounds), segments, strict=True):
        if it.start != begin or stop <= begin:
            return f"must follow each other and hold a layer each, got [{it.start}, {it.end}) at {begin}"
    return "" if bounds[-1] == end else f"must end at layer {end}, got {bounds[-1]}"

"""The cases of `bench/scale.py`: what is asked of which fabric, and what was promised of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SYMMETRIC, WRITTEN_OUT, REPAIR, PARTLY = "symmetric", "written out", "repair", "partly symmetric"
SEARCHED, GROUPS = "symmetry searched", "groups"


@dataclass(frozen=True, slots=True)
class Case:
    """One question, answered by one process.

    Attributes:
        title: what reports call the fabric.
        spec: of the topology, healthy and whole.
        kind: of the collective.
        method: "symmetric" solves by orbits, "written out" makes no use of symmetry, "repair" starts from the
            symmetric schedule of the fabric without faults, whose making does not count; in "partly
            symmetric" it does. "symmetry searched" is "symmetric" where the fabric declares no symmetry.
            "groups" shares the fabric among the lines of `mesh`.
        faults: what is gone, as `bench.scaling.children.faulty` reads it; empty for nothing.
        every_translate: whether a schedule in implicit form is verified chunk by chunk for all ranks, not on
            its representatives.
        target_s: seconds promised for loading, solving and verifying together, of a repair for repairing
            alone; None for no promise.
        target_MB: the same of memory.
        runs: of which the median counts.
        mesh: sides and, behind a colon, the axis along whose lines the groups are.
        family: cases whose times belong to one curve over the ranks; empty for none.
    """

    title: str
    spec: str
    kind: str
    method: str = SYMMETRIC
    faults: str = ""
    every_translate: bool = False
    target_s: float | None = None
    target_MB: float | None = None  # noqa: N815 - a unit
    runs: int = 3
    family: str = ""
    mesh: str = ""


def targets() -> Iterator[Case]:
    """What was promised, and the same for allreduce where the promise names no kind."""
    for kind in ("allgather", "allreduce"):
        yield Case("128x8 A100", "dgx-a100:boxes=128", kind, every_translate=True, target_s=2)
        yield Case("512x8 A100", "dgx-a100:boxes=512", kind, target_s=5)
        yield Case("torus 32x32", "torus:32x32", kind, every_translate=True, target_s=3)
        yield Case("torus 8x8x16", "torus:8x8x16", kind, every_translate=True, target_s=3)
        yield Case("128x8 A100", "dgx-a100:boxes=128", kind, WRITTEN_OUT, target_s=30, target_MB=3000, runs=1)
        yield Case("torus 32x32", "torus:32x32", kind, WRITTEN_OUT, target_s=120, runs=1)
        yield Case(
            "128x8 A100, 150 GPUs gone",
            "dgx-a100:boxes=128",
            kind,
            WRITTEN_OUT,
            faults="ranks:150:0",
            target_s=20,
            runs=1,
        )
        yield Case(
            "128x8 A100, a link gone",
            "dgx-a100:boxes=128",
            kind,
            REPAIR,
            faults="link:0-fabric0",
            target_s=5,
            runs=1,
        )
        yield Case("torus 32x32, a link gone", "torus:32x32", kind, REPAIR, "link:0-1", target_s=5, runs=1)
    yield Case("torus 8x8x8", "torus:8x8x8", "alltoall", target_s=60, runs=1)
    for title, spec, kind, mesh in (
        ("64 boxes of 8 A100, 64 groups across boxes", "dgx-a100:boxes=64", "allreduce", "8x64:0"),
        ("torus 8x8x8, 64 groups on lines", "torus:8x8x8", "allreduce", "8x64:0"),
        ("torus 8x8x8, 64 groups on lines", "torus:8x8x8", "alltoall", "64x8:1"),
    ):
        yield Case(title, spec, kind, GROUPS, target_s=5, runs=1, mesh=mesh)


def others() -> Iterator[Case]:
    """Fabrics that the promises name without a time: in seconds, or at most a minute with faults."""
    for title, spec in (
        ("64x16 MI250", "mi250:boxes=64"),
        ("fat tree 8x8x16", "fat-tree:8x8x16"),
        ("dragonfly 16x8x8", "dragonfly:16x8x8"),
        ("hypercube 10", "hypercube:10"),
    ):
        for kind in ("allgather", "allreduce"):
            yield Case(title, spec, kind, every_translate=True, runs=1)
    for kind in ("allgather", "allreduce"):
        yield Case(
            "128x8 A100, 150 GPUs and 20 links gone",
            "dgx-a100:boxes=128",
            kind,
            WRITTEN_OUT,
            faults="both:150:20:0",
            target_s=60,
            runs=1,
        )
        for title, spec in (("128x8 A100", "dgx-a100:boxes=128"), ("torus 32x32", "torus:32x32")):
            faults = "both:2:2:0"
            name = f"{title}, 2 GPUs and 2 links gone"
            yield Case(name, spec, kind, PARTLY, faults=faults, target_s=60, runs=1)
        yield Case("64x16 MI250, 5 dies gone", "mi250:boxes=64", kind, PARTLY, faults="ranks:5:0", runs=1)
    for title, spec in (
        ("512x8 A100", "dgx-a100:boxes=512"),
        ("torus 64x64", "torus:64x64"),
        ("hypercube 12", "hypercube:12"),
    ):
        yield Case(f"{title}, no symmetry declared", spec, "allgather", SEARCHED, runs=1)
    yield Case("64x8 A100", "dgx-a100:boxes=64", "alltoall", runs=1)
    yield Case("torus 16x16", "torus:16x16", "alltoall", runs=1)


def growth() -> Iterator[Case]:
    """The same question on larger and larger fabrics."""
    for boxes in (2, 8, 32, 128, 512):
        spec, family = f"dgx-a100:boxes={boxes}", "A100 boxes, symmetric"
        yield Case(f"{boxes}x8 A100", spec, "allgather", family=family)
    for side in (4, 8, 16, 32, 64):
        yield Case(f"torus {side}x{side}", f"torus:{side}x{side}", "allgather", family="tori, symmetric")
    for boxes in (2, 8, 32, 64):
        family = "MI250 boxes, symmetric"
        yield Case(f"{boxes}x16 MI250", f"mi250:boxes={boxes}", "allgather", family=family)
    for boxes in (2, 8, 32, 128):
        spec, family = f"dgx-a100:boxes={boxes}", "A100 boxes, written out"
        yield Case(f"{boxes}x8 A100", spec, "allgather", WRITTEN_OUT, runs=1, family=family)
    for side in (4, 8, 16, 32):
        family = "tori, written out"
        spec = f"torus:{side}x{side}"
        yield Case(f"torus {side}x{side}", spec, "allgather", WRITTEN_OUT, runs=1, family=family)
    for side in (3, 4, 6, 8):
        spec = f"torus:{side}x{side}x{side}"
        yield Case(spec.replace(":", " "), spec, "alltoall", runs=1, family="tori, alltoall, symmetric")

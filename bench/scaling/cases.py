"""The cases of `bench/scale.py`: what is asked of which fabric, and what was promised of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SYMMETRIC, WRITTEN_OUT, REPAIR, PARTLY = "symmetric", "written out", "repair", "partly symmetric"
SEARCHED, GROUPS = "symmetry searched", "groups"
BOXES, A100 = "128x8 A100", "dgx-a100:boxes=128"


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
        yield Case(BOXES, A100, kind, every_translate=True, target_s=2)
        yield Case("512x8 A100", "dgx-a100:boxes=512", kind, target_s=5)
        yield Case("torus 32x32", "torus:32x32", kind, every_translate=True, target_s=3)
        yield Case("torus 8x8x16", "torus:8x8x16", kind, every_translate=True, target_s=3)
        yield Case(BOXES, A100, kind, WRITTEN_OUT, target_s=30, target_MB=3000, runs=1)
        yield Case("torus 32x32", "torus:32x32", kind, WRITTEN_OUT, target_s=120, runs=1)
        yield Case(f"{BOXES}, 150 GPUs gone", A100, kind, WRITTEN_OUT, "ranks:150:0", target_s=20, runs=1)
        yield Case(f"{BOXES}, a link gone", A100, kind, REPAIR, "link:0-fabric0", target_s=5, runs=1)
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
        title = f"{BOXES}, 150 GPUs and 20 links gone"
        yield Case(title, A100, kind, WRITTEN_OUT, "both:150:20:0", target_s=60, runs=1)
        for title, spec in ((BOXES, A100), ("torus 32x32", "torus:32x32")):
            name = f"{title}, 2 GPUs and 2 links gone"
            yield Case(name, spec, kind, PARTLY, "both:2:2:0", target_s=60, runs=1)
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
    boxes, tori = ("{}x8 A100", "dgx-a100:boxes={}"), ("torus {0}x{0}", "torus:{0}x{0}")
    cubes, dies = ("torus {0}x{0}x{0}", "torus:{0}x{0}x{0}"), ("{}x16 MI250", "mi250:boxes={}")
    for family, (title, spec), kind, method, runs, sizes in (
        ("A100 boxes, symmetric", boxes, "allgather", SYMMETRIC, 3, (2, 8, 32, 128, 512)),
        ("tori, symmetric", tori, "allgather", SYMMETRIC, 3, (4, 8, 16, 32, 64)),
        ("MI250 boxes, symmetric", dies, "allgather", SYMMETRIC, 3, (2, 8, 32, 64)),
        ("A100 boxes, written out", boxes, "allgather", WRITTEN_OUT, 1, (2, 8, 32, 128)),
        ("tori, written out", tori, "allgather", WRITTEN_OUT, 1, (4, 8, 16, 32)),
        ("tori, alltoall, symmetric", cubes, "alltoall", SYMMETRIC, 1, (3, 4, 6, 8)),
    ):
        for size in sizes:
            yield Case(title.format(size), spec.format(size), kind, method, runs=runs, family=family)

"""Trains a small network on scikit-learn's digits, first serially, then as a pipeline, and compares.

    torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py [--stages N | --plan FILE] [--steps N]

The network is profiled and planned over the fabric of ARBORCAST_TOPOLOGY (unless it is set, links of 1 GB/s
between all ranks), then trained by that plan. Ends with status 1 when the losses of the two ways differ by
more than 1e-6.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # keeps the default group that it finds: while there is none
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arborcast import pipeline, topologies
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.pictures import draw_timelines
from arborcast.pipeline.pictures.timeline_picture import title_of
from arborcast.synth.errors import InputError
from arborcast.synth.pictures.canvas import FAINT, PALETTE, check_path, headline, picture

BATCH = 120  # images per step, of 1797
LIMIT = 1e-6  # the same sums of float32, in another order

T = TypeVar("T")


def network(seed: int) -> pipeline.Divisible:
    """Eight layers, cut between any two of them; it is trained serially as it is."""
    torch.manual_seed(seed)
    # Smooth, since sums differ in their last bit: at the kink of ReLU that can flip a unit, and losses part.
    return pipeline.Divisible(
        *(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh()),
        *(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64), nn.Linear(64, 10)),
    )


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of both ways; the trainer makes one for each stage."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def batches(steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """The same for both ways, and on every rank: whole batches of images and labels."""
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    random = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(len(images), generator=random)[:BATCH] for _ in range(steps)]
    return [(images[row], labels[row]) for row in rows]


def train_serially(data: Sequence[tuple[Tensor, Tensor]], seed: int) -> list[float]:
    """An ordinary training on one process."""
    model = network(seed)
    optimizer = sgd(model.parameters())
    losses = []
    for images, labels in data:
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_pipelined(
    data: Sequence[tuple[Tensor, Tensor]], seed: int, plan: pipeline.Plan, collectives: str, record: bool
) -> tuple[list[float], pipeline.Timeline | None]:
    """The same by a plan; every rank sees every loss, and what all did in the last step."""
    #                                              ┌──── a function, since each rank holds only its stage
    with pipeline.Trainer(
        network(seed), plan, cross_entropy, sgd, collectives=collectives, record=record
    ) as trainer:
        losses = [trainer.step(images, labels) for images, labels in data]
        return losses, trainer.timeline() if record else None


def message_us(*, rounds: int = 20) -> float:
    """What a small message costs while every rank sends one to the next."""
    rank, size = dist.get_rank(), dist.get_world_size()
    box, times = torch.zeros(1), []
    for _ in range(rounds if size > 1 else 0):
        begin = time.perf_counter()
        sent = dist.isend(torch.ones(1), (rank + 1) % size)
        dist.recv(box, (rank - 1) % size)
        if sent is not None:
            sent.wait()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times) if times else 0.0


def make_plan(
    asked: argparse.Namespace, data: Sequence[tuple[Tensor, Tensor]], each_message_us: float
) -> tuple[pipeline.Plan, pipeline.Prediction]:
    """The plan of the file, or the planner's for this network on this fabric, and what it should take."""
    profile = pipeline.profile(network(asked.seed), data[0], cross_entropy, name="digits")
    plans = [pipeline.read_plan(asked.plan)] if asked.plan else []
    spec = os.environ.get("ARBORCAST_TOPOLOGY", f"full:{dist.get_world_size()}")
    fabric = plans[0].topology if plans and plans[0].topology is not None else topologies.load(spec)
    links = pipeline.LinkCosts(fabric, message_us=each_message_us)
    if not plans:
        options = {"microbatches": asked.microbatches, "order": asked.order, "network": links}
        # A network as small as this one is fastest without any pipeline: that is one stage, if asked for.
        numbers = [asked.stages] if asked.stages else range(min(2, fabric.ranks), fabric.ranks + 1)
        plans = [pipeline.plan(profile, fabric, stages=number, **options) for number in numbers]
    plan, prediction = min(
        ((plan, pipeline.predict(plan, profile, links)) for plan in plans), key=lambda pair: pair[1].time_us
    )
    if max(plan.ranks) >= dist.get_world_size():
        raise InputError(
            f"plan: ranks must be in 0..{dist.get_world_size() - 1} of this job, got {max(plan.ranks)}"
        )
    return plan, prediction


def from_rank_0(value: T | None) -> T:
    """What rank 0 has, on every rank; if that is an error, it is raised on every rank."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box)
    if isinstance(box[0], InputError):
        raise box[0]
    return box[0]  # type: ignore[no-any-return]


def describe(plan: pipeline.Plan) -> list[str]:
    """A line for the plan and one for each stage."""
    names = network(0).layer_names
    lines = [f"{title_of(plan)} ({plan.method})"]
    for index, stage in enumerate(plan.stages):
        ranks = ", ".join(map(str, stage.ranks))
        lines.append(f"  stage {index} on rank {ranks}: {', '.join(names[stage.start : stage.end])}")
    return lines


def draw_losses(serial: Sequence[float], pipelined: Sequence[float], path: str) -> None:
    """Both curves on top of each other, and how far they are apart."""
    steps = range(1, len(serial) + 1)
    differences = [abs(a - b) for a, b in zip(serial, pipelined, strict=True)]
    with picture(path, 7, 5, 2) as (figure, (above, below)):
        above.get_subplotspec().get_gridspec().set_height_ratios([2, 1])
        above.plot(steps, serial, color=PALETTE[5], linewidth=5, label="serial")
        above.plot(steps, pipelined, color=PALETTE[1], linewidth=1.2, label="pipelined")
        above.set_ylabel("loss")
        above.legend()
        below.plot(steps, differences, ".", color=PALETTE[0], markersize=4)
        below.axhline(LIMIT, color=PALETTE[1], linewidth=0.8, linestyle="--")
        below.text(1, LIMIT, "limit ", color=PALETTE[1], va="bottom", fontsize=8)
        below.set_yscale("symlog", linthresh=1e-8)
        below.set_ylim(-2e-9, 1e-5)
        below.set_ylabel("difference")
        below.set_xlabel("step")
        for axes in (above, below):
            axes.grid(color=FAINT)
        headline(figure, "Digits, trained serially and as a pipeline")


def show(serial: Sequence[float], pipelined: Sequence[float], *, lines: int = 10) -> bool:
    """Losses side by side, about so many lines; whether they are equal."""
    print(f"{'step':>5}{'loss, serial':>16}{'loss, pipelined':>18}{'difference':>13}")
    every = max(1, len(serial) // lines)
    for step, (one, other) in enumerate(zip(serial, pipelined, strict=True), 1):
        if step == 1 or step % every == 0:
            print(f"{step:5}{one:16.7f}{other:18.7f}{abs(one - other):13.1e}")
    differences = torch.tensor(serial, dtype=torch.float64) - torch.tensor(pipelined, dtype=torch.float64)
    difference = differences.abs().max().item()
    is_equal = difference <= LIMIT
    print(f"largest difference {difference:.1e}: {'equal' if is_equal else 'NOT equal'} (limit {LIMIT:g})")
    return is_equal


def run(asked: argparse.Namespace) -> bool:
    """Plan on rank 0, train both ways, compare on rank 0; whether the losses are equal, on every rank."""
    is_first = dist.get_rank() == 0
    data = batches(asked.steps, asked.seed)
    each_message_us = message_us()
    made: Any = None
    if is_first:
        try:
            made = make_plan(asked, data, each_message_us)
        except InputError as error:
            made = error
    plan, prediction = from_rank_0(made)
    if is_first:
        print(*describe(plan), sep="\n")
    serial = train_serially(data, asked.seed) if is_first else []
    pipelined, measured = train_pipelined(
        data, asked.seed, plan, asked.collectives, record=asked.timeline is not None
    )
    is_equal = False
    if is_first:
        is_equal = show(serial, pipelined)
        if asked.output:
            draw_losses(serial, pipelined, asked.output)
        if measured is not None:
            both = {"predicted": prediction.timeline, "measured": measured}
            draw_timelines(both, asked.timeline, plan=plan)
    return from_rank_0(is_equal)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description="Digits, trained serially and as a pipeline.")
    parser.add_argument("--plan", metavar="FILE", help="a plan, as synth plan writes it")
    parser.add_argument("--stages", type=int, help="how many; by default the best of two or more")
    parser.add_argument("--order", choices=ORDERS, help="by default the planner chooses")
    parser.add_argument("--microbatches", type=int, help="per step; 8 unless a plan says")
    parser.add_argument("--collectives", choices=("synth", "gloo"), default="synth")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", metavar="PICTURE", help="of both loss curves, .svg or .png")
    parser.add_argument("--timeline", metavar="PICTURE", help="of the last step, predicted and measured")
    asked = parser.parse_args(arguments)
    if asked.steps < 1:
        parser.error(f"--steps: must be at least 1, got {asked.steps}")
    for name in ("stages", "order", "microbatches"):
        if asked.plan and getattr(asked, name) is not None:
            parser.error(f"--{name}: must be left out with --plan, which says it, got {getattr(asked, name)}")
    asked.microbatches = 8 if asked.microbatches is None else asked.microbatches
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Train in both ways, and compare."""
    asked = parse(arguments)
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        import sklearn  # noqa: F401
    except ImportError:
        return refuse("the digits come with scikit-learn: pip install scikit-learn", is_first)
    if "RANK" not in os.environ:
        return refuse(
            "start it with: torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py", is_first
        )
    try:
        for path in filter(None, (asked.output, asked.timeline)):
            check_path(path)
        dist.init_process_group("gloo")
        is_equal = run(asked)
    except InputError as error:
        return refuse(str(error), is_first)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # also before a refusal: gloo's threads must not outlive us
    return 0 if is_equal else 1


def refuse(reason: str, is_first: bool) -> int:
    """One line from one rank."""
    if is_first:
        print(f"train_pipeline: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

"""Trains a small network on scikit-learn's digits with DDP, first on "gloo", then on "synth", and compares.

    torchrun --standalone --nproc-per-node 4 examples/train_ddp.py [--backend gloo|synth|both] [--epochs N]

A comment marks the one line that a training script changes. Ends with status 1 when the losses of the two
ways differ by more than 1e-5. With `--trace PREFIX` each rank writes what its group did in the first epoch,
for Perfetto: PREFIX0.json, PREFIX1.json, ...
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # keeps the default group that it finds: while there is none
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import arborcast.torch_backend  # noqa: F401  (not needed where arborcast is installed: torch finds it)

BATCH = 128  # images per step, on all ranks together
HELD_OUT = 360  # of 1797 images
LIMIT = 1e-5  # the same sums of float32, in another order


@dataclass(frozen=True)
class History:
    """What a training leaves: the mean loss of each epoch, the accuracy at the end, what the group says."""

    losses: list[float]
    accuracy: float
    notes: list[str]


def train(
    backend: str, images: Tensor, labels: Tensor, *, epochs: int, seed: int, trace: str | None = None
) -> History:
    """An ordinary training with DDP; the last images are held out."""
    #                       ┌──── the one line that changes: "gloo" becomes "synth"
    dist.init_process_group(backend)

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    # Smooth, since sums differ in their last bit: at the kink of ReLU that can flip a unit, and losses part.
    network = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(epochs):
        batches = torch.randperm(len(images) - HELD_OUT).split(BATCH)[:-1]  # all of one size
        total = torch.zeros(1)
        is_traced = trace is not None and epoch == 0 and backend == "synth"
        with dist.group.WORLD.trace(f"{trace}{rank}.json") if is_traced else nullcontext():
            for batch in batches:
                mine = batch[rank::ranks]
                loss = cross_entropy(model(images[mine]), labels[mine])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.detach() / len(batches)
        dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total.item())
    with torch.no_grad():
        right = network(images[-HELD_OUT:]).argmax(1) == labels[-HELD_OUT:]
    notes = describe(network) if backend == "synth" else []
    # DDP's half in C++ holds the group. Were it the last to let go of one on gloo, it would wait for gloo's
    # threads without giving up the interpreter, which a thread may need to forget its last call.
    del model
    dist.destroy_process_group()
    return History(losses, right.float().mean().item(), notes)


def describe(network: nn.Module) -> list[str]:
    """What served the gradients of a network, and how many calls went which way."""
    group = dist.group.WORLD
    gradients = group.explain(sum(parameter.nbytes for parameter in network.parameters()))
    calls = [
        f"{kind}: {sums['schedule']} by schedules, {sums['gloo']} by gloo, "
        f"{sums['bytes'] / 1e6:.1f} MB in {sums['seconds']:.2f} s"
        for kind, sums in group.counters().items()
    ]
    return [f"gradients go as {gradients}", *calls]


def show(histories: dict[str, History]) -> None:
    """Losses side by side."""
    names = list(histories)
    print("epoch" + "".join(f"{'loss, ' + name:>14}" for name in names))
    for epoch, losses in enumerate(zip(*(history.losses for history in histories.values()), strict=True), 1):
        print(f"{epoch:5}" + "".join(f"{loss:14.7f}" for loss in losses))
    for name, history in histories.items():
        print(f"{name}: {history.accuracy:.1%} of {HELD_OUT} held-out images right")
        print(*(f"{name}: {note}" for note in history.notes), sep="\n", end="\n" if history.notes else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train in the ways that are asked for, and compare."""
    parser = argparse.ArgumentParser(description="DDP on scikit-learn's digits, on gloo and on synth.")
    parser.add_argument("--backend", choices=("gloo", "synth", "both"), default="both")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", metavar="PREFIX", help="of files with the first epoch's calls on synth")
    asked = parser.parse_args(arguments)
    if asked.epochs < 1:
        parser.error(f"--epochs: must be at least 1, got {asked.epochs}")
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return refuse("the digits come with scikit-learn: pip install scikit-learn", is_first)
    if "RANK" not in os.environ:
        return refuse(
            "start it with: torchrun --standalone --nproc-per-node 4 examples/train_ddp.py", is_first
        )

    logging.basicConfig(level=logging.INFO, format="%(message)s")  # says which schedule serves which sizes
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    names = ("gloo", "synth") if asked.backend == "both" else (asked.backend,)
    histories = {
        name: train(name, images, labels, epochs=asked.epochs, seed=asked.seed, trace=asked.trace)
        for name in names
    }
    gc.collect()  # gloo's threads end with the last reference to their group, and DDP's go in circles
    if is_first:
        show(histories)
    losses = torch.tensor([history.losses for history in histories.values()])
    difference = (losses.amax(0) - losses.amin(0)).max().item()
    is_equal = difference <= LIMIT
    if is_first and len(histories) > 1:
        print(
            f"largest difference {difference:.1e}: {'equal' if is_equal else 'NOT equal'} (limit {LIMIT:g})"
        )
    return 0 if is_equal else 1


def refuse(reason: str, is_first: bool) -> int:
    """One line from one rank."""
    if is_first:
        print(f"train_ddp: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

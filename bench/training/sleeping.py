"""Predicted against measured time of a step, over the number of microbatches, with layers that sleep.

A layer sleeps as long as it would compute, so that ranks on few cores do not wait for each other's cores:
what is measured is the order, the messages and the trainer. Costs are measured once, beforehand: those of
layers by the profiler on one process, that of a message between two ranks, and what the trainer itself does
for each message, on one plan for each number of stages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

from arborcast.bench.emulation.machine import real_time
from arborcast.bench.harness.processes import run_ranks
from arborcast.bench.harness.turns import in_turns

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from arborcast.pipeline.costs.link_costs import LinkCosts
    from arborcast.pipeline.model.divisible import Divisible
    from arborcast.pipeline.profiles import Profile
    from arborcast.pipeline.simulation.timeline import Timeline
    from arborcast.pipeline.stages import Plan

ORDERS = ("gpipe", "1f1b", "pe")
MICROBATCHES = (1, 2, 4, 8, 16, 24, 40)
BISECTIONS = 40
PAUSE_S = 0.004
"""Between messages whose time is measured: about as long as a pass of a small microbatch."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """A model of layers that sleep.

    Attributes:
        layers: their number.
        batch: samples of a step.
        forward_us: that a layer sleeps for each sample in a forward pass.
        backward_us: likewise in a backward pass.
        width: elements (float32) of a sample that cross each boundary.
    """

    layers: int = 8
    batch: int = 240
    forward_us: float = 400.0
    backward_us: float = 800.0
    width: int = 64

    def model(self) -> Divisible:
        """The layers, each with one parameter."""
        from arborcast.pipeline.model.divisible import Divisible

        return Divisible([_layer(self.forward_us, self.backward_us) for _ in range(self.layers)])

    def data(self) -> tuple[Tensor, Tensor]:
        """A batch and its targets."""
        import torch

        return torch.ones(self.batch, self.width), torch.zeros(self.batch, self.width)

    def plan(self, stages: int, microbatches: int, order: str) -> Plan:
        """Layers divided evenly among stages of one rank each."""
        from arborcast.pipeline.stages import Plan, divided

        made, start = [], 0
        for rank, size in enumerate(divided(self.layers, stages)):
            made.append((start, start + size, [rank]))
            start += size
        return Plan(made, microbatches, order)


def _layer(forward_us: float, backward_us: float) -> torch.nn.Module:
    import torch
    from torch import nn

    class Nap(torch.autograd.Function):
        """Sleeps in both passes; the gradient of the weight is a mean, so that nothing grows."""

        @staticmethod
        def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
            ALARM.sleep(forward_us * len(inputs))
            return inputs * 1.0

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            (gradient,) = gradients
            ALARM.sleep(backward_us * len(gradient))
            return gradient * 1.0, gradient.mean().reshape(1)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = Nap.apply(inputs, self.weight)  # type: ignore[no-untyped-call]
            return result

    return Layer()


class Alarm:
    """Sleeps that last as long as they should, on average: one that was too long shortens the next one."""

    def __init__(self) -> None:
        self._over_s = 0.0

    def sleep(self, time_us: float) -> None:
        """Sleep; the system wakes a process a little late, by more after longer sleeps."""
        wanted_s = time_us / 1e6 - self._over_s
        begin = time.perf_counter()
        if wanted_s > 0:
            time.sleep(wanted_s)
        self._over_s = time.perf_counter() - begin - wanted_s


ALARM = Alarm()
"""Of this process."""


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Any that is cheap."""
    return (output - target).square().mean()


@dataclass(frozen=True, slots=True)
class Measured:
    """What the ranks of a plan saw.

    Attributes:
        times_us: of the slowest rank, run by run.
        timeline: of the last run; empty where nothing was recorded, which costs a little time.
    """

    times_us: tuple[float, ...]
    timeline: Timeline

    @property
    def time_us(self) -> float:
        """The median run."""
        return statistics.median(self.times_us)


def sleeping_rows(
    *,
    microbatches: Sequence[int] = MICROBATCHES,
    stages: Sequence[int] = (2, 4),
    orders: Sequence[str] = ORDERS,
    sleep: Sleep | None = None,
    runs: int = 3,
    timeout_s: float = 600,
) -> list[dict[str, Any]]:
    """A row for each number of stages, order and number of microbatches.

    `error` is that of the simulator, `equation_error` that of equation (3) of the Divisible paper, fitted per
    order and number of stages to the runs that have `fitted` set, at most three; both relative to the
    measured time, without their sign.
    """
    from arborcast.pipeline.simulation.pass_simulator import simulate

    sleep = Sleep() if sleep is None else sleep
    profile, serial_us = costs(sleep, timeout_s)
    network = links(sleep, max(stages), timeout_s)
    rows = []
    for depth in stages:
        fullest = sleep.plan(depth, max(microbatches), "gpipe")
        mine_us = handling_us(sleep, profile, network, fullest, runs, timeout_s)
        handled = replace(network, handling_us=mine_us)
        plans = [sleep.plan(depth, number, order) for order in orders for number in microbatches]
        found = measure(sleep, plans, runs, timeout_s)
        for order in orders:
            mine = [(plan, seen) for plan, seen in zip(plans, found, strict=True) if plan.order == order]
            equation = _equation([(plan.microbatches, seen.time_us) for plan, seen in mine], depth, serial_us)
            for plan, seen in mine:
                predicted = simulate(plan, profile, handled, batch=sleep.batch)
                rows.append(_row(plan, seen, predicted.time_us, equation[plan.microbatches]))
    return rows


def measure(
    sleep: Sleep, plans: Sequence[Plan], runs: int, timeout_s: float, *, record: bool = False
) -> list[Measured]:
    """Steps of several plans for equally many ranks, in the same processes."""
    found = run_ranks(
        len(plans[0].ranks),
        _train,
        sleep,
        tuple(plans),
        runs,
        record,
        timeout_s=timeout_s,
        within=real_time,
    )
    return [
        Measured(
            tuple(max(times) for times in zip(*(each[index][0] for each in found), strict=True)),
            found[0][index][1],
        )
        for index in range(len(plans))
    ]


def _train(
    rank: int, sleep: Sleep, plans: Sequence[Plan], runs: int, record: bool
) -> list[tuple[list[float], Timeline]]:
    import torch

    from arborcast import pipeline

    inputs, targets = sleep.data()
    results = []
    for plan in plans:
        trainer = pipeline.Trainer(
            sleep.model(),
            plan,
            loss_of,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-3),
            collectives="gloo",
            check_loss=False,
            record=record,
        )
        seconds, _ = in_turns({"step": partial(trainer.step, inputs, targets)}, runs)
        results.append(([1e6 * each for each in seconds["step"]], trainer.timeline()))
        trainer.close()
    return results


def costs(sleep: Sleep, timeout_s: float) -> tuple[Profile, float]:
    """The profile of the layers, and the time of a whole batch through all of them on one rank."""
    profile, serial_us = run_ranks(1, _profile, sleep, timeout_s=timeout_s, within=real_time)[0]
    return profile, serial_us


def _profile(rank: int, sleep: Sleep) -> tuple[Profile, float]:
    from arborcast import pipeline

    inputs, targets = sleep.data()
    # With few samples: after a long sleep a process finds cold caches, which no computing layer does.
    few = max(1, sleep.batch // 10)
    measured = pipeline.profile(
        sleep.model(), (inputs, targets), loss_of, name="sleeping", at=few, repeats=15, fixed=False
    )
    model = sleep.model()
    times = []
    for _ in range(3):
        begin = time.perf_counter_ns()
        loss_of(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return _with_known_sleep(measured, sleep), statistics.median(times)


def _with_known_sleep(profile: Profile, sleep: Sleep) -> Profile:
    """What a layer takes beyond its sleep is the fixed part of its time."""
    forward_us, backward_us = sleep.forward_us * profile.samples, sleep.backward_us * profile.samples
    layers = []
    for layer in profile.layers:
        fixed = max(0.0, layer.forward_us - forward_us), max(0.0, layer.backward_us - backward_us)
        layers.append(
            replace(
                layer,
                forward_us=forward_us + fixed[0],
                backward_us=backward_us + fixed[1],
                forward_fixed_us=fixed[0],
                backward_fixed_us=fixed[1],
            )
        )
    return replace(profile, layers=tuple(layers))


def handling_us(
    sleep: Sleep,
    profile: Profile,
    network: LinkCosts,
    plan: Plan,
    runs: int,
    timeout_s: float,
) -> float:
    """What the trainer spends on each message of a pass.

    It is found by bisection: so much that one plan takes as long as simulated. Ranks that share cores have
    each their own, so that it holds for this number of stages.
    """
    from arborcast.pipeline.simulation.pass_simulator import simulate

    (seen,) = measure(sleep, [plan], runs, timeout_s)
    low, high = 0.0, seen.time_us / plan.microbatches
    if len(plan.stages) == 1:
        return 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        simulated = simulate(plan, profile, replace(network, handling_us=middle), batch=sleep.batch)
        low, high = (low, middle) if simulated.time_us > seen.time_us else (middle, high)
    return low


def links(sleep: Sleep, ranks: int, timeout_s: float, *, repeats: int = 50) -> LinkCosts:
    """What messages between ranks of this machine cost, as a network in which all are connected."""
    from arborcast.pipeline.costs.link_costs import BYTES_PER_US, LinkCosts
    from arborcast.synth.topology import Link, Topology

    small, large = 64, sleep.batch * sleep.width * 4
    start_us, whole_us = run_ranks(
        2, _messages, (small, large), repeats, timeout_s=timeout_s, within=real_time
    )[1]
    per_us = max(1.0, (large - small) / max(whole_us - start_us, 1e-3))
    bandwidth = Fraction(round(per_us), BYTES_PER_US)
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    topology = Topology.build("loopback", ranks, [Link(a, b, bandwidth, Fraction(0)) for a, b in pairs])
    return LinkCosts(topology, message_us=start_us)


def _messages(rank: int, sizes: Sequence[int], repeats: int) -> list[float]:
    """The median time of a message for each size, on rank 1; it carries the time at which it was sent.

    The sender sleeps before each, as it does in the step; without, both would be awake, or on busy cores not.
    """
    import torch
    import torch.distributed as dist

    medians = []
    for size in sizes:
        buffer = torch.zeros(size // 8, dtype=torch.int64)
        times = [0.0]
        for _ in range(repeats):
            if rank == 0:
                time.sleep(PAUSE_S)
                buffer[0] = time.perf_counter_ns()
                dist.send(buffer, 1)
            else:
                dist.recv(buffer, 0)
                times.append((time.perf_counter_ns() - int(buffer[0])) / 1e3)
        medians.append(statistics.median(times))
    return medians


def _equation(
    measured: Sequence[tuple[int, float]], stages: int, serial_us: float
) -> dict[int, tuple[float, bool]]:
    """By number of microbatches, what equation (3) says, and whether it was fitted to that run."""
    from arborcast.bench.training.step_formula import Run, fit

    numbers = sorted(number for number, _ in measured)
    chosen = {numbers[0], numbers[len(numbers) // 2], numbers[-1]}
    runs = [Run(number, stages, time_us) for number, time_us in measured if number in chosen]
    model = fit(runs, compute_us=serial_us).model
    return {number: (model.step_us(number, stages), number in chosen) for number, _ in measured}


def _row(plan: Plan, seen: Measured, predicted_us: float, equation: tuple[float, bool]) -> dict[str, Any]:
    equation_us, is_fitted = equation
    spread = max(seen.times_us) - min(seen.times_us)
    by_time = spread / seen.time_us**2  # d(predicted / time) = predicted * d(time) / time**2
    return {
        "order": plan.order,
        "stages": len(plan.stages),
        "microbatches": plan.microbatches,
        "time_us": seen.time_us,
        "spread": spread,
        "predicted_us": predicted_us,
        "error": abs(predicted_us / seen.time_us - 1),
        "error_spread": predicted_us * by_time,
        "equation_us": equation_us,
        "equation_error": abs(equation_us / seen.time_us - 1),
        "equation_error_spread": equation_us * by_time,
        "fitted": is_fitted,
    }

"""Our step beside those of torch.distributed.pipelining and DDP, and what orders leave of the bubble.

Both sides do the same: the same layers on the same ranks, the same microbatches, in the same processes, whole
steps with the optimizer, in turns. Processes keep the memory that they free: to give it back and take it
again costs up to a fifth of a step, of ours or of torch's, by the chance of where it lies. Where the question
is the bubble, layers sleep as long as they would compute, so that ranks on few cores do not wait for each
other's cores.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arborcast.bench.emulation.machine import real_time
from arborcast.bench.harness.processes import run_ranks
from arborcast.bench.harness.turns import in_turns, median_of
from arborcast.bench.training.laid_out import evenly, laid_out

if TYPE_CHECKING:
    from torch import Tensor, nn

    from arborcast.pipeline.model.divisible import Divisible
    from arborcast.pipeline.stages import Plan

ROUNDS = 7
STEP_ROUNDS = 41
"""Of steps that compute: on two cores one of them takes up to a tenth longer or shorter than the next."""

BUBBLE_ORDERS = ("1f1b", "interleaved", "zb-h1", "zb-v")
MALLOPT = {-1: 2**31 - 1, -3: 32 << 20}
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc, at the most that they may be."""

TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
}
"""The schedule of torch that does what an order of ours does."""
DATA_PARALLEL = "data parallel"
"""The whole model on each rank, a microbatch each; torch's is DDP."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained.

    Attributes:
        workers: ranks, each with one stage or two.
        microbatches: of a step.
        samples: of a microbatch.
        layers: a multiple of twice the workers.
        width: of a sample.
        sleep_us: of a layer for a microbatch in a forward pass, in each half of a backward pass as long; 0
            for layers that compute.
    """

    workers: int
    microbatches: int = 8
    samples: int = 4
    layers: int = 8
    width: int = 256
    sleep_us: float = 0.0

    def plan(self, order: str) -> Plan:
        """Layers divided evenly among the stages of an order."""
        from arborcast.pipeline.stages import Plan

        if order == DATA_PARALLEL:
            return Plan([(0, self.layers, range(self.workers))], 1, "1f1b")
        ranks = [[rank] for rank in range(self.workers)]
        return laid_out(order, ranks, evenly(self.layers), self.microbatches)

    def model(self) -> Divisible:
        """The layers."""
        import torch

        from arborcast.pipeline.model.divisible import Divisible

        torch.manual_seed(0)
        return Divisible([_layer(self) for _ in range(self.layers)])

    def data(self) -> tuple[Tensor, Tensor]:
        """A batch and its targets."""
        import torch

        torch.manual_seed(1)
        shape = self.samples * self.microbatches, self.width
        return torch.randn(shape), torch.randn(shape)

    @property
    def busy_us(self) -> float:
        """That a rank sleeps in a step."""
        return 3 * self.sleep_us * self.microbatches * self.layers / self.workers


def _layer(setting: Setting) -> nn.Module:
    from torch import nn

    if setting.sleep_us:
        from arborcast.bench.training.sleeping import Nap

        return Nap(setting.width, setting.sleep_us / setting.samples)
    wide = 4 * setting.width
    return nn.Sequential(nn.Linear(setting.width, wide), nn.GELU(), nn.Linear(wide, setting.width))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.mse_loss(output, target)


def bubble_rows(*, workers: int = 4, microbatches: int = 8, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """A row for each order: the share of a step in which ranks wait, and that share over 1F1B's.

    What the trainer itself does for a step counts as waiting.
    """
    setting = Setting(workers, microbatches, samples=1, width=8, sleep_us=10_000.0)
    found = _in_turns(setting, [Contender(order) for order in BUBBLE_ORDERS], rounds)
    times = {contender.order: of_rounds for contender, of_rounds in found.items()}
    bubbles = {
        order: [1 - setting.busy_us / time_us for time_us in of_rounds] for order, of_rounds in times.items()
    }
    ratios = {order: _ratios(bubbles[order], bubbles["1f1b"]) for order in BUBBLE_ORDERS}
    return [
        {
            "order": order,
            "stages": len(setting.plan(order).stages),
            "ranks": workers,
            "microbatches": microbatches,
            "time_us": statistics.median(times[order]),
            "bubble": statistics.median(bubbles[order]),
            "predicted_bubble": _predicted(setting, order),
            **median_of("ratio", ratios[order]),
        }
        for order in BUBBLE_ORDERS
    ]


def _predicted(setting: Setting, order: str) -> float:
    """The bubble by the simulator, over links that cost nothing to speak of."""
    from arborcast import topologies
    from arborcast.pipeline.costs.link_costs import LinkCosts
    from arborcast.pipeline.planning.plan_prediction import predict
    from arborcast.pipeline.profiles import Layer, Profile

    time_us = setting.sleep_us
    layers = tuple(
        Layer(f"{it}", time_us, 2 * time_us, 0, 0, 0, 0, weights_us=time_us) for it in range(setting.layers)
    )
    plan = setting.plan(order)
    fabric = LinkCosts(topologies.load(f"full:{setting.workers}"))
    batch = setting.samples * setting.microbatches
    return predict(plan, Profile("naps", setting.samples, layers), fabric, batch=batch).bubble


def runtime_rows(
    *, workers: Sequence[int] = (2,), microbatches: int = 8, rounds: int = STEP_ROUNDS
) -> list[dict[str, Any]]:
    """A row for each order that torch has too, and for data parallel: our step's time over torch's.

    All collectives are gloo's but those of the last row, which are synthesized.
    """
    rows = []
    for count in workers:
        setting = Setting(count, microbatches, samples=8, layers=4 * count, width=512)
        asked = [(order, "gloo", schedule) for order, schedule in TORCH.items()]
        asked += [
            (DATA_PARALLEL, collectives, "DistributedDataParallel") for collectives in ("gloo", "synth")
        ]
        contenders = [Contender(order, by) for order, by, _ in asked]
        contenders += [Contender(order, "torch") for order in (*TORCH, DATA_PARALLEL)]
        times = _in_turns(setting, contenders, rounds)
        batch = setting.samples * microbatches
        for order, by, schedule in asked:
            ours, theirs = times[Contender(order, by)], times[Contender(order, "torch")]
            ratios = _ratios(ours, theirs)
            time_us, torch_us = statistics.median(ours), statistics.median(theirs)
            rows.append(
                {
                    "order": order,
                    "schedule": schedule,
                    "ranks": count,
                    "microbatches": 1 if order == DATA_PARALLEL else microbatches,
                    "collectives": by,
                    "time_us": time_us,
                    "torch_us": torch_us,
                    "samples_per_second": 1e6 * batch / time_us,
                    "torch_samples_per_second": 1e6 * batch / torch_us,
                    **median_of("ratio", ratios),
                }
            )
    return rows


@dataclass(frozen=True, slots=True)
class Contender:
    """Who makes a step of an order: the trainer with these collectives, or "torch"."""

    order: str
    by: str = "gloo"


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _in_turns(setting: Setting, contenders: Sequence[Contender], rounds: int) -> dict[Contender, list[float]]:
    """The time of the slowest rank, in us, of each contender in each round."""
    found = run_ranks(
        setting.workers, _train, setting, tuple(contenders), rounds, timeout_s=600, within=real_time
    )
    return {
        contender: [max(times) for times in zip(*(each[index] for each in found), strict=True)]
        for index, contender in enumerate(contenders)
    }


def _train(rank: int, setting: Setting, contenders: Sequence[Contender], rounds: int) -> list[list[float]]:
    import torch

    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    for parameter, most in MALLOPT.items():
        libc.mallopt(parameter, most)
    steps, ends = dict[Contender, Step](), []
    for contender in contenders:
        if contender.by != "torch":
            steps[contender], end = _ours(rank, setting, contender)
        else:
            make = _ddp if contender.order == DATA_PARALLEL else _torchs
            steps[contender], end = make(rank, setting, contender.order)
        ends.append(end)
    seconds, _ = in_turns(steps, rounds, warm_ups=2)
    for end in ends:
        end()
    return [[1e6 * each for each in seconds[contender]] for contender in contenders]


Step = Callable[[], object]


def _ours(rank: int, setting: Setting, contender: Contender) -> tuple[Step, Step]:
    import torch

    from arborcast import pipeline

    inputs, targets = setting.data()
    trainer = pipeline.Trainer(
        setting.model(),
        setting.plan(contender.order),
        _loss,
        lambda parameters: torch.optim.SGD(parameters, 1e-3),
        collectives=contender.by,
        check_loss=False,
    )
    return lambda: trainer.step(inputs, targets), trainer.close


def _torchs(rank: int, setting: Setting, order: str) -> tuple[Step, Step]:
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining

    plan, model = setting.plan(order), setting.model()
    held = plan.workers[rank].stages
    parts = [model.divide(plan.stages[it].start, plan.stages[it].end) for it in held]
    count = len(plan.stages)
    # A group of its own, whose threads begin here too, as those of ours do.
    group = dist.new_group(backend="gloo")
    stages = [
        pipelining.PipelineStage(part, it, count, torch.device("cpu"), group=group)
        for part, it in zip(parts, held, strict=True)
    ]
    made = getattr(pipelining, TORCH[order])
    schedule = made(stages[0] if len(stages) == 1 else stages, setting.microbatches, loss_fn=_loss)
    optimizer = torch.optim.SGD([it for part in parts for it in part.parameters()], 1e-3)
    inputs, targets = setting.data()

    def step() -> None:
        optimizer.zero_grad()
        given = (inputs,) if 0 in held else ()
        if count - 1 in held:
            schedule.step(*given, target=targets, losses=[])
        else:
            schedule.step(*given)
        optimizer.step()

    return step, lambda: None


def _ddp(rank: int, setting: Setting, order: str) -> tuple[Step, Step]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(
        setting.model().divide(0, setting.layers), process_group=dist.new_group(backend="gloo")
    )
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    inputs, targets = (it.chunk(setting.workers)[rank] for it in setting.data())

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(_loss(model(inputs), targets))
        optimizer.step()

    return step, lambda: None

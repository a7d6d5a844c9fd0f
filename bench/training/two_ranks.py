"""Plans of all kinds for real models on two ranks of this machine: steps and memory, predicted and measured.

What a user would do: trace the model, profile it on the ranks that will train it, measure what their messages
and sums cost, and predict each plan before it is trained. Nothing is fitted to what is predicted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from arborcast.bench.emulation.machine import real_time
from arborcast.bench.harness.processes import run_ranks
from arborcast.bench.harness.turns import beside_prediction, in_turns
from arborcast.bench.training.laid_out import laid_out

if TYPE_CHECKING:
    from torch import Tensor, nn

    from arborcast.pipeline.costs.devices import DeviceRates
    from arborcast.pipeline.costs.link_costs import LinkCosts
    from arborcast.pipeline.costs.live import LiveBytes
    from arborcast.pipeline.model.traced import Traced
    from arborcast.pipeline.planning.plan_prediction import Prediction
    from arborcast.pipeline.profiles import Profile
    from arborcast.pipeline.stages import Plan
    from arborcast.pipeline.trainer import Trainer

RANKS = 2
TIMEOUT_S = 900
STEPS = 3
"""Of which memory is measured: from the second on the optimizer has its state."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model as a user brings it.

    Attributes:
        name: of the model.
        make: it.
        samples: of a step.
        data: inputs and targets of so many samples; no targets for a model that returns its loss.
    """

    name: str
    make: Callable[[], nn.Module]
    samples: int
    data: Callable[[int], tuple[Any, Tensor | None]]

    def batch(self) -> tuple[Any, Tensor | None]:
        """Of a step, always the same."""
        import torch

        torch.manual_seed(1)
        return self.data(self.samples)

    def traced(self, model: nn.Module | None = None) -> Traced:
        """The model with its loss; one of its own unless it is given."""
        import torch

        from arborcast import pipeline

        torch.manual_seed(0)
        model, (inputs, targets) = model or self.make(), self.batch()
        if targets is None:
            return pipeline.trace(model, inputs, evaluation=False)
        loss = torch.nn.functional.cross_entropy
        return pipeline.trace(model, (inputs, targets), loss, evaluation=False)


def _gpt2() -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    sizes: dict[str, Any] = {"n_layer": 3, "n_embd": 384, "n_head": 6, "vocab_size": 4000, "n_positions": 64}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    )


def _bert() -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    sizes: dict[str, Any] = {"hidden_size": 320, "intermediate_size": 1280, "vocab_size": 4000}
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            num_hidden_layers=4, num_attention_heads=5, **sizes, tie_word_embeddings=False
        )
    )


def _sentences(words: int, samples: int) -> tuple[dict[str, Tensor], None]:
    import torch

    drawn = torch.randint(0, words, (samples, 32))
    return {"input_ids": drawn, "labels": drawn}, None


def _perceptron() -> nn.Module:
    from torch import nn

    hidden = [it for _ in range(10) for it in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(nn.Linear(256, 1024), *hidden, nn.Linear(1024, 10))


def _convolutions() -> nn.Module:
    from torch import nn

    layers: list[nn.Module] = []
    before = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 0):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        before = width or before
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10))


def _classes(shape: tuple[int, ...], samples: int) -> tuple[Tensor, Tensor]:
    import torch

    return torch.randn(samples, *shape), torch.randint(0, 10, (samples,))


SUBJECTS = (
    Subject("GPT-2 (transformers), 3 blocks of 384", _gpt2, 16, partial(_sentences, 4000)),
    Subject("BERT (transformers), 4 layers of 320", _bert, 16, partial(_sentences, 4000)),
    Subject("perceptron, 12 layers of 1024", _perceptron, 512, partial(_classes, (256,))),
    Subject("VGG, 6 convolutions", _convolutions, 32, partial(_classes, (3, 32, 32))),
)


def optimizer(parameters: list[nn.Parameter]) -> Any:
    """Of all trainings."""
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, what sums its gradients, and what is predicted of it."""

    plan: Plan
    collectives: str
    prediction: Prediction


def planned(subject: Subject, traced: Traced, repeats: int = 5) -> dict[str, Planned]:
    """All plans by name, as measured costs predict them; both ranks call it and get those of the first.

    Layers are profiled with the samples of one of four microbatches.
    """
    import torch.distributed as dist

    from arborcast import pipeline

    inputs, targets = subject.batch()
    profile = pipeline.profile(
        traced,
        inputs if targets is None else (inputs, targets),
        repeats=repeats,
        at=subject.samples // 4,
        optimizer=optimizer,
        group=dist.group.WORLD,
    )
    networks = {it: pipeline.measure_links(collectives=it) for it in ("gloo", "synth")}
    found = {}
    for name, plan, collectives in _plans(profile, networks["gloo"]):
        prediction = pipeline.predict(plan, profile, networks[collectives], batch=subject.samples)
        found[name] = Planned(plan, collectives, prediction)
    found["operators divided"] = _divided(subject, traced, profile, networks["synth"])
    of_first = [found]
    dist.broadcast_object_list(of_first)  # copies in memory were measured by each
    return of_first[0]


def _plans(profile: Profile, network: LinkCosts) -> Iterator[tuple[str, Plan, str]]:
    from arborcast.pipeline.costs.saved_bytes import Segment, Treatment
    from arborcast.pipeline.model.balance import balanced_cuts
    from arborcast.pipeline.stages import Plan, Stage

    times = [it.forward_us + it.backward_us for it in profile.layers]
    fabric: dict[str, Any] = {"topology": network.topology, "model": profile.model}

    def staged(order: str, microbatches: int, **more: Any) -> Plan:
        def cuts(stages: int) -> tuple[int, ...]:
            return 0, *balanced_cuts(times, stages), profile.depth

        return laid_out(order, [[rank] for rank in range(RANKS)], cuts, microbatches, **fabric, **more)

    for order, microbatches in (("gpipe", 4), ("1f1b", 4), ("1f1b", 8), ("zb-h1", 4)):
        yield f"{order}, {microbatches} microbatches", staged(order, microbatches), "gloo"
    for order in ("zb-v", "interleaved"):
        yield f"{order}, 4 stages", staged(order, 4), "gloo"
    even = staged("1f1b", 4)
    third = even.cuts[0] // 2
    yield "1f1b, uneven", Plan([(0, third, [0]), (third, profile.depth, [1])], 4, **fabric), "gloo"
    yield "1f1b, recompute", replace(even, recompute=True), "gloo"
    halves = []
    for it in even.stages:
        middle = (it.start + it.end) // 2
        parts = Segment(it.start, middle, Treatment.OFFLOAD), Segment(middle, it.end, Treatment.KEEP)
        halves.append(Stage(it.start, it.end, it.ranks, parts))
    yield "1f1b, offload", replace(even, stages=tuple(halves), offload_gbps=_copy_gbps()), "gloo"
    for microbatches, collectives in ((1, "gloo"), (1, "synth"), (4, "synth")):
        plan = Plan([(0, profile.depth, range(RANKS))], microbatches, **fabric)
        yield f"data parallel by {collectives}, {microbatches} microbatches", plan, collectives


def _divided(subject: Subject, traced: Traced, profile: Profile, network: LinkCosts) -> Planned:
    """Heads, columns and rows of weights over both ranks."""
    from arborcast.pipeline.planning.sharded_planning import choose_both
    from arborcast.pipeline.sharding.mesh_choice import graph_of_microbatch

    graph = replace(graph_of_microbatch(traced, subject.samples, 1, by_layer=True), name=profile.model)
    found = choose_both(graph, network.topology, device_here(), profile, network=network)
    prediction = found.ways["megatron"].prediction
    assert prediction is not None, "two ranks hold any of these models"
    return Planned(found.plan_by("megatron", divided=True), "synth", prediction)


def device_here() -> DeviceRates:
    """This machine's rates, for the ratio of an operator's parts to the whole."""
    import torch

    from arborcast.pipeline.costs.devices import GIB, DeviceRates

    values = torch.randn(512, 512)
    flops = 2 * 512**3 / _least_s(lambda: values @ values)
    return DeviceRates("here", {"float32": flops}, 2 * _copy_gbps(), GIB << 4, 1.0, 1.0, 0.0)


def _copy_gbps() -> float:
    """GB/s of a copy in memory."""
    import torch

    values, other = torch.zeros(2, 1 << 22)
    return int(values.nbytes) / _least_s(lambda: other.copy_(values)) / 1e9


def _least_s(run: Callable[[], object], repeats: int = 9) -> float:
    def once() -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    return min(once() for _ in range(repeats))


# --------------------------------------------------------------------------------------------------- steps


def step_rows(subject: Subject, turns: int = 5) -> list[dict[str, Any]]:
    """A row for each plan: the median of so many steps of the slowest rank."""
    found = run_ranks(RANKS, _steps, SUBJECTS.index(subject), turns, timeout_s=TIMEOUT_S, within=real_time)
    return [
        _row(subject, name, it)
        | beside_prediction(it.prediction.time_us, [of_rank[name][1] for of_rank in found])
        for name, (it, _) in found[0].items()
    ]


def _steps(rank: int, number: int, turns: int) -> dict[str, tuple[Planned, list[float]]]:
    """Of each plan this rank's seconds."""
    subject = SUBJECTS[number]
    traced, (inputs, targets) = subject.traced(), subject.batch()
    found = {}
    for name, it in planned(subject, traced).items():
        with _trainer(traced, it) as trainer:
            seconds, _ = in_turns({name: partial(trainer.step, inputs, targets)}, turns, warm_ups=2)
        found[name] = it, seconds[name]
    return found


def _row(subject: Subject, name: str, it: Planned) -> dict[str, Any]:
    return {
        "model": subject.name,
        "plan": name,
        "stages": len(it.plan.stages),
        "microbatches": it.plan.microbatches,
    }


def _trainer(model: Traced, it: Planned) -> Trainer:
    from arborcast import pipeline

    os.environ["ARBORCAST_START"] = "wait"  # for schedules: looking for them beside steps would take a core
    return pipeline.Trainer(model, it.plan, None, optimizer, collectives=it.collectives, check_loss=False)


# -------------------------------------------------------------------------------------------------- memory


def memory_rows(subject: Subject) -> list[dict[str, Any]]:
    """A row for each plan and rank."""
    found = run_ranks(RANKS, _memory, SUBJECTS.index(subject), timeout_s=TIMEOUT_S)
    rows = []
    for name, (it, _) in found[0].items():
        for rank in range(RANKS):
            stage = next(place for place, own in enumerate(it.plan.stages) if rank in own.ranks)
            need, held = it.prediction.memory[stage], found[rank][name][1]
            rows.append(
                _row(subject, name, it)
                | {
                    "rank": rank,
                    "predicted_bytes": need.total,
                    "live_bytes": held,
                    "ratio": held / need.total,
                    "off": abs(held / need.total - 1),
                    **{f"{part}_bytes": size for part, size in asdict(need).items()},
                }
            )
    return rows


def _memory(rank: int, number: int) -> dict[str, tuple[Planned, int]]:
    """Of each plan bytes behind torch's tensors at most, on this rank, without the batch."""
    from arborcast.pipeline.costs.layer_pass import size_bytes
    from arborcast.pipeline.costs.live import LiveBytes

    subject = SUBJECTS[number]
    traced, (inputs, targets) = subject.traced(), subject.batch()
    found = {}
    for name, it in planned(subject, traced, repeats=1).items():
        with LiveBytes() as live, _copies_back(live), _trainer(traced, it) as trainer:
            for _ in range(STEPS):
                trainer.step(inputs, targets)
            values = {id(own): own for own in (*trainer.module.parameters(), *trainer.module.buffers())}
        # Where operators are divided, a rank's parts are made anew; else its layers have the model's values.
        given = 0 if it.plan.is_divided else size_bytes(values.values())
        found[name] = it, live.peak + given
    return found


@contextmanager
def _copies_back(live: LiveBytes) -> Iterator[None]:
    """Count what comes back of offloaded results, too, which a thread copies; host memory does not count."""
    from arborcast.pipeline.run.activation_treatment import OffloadedMemory

    call = OffloadedMemory.call

    def counted(memory: OffloadedMemory) -> None:
        call(memory)
        if memory.work is not None:
            memory.work.add_done_callback(lambda work: live.add(work.result()))

    OffloadedMemory.call = counted  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        OffloadedMemory.call = call  # type: ignore[method-assign]

"""Trainings in stages beside serial ones, predictions beside measurements, and the planners' own time.

Eight questions, each a results file `bench/results/pipeline_<part>.json`: models of libraries in stages
(models), predicted against measured steps of real models (prediction), the planner's own time (planner), a
training step on emulated links (testbed), what orders leave of the bubble (bubbles), our steps beside those
of torch's own schedules and DDP (runtimes), what ranks hold beside what their plans say (memory), and how
long layouts of operators on meshes take to find (intra). What the experiments of SPP, RaNNC and Divisible
gave, loss curves, divided steps and layers that sleep is in `docs/explanation/findings.md`.

    python bench/pipeline.py --only planner --only intra
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arborcast.bench.harness.document import TRAINING
from arborcast.bench.harness.script import KEPT, CannotMeasureError, command_line, keep
from arborcast.bench.page.console import print_results
from arborcast.synth.errors import InputError
from arborcast.synth.formats.results import Measure, document

HOME = Path(__file__).resolve().parent
Found = dict[str, Any]
TORCH = ("arborcast", "numpy", "torch")
STEPS = {
    "time_us": "of the slowest rank, a whole step with its update; median over the runs",
    "error": "|predicted - measured| / measured",
    "error_spread": "what the spread of the measured time moves it by",
}
OF_PREDICTIONS: dict[str, Any] = {"target": 0.2, "target_of_median": 0.1}
"""Of all errors beyond what repeats differ by, and of the median error."""


def _document(
    question: str, rows: list[dict[str, Any]], *, packages: Sequence[str] = (), **more: Any
) -> Found:
    return document(question, rows, packages=(*TORCH, *packages), code=TRAINING, **more)


def models(quick: bool) -> Found:
    """Models of libraries cut in two and in four."""
    from arborcast.bench.training.in_stages import LIMIT, rows_of_all

    return _document(
        "Which models train in stages as in one piece, unmodified?",
        rows_of_all(most=4, steps=3) if quick else rows_of_all(),
        keys=("model", "stages"),
        measures={"loss_difference": Measure("less"), "weight_difference": Measure("less")},
        units={
            "loss_difference": f"largest over all steps, relative where a loss is above 1; limit {LIMIT:g}",
            "weight_difference": "largest after them, relative where the largest of its tensor is above 1",
            "evaluation_difference": "of the loss in evaluation afterwards; null where that is refused",
            "microbatches": "1 for a model with batch norm, which normalises each",
            "legal_cuts": "places where the graph may be cut",
        },
        packages=("transformers", "torchvision", "timm"),
        limit=LIMIT,
    )


def prediction(quick: bool) -> Found:
    """Predicted against measured time of steps of real models."""
    from arborcast.bench.training.two_ranks import RANKS, SUBJECTS, step_rows

    subjects = SUBJECTS[:1] if quick else SUBJECTS
    return _document(
        "How far is the predicted time of a step from the measured one?",
        [row for it in subjects for row in step_rows(it, turns=2 if quick else 5)],
        keys=("model", "plan"),
        measures={"error": Measure("less", "error_spread")},
        units=STEPS,
        packages=("transformers",),
        ranks=RANKS,
        **OF_PREDICTIONS,
    )


def planner(quick: bool) -> Found:
    """The planner's own time."""
    from arborcast.bench.training.planner_time import planner_rows

    return _document(
        "How long does planning take?",
        planner_rows(runs=1 if quick else 5),
        keys=("topology", "layers", "limit_bytes"),
        measures={
            "seconds": Measure("less", "spread"),
            "first_seconds": Measure("less", "first_spread"),
        },
        units={
            "seconds": "from profile and topology to plan; the median over processes",
            "first_seconds": "of the first plan of a process, which loads compiled kernels",
        },
    )


def intra(quick: bool) -> Found:
    """How long it takes to divide the operators of deep models."""
    from arborcast.bench.training.sharded import TIMED, time_rows

    return _document(
        "How long does planning inside a stage take?",
        time_rows(TIMED[:1] if quick else TIMED),
        keys=("topology", "layers"),
        measures={"cpu_seconds": Measure("less", "spread")},
        units={
            "cpu_seconds": "from a module on meta to the sharding on the best mesh; one run",
            "trace_seconds": "CPU time of that for the graph of operators",
            "program_seconds": "CPU time of the program of the best mesh once more, its prices known",
            "seconds": "elapsed",
        },
    )


def testbed(quick: bool) -> Found:
    """A training step on emulated links."""
    from arborcast.bench.emulation.machine import check_machine
    from arborcast.bench.training.testbed_step import CASES, step_rows

    check_machine()
    cases = CASES[:1] if quick else CASES
    return _document(
        "What do synthesized allreduces give a training step on real links, and how far are predictions off?",
        [row for case in cases for row in step_rows(case, turns=2 if quick else 5)],
        keys=("topology", "replicas", "order", "collectives"),
        measures={
            "time_us": Measure("less", "spread"),
            "error": Measure("less", "error_spread"),
            "times_faster_than_gloo": Measure("more", follows="time_us"),
        },
        units=STEPS,
        **OF_PREDICTIONS,
    )


def bubbles(quick: bool) -> Found:
    """How much of a step ranks wait, with layers that sleep."""
    from arborcast.bench.training.runtimes import bubble_rows

    return _document(
        "How much of 1F1B's bubble do other orders leave?",
        bubble_rows(rounds=2) if quick else bubble_rows(),
        keys=("order", "ranks", "microbatches"),
        measures={"ratio": Measure("less", "spread"), "bubble": Measure("less")},
        units={
            "time_us": "of the slowest rank, a whole step; median over the rounds",
            "bubble": "share of the step in which ranks do not sleep; median over the rounds",
            "predicted_bubble": "the same by the simulator",
            "ratio": "bubble over that of 1F1B in the same round; the median",
        },
        target=0.6,
    )


def runtimes(quick: bool) -> Found:
    """Steps of the trainer and of torch.distributed.pipelining or DDP, in turns."""
    from arborcast.bench.training.runtimes import runtime_rows

    return _document(
        "Is a step as fast as that of torch's own schedule for the same plan?",
        runtime_rows(rounds=2) if quick else runtime_rows(),
        keys=("order", "ranks", "microbatches", "collectives"),
        measures={"ratio": Measure("less", "spread")},
        units={
            "time_us": "of the slowest rank, a whole step with its update; median over the rounds",
            "torch_us": "likewise of torch's schedule, or of DDP over gloo",
            "ratio": "our time over torch's in the same round; the median",
        },
        target=1.0,
    )


def memory(quick: bool) -> Found:
    """The memory of ranks, beside what their plan says."""
    from arborcast.bench.training.two_ranks import SUBJECTS, memory_rows

    return _document(
        "Does a rank need as much memory as its plan says?",
        [row for it in (SUBJECTS[:1] if quick else SUBJECTS) for row in memory_rows(it)],
        keys=("model", "plan", "rank"),
        measures={"off": Measure("less"), "live_bytes": Measure("less")},
        units={
            "live_bytes": "behind torch's tensors, at most, in 3 steps, without the batch",
            "predicted_bytes": "by the plan; the rest of the columns are its parts",
            "ratio": "of the two",
            "off": "by how much that is not 1",
        },
        packages=("transformers",),
        limit=0.1,
    )


PARTS: Mapping[str, Callable[[bool], Found]] = {
    "models": models,
    "prediction": prediction,
    "planner": planner,
    "intra": intra,
    "testbed": testbed,
    "bubbles": bubbles,
    "runtimes": runtimes,
    "memory": memory,
}


def main() -> int:
    """Answer the questions that the command line asks for."""
    # This file has the name of the package that it measures: its folder must not be searched for that.
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != HOME]
    parser = command_line(__doc__)
    parser.add_argument("--only", action="append", choices=tuple(PARTS), help="of the questions; all")
    parser.add_argument("--quick", action="store_true", help="a few points of each, for a first look")
    parser.add_argument("--results", type=Path, help="folder of the results; bench/results unless --quick")
    arguments = parser.parse_args()
    folder = arguments.results or (None if arguments.quick else KEPT)
    status = 0
    for name in arguments.only or PARTS:
        try:
            found = PARTS[name](arguments.quick)
        except (InputError, CannotMeasureError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            status = 2  # the others can be answered all the same
            continue
        print_results(found, section=f"pipeline_{name}")
        keep(folder and folder / f"pipeline_{name}.json", found)
    return status


if __name__ == "__main__":
    sys.exit(main())

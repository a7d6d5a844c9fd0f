"""`synth plan`: the best pipeline for a model on a topology, beside the other ways to train it there.

The model is a profile file, the name of a network whose costs are known, or a function of a Python file,
whose model is costed for what the ranks of the topology are, without allocating it, or measured here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from arborcast.synth.cli.console import Stopwatch, answer, progress
from arborcast.synth.cli.inputs import load_fabric
from arborcast.synth.cli.options import (
    OF_MACHINES,
    AsJson,
    FabricOptions,
    about_a_fabric,
    count,
    gigabytes_a_second,
    in_bytes,
    option,
    refuse,
    target,
)
from arborcast.synth.cli.plan_description import (
    comparison_document,
    describe_comparison,
    describe_plan,
    figures,
    plan_document,
)
from arborcast.synth.errors import InputError

if TYPE_CHECKING:
    from arborcast.pipeline.planning.planner import PlanWishes

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="a profile file, vgg19, bert-large or bert-base, or FILE.py:FUNCTION, which returns "
        "(model, inputs) or (model, (inputs, targets), loss)",
    ),
]


OrderName = Literal["1f1b", "pe", "gpipe", "interleaved", "zb-h1", "zb-v"]
MethodName = Literal["all", "arborcast", "data-parallel", "gpipe", "pipedream", "rannc", "spp"]


@about_a_fabric("ranks", *OF_MACHINES)
def plan(
    model: Model,
    fabric: FabricOptions,
    method: Annotated[
        MethodName, option("--method", "all: compare them, the fastest is the plan; or the plan of one")
    ] = "all",
    batch: Annotated[
        int | None,
        count(
            "--batch", "samples of a step; by default those of the profile, for a named network on each rank"
        ),
    ] = None,
    microbatches: Annotated[int | None, count("--microbatches", "by default the best")] = None,
    stages: Annotated[int | None, count("--stages", "by default the best")] = None,
    order: Annotated[OrderName | None, option("--order", "of passes; by default the best")] = None,
    recompute: Annotated[
        bool | None,
        option(
            "--recompute/--keep",
            "repeat all forward passes or keep their results; by default by layer, as memory asks for it",
        ),
    ] = None,
    offload: Annotated[
        float | None,
        option(
            "--offload",
            "GB/s to host memory, each way: results may wait there where memory is short",
            parser=gigabytes_a_second,
            metavar="GB/S",
        ),
    ] = None,
    memory: Annotated[
        int | None, in_bytes("--memory", "limit on each rank, such as 16GiB; by default the device's")
    ] = None,
    max_in_flight: Annotated[
        int | None, count("--max-in-flight", "microbatches that a rank may keep")
    ] = None,
    keep_ties: Annotated[
        bool, option("--keep-ties-together", "layers that share a parameter stay on one stage")
    ] = False,
    device: Annotated[
        str | None,
        option(
            "--device",
            "cost the model for it: v100, a100-80, h100, mi300x, ...; here: measure it on this machine. By "
            "default what the topology's ranks are",
        ),
    ] = None,
    output: Annotated[Path | None, target("-o", "--output", "write the plan here")] = None,
    picture: Annotated[Path | None, target("--picture", "draw the plan: .svg or .png")] = None,
    trace: Annotated[Path | None, target("--trace", "write the predicted step as a Chrome trace")] = None,
    profile_output: Annotated[Path | None, target("--profile", "write the model's profile here")] = None,
    intra: Annotated[
        bool,
        option(
            "--intra",
            "divide each operator over a mesh of its stage's ranks, beside fixed layouts; one microbatch "
            "unless --microbatches says more, at most as many stages as --stages says",
        ),
    ] = False,
    compared: Annotated[
        bool,
        option(
            "--compare",
            "print every way in one table, those that divide operators too, and what the collectives of each "
            "take at least",
        ),
    ] = False,
    given: Annotated[
        Path | None,
        option(
            "--given",
            "with --intra: tell what this plan takes, for its batch and microbatches, instead of finding one",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a pipeline: stages, ranks, microbatches, order.

    Beside ours stand the published methods on the same costs, each a plan that `--method` writes.
    """
    if intra:
        of_layouts = {"method": None if method == "all" else method, "order": order, "offload": offload}
        kept = {"recompute": recompute, "keep": recompute is False, "keep_ties_together": keep_ties}
        files = {"trace": trace, "profile": profile_output}
        refuse("must not be given with --intra", **of_layouts, **kept, **files, compare=compared)
        asked = _Inside(device, batch, microbatches, memory, stages, given, output, picture)
        _inside(model, fabric, asked, as_json)
        return
    refuse("must be given with --intra only", given=given)
    from arborcast.pipeline.pictures.chrome_trace import write_chrome_trace
    from arborcast.pipeline.pictures.plan_picture import draw_plan
    from arborcast.pipeline.planning.formats import write_plan, write_profile
    from arborcast.pipeline.planning.plan_comparison import EVERY, compare

    if compared:
        files = {"output": output, "picture": picture, "trace": trace, "profile": profile_output}
        refuse("goes with the plan of one way, not with --compare", **files)
    on = load_fabric(fabric)
    wishes: PlanWishes = {
        "batch": batch,
        "microbatches": microbatches,
        "order": order,
        "recompute": recompute,
        "offload_gbps": offload,
        "max_in_flight": max_in_flight,
        "keep_ties_together": keep_ties,
        "stages": stages,
    }
    if memory is not None:
        wishes["memory_bytes"] = memory
    watch = Stopwatch()
    with progress(f"planning {model} on {on.topology.name}", quiet=as_json):
        made, *trained_on = _called(model) if ".py:" in model else (model,)
        found = compare(
            made,
            replace(on.machine_left, topology=on.topology),
            *trained_on,
            device=device,
            name=model,
            methods=EVERY if method == "all" else (method,),
            divided=compared,
            **wishes,
        )
    if compared:
        document = comparison_document(found, watch.seconds)
        answer(as_json, document, lambda: describe_comparison(document))
        return
    best, predicted = found.best.runnable()
    document = plan_document(found, watch.seconds, output)
    if output is not None:
        write_plan(
            best, output, {key: document[key] for key in (*figures(predicted), "batch", "alternatives")}
        )
    if profile_output is not None:
        write_profile(found.profile, profile_output)
    if picture is not None:
        limit = found.memory_bytes if isinstance(found.memory_bytes, int) else None
        draw_plan(best, found.profile, predicted, picture, batch=found.batch, memory_bytes=limit)
    if trace is not None:
        write_chrome_trace({"predicted": predicted.timeline}, trace)
    answer(as_json, document, lambda: describe_plan(found, document))


@dataclass(frozen=True)
class _Inside:
    """What was asked of a plan of both levels, as in `plan`."""

    device: str | None
    batch: int | None
    microbatches: int | None
    memory: int | None
    stages: int | None
    given: Path | None
    output: Path | None
    picture: Path | None


def _inside(model: str, fabric: FabricOptions, asked: _Inside, as_json: bool) -> None:
    from arborcast.pipeline import shard_in_stages, trace, zoo
    from arborcast.pipeline.pictures.sharded_picture import draw_sharded
    from arborcast.pipeline.planning.costing import device_for
    from arborcast.pipeline.planning.formats import write_plan
    from arborcast.pipeline.zoo.catalog import CATALOG
    from arborcast.synth.cli.plan_inside import (
        choice_document,
        describe_choice,
        given_plan,
    )

    batch, microbatches, plan = asked.batch, 1 if asked.microbatches is None else asked.microbatches, None
    if asked.given is not None:
        plan = given_plan(asked.given, batch, asked.microbatches, asked.stages)
        batch, microbatches = plan.batch, plan.microbatches
    on = load_fabric(fabric)
    machine = replace(on.machine_left, topology=on.topology)
    named = device_for(asked.device, machine)
    watch = Stopwatch()
    with progress(f"sharding {model} on {on.topology.name}", quiet=as_json):
        if ".py:" in model:
            made = _called(model)
        elif model in zoo.NAMES:
            made = zoo.build(model, samples=batch)
        else:
            raise InputError(
                f"model {model}: with --intra must be one of {', '.join(zoo.NAMES)}, or FILE.py:FUNCTION"
            )
        network, example, loss = made
        traced = trace(network, example, loss, evaluation=False)
        found = shard_in_stages(
            traced,
            machine.topology,
            named,
            batch=traced.training.captured.example if batch is None else batch,
            microbatches=microbatches,
            memory_bytes=asked.memory,
            stages=asked.stages,
            given=plan,
            optimizer=CATALOG[model].optimizer if model in zoo.NAMES else None,
            name=Path(model).name,
        )
    document = choice_document(found, named, watch.seconds)
    if asked.output is not None:
        kept = ("device", "time_us", "time_at_rates_us", "bound_at_rates_us", "memory_bytes", "ways")
        write_plan(found.plan, asked.output, {key: document[key] for key in kept})
    if asked.picture is not None:
        draw_sharded(found, asked.picture)
    answer(as_json, document, lambda: describe_choice(document))


def _called(model: str) -> tuple[Any, Any, Any]:
    """What the function of FILE.py:FUNCTION returns: a model, its example inputs, a loss or None."""
    import runpy

    from torch import nn

    from arborcast.pipeline.model.layered import Layered

    path, _, name = model.partition(".py:")
    file = Path(f"{path}.py")
    if not file.is_file():
        raise InputError(f"{file}: there is no such file")
    try:
        function = runpy.run_path(str(file), run_name="model").get(name)
    except Exception as error:  # whatever the person's own code raises
        raise InputError(f"{file}: raised {type(error).__name__}: {error}") from error
    if not callable(function):
        what = f"a function {name}" if name else "the function that FILE.py:FUNCTION names"
        raise InputError(f"{file}: must define {what}, and does not")
    try:
        made = function()
    except Exception as error:
        raise InputError(f"{file}: {name}() raised {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise InputError(
            f"{file}: {name}() must return (model, inputs) or (model, (inputs, targets), loss), "
            f"got {type(made).__name__}"
        )
    if not isinstance(made[0], (nn.Module, Layered)):
        raise InputError(
            f"{file}: {name}(): the model must be a torch.nn.Module, got {type(made[0]).__name__}"
        )
    return made if len(made) == 3 else (*made, None)

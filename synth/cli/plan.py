"""`synth plan`: the best pipeline for a model on a topology, beside the other ways to train it there.

The model is a profile file, the name of a network whose costs are known, or a function of a Python file,
whose model is costed for what the ranks of the topology are, without allocating it, or measured here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from arborcast.synth.cli.console import Stopwatch, print_json, print_lines, progress
from arborcast.synth.cli.inputs import FabricRequest, load_fabric
from arborcast.synth.cli.options import AsJson, FabricOptions, about_a_fabric, number, option, writable
from arborcast.synth.cli.plan_description import describe_plan, figures, plan_document
from arborcast.synth.errors import InputError

if TYPE_CHECKING:
    from arborcast.pipeline.profiles import Profile

DEVICE = "v100"
"""What a network that is only named is costed for where neither `--device` nor the topology says."""

HERE = "here"
"""The device on which a model is measured."""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="a profile file, vgg19, resnet152, inception-v3, transformer, bert-large, xlnet-large or "
        "bert-base, or FILE.py:FUNCTION, which returns (model, inputs) or (model, (inputs, targets), loss)",
    ),
]


OrderName = Literal["1f1b", "pe", "gpipe", "interleaved", "zb-h1", "zb-v"]


@about_a_fabric("ranks", "gpu", "pcie", "between_sockets", "rates", "no_in_network")
def plan(
    model: Model,
    fabric: FabricOptions,
    batch: Annotated[
        int | None,
        number(
            "--batch", "samples of a step; by default those of the profile, for a named network on each rank"
        ),
    ] = None,
    microbatches: Annotated[int | None, number("--microbatches", "by default the best")] = None,
    stages: Annotated[int | None, number("--stages", "by default the best")] = None,
    order: Annotated[OrderName | None, option("--order", "of passes; by default the best")] = None,
    recompute: Annotated[
        bool | None, option("--recompute/--keep", "repeat forward passes or keep their results")
    ] = None,
    memory: Annotated[
        str | None, option("--memory", "limit on each rank, such as 16GiB; by default the device's")
    ] = None,
    max_in_flight: Annotated[
        int | None, number("--max-in-flight", "microbatches that a rank may keep")
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
    output: Annotated[Path | None, option("-o", "--output", "write the plan here")] = None,
    picture: Annotated[Path | None, option("--picture", "draw the plan: .svg or .png")] = None,
    trace: Annotated[Path | None, option("--trace", "write the predicted step as a Chrome trace")] = None,
    profile_output: Annotated[Path | None, option("--profile", "write the model's profile here")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a pipeline: stages, ranks, microbatches, order.

    Beside it stand data parallelism, GPipe, PipeDream and HetPipe on the same costs.
    """
    from arborcast.pipeline import zoo as networks
    from arborcast.pipeline.pictures.chrome_trace import write_chrome_trace
    from arborcast.pipeline.pictures.plan import draw_plan
    from arborcast.pipeline.planning.alternatives import compare
    from arborcast.pipeline.planning.formats import write_plan, write_profile
    from arborcast.synth.formats.sizes import parse_size

    for path in (output, picture, trace, profile_output):
        writable(path)
    on = load_fabric(fabric)
    topology = on.topology
    device, why = _device(device, on, model)
    limit = parse_size(memory) if memory is not None else _memory_of(device)
    watch = Stopwatch()
    with progress(f"costing {model}", quiet=as_json):
        profile = _profile(model, device)
    if batch is None:
        batch = profile.samples * (topology.ranks if model in networks.NAMES else 1)
    with progress(f"planning {profile.model} on {topology.name}", quiet=as_json):
        found = compare(
            profile,
            topology,
            batch=batch,
            microbatches=microbatches,
            order=order,
            recompute=recompute,
            memory_bytes=limit,
            max_in_flight=max_in_flight,
            keep_ties_together=keep_ties,
            stages=stages,
        )
    document = {**plan_document(found, watch.seconds, output), "device": device, "device_from": why}
    if output is not None:
        keys = (*figures(found.prediction), "batch", "alternatives")
        write_plan(found.plan, output, {key: document[key] for key in keys})
    if profile_output is not None:
        write_profile(profile, profile_output)
    if picture is not None:
        draw_plan(found.plan, profile, found.prediction, picture, batch=batch, memory_bytes=limit)
    if trace is not None:
        write_chrome_trace({"predicted": found.prediction.timeline}, trace)
    if as_json:
        print_json(document)
    else:
        print_lines(describe_plan(found, topology, document))


def _device(asked: str | None, on: FabricRequest, model: str) -> tuple[str | None, str]:
    """What a model is costed for, None where it is measured here or has its costs; and who says so.

    Raises:
        InputError: an unknown device, one for a profile, or ranks that differ.
    """
    from arborcast.pipeline import zoo as networks
    from arborcast.pipeline.costs.devices import device_named, device_or_none

    is_named = model in networks.NAMES
    if not is_named and ".py:" not in model:  # a profile, or nothing that is known
        return asked, "profile"
    if asked == HERE:
        if is_named:
            raise InputError(f"--device {HERE}: measures FILE.py:FUNCTION, and {model} is only a name")
        return None, "option"
    if asked is not None:
        return device_named(asked).name, "option"
    kinds = sorted({gpu or "unknown" for gpu in on.machine_left.gpus})
    if len(kinds) > 1:
        raise InputError(
            f"{on.options.spec}: its ranks are {' and '.join(kinds)}; say by --device for which to cost"
        )
    # Accelerators that are no GPUs have no name there, and go by that of their machine: tpu-v4, trn2, gaudi3.
    known = device_or_none(kinds[0]) or device_or_none(on.options.spec.partition(":")[0])
    if known is not None:
        return known.name, "topology"
    return (DEVICE if is_named else None), "default"


def _profile(model: str, device: str | None) -> Profile:
    """The costs of what the argument names.

    Raises:
        InputError: it names nothing, or the file or function does not give a profile or a model.
    """
    from arborcast.pipeline import zoo as networks
    from arborcast.pipeline.planning.formats import read_profile

    if model.endswith(".json") or (Path(model).is_file() and ".py" not in model):
        if device is not None:
            raise InputError(f"--device {device}: a profile file has its costs already")
        return read_profile(model)
    if ".py:" in model:
        return _profile_of_function(model, device)
    if model not in networks.NAMES:
        raise InputError(
            f"model {model}: must be a profile file, one of {', '.join(networks.NAMES)}, or FILE.py:FUNCTION"
        )
    return networks.analytic_profile(model, device or DEVICE)


def _profile_of_function(model: str, device: str | None) -> Profile:
    """Measured here, or analysed for a device, of the model that a function returns."""
    from arborcast.pipeline.costs.analytic import analyse
    from arborcast.pipeline.costs.devices import device_named as named
    from arborcast.pipeline.costs.measured import profile

    found, example, loss = _call(model)
    if device is None:
        return profile(found, example, loss, name=model)
    return analyse(found, example, named(device), loss_fn=loss, name=model)


def _call(model: str) -> tuple[Any, Any, Any]:
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


def _memory_of(device: str | None) -> int | None:
    if device is None:
        return None
    from arborcast.pipeline.costs.devices import device_named as named

    return named(device).memory_bytes

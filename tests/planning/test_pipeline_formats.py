"""Profile and plan files: what is written is read back, and what is wrong is said in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.pipeline.costs.saved_bytes import Segment, Treatment
from arborcast.pipeline.errors import PlanError, ProfileError
from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.planning.formats import (
    plan_from_document,
    plan_to_document,
    profile_from_document,
    profile_to_document,
    read_plan,
    read_profile,
    write_plan,
    write_profile,
)
from arborcast.pipeline.profiles import Layer, Profile, Tie
from arborcast.pipeline.stage_sharding import OperatorSharding, ParameterSharding, ReadSharding, StageSharding
from arborcast.pipeline.stages import Plan, Stage
from arborcast.synth.errors import InputError
from arborcast.synth.formats.reading import parse_json
from tests.support.planning_cases import model
from tests.support.refusals import refusals, refuses

times = st.just(0.0) | st.floats(1e-9, 1e12)
sizes = st.integers(0, 1 << 50)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Profiles of up to five layers."""
    layers = []
    for index in range(draw(st.integers(1, 5))):
        forward_us, backward_us = draw(times), draw(times)
        layers.append(
            Layer(
                name=f"block.{index}",
                forward_us=forward_us,
                backward_us=backward_us,
                output_bytes=draw(sizes),
                saved_bytes=draw(sizes),
                parameter_bytes=draw(sizes),
                gradient_bytes=draw(sizes),
                optimizer_bytes=draw(sizes),
                forward_fixed_us=forward_us * draw(st.sampled_from([0, 0.3, 1])),
                backward_fixed_us=draw(st.sampled_from([0.0, backward_us])),
            )
        )
    ties = (Tie("weight", 12, (0, len(layers) - 1)),) if len(layers) > 1 and draw(st.booleans()) else ()
    crowding = draw(st.sampled_from([1.0, 1.25]))
    return Profile("a model", draw(st.integers(1, 4096)), tuple(layers), ties, "drawn", crowding)


def written(document: object) -> object:
    """A document as it comes back from its text."""
    return parse_json(json.dumps(document), "drawn.json")


@given(profiles())
def test_profiles_come_back(profile: Profile) -> None:
    assert profile_from_document(written(profile_to_document(profile)), "drawn.json") == profile


PLAN = Plan(
    [(0, 3, [0]), (3, 6, [2, 1]), (6, 8, [3])],
    microbatches=8,
    order="pe",
    recompute=True,
    max_in_flight=3,
    topology=topologies.load("ring:4"),
    model="a model",
)


def test_plans_come_back_with_their_topology(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.json", {"time_us": 12.5})
    assert read_plan(tmp_path / "plan.json") == PLAN
    assert json.loads((tmp_path / "plan.json").read_text())["predicted"] == {"time_us": 12.5}
    hand_made = {"format": "arborcast.plan/1", "stages": [{"start": 0, "end": 2, "ranks": [0]}]}
    read = plan_from_document(hand_made | {"microbatches": 2, "order": "gpipe"}, "hand.json")
    assert read.stages == Plan([(0, 2, [0])], 2).stages and read.topology is None


def test_plans_with_several_stages_on_a_rank_come_back(tmp_path: Path) -> None:
    plan = Plan([(0, 1, [1, 2]), (1, 2, [0]), (2, 4, [0]), (4, 5, [1, 2])], 4, "zb-v")
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["format"] == "arborcast.plan/4"
    assert plan_from_document(document | {"format": "arborcast.plan/2"}, "old.json") == plan


def test_plans_say_by_layer_what_becomes_of_results(tmp_path: Path) -> None:
    treatments = (Treatment.KEEP, 0, 2), (Treatment.RECOMPUTE, 2, 4), (Treatment.RECOMPUTE, 4, 5)
    segments = tuple(Segment(start, end, it) for it, start, end in treatments)
    offloads = (Segment(5, 6, Treatment.OFFLOAD),)
    plan = Plan([Stage(0, 5, (0,), segments), Stage(5, 6, (1,), offloads)], 4, offload_gbps=12.5)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    document = json.loads((tmp_path / "plan.json").read_text())
    found = document["stages"][0]["segments"]
    assert found == [
        {"treatment": treatment, "layers": layers}
        for treatment, layers in (("keep", 2), ("recompute", 2), ("recompute", 1))
    ]
    for broken, message in refusals(__file__, "test_wrong_segments_are_refused"):
        document["stages"][0]["segments"] = [{"treatment": it, "layers": count} for it, count in broken]
        with pytest.raises(PlanError, match=message):
            plan_from_document(document, "broken.json")
    with pytest.raises(PlanError, match="offload_gbps must be given where stage 1 offloads, got none"):
        Plan(plan.stages, 4)
    with pytest.raises(PlanError, match=r"order zb-h1 must keep .* got recompute on stage 0"):
        Plan([Stage(0, 5, (0,), segments), (5, 6, [1])], 4, "zb-h1")
    with pytest.raises(PlanError, match="stage 0: must have no segments where all recompute"):
        Plan([Stage(0, 5, (0,), segments)], 4, recompute=True)


def test_what_nobody_measured_is_not_in_a_profile_file() -> None:
    layers = Layer("a", 2.0, 4.0, 4, 8, 12, 12), Layer("b", 2.0, 4.0, 4, 8, 12, 12, weights_us=1.0)
    document = profile_to_document(Profile("two", 1, layers))
    assert ["weights_us" in layer for layer in document["layers"]] == [False, True]
    read = profile_from_document(written(document), "profile.json")
    assert [it.weights_share for it in read.layers] == [0.5, 0.25]
    assert read.halves_us(0, 2, 2) == (2 * (2.0 + 3.0), 2 * (2.0 + 1.0))


def test_profile_files_have_a_layer_a_line(tmp_path: Path) -> None:
    profile = model([1.5] * 3, samples=16, output=4, saved=8, weights=12)
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    assert sum("layer" in line for line in (tmp_path / "profile.json").read_text().splitlines()) == 3


def test_plans_whose_operators_are_divided_come_back(tmp_path: Path) -> None:
    weight = ParameterSharding("0.weight", "R", "S(0)")
    product = OperatorSharding(
        *("linear", "linear", ("linear",), (ReadSharding("x", "S(0)", None),)),
        *("S(0)", "S(0)", (("linear", "S(0)"),)),
    )
    stages = [
        Stage.divided(at, at + 1, StageSharding(Mesh((2,), ranks), (weight,), (product,)))
        for at, ranks in enumerate([(0, 1), (3, 2)])
    ]
    plan = Plan(stages, 2, topology=PLAN.topology, model="two", batch=8, whole=("renorm",))
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    document = json.loads((tmp_path / "plan.json").read_text())
    for stage in document["stages"]:
        del stage["ranks"]
    del document["order"]
    old = {key: document[key] for key in ("model", "batch", "microbatches", "stages", "whole", "topology")}
    read = plan_from_document(old | {"format": "arborcast.sharded-plan/1"}, "old.json")
    assert replace(read, method=plan.method) == plan
    with pytest.raises(PlanError, match=r"^plan.json: order: is missing"):
        plan_from_document(document, "plan.json")
    del document["stages"][1]["sharding"]
    with pytest.raises(PlanError, match=r"^plan.json: stages\[1\].ranks: is missing"):
        plan_from_document(document | {"order": "1f1b"}, "plan.json")


@refuses("change", "message")
def test_wrong_plans_are_one_line(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        plan_from_document(written(plan_to_document(PLAN) | change), "plan.json")
    assert str(caught.value).startswith("plan.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [*refusals(__file__, "test_wrong_profiles_are_one_line"), ({"forward_us": 10**400}, "forward_us")],
)
def test_wrong_profiles_are_one_line(change: dict[str, object], message: str) -> None:
    document = profile_to_document(Profile("one", 1, (Layer("fc", 2.0, 2.0, 4, 4, 4, 4),)))
    document["layers"][0] |= change
    with pytest.raises(ProfileError, match=message):
        profile_from_document(written(document), "profile.json")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.json: cannot be read"):
        read_plan(tmp_path / "missing.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ProfileError, match=r"list\.json: format: must be a profile"):
        read_profile(tmp_path / "list.json")

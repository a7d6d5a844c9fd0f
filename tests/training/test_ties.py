"""Parameters on several stages: copies get the sum of all stages' gradients and stay equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.run.gradients import GradientBuffer, Gradients, SummedGradients
from arborcast.pipeline.run.ties import TieGroups
from arborcast.pipeline.stages import Plan
from tests.support.packed import pack, unpack
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("torch._dynamo",)

# Ranks in a mixed order, the middle stage on three; rank 0 has no work.
PLAN = Plan([(0, 2, (5,)), (2, 3, (4, 2, 3)), (3, 5, (1,))], microbatches=1)
TIES = (
    ("ends", (0, 4)),
    ("also.ends", (1, 3)),
    ("double", (0, 3)),
    ("all", (1, 2, 4)),
    ("unused", (1, 4)),
    ("frozen", (0, 4)),
    ("local", (3, 4)),
)
SHAPES = {"ends": (3, 2), "also.ends": (4,), "double": (2,), "all": (5,), "unused": (2,), "frozen": (3,)}
STAGES = {"all": (0, 1, 2)} | dict.fromkeys(("ends", "also.ends", "double", "unused", "frozen"), (0, 2))


def gradient(name: str, stage: int) -> torch.Tensor:
    """What a stage's backward passes find, the same on all its replicas; only the last stage uses `ends`."""
    kind = torch.float64 if name == "double" else torch.float32
    drawn = torch.randn(
        SHAPES[name], dtype=kind, generator=torch.Generator().manual_seed(stage * 10 + len(name))
    )
    return drawn * 0 if name == "ends" and stage == 0 else drawn


def holder(rank: int, size: int) -> bytes:
    groups = TieGroups(PLAN, TIES, lambda ranks: dist.new_group(list(ranks)))
    stage = PLAN.worker_of(rank)
    names = [name for name, stages in STAGES.items() if stage in stages]
    torch.manual_seed(rank)
    parameters = {
        name: nn.Parameter(
            torch.randn(SHAPES[name], dtype=torch.float64 if name == "double" else torch.float32)
        )
        for name in names
    }
    if "frozen" in parameters:
        parameters["frozen"].requires_grad_(False)
    begin = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    groups.equalise(parameters)
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    calls = 0
    plain = dist.all_reduce

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return plain(*arguments, **named)

    dist.all_reduce = counted
    answers: dict[str, Any] = {}
    for how in ("buffer", "plain"):
        buffer = GradientBuffer(parameters.values())
        buffer.zero()
        for name, parameter in parameters.items():
            if name in ("frozen", "unused") or (name == "ends" and stage == 0):
                continue
            # As a backward pass does it: in place, and the hook says so.
            (parameter * gradient(name, stage or 0)).sum().backward()
        if how == "plain":
            buffer.detach_unused()
            groups.synchronise(parameters, SummedGradients(parameters.values()))
        else:
            groups.synchronise(parameters, buffer)
            buffer.detach_unused()
        answers[how] = {name: parameter.grad for name, parameter in parameters.items()}
        if how == "buffer":
            flat = torch.cat([t.double() for t in buffer.tensors]) if parameters else torch.zeros(0)
            known = [g for g in answers[how].values() if g is not None]
            answers["sums"] = flat.sum().item(), sum(g.double().sum().item() for g in known)
            answers[how] = {name: None if g is None else g.clone() for name, g in answers[how].items()}
        buffer_calls, calls = calls, 0
        answers[f"{how} calls"] = buffer_calls
    return pack((begin, values, answers, groups.holders, groups.mine))


def test_copies_get_the_sum_over_stages() -> None:
    everyone = [unpack(answer) for answer in run_ranks(6, holder)]
    first_of = {0: 5, 1: 4, 2: 1}
    for rank, (_, values, answers, holders, mine) in enumerate(everyone):
        stage = PLAN.worker_of(rank)
        names = {name for name, stages in STAGES.items() if stage in stages}
        assert holders == {"all": 5} | dict.fromkeys(("also.ends", "double", "ends", "frozen", "unused"), 2)
        assert set(mine) == names
        for name in names:
            source = first_of[STAGES[name][0]]
            assert torch.equal(values[name], everyone[source][0][name])
            for how in ("buffer", "plain"):
                got = answers[how][name]
                if name in ("unused", "frozen"):
                    assert got is None
                else:
                    want = sum(gradient(name, it) for it in STAGES[name])
                    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
        if stage is not None:
            # One for each group and type: all; ends with also.ends and unused; double.
            assert (answers["buffer calls"], answers["plain calls"]) == ((1, 1) if stage == 1 else (3, 3))
            assert answers["sums"][0] == pytest.approx(answers["sums"][1], abs=1e-6)
    assert everyone[0][1] == {}
    # Bit for bit, or copies would drift apart.
    for name, stages in STAGES.items():
        copies = [
            answers["buffer"][name]
            for rank, (_, _, answers, _, _) in enumerate(everyone)
            if PLAN.worker_of(rank) in stages
        ]
        assert all(copy is None or torch.equal(copy, copies[0]) for copy in copies)


def test_a_tie_within_one_stage_needs_no_group() -> None:
    made: list[tuple[int, ...]] = []

    def make_group(ranks: tuple[int, ...]) -> None:
        made.append(ranks)

    groups = TieGroups(PLAN, [("local", (3, 4))], make_group, rank=1)
    assert made == [] and groups.mine == () and groups.holders == {}
    groups.synchronise({}, Gradients(()))


def test_what_does_not_fit_the_plan() -> None:
    with pytest.raises(PlanError, match=r"tie ends: layers must be in 0\.\.4 of the plan, got 5"):
        TieGroups(PLAN, [("ends", (0, 5))], lambda ranks: None, rank=0)
    groups = TieGroups(PLAN, [("ends", (0, 4))], lambda ranks: None, rank=1)
    with pytest.raises(
        PlanError, match=r"tie ends: this stage uses the parameter and must hold it, got \['a'\]"
    ):
        groups.synchronise({"a": nn.Parameter(torch.ones(1))}, Gradients(()))

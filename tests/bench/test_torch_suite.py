"""What counts as behind gloo in the results of torch's own tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("torch")

from arborcast.bench import torch_suite

OUTCOMES = ("passed", "failed", "hung", "skipped")


def rows(
    monkeypatch: pytest.MonkeyPatch, configuration: str, outcomes: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, Any]]:
    """What is written of tests that end as they are told, by backend."""

    def endings(_: str, backend: str, *__: object) -> list[dict[str, Any]]:
        told = outcomes[backend].items()
        return [{"test": test, "outcome": outcome, "why": "", "seconds": 1.0} for test, outcome in told]

    monkeypatch.setattr(torch_suite, "_endings", endings)
    found = torch_suite.compared(list(torch_suite.run_suite([configuration], list(outcomes), "", 1.0)))
    return {row["backend"]: row for row in found}


def test_what_passes_on_gloo_must_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pairs of outcomes: a test that skips itself here and passes there is behind like one that fails."""
    gloo = {f"{there} there, {here} here": there for there in OUTCOMES for here in OUTCOMES}
    here = {name: name.split()[2] for name in gloo}
    by_name = next(iter(torch_suite.BY_NAME))
    told = {"gloo": gloo | {by_name: "passed"}, "synth": here | {by_name: "skipped"}}
    found = rows(monkeypatch, "file store", told)
    assert found["synth"]["behind"] == [f"passed there, {end} here" for end in ("failed", "hung", "skipped")]
    assert found["synth"]["by_name"] == [by_name]
    assert found["gloo"]["behind"] == []
    alone = rows(monkeypatch, "file store", {"synth": here})["synth"]
    assert alone["behind"] == sorted(name for name, end in here.items() if end in {"failed", "hung"})


def test_a_name_with_a_device_is_told_from_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    test = next(iter(torch_suite.BY_NAME_OF_PARTS))
    told = {"gloo": {test: "passed"}, "synth": {test: "failed"}, "cpu:synth": {test: "failed"}}
    found = rows(monkeypatch, "file store", told)
    assert found["synth"]["behind"] == found["cpu:synth"]["by_name"] == [test]
    assert found["synth"]["by_name"] == found["cpu:synth"]["behind"] == []


def test_events_are_expected_only_where_torch_looks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {backend: {"test": "passed"} for backend in torch_suite.BACKENDS}
    assert set(rows(monkeypatch, "profiler events expected", told)) == {"gloo", "synth"}
    assert set(rows(monkeypatch, "file store", told)) == {"gloo", "synth", "cpu:synth"}

"""What a group may be told: each variable, each rule, and what wins over what."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.backends import Options
from arborcast.backends import options as module
from arborcast.synth.errors import InputError
from arborcast.topologies import load
from tests.support.refusals import refuses


def test_every_variable_is_read() -> None:
    environ = {
        "ARBORCAST_TOPOLOGY": "dgx1",
        "ARBORCAST_RANKS": "1,4-6, 0",
        "ARBORCAST_DEADLINE": "2.5",
        "ARBORCAST_LOST_AFTER": "10",
        "ARBORCAST_GLOO_BELOW": "64KiB",
        "ARBORCAST_TRANSPORT": "Shared-Memory",
        "ARBORCAST_METHOD": "ring",
        "ARBORCAST_WITHOUT": "0-3, 5-2",
        "ARBORCAST_GROUPS": "folder",
        "ARBORCAST_SPARES": f"a.json{os.pathsep}b.json",
        "ARBORCAST_P2P": "CUDA",
        "ARBORCAST_KERNEL_BELOW": "1MiB",
        "PATH": "/bin",
    }
    assert Options.from_environment(environ) == Options(
        topology="dgx1",
        ranks=(1, 4, 5, 6, 0),
        deadline_s=2.5,
        lost_after_s=10,
        gloo_below=65536,
        transport="shared memory",
        method="ring",
        without=((0, 3), (5, 2)),
        groups="folder",
        spares=("a.json", "b.json"),
        p2p="cuda",
        kernel_below=1 << 20,
    )


def test_variables_that_are_empty_say_nothing() -> None:
    assert Options.from_environment({"ARBORCAST_RANKS": "", "ARBORCAST_TOPOLOGY": " "}) == Options()
    assert Options.from_environment({"ARBORCAST_GLOO_BELOW": "0"}).gloo_below == 0


def test_code_wins_field_by_field() -> None:
    environ = {"ARBORCAST_TOPOLOGY": "dgx1", "ARBORCAST_DEADLINE": "7", "ARBORCAST_METHOD": "ring"}
    given_in_code = Options(topology="full:4", piece_bytes=1 << 20, deadline_s=3)
    merged = given_in_code.merged(environ)
    assert merged == Options(topology="full:4", piece_bytes=1 << 20, deadline_s=3, method="ring")
    topology = load("ring:4")
    assert Options(topology=topology).merged(environ).topology is topology


@refuses("variable", "value", "message")
def test_a_variable_that_breaks_a_rule(variable: str, value: str, message: str) -> None:
    for read in (Options.from_environment, Options().merged):
        with pytest.raises(InputError, match=message) as caught:
            read({f"ARBORCAST_{variable}": value})
        assert "\n" not in str(caught.value)


@refuses("field", "value", "message")
def test_a_field_that_breaks_a_rule(field: str, value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Options(**{field: value})  # type: ignore[arg-type]


def test_lists_become_tuples() -> None:
    options = Options(ranks=[2, 0], prepare=["broadcast"], without=[[0, 1]])  # type: ignore[arg-type, list-item]
    assert (options.ranks, options.prepare, options.without) == ((2, 0), ("broadcast",), ((0, 1),))
    assert hash(options) == hash(Options(ranks=(2, 0), prepare=("broadcast",), without=((0, 1),)))


def test_unknown_variables_are_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_warned", set())
    environ = {"ARBORCAST_TOPOLGY": "dgx1", "ARBORCAST_XYZZY": "1", "ARBORCAST_CACHE": str(tmp_path)}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert Options.from_environment(environ) == Options()
    first, second = (record.getMessage() for record in caplog.records)
    assert "'ARBORCAST_TOPOLGY': nothing reads it; did you mean ARBORCAST_TOPOLOGY?" in first
    assert "'ARBORCAST_XYZZY': nothing reads it; there are ARBORCAST_BITS, ARBORCAST_CACHE, " in second


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), min_size=1, max_size=5))
def test_ranges_mean_their_ranks(ranges: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first}-{first + more}" if more else f"{first}" for first, more in ranges)
    expected = [rank for first, more in ranges for rank in range(first, first + more + 1)]
    if len(set(expected)) < len(expected):
        with pytest.raises(InputError, match="must name each rank once"):
            Options.from_environment({"ARBORCAST_RANKS": text})
    else:
        assert Options.from_environment({"ARBORCAST_RANKS": text}).ranks == tuple(expected)


@given(
    st.sampled_from(sorted(module._VARIABLES)),
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=30),
)
def test_nothing_but_input_errors_escapes(variable: str, text: str) -> None:
    try:
        Options.from_environment({variable: text})
    except InputError as error:
        assert str(error).startswith(f"{variable}=") and str(error).isprintable()

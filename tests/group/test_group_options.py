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


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RANKS", "1,x", r"ARBORCAST_RANKS='1,x': must be ranks such as 1,4,5,6 or 0-3,8, got 'x'"),
        ("RANKS", "1,,2", "must be ranks such as .*, got ''"),
        ("RANKS", "3-1", "the last must not be below the first, got '3-1'"),
        ("RANKS", "0-999999999", "at most 65536 ranks, got '0-999999999'"),
        ("RANKS", "-1", "must be ranks such as"),
        ("RANKS", "4,2,4", "ARBORCAST_RANKS='4,2,4': must name each rank once, names 4 twice"),
        ("DEADLINE", "soon", "ARBORCAST_DEADLINE='soon': must be a number of seconds"),
        ("DEADLINE", "0", "must be a positive number of seconds"),
        ("DEADLINE", "nan", "must be a positive number of seconds"),
        ("DEADLINE", "inf", "must be a positive number of seconds"),
        ("LOST_AFTER", "0.5", "ARBORCAST_LOST_AFTER='0.5': must be 0 .never. or 1 to 86400 seconds"),
        ("LOST_AFTER", "nan", "must be 0 .never. or 1 to 86400 seconds"),
        ("GLOO_BELOW", "64 apples", "ARBORCAST_GLOO_BELOW='64 apples': must be 0 or a size such as"),
        ("GLOO_BELOW", "-1", "must be 0 or a size"),
        (
            "TRANSPORT",
            "pigeons",
            "ARBORCAST_TRANSPORT='pigeons': must be one of auto, sockets, shared memory",
        ),
        ("METHOD", "best", "ARBORCAST_METHOD='best': must be one of auto, trees, mwu, routes, ring"),
        ("METHOD", "sat", "ARBORCAST_METHOD='sat': needs chunks, steps and rounds"),
        ("WITHOUT", "0-3,2", "ARBORCAST_WITHOUT='0-3,2': must be pairs of ranks of the fabric such as 0-3"),
        ("WITHOUT", "3-3", "must join two different ranks"),
        ("P2P", "gpu", "ARBORCAST_P2P='gpu': must be one of off, cuda, cpu"),
    ],
)
def test_a_variable_that_breaks_a_rule(variable: str, value: str, message: str) -> None:
    for read in (Options.from_environment, Options().merged):
        with pytest.raises(InputError, match=message) as caught:
            read({f"ARBORCAST_{variable}": value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ranks", [], "ranks: must be ranks of the fabric, from 0 on, got"),
        ("ranks", [0, -1], r"ranks: must be ranks of the fabric, from 0 on, got \[0, -1\]"),
        ("ranks", [1, 1], "ranks: must name each rank once, names 1 twice"),
        ("groups", ["one", "two"], r"groups: must be a folder, or .* list of them, got \['one', 'two'\]"),
        ("groups", 3, "groups: must be a folder, or GroupSchedules, one or a list of them, got 3"),
        ("deadline_s", -1.0, "deadline_s: must be a positive number of seconds, got -1.0"),
        ("gloo_below", -1, "gloo_below: must be at least 0 bytes, got -1"),
        ("piece_bytes", 0, "piece_bytes: must be at least 1 byte, got 0"),
        ("prepare", ("allreduce", "party"), "prepare: must be some of broadcast, .*got .*party"),
        ("prepare", "allreduce", "prepare: must be some of broadcast"),
        ("address", " ", "address: must not be empty"),
        ("bits", "some", "bits: must be one of alike, any, got 'some'"),
        ("p2p", "cuda:1", "p2p: must be one of off, cuda, cpu, got 'cuda:1'"),
        ("without", ((0, 0),), "without: must join two different ranks"),
        ("without", ((0, -2),), "without: must be pairs of ranks of the fabric"),
        ("spares", (3,), "spares: must be files of spare schedules, or BackupSchedules, got"),
    ],
)
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

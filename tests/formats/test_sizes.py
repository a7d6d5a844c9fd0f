from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.synth.errors import InputError
from arborcast.synth.formats.sizes import format_size, parse_size, size_range
from tests.support.refusals import refuses


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("65536", 65536),
        ("64KiB", 65536),
        ("64k", 65536),
        ("16M", 16 << 20),
        ("16 MiB", 16 << 20),
        ("1.5MB", 1_500_000),
        ("0.5KiB", 512),
        ("1e6", 1_000_000),
        ("1E+6 B", 1_000_000),
        ("2g", 2 << 30),
        ("1TiB", 1 << 40),
        ("3kB", 3000),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@refuses("text")
def test_what_is_no_size_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(InputError, match=r"size .*: must be a whole number of bytes from 1 to 1 EiB"):
        parse_size(text)


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_an_input_error(text: str) -> None:
    try:
        assert parse_size(text) >= 1
    except InputError as error:
        assert "\n" not in str(error)


@given(st.integers(1, 1 << 60))
def test_formatted_sizes_are_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_format_takes_the_largest_unit_that_divides() -> None:
    assert [format_size(size) for size in (1, 1000, 1024, 1536, 3 << 20, 1 << 60)] == [
        "1 B",
        "1000 B",
        "1 KiB",
        "1536 B",
        "3 MiB",
        "1048576 TiB",
    ]


def test_ranges_double() -> None:
    assert size_range("64KiB:256KiB") == (65536, 131072, 262144)
    assert size_range("3:20") == (3, 6, 12)
    assert size_range("16MiB") == (16 << 20,)
    assert size_range("5:5") == (5,)


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_ranges_stay_within_their_ends(first: int, last: int) -> None:
    if last < first:
        with pytest.raises(InputError, match="must not be below the first"):
            size_range(f"{first}:{last}")
        return
    sizes = size_range(f"{first}:{last}")
    assert sizes[0] == first
    assert sizes[-1] <= last < 2 * sizes[-1]


def test_a_third_part_is_refused() -> None:
    with pytest.raises(InputError, match="must be a whole number of bytes"):
        size_range("1:2:3")

"""Properties draw as many examples as they should, in `make test`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.suite.examples import draw_fewer


@pytest.mark.parametrize(("whole", "few", "drawn"), [(60, None, 10), (8, None, 4), (3, None, 3), (60, 7, 7)])
def test_a_property_draws_so_many(whole: int, few: int | None, drawn: int) -> None:
    seen = []

    @settings(max_examples=whole, derandomize=True, database=None)
    @given(st.integers())
    def holds(number: int) -> None:
        seen.append(number)

    for _ in range(2):  # each case of a parametrized test asks again
        draw_fewer(holds, few)
    holds()
    assert len(seen) == drawn

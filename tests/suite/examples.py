"""How many examples of a property `make test` draws: a sixth of what `make test-all` does.

`@settings(max_examples=60)` says how many there are in all. Where each takes seconds, `@pytest.mark.few(2)`
says how many `make test` draws of them. Mutants are tried with all.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

PART = 6
LEAST = 4
"""Properties with no more examples draw all of them."""


def draw_fewer(test: Any, few: int | None = None) -> None:
    """Have a property draw `few` examples, or a part of its own; asked twice, it changes nothing more.

    Hypothesis has no way to change settings once they are given, hence the attributes of its own.
    """
    if vars(test).get("draws_fewer"):
        return
    test.draws_fewer = True
    given: settings = test._hypothesis_internal_use_settings
    count = few or max(given.max_examples // PART, min(given.max_examples, LEAST))
    test._hypothesis_internal_use_settings = settings(given, max_examples=count)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if settings.get_current_profile_name() != "steady":
        return
    for item in items:
        test = getattr(item, "function", None)
        if is_hypothesis_test(test):
            marker = item.get_closest_marker("few")
            draw_fewer(test, marker.args[0] if marker else None)

"""How many examples of a property are drawn."""

from __future__ import annotations

from hypothesis import settings


def examples(few: int, *, many: int = 100) -> settings:
    """Of a property whose examples take long: `few` in `make test`, `many` in `make test-all`."""
    return settings(max_examples=many if settings.get_current_profile_name() == "explore" else few)

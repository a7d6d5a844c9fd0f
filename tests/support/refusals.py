"""Tables of what is refused, a line each, in a file `refusals.yaml` beside the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


def refusals(test_file: str, test: str) -> list[list[Any]]:
    """The rows of a test, in the order of its parameters."""
    tables = yaml.safe_load(Path(test_file).with_name("refusals.yaml").read_text("utf-8"))
    rows: list[list[Any]] = tables[test]
    return rows


def refuses(*parameters: str) -> Callable[[Any], Any]:
    """Run a test once for each of its rows."""

    def of_rows(test: Any) -> Any:
        rows = refusals(test.__code__.co_filename, test.__name__)
        return pytest.mark.parametrize(",".join(parameters), rows)(test)

    return of_rows

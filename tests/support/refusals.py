"""Tables of what is refused, a line each, in a file `refusals.yaml` beside the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def refusals(test_file: str, test: str) -> list[list[Any]]:
    """The rows of a test, in the order of its parameters."""
    tables = yaml.safe_load(Path(test_file).with_name("refusals.yaml").read_text("utf-8"))
    rows: list[list[Any]] = tables[test]
    return rows

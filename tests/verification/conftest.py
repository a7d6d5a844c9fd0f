"""The foreign checker of certificates, which several files compare the package's own with."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOREIGN_CHECKER = Path(__file__).resolve().parents[2] / "examples" / "check_certificate.py"


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_certificate", FOREIGN_CHECKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

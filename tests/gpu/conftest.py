"""These tests need a GPU, and are skipped where torch finds none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")

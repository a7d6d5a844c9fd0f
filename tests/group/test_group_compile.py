"""`torch.compile` over the group "synth": each form gives what it gives without the compiler.

The forms are those of the bench (`bench/suite/compiled.py`), which runs them on gloo, too.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from arborcast.bench.suite.compiled import FORMS
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("torch._dynamo.backends.debugging",)
ENVIRON = {"ARBORCAST_TOPOLOGY": "full:2"}
QUICK = {"compile(DDP(model))"}


def run(rank: int, size: int, name: str) -> None:
    FORMS[name](rank, size)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in FORMS]
)
def test_compiled_as_not_compiled(name: str) -> None:
    run_ranks(2, run, name, backend="synth", environ=ENVIRON)

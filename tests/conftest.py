"""How hypothesis draws: the same examples every time in `make test`, new ones in `make test-all`.

Beside it the fixture that many folders share.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:
    from tests.support.commands import Command

# No test may depend on the speed of the machine, hence no deadline and no complaint about slow drawing.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Whether an example fails is all that mutation testing asks (tests/mutants.py).
settings.register_profile("mutants", settings.get_profile("steady"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("steady")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `synth` in this process."""
    from arborcast.synth.cli import app
    from tests.support.commands import Said

    def run(*words: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["synth", *words])
        capsys.readouterr()
        status = app._status()
        said = capsys.readouterr()
        return Said(status, said.out, said.err)

    return run

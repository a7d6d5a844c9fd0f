"""How hypothesis draws: the same examples every time in `make test`, new ones in `make test-all`."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

# No test may depend on the speed of the machine, hence no deadline and no complaint about slow drawing.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Whether an example fails is all that mutation testing asks (tests/mutants.py).
settings.register_profile("mutants", settings.get_profile("steady"), phases=(Phase.explicit, Phase.generate))
settings.load_profile("steady")

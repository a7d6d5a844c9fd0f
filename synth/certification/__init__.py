"""What certificates prove, recomputed from them alone, in exact arithmetic.

The room of those who check: nothing here is taken from the packages that find bounds or build schedules, and
a rule of `make lint` keeps it so.
"""

from arborcast.synth.certification.proven_rates import certified_rate, certified_scope, dual_of, dual_or_none
from arborcast.synth.certification.tolls import check_tolls

__all__ = ["certified_rate", "certified_scope", "check_tolls", "dual_of", "dual_or_none"]

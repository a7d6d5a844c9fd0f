"""A plugin of pytest (`-p tests.support.without_torch`): torch is as good as not installed."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]

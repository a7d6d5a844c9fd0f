"""In which order each stage does its passes: fill and drain, one forward one backward, SPP's list order.

`ORDERS` holds them by name (`Plan.passes` is what a plan's stages do), `messages` adds what is sent and
received.
"""

from __future__ import annotations

from arborcast.pipeline.order.actions import Order
from arborcast.pipeline.order.gpipe import GPIPE
from arborcast.pipeline.order.list_order import LIST_ORDER
from arborcast.pipeline.order.one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD

__all__ = ["ORDERS"]

ORDERS: dict[str, Order] = {"1f1b": ONE_FORWARD_ONE_BACKWARD, "pe": LIST_ORDER, "gpipe": GPIPE}
"""By name; of equally fast ones the first is taken, which keeps least in flight."""

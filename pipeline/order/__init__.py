"""In which order each worker does its passes, and on which stages.

Fill and drain, one forward one backward, SPP's list order, interleaved 1F1B, zero-bubble orders. `ORDERS`
holds them by name (`Plan.passes` is what the workers of a plan do), `messages` adds what is sent and
received.
"""

from __future__ import annotations

from arborcast.pipeline.order.actions import PassOrder
from arborcast.pipeline.order.gpipe import GPIPE
from arborcast.pipeline.order.interleaved import INTERLEAVED
from arborcast.pipeline.order.list_order import LIST_ORDER
from arborcast.pipeline.order.one_forward_one_backward import ONE_FORWARD_ONE_BACKWARD
from arborcast.pipeline.order.zero_bubble import ZB_H1, ZB_V

__all__ = ["ORDERS"]

ORDERS: dict[str, PassOrder] = {
    "1f1b": ONE_FORWARD_ONE_BACKWARD,
    "pe": LIST_ORDER,
    "gpipe": GPIPE,
    "interleaved": INTERLEAVED,
    "zb-h1": ZB_H1,
    "zb-v": ZB_V,
}
"""By name; of equally fast ones the first is taken, which keeps least in flight."""

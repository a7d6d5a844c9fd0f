"""In which order each stage does its passes: fill and drain, one forward one backward, SPP's list order.

`order_of` gives a plan's order, `messages` adds what is sent and received, `deadlock` checks the result
without knowing how it was made, `bound` limits the time of the list order.
"""

from __future__ import annotations

from arborcast.pipeline.order.actions import Order
from arborcast.pipeline.order.cap import capped
from arborcast.pipeline.order.gpipe import gpipe
from arborcast.pipeline.order.list_order import list_order
from arborcast.pipeline.order.one_forward_one_backward import one_forward_one_backward
from arborcast.pipeline.stages import Plan

__all__ = ["capped", "gpipe", "list_order", "one_forward_one_backward", "order_of"]

_MAKERS = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "pe": list_order}


def order_of(plan: Plan) -> Order:
    """What each stage of a plan does, with its `max_in_flight` applied."""
    order = _MAKERS[plan.order](len(plan.stages), plan.microbatches)
    return order if plan.max_in_flight is None else capped(order, plan.max_in_flight)

"""Pictures of plans and steps, and steps as traces for a browser's profiler."""

from __future__ import annotations

from arborcast.pipeline.pictures.chrome_trace import chrome_trace, write_chrome_trace
from arborcast.pipeline.pictures.plan_picture import draw_plan
from arborcast.pipeline.pictures.timeline_picture import draw_timelines

__all__ = ["chrome_trace", "draw_plan", "draw_timelines", "write_chrome_trace"]
